"""What the groups of a record show, in plain words computed from its numbers."""

from __future__ import annotations

from collections import Counter
from statistics import mean

from focus_exp.records.answers import DOMINANT
from focus_exp.records.groups import GroupReport
from focus_exp.records.record import Record
from focus_exp.reporting.findings import difference_word
from focus_exp.reporting.groups import (
    READS_FUTURE,
    average,
    by_share,
    distant_mass_kept,
    largest,
    least,
    most_like_classes,
    punctuation_groups,
)
from focus_exp.reporting.printed import paper_rows
from focus_exp.reporting.tables import change_text, share_text


def group_findings(record: Record) -> list[str]:
    report = record.groups
    assert report is not None
    return [
        *_classes(report),
        *_members(report),
        *_balance(report),
        *_agreement(report),
        *_attention(report),
        *_sink(record, report),
        *_affinity(report),
        *([f"Warning: {READS_FUTURE}."] if not record.method.get("causal", True) else []),
        *_cost(report),
    ]


def _classes(report: GroupReport) -> list[str]:
    trained, untrained, chance = ([row.fit(r) for row in report.layers] for r in ("trained", "untrained", "chance"))
    nmi, before, by_chance = (mean(fit.nmi for fit in fits) for fits in (trained, untrained, chance))
    higher = sum(a.nmi > b.nmi for a, b in zip(trained, untrained, strict=True))
    common, share = by_share(report)[0]
    purities = [share_text(mean(fit.purity for fit in fits)) for fits in (trained, untrained, chance)]
    return [
        f"Groups follow word classes {_more(nmi, by_chance)} chance and {_more(nmi, before)} an untrained router: NMI "
        f"{nmi:.3f} against {by_chance:.3f} and {before:.3f}, means of {len(report.layers)} layers; the "
        f"trained router's is the higher in {higher} of them.",
        f"Purity by word class: {purities[0]}; an untrained router {purities[1]}, groups by chance {purities[2]}; the "
        f"largest class alone ({common}) is {share_text(share)} of the text.",
    ]


def _more(value: float, other: float) -> str:
    return "more than" if value > other else "no more than"


def _members(report: GroupReport) -> list[str]:
    paper = {row["quantity"]: row["value"] for row in paper_rows("groups_section5")}
    best = most_like_classes(report)
    groups = [group for group in best.groups if group.purity is not None]
    named = ", ".join(
        f"{group.name} {group.word_class} {share_text(group.purity)} (text {share_text(group.class_share)})"
        for group in groups
    )
    marks = punctuation_groups(report)
    purest = max((group.purity or 0.0 for _, group in marks), default=None)
    said = [f"Closest to word classes is layer {best.layer}, NMI {best.fit('trained').nmi:.3f}: {named}."]
    if purest is None:
        said.append(
            "In no group of any layer punctuation is the most frequent class (paper: one that is "
            f"{paper['punctuation_purity_percent']} % punctuation)."
        )
    else:
        said.append(
            f"In {len(marks)} groups punctuation is the most frequent class, at best {share_text(purest)}, on average "
            f"{share_text(average(group.purity for _, group in marks))} "
            f"(paper: {paper['punctuation_purity_percent']} %)."
        )
    confidence = mean(row.confidence for row in report.layers)
    said.append(f"Mean confidence of an assignment: {confidence:.2f} (paper: {paper['mean_confidence']}).")
    return said


def _balance(report: GroupReport) -> list[str]:
    paper = {row["quantity"]: row["value"] for row in paper_rows("groups_section5")}
    smallest, biggest = min(map(least, report.layers)), max(map(largest, report.layers))
    said = [
        f"Groups hold {share_text(smallest)} to {share_text(biggest)} of the tokens, over all layers "
        f"(paper: {paper['smallest_group_percent']} to {paper['largest_group_percent']} %)."
    ]
    dominated = [str(row.layer) for row in report.layers if largest(row) > DOMINANT]
    if dominated:
        said.append(f"Warning: one group holds more than half of the tokens in layers {', '.join(dominated)}.")
    if empty := [str(row.layer) for row in report.layers if not least(row)]:
        said.append(f"Warning: a group is empty in layers {', '.join(empty)}.")
    return said


def _agreement(report: GroupReport) -> list[str]:
    untrained = average(row.agreement_untrained for row in report.layers)
    chance = average(row.agreement_chance for row in report.layers)
    beside = f"with an untrained router {untrained:.3f}, by chance {chance:.3f}" if untrained is not None else ""
    seeds = average(mean(row.agreement) for row in report.layers if row.agreement)
    if seeds is None:
        return [f"Agreement across seeds is not measured: give analyze.others; AMI {beside}."]
    return [f"Agreement with {len(report.others)} other seeds: AMI {seeds:.3f}, mean of layers; {beside}."]


def _attention(report: GroupReport) -> list[str]:
    pairs, kept = average(row.distant_pairs_kept for row in report.layers), distant_mass_kept(report.layers)
    cut = average(row.cut_mass for row in report.layers)
    if pairs is None or kept is None or not pairs:
        return [f"The passage of {report.passage_tokens} tokens has no pair beyond window and sinks: nothing was cut."]
    worst = max(report.layers, key=lambda row: row.cut_mass or 0.0)
    return [
        f"Groups keep {share_text(pairs)} of the distant pairs of the passage, and on them {share_text(kept)} of the "
        f"base's distant attention: {kept / pairs:.1f} times what as many pairs at random would hold.",
        f"{share_text(cut)} of the base's attention lay on pairs that were cut, most in layer {worst.layer} "
        f"({share_text(worst.cut_mass)}).",
    ]


def _sink(record: Record, report: GroupReport) -> list[str]:
    """Where most of what is cut lay on a single key: it need not have meant anything."""
    single = [row for row in report.layers if (row.cut_key_share or 0.0) > 0.5]
    if not single:
        return []
    (key, word), times = Counter((row.cut_key, row.cut_key_word) for row in single).most_common(1)[0]
    return [
        f"In {len(single)} of {len(report.layers)} layers more than half of what was cut lay on one key alone, in "
        f"{times} of them on '{word}' ({key}): an attention sink that is not among the first "
        f"{record.setting('attention', 'sinks')} tokens."
    ]


def _affinity(report: GroupReport) -> list[str]:
    median = average(row.affinity_median for row in report.layers)
    if median is None:
        return []
    printed = sorted(float(str(row["affinity"])) for row in paper_rows("groups_section5.pairs"))
    return [
        f"Half of all kept distant pairs have an affinity of {median:.3f} or more (mean of layers), so one of "
        f"{' or '.join(map(str, printed))}, as the paper prints of two pairs, marks no special pair."
        if median >= printed[0]
        else f"Half of all kept distant pairs have an affinity below {median:.3f} (mean of layers); the paper prints "
        f"two pairs of {' and '.join(map(str, printed))}."
    ]


def _cost(report: GroupReport) -> list[str]:
    said = []
    for cost in report.costs:
        change = change_text(cost.delta, cost.delta_low, cost.delta_high)
        if cost.word_class == "all":
            word = difference_word(cost.delta, cost.delta_low, cost.delta_high, ("better than", "worse than"))
            said.append(f"Beyond the window hard groups are {word} full attention: perplexity {change}.")
    classes = sorted((cost for cost in report.costs if cost.word_class != "all"), key=lambda cost: cost.delta)
    if len(classes) > 1:
        least_cost, most_cost = (
            f"{cost.word_class} ({change_text(cost.delta, cost.delta_low, cost.delta_high)}, {cost.tokens:,} tokens)"
            for cost in (classes[0], classes[-1])
        )
        said.append(f"By the class of the token that is predicted it costs most in {most_cost}, least in {least_cost}.")
    if report.cut_cost is not None:
        said.append(
            "Rank correlation, over the queries of the passage, of the attention that was cut with the rise of the "
            f"next token's loss: {report.cut_cost:+.2f}."
        )
    return said
