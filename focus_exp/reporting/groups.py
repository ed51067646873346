"""Tables of what groups are made of, what they keep and what they cost, and the paper's section 5 beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from statistics import mean
from typing import Any

from focus_exp.records.groups import DistantPair, GroupLayer, GroupReport, TokenGroup
from focus_exp.records.record import Record
from focus_exp.reporting.printed import paper_rows
from focus_exp.reporting.tables import ABSENT, Table, assets, caveats, change_text, identity, origin, share_text, title

PUNCTUATION = "punctuation"
READS_FUTURE = "this router reads the future (its assignment runs over the whole text): its losses mean nothing"
UNLIKE_TEXT = "tokens: those that set the group apart, n log(share in the group / share in the text)"


def group_tables(record: Record) -> list[Table]:
    report = record.groups
    assert report is not None
    return [
        layer_table(record, report),
        member_table(record, report),
        section5_table(record, report),
        pair_table(record, report),
        cost_table(record, report),
    ]


def layer_table(record: Record, report: GroupReport) -> Table:
    """One line a layer, and their mean."""
    classes = ", ".join(f"{name} {share_text(share)}" for name, share in by_share(report))
    seeds = f"other seeds: {', '.join(report.others)}" if report.others else "other seeds: none given (analyze.others)"
    return Table(
        columns=[
            *("layer", "least and largest group", "confidence", "purity (untrained, chance)"),
            *("NMI with word classes (untrained, chance)", "AMI with other seeds", "AMI with untrained (chance)"),
            *("distant pairs kept", "distant attention kept", "attention cut"),
            "of it on one key",
        ],
        rows=[*(_layer_cells(row) for row in report.layers), _mean_cells(report.layers)],
        name="groups",
        title=f"{title(record)}: groups of {report.tokens:,} held-out tokens",
        notes=[
            *caveats(record),
            *assets(record),
            f"word classes by {report.tagger}: {classes}; a token that goes on with a word is a class of its own",
            "purity: share of the tokens that are of their group's most frequent class; NMI, AMI: mutual information, "
            "normalised, and adjusted for chance; chance: groups of the same sizes that ignore the text; untrained: a "
            "router before training, balanced alike",
            f"{seeds}; AMI of the same layer's groups on the same tokens",
            f"attention: the base's own in one passage of {report.passage_tokens:,} tokens ({report.passage_from}), "
            "averaged over heads and queries; distant: beyond window and sinks; cut: distant, no common group",
            origin(record),
        ],
        values=[_layer_values(record, row) for row in report.layers],
    )


def _layer_cells(row: GroupLayer) -> list[str]:
    trained, untrained, chance = (row.fit(router) for router in ("trained", "untrained", "chance"))
    shares = [group.share for group in row.groups]
    return [
        str(row.layer),
        f"{share_text(min(shares))} to {share_text(max(shares))}",
        f"{row.confidence:.2f}",
        f"{share_text(trained.purity)} ({share_text(untrained.purity)}, {share_text(chance.purity)})",
        f"{trained.nmi:.3f} ({untrained.nmi:.3f}, {chance.nmi:.3f})",
        f"{mean(row.agreement):.3f}" if row.agreement else ABSENT,
        f"{_three(row.agreement_untrained)} ({_three(row.agreement_chance)})",
        share_text(row.distant_pairs_kept),
        share_text(row.distant_mass_kept),
        share_text(row.cut_mass),
        f"{share_text(row.cut_key_share)} '{row.cut_key_word}' ({row.cut_key})" if row.cut_key_share else ABSENT,
    ]


def _mean_cells(layers: list[GroupLayer]) -> list[str]:
    def fits(of: Callable[[Any], float]) -> list[float]:
        return [mean(of(row.fit(router)) for row in layers) for router in ("trained", "untrained", "chance")]

    purities, nmis = fits(lambda fit: fit.purity), fits(lambda fit: fit.nmi)
    agreements = [mean(row.agreement) for row in layers if row.agreement]
    return [
        "mean",
        f"{share_text(mean(least(row) for row in layers))} to {share_text(mean(largest(row) for row in layers))}",
        f"{mean(row.confidence for row in layers):.2f}",
        "{} ({}, {})".format(*map(share_text, purities)),
        "{:.3f} ({:.3f}, {:.3f})".format(*nmis),
        f"{mean(agreements):.3f}" if agreements else ABSENT,
        f"{_three(average(row.agreement_untrained for row in layers))} "
        f"({_three(average(row.agreement_chance for row in layers))})",
        share_text(average(row.distant_pairs_kept for row in layers)),
        share_text(distant_mass_kept(layers)),
        share_text(average(row.cut_mass for row in layers)),
        share_text(average(row.cut_key_share for row in layers)),
    ]


def _layer_values(record: Record, row: GroupLayer) -> dict[str, Any]:
    plain = {key: value for key, value in asdict(row).items() if key not in ("groups", "fits", "pairs", "agreement")}
    fits = {
        f"{measure}_{fit.router}": getattr(fit, measure) for fit in row.fits for measure in ("purity", "nmi", "ami")
    }
    agreement = {"agreement_seeds": " ".join(map(str, row.agreement))}
    shares = {"group_shares": " ".join(str(group.share) for group in row.groups)}
    return {**plain, **fits, **agreement, **shares, "distant_mass_kept": row.distant_mass_kept, **identity(record)}


def member_table(record: Record, report: GroupReport) -> Table:
    """The groups of the layer that goes best with word classes; those of all layers in the CSV and on the page."""
    best = most_like_classes(report)
    return Table(
        columns=["group", "share", "confidence", "most frequent class", "of the group", "of the text", "tokens"],
        rows=[
            [
                *(group.name, share_text(group.share)),
                ABSENT if group.confidence is None else f"{group.confidence:.2f}",
                group.word_class or ABSENT,
                *(share_text(group.purity), share_text(group.class_share)),
                "  ".join(group.tokens) or ABSENT,
            ]
            for group in best.groups
        ],
        name="group_members",
        title=f"{title(record)}: groups of layer {best.layer}, of all layers the one closest to word classes",
        notes=[
            UNLIKE_TEXT,
            "of the text: the same class's share of the whole text, which a group that ignores classes would have too",
            origin(record),
        ],
        values=[
            {"layer": row.layer, **asdict(group), "tokens": "  ".join(group.tokens), **identity(record)}
            for row in report.layers
            for group in row.groups
        ],
    )


def section5_table(record: Record, report: GroupReport) -> Table:
    """The paper's numbers on groups beside ours."""
    paper = {str(row["quantity"]): row["value"] for row in paper_rows("groups_section5")}
    marks = punctuation_groups(report)
    best = max((group for _, group in marks), key=lambda group: group.purity or 0.0, default=None)
    typical = average(group.purity for _, group in marks)
    confidences = [row.confidence for row in report.layers]
    rows = [
        [
            "purity of the punctuation group",
            f"{paper['punctuation_purity_percent']} %",
            ABSENT if best is None else f"{share_text(best.purity)} at best, {share_text(typical)} on average",
            f"{len(marks)} groups in {len({row.layer for row, _ in marks})} of {len(report.layers)} layers have it as "
            f"most frequent class; it is {share_text(report.class_shares.get(PUNCTUATION, 0.0))} of the text",
        ],
        [
            "mean confidence",
            f"{paper['mean_confidence']}",
            f"{mean(confidences):.2f}, by layer {min(confidences):.2f} to {max(confidences):.2f}",
            f"temperature {record.setting('attention', 'temperature')} on "
            f"{'cosines' if record.setting('attention', 'normalize') else 'products'} here, 0.1 there",
        ],
        [
            "share of tokens in a group",
            f"{paper['smallest_group_percent']} to {paper['largest_group_percent']} %",
            f"{share_text(min(map(least, report.layers)))} to {share_text(max(map(largest, report.layers)))}",
            f"K = {record.setting('attention', 'groups')} here, 8 there; all layers",
        ],
        *(_paper_pair(pair, report) for pair in paper_rows("groups_section5.pairs")),
    ]
    return Table(
        columns=["quantity", "paper", "here", "read it as"],
        rows=rows,
        name="section5",
        title=f"{title(record)}: the paper's section 5 beside ours",
        notes=[*caveats(record), "the paper does not name its layers; here all count", origin(record)],
    )


def _paper_pair(pair: dict[str, Any], report: GroupReport) -> list[str]:
    medians = [row.affinity_median for row in report.layers if row.affinity_median is not None]
    above = sum(median >= pair["affinity"] for median in medians)
    words = f"'{pair['word']}'({pair['position']}) and '{pair['other_word']}'({pair['other_position']})"
    return [
        "affinity of a long-range pair",
        f"{words}: {pair['affinity']}",
        f"{average(medians):.3f} is the median of all kept distant pairs" if medians else ABSENT,
        f"in {above} of {len(medians)} layers at least half of all kept distant pairs have as much",
    ]


def pair_table(record: Record, report: GroupReport) -> Table:
    """The first pair of every layer by either measure; all that are listed in the CSV."""
    return Table(
        columns=["layer", "highest affinity", "distance", "affinity", "most attended", "distance", "attention"],
        rows=[
            [
                str(row.layer),
                *_pair_cells(row, "affinity", lambda pair: f"{pair.affinity:.3f}"),
                *_pair_cells(row, "mass", lambda pair: share_text(pair.mass)),
            ]
            for row in report.layers
        ],
        name="distant_pairs",
        title=f"{title(record)}: kept pairs beyond window and sinks",
        notes=[
            "query (position) from key (position) in one passage; affinity g_i . g_j; attention: of the query's mass "
            "under full attention, averaged over heads",
            origin(record),
        ],
        values=[
            {"layer": row.layer, **asdict(pair), "distance": pair.query - pair.key, **identity(record)}
            for row in report.layers
            for pair in row.pairs
        ],
    )


def _pair_cells(row: GroupLayer, by: str, measure: Callable[[DistantPair], str]) -> list[str]:
    pair = next((pair for pair in row.pairs if pair.by == by), None)
    if pair is None:
        return [ABSENT] * 3
    words = f"'{pair.query_word}' ({pair.query}) from '{pair.key_word}' ({pair.key})"
    return [words, str(pair.query - pair.key), measure(pair)]


def cost_table(record: Record, report: GroupReport) -> Table:
    return Table(
        columns=["class of the token", "tokens", "full attention [nats]", "hard groups [nats]", "perplexity [95 %]"],
        rows=[
            [
                cost.word_class, f"{cost.tokens:,}", f"{cost.nll_full:.3f}", f"{cost.nll_hard:.3f}",
                change_text(cost.delta, cost.delta_low, cost.delta_high),
            ]
            for cost in report.costs
        ],
        name="cutting_cost",
        title=f"{title(record)}: what cutting costs, by the token that is predicted",
        notes=[
            *caveats(record),
            *([] if record.method.get("causal", True) else [READS_FUTURE]),
            f"tokens beyond window and sinks in {report.windows} windows; hard groups against full attention, paired; "
            "intervals: bootstrap over windows; classes that every window has",
            origin(record),
        ],
        values=[{**asdict(cost), **identity(record)} for cost in report.costs],
    )  # fmt: skip


def by_share(report: GroupReport) -> list[tuple[str, float]]:
    return sorted(report.class_shares.items(), key=lambda item: -item[1])


def most_like_classes(report: GroupReport) -> GroupLayer:
    return max(report.layers, key=lambda row: row.fit("trained").ami)


def punctuation_groups(report: GroupReport) -> list[tuple[GroupLayer, TokenGroup]]:
    return [(row, group) for row in report.layers for group in row.groups if group.word_class == PUNCTUATION]


def least(row: GroupLayer) -> float:
    return min(group.share for group in row.groups)


def largest(row: GroupLayer) -> float:
    return max(group.share for group in row.groups)


def distant_mass_kept(layers: list[GroupLayer]) -> float | None:
    """Over all layers, of the attention beyond window and sinks the share on kept pairs."""
    kept, cut = (sum(getattr(row, name) or 0.0 for row in layers) for name in ("kept_mass", "cut_mass"))
    return kept / (kept + cut) if kept + cut else None


def average(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _three(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.3f}"
