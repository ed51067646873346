"""What the tables of an analysis of groups have a line for, the paper's section 5 beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import mean

from focus_exp.records.groups import PUNCTUATION, ClassCost, DistantPair, GroupLayer, TokenGroup, distant_mass_kept
from focus_exp.records.record import Record
from focus_exp.reporting.formats import ABSENT, share_text
from focus_exp.reporting.printed import paper_rows


@dataclass(frozen=True)
class GroupLine:
    """A layer, or the mean of several. purity, nmi: of the trained router, of an untrained one, by chance."""

    name: str
    least: float
    largest: float
    confidence: float
    purity: list[float]
    nmi: list[float]
    agreement: float | None
    agreement_untrained: float | None
    agreement_chance: float | None
    distant_pairs_kept: float | None
    distant_mass_kept: float | None
    cut_mass: float | None
    cut_key_share: float | None
    cut_key: str = ""


def layers_and_mean(record: Record) -> list[GroupLine]:
    layers = record.groups.layers if record.groups else []
    lines = [replace(_group_line(str(row.layer), [row]), cut_key=_cut_key(row)) for row in layers]
    return [*lines, _group_line("mean", layers)] if layers else []


def _cut_key(row: GroupLayer) -> str:
    return f" '{row.cut_key_word}' ({row.cut_key})"


def _group_line(name: str, layers: list[GroupLayer]) -> GroupLine:
    def means(measure: str) -> list[float]:
        routers = ("trained", "untrained", "chance")
        return [mean(getattr(row.fit(router), measure) for row in layers) for router in routers]

    averaged = ("agreement_untrained", "agreement_chance", "distant_pairs_kept", "cut_mass", "cut_key_share")
    return GroupLine(
        name=name,
        least=mean(min(row.shares) for row in layers),
        largest=mean(max(row.shares) for row in layers),
        confidence=mean(row.confidence for row in layers),
        purity=means("purity"),
        nmi=means("nmi"),
        agreement=average(mean(row.agreement) if row.agreement else None for row in layers),
        distant_mass_kept=distant_mass_kept(layers),
        **{key: average(getattr(row, key) for row in layers) for key in averaged},
    )


@dataclass(frozen=True)
class PairLine:
    """The first kept pair of a layer by either measure."""

    layer: int
    affinity: DistantPair | None
    mass: DistantPair | None


def pairs_of_layers(record: Record) -> list[PairLine]:
    layers = record.groups.layers if record.groups else []
    firsts = [(row.layer, {pair.by: pair for pair in reversed(row.pairs)}) for row in layers]
    return [PairLine(layer, first.get("affinity"), first.get("mass")) for layer, first in firsts]


def groups_of_closest_layer(record: Record) -> list[TokenGroup]:
    return record.groups.closest.groups if record.groups else []


def layers(record: Record) -> list[GroupLayer]:
    return record.groups.layers if record.groups else []


def costs(record: Record) -> list[ClassCost]:
    return record.groups.costs if record.groups else []


def groups_of_layers(record: Record) -> list[tuple[GroupLayer, TokenGroup]]:
    return [(row, group) for row in layers(record) for group in row.groups]


def pairs(record: Record) -> list[tuple[GroupLayer, DistantPair]]:
    return [(row, pair) for row in layers(record) for pair in row.pairs]


@dataclass(frozen=True)
class Quantity:
    """A number of the paper's section 5 beside ours. value: ours, unrounded."""

    quantity: str
    paper: str
    here: str
    value: float | None
    read_it_as: str


def section5(record: Record) -> Iterator[Quantity]:
    report = record.groups
    if report is None:
        return
    paper = {str(row["quantity"]): row["value"] for row in paper_rows("groups_section5")}
    purities = [group.purity or 0.0 for _, group in report.punctuation]
    best, typical = max(purities, default=None), average(group.purity for _, group in report.punctuation)
    yield Quantity(
        "purity of the punctuation group",
        f"{paper['punctuation_purity_percent']} %",
        f"{share_text(best)} at best, {share_text(typical)} on average" if purities else ABSENT,
        best,
        f"{len(purities)} groups in {len({row.layer for row, _ in report.punctuation})} of {len(report.layers)} layers "
        f"have it as most frequent class; it is {share_text(report.class_shares.get(PUNCTUATION, 0.0))} of the text",
    )
    confidences = [row.confidence for row in report.layers]
    yield Quantity(
        "mean confidence",
        f"{paper['mean_confidence']}",
        f"{mean(confidences):.2f}, by layer {min(confidences):.2f} to {max(confidences):.2f}",
        mean(confidences),
        f"temperature {record.setting('attention', 'temperature')} on "
        f"{'cosines' if record.setting('attention', 'normalize') else 'products'} here, 0.1 there",
    )
    shares = [share for row in report.layers for share in row.shares]
    yield Quantity(
        "share of tokens in a group",
        f"{paper['smallest_group_percent']} to {paper['largest_group_percent']} %",
        f"{share_text(min(shares))} to {share_text(max(shares))}",
        max(shares),
        f"K = {record.setting('attention', 'groups')} here, 8 there; all layers",
    )
    medians = [row.affinity_median for row in report.layers if row.affinity_median is not None]
    for pair in paper_rows("groups_section5.pairs"):
        above = sum(median >= float(str(pair["affinity"])) for median in medians)
        words = f"'{pair['word']}'({pair['position']}) and '{pair['other_word']}'({pair['other_position']})"
        yield Quantity(
            "affinity of a long-range pair",
            f"{words}: {pair['affinity']}",
            f"{mean(medians):.3f} is the median of all kept distant pairs" if medians else ABSENT,
            average(medians),
            f"in {above} of {len(medians)} layers at least half of all kept distant pairs have as much",
        )


def average(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


GROUP_LINES = {
    found.__name__: found
    for found in (
        layers_and_mean, groups_of_closest_layer, section5, pairs_of_layers, layers, groups_of_layers, pairs, costs,
    )
}  # fmt: skip
