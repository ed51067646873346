"""What the groups of a record show: the facts that the topic `groups` of findings.yaml tells of."""

from collections import Counter
from collections.abc import Iterator
from statistics import mean
from typing import Any

from focus_exp.records.answers import DOMINANT
from focus_exp.records.groups import distant_mass_kept
from focus_exp.records.record import Record
from focus_exp.reporting.paper import paper_rows
from focus_exp.reporting.sentences import say, tell

ROUTERS = ("trained", "untrained", "chance")


def group_findings(record: Record) -> Iterator[str]:
    """What the groups are made of, how evenly they hold the tokens, what they keep, cut and cost."""
    report = record.groups
    assert report is not None
    layers = report.layers

    def mean_of(name: str) -> float | None:
        """The mean over the layers that have it."""
        known = [value for row in layers if (value := getattr(row, name)) is not None]
        return mean(known) if known else None

    nmi, purity = ([mean(getattr(row.fit(r), of) for row in layers) for r in ROUTERS] for of in ("nmi", "purity"))
    least, largest = ({row.layer: end(row.shares) for row in layers} for end in (min, max))
    on_one_key = [row for row in layers if (row.cut_key_share or 0.0) > 0.5]
    agreements = [mean(row.agreement) for row in layers if row.agreement]
    kept_pairs, kept_mass = mean_of("distant_pairs_kept"), distant_mass_kept(layers)
    facts: dict[str, Any] = {
        "nmi": nmi,
        "purity": purity,
        "higher": sum(row.fit("trained").nmi > row.fit("untrained").nmi for row in layers),
        "common": max(report.class_shares.items(), key=lambda item: item[1]),
        "members": [group for group in report.closest.groups if group.purity is not None],
        "marks": [group.purity for _, group in report.punctuation if group.purity is not None],
        "least": least,
        "largest": largest,
        "dominated": [layer for layer, share in largest.items() if share > DOMINANT],
        "empty": [layer for layer, share in least.items() if not share],
        "agreement": mean(agreements) if agreements else None,
        "other_agreement": say(
            "other_agreement", untrained=mean_of("agreement_untrained"), chance=mean_of("agreement_chance")
        ),
        "kept_pairs": kept_pairs,
        "kept_mass": kept_mass,
        "cut": kept_pairs and kept_mass is not None,
        "most_cut": max(layers, key=lambda row: row.cut_mass or 0.0),
        "on_one_key": on_one_key,
        "sink": next(iter(Counter((row.cut_key, row.cut_key_word) for row in on_one_key).most_common(1)), None),
        "median": mean_of("affinity_median"),
        "affinities": sorted(float(str(row["affinity"])) for row in paper_rows("groups_section5.pairs")),
        "overall": next((cost for cost in report.costs if cost.word_class == "all"), None),
        "classes": sorted((cost for cost in report.costs if cost.word_class != "all"), key=lambda cost: cost.delta),
        "paper": {row["quantity"]: row["value"] for row in paper_rows("groups_section5")},
    }
    yield from tell("groups", record=record, report=report, layers=layers, mean=mean, mean_of=mean_of, **facts)
