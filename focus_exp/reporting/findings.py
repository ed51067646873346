"""What a record shows: which sentences of findings.yaml are true of its quality, benchmarks, arms, groups, texts."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from statistics import mean
from typing import Any

from focus_exp.records.answers import (
    COLLAPSED,
    by_phase,
    configured_row,
    dominant,
    dominates,
    groups_of,
    is_comparable,
    is_configured,
    keeps_everything,
    memberships,
    phases,
    row_of,
)
from focus_exp.records.benchmarks import BenchmarkRow, telling
from focus_exp.records.groups import distant_mass_kept
from focus_exp.records.record import Record
from focus_exp.records.rows import ENGAGED, Arm, Row, of_tokens
from focus_exp.reporting.frontier import ways
from focus_exp.reporting.lines import average, fit_means
from focus_exp.reporting.paper import paper_rows
from focus_exp.reporting.sentences import BETTER, WORSE, say, tell, than, vs_hard
from focus_exp.reporting.speed_findings import method_findings, speed_findings

WORDS = (BETTER, WORSE, "indistinguishable from")
SAME_DENSITY = 0.02
SAME_BUDGET = 0.1  # of the number of trained parameters
MOST_GROUPS = 8  # that one sentence describes


def all_findings(record: Record) -> list[str]:
    """Sentences on whatever the record holds; a record without rows of quality is not blamed for that."""
    if record.arms:
        return [*comparison_findings(record), *stability_findings(record)]
    if record.continuations:
        return [*continuation_findings(record)]
    if record.groups:
        return [*group_findings(record)]
    said = quality_findings(record) if record.rows or not record.is_timed else []
    return [
        *said,
        *benchmark_findings(record.benchmarks, groups_of(record)),
        *speed_findings(record),
        *method_findings(record),
    ]


def quality_findings(record: Record) -> Iterator[str]:
    """The verdict, the soft-to-hard gap, the controls and everything that spoils a comparison."""
    method, hard = record.setting("attention", "method", "full"), configured_row(record)
    facts = {"record": record, "method": method, "parameters": record.method.get("trainable_parameters") or 0}
    trained = any(row.kind == "trained" for row in record.rows)
    near = sum(record.setting("attention", part) or 0 for part in ("window", "sinks"))
    everything, length = any(keeps_everything(row) for row in record.rows), record.setting("eval", "window")
    facts["nothing_distant"] = everything and length is not None and near >= length - 1
    yield from tell("run", trained=trained, configured=any(is_configured(record, r) for r in record.rows), **facts)
    yield from tell("adapted", record.rows if record.base else [], **facts)
    if hard is not None:
        yield from _configured(record, hard)
    yield from tell("twins", record.rows)
    yield from _dominance(record)
    yield from tell("rows", record.rows, keeps_everything=keeps_everything, **facts)


def _configured(record: Record, hard: Row) -> Iterator[str]:
    """The configured hard row against the base, its own soft gate, and the controls."""
    if record.base is not None and hard.delta_nll is not None:
        yield say("verdict", hard=hard, base=record.base)
        yield say("sparsity", hard=hard)
    soft = next((row for row in record.rows if row.kind == "soft" and row.method == hard.method and row.scored), None)
    if soft is not None:
        yield say("gap", soft=soft, hard=hard)
    for row in record.rows:
        other_k = row.method == "random_groups" and row.top_k not in (None, hard.top_k)
        if row.kind == "control" and is_comparable(row) and not other_k:
            yield _against(hard, row, record.setting("attention", "window", 0))


def _against(hard: Row, control: Row, window: int) -> str:
    if control.delta_vs_hard is not None:
        # the difference is the control's, the word the hard row's
        word = {BETTER: WORSE, WORSE: BETTER}.get(found := than(*vs_hard(control)), found)
        how = say("control_paired", row=control)
    else:
        word, how = _unpaired(hard, control)
    ours, theirs, density = hard.pairs_removed, control.pairs_removed, say("no_density")
    if ours is not None and theirs is not None:
        density = say("density", ours=ours, theirs=theirs, same=abs(ours - theirs) <= SAME_DENSITY)
    label = say("control_label", row=control, width=control.window or window, configured=window)
    return say("control", hard=hard, row=control, label=label, word=word, how=how, density=density)


def _unpaired(hard: Row, control: Row) -> tuple[str, str]:
    word = BETTER if (hard.nll or 0.0) < (control.nll or 0.0) else WORSE
    if hard.delta_low is None or hard.delta_high is None or control.delta_low is None or control.delta_high is None:
        return word, say("no_intervals")
    if hard.delta_low <= control.delta_high and control.delta_low <= hard.delta_high:
        return "not separated from", say("intervals_overlap")
    return word, say("intervals_apart")


def _dominance(record: Record) -> Iterator[str]:
    told = [row for row in record.rows if row.largest_share is not None]
    if rows := [x for x in told if dominates(x.largest_share or 0.0, groups_of(record, x.arm), x.memberships)]:
        yield say("dominated", rows=rows)
    times = memberships(record)
    shares = [of_tokens(max(groups, default=0.0), times) or 0.0 for groups in record.group_shares or []]
    largest = dict(zip(record.layers or range(len(shares)), shares, strict=False))
    if dominated := [layer for layer, share in largest.items() if dominates(share, groups_of(record), times)]:
        worst = max(dominated, key=lambda layer: largest[layer])
        facts = {"layers": len(dominated), "of": len(largest), "worst": worst, "largest": largest[worst]}
        yield say("dominated_layers", most=dominant(groups_of(record), times), times=times, **facts)
    for phase, probes in by_phase([] if record.arms else record.probes).items():
        if dominates(probes[-1].dominance, groups_of(record)):
            yield say("taken_over", phase=phase, probe=probes[-1])


def benchmark_findings(rows: list[BenchmarkRow], groups: int | None = None) -> Iterator[str]:
    """Degradation where the mask acted, where it did not, the controls, and what went wrong."""
    scored = telling([row for row in rows if row.scored])
    routed = any(row.kind == "hard" for row in scored)
    # a control is judged for its own sake where there is no router that it controls
    judged = [row for row in scored if row.kind in ("trained", "hard") or (row.kind == "control" and not routed)]
    for attention in dict.fromkeys(row.attention for row in judged):
        yield from _on_tasks(attention, [row for row in judged if row.attention == attention])
    # tasks that do not need distant pairs cannot show that a router keeps the right ones
    acted = {row.task for row in scored if row.kind == "hard" and row.engaged}
    windows = [row for row in scored if row.kind == "control" and row.method == "window" and row.task in acted]
    if easy := [row.task for row in windows if row.outcome == "indistinguishable"]:
        yield say("easy", tasks=easy)
    hard = [row for row in scored if row.kind == "hard" and row.distant_share]
    yield from tell("broken_tasks", hard, most=lambda row: dominant(groups, row.memberships))
    yield from tell("failed_tasks", rows)


def _on_tasks(attention: str, rows: list[BenchmarkRow]) -> Iterator[str]:
    # adapted weights under full attention have no mask that could fail to act
    compared = [row for row in rows if row.engaged is not False and row.outcome]
    told = {word: [row for row in compared if row.outcome == word] for word in ("worse", "better")}
    parts = [say("outcome", word=word, rows=found) for word, found in told.items() if found]
    if same := [row for row in compared if row.outcome == "indistinguishable"]:
        losses = [100 * -(row.difference_low or 0) for row in same if row.is_share]
        parts.append(say("no_outcome", rows=same, losses=losses))
    idle, causal = [row for row in rows if row.engaged is False], all(row.causal for row in rows)
    yield from tell(
        "tasks", attention=attention, causal=causal, compared=compared, parts=parts, idle=idle, engaged=ENGAGED
    )


def comparison_findings(record: Record) -> Iterator[str]:
    """Who is better and worse than the first arm, what was lost on benchmarks, and what cannot be told."""
    for arm in record.arms:
        yield from tell("arms", arm=arm)
    yield from tell("arm_rows", record.rows)
    found = [(arm, own) for arm in record.arms if (own := row_of(record, arm.name))]
    first = record.arms[0]
    yield from _against_first(first, row_of(record, first.name), [(arm, own) for arm, own in found if arm is not first])
    yield from _against_others(record)
    yield from _arms_on_tasks(record)
    for way in ways(record):
        yield say("way", **way)
    yield from tell("spoiled_arms", [own for _, own in found if own.scored])
    tokens = sorted({arm.tokens_seen for arm in record.arms if arm.steps})
    if len(tokens) > 1:
        yield say("unequal_tokens", tokens=", ".join(f"{count:,}" for count in tokens))


def _against_first(first: Arm, own: Row | None, others: list[tuple[Arm, Row]]) -> Iterator[str]:
    if own is None or not own.scored:
        yield say("no_first", first=first)
    else:
        yield say("first", first=first, row=own)
        compared = [row for _, row in others if row.delta_vs_hard is not None and row.causal and own.causal]
        for word in WORDS:
            if rows := [row for row in compared if than(*vs_hard(row)) == word]:
                yield say("against_first", word=word, first=first, rows=rows)
    # of the arms that train about as many numbers on as many tokens the best, chosen on these tokens
    rivals = [
        row
        for arm, row in others
        if arm.steps
        and arm.tokens_seen == first.tokens_seen
        and abs(arm.trainable_parameters - first.trainable_parameters) <= SAME_BUDGET * first.trainable_parameters
        and (row.causal and row.nll is not None and row.kind == "trained")
    ]
    if rivals:
        best, removed = min(rivals, key=lambda row: row.nll or 0.0), own.pairs_removed if own else None
        yield say("equal_budget", first=first, best=best, rivals=len(rivals), removed=removed)


def _against_others(record: Record) -> Iterator[str]:
    """Who is better and worse than the arms that are named as another reference, or are the first of their text."""
    causal = {row.arm for row in record.rows if row.causal} - {record.arms[0].name}
    found = [each for each in record.differences if each.against and {each.arm, each.against} <= causal]
    for against in dict.fromkeys(each.against for each in found):
        for word in WORDS:
            rows = [each for each in found if each.against == against and than(each.value, each.low, each.high) == word]
            if rows:
                yield say("against_other", word=word, against=against, rows=rows)


def _arms_on_tasks(record: Record) -> Iterator[str]:
    rows = telling([row for row in record.benchmarks if row.scored and row.kind not in ("base", "missing")])
    for word in ("worse", "better"):
        if told := [row for row in rows if row.outcome == word and row.engaged is not False and row.causal]:
            yield say("arm_outcomes", word=word, rows=told)
    for arm in dict.fromkeys(row.attention for row in rows):
        own = [row for row in rows if row.attention == arm]
        if idle := [row.task for row in own if row.engaged is False]:
            yield say("idle_arm", arm=arm, idle=idle, acted=[row.task for row in own if row.engaged])


def stability_findings(record: Record) -> Iterator[str]:
    """Who collapsed in which phase, and who kept all groups."""
    found = list(phases(record))
    for name in dict.fromkeys(phase.name for phase in found):
        own = [phase for phase in found if phase.name == name]
        collapsed = [phase for phase in own if phase.probe.dominance >= COLLAPSED]
        left = [phase for phase in own if phase not in collapsed]
        dominating = [x for x in left if dominates(x.probe.dominance, groups_of(record, x.arm.name))]
        alive = [phase for phase in left if phase not in dominating]
        fates = {"collapsed": collapsed, "dominating": dominating, "alive": alive}
        yield say("fates", phase=name, fates=[say(fate, rows=rows) for fate, rows in fates.items() if rows])


def group_findings(record: Record) -> Iterator[str]:
    """What the groups are made of, how evenly they hold the tokens, what they keep, cut and cost."""
    report = record.groups
    assert report is not None
    layers = report.layers
    mean_of = partial(average, layers)
    on_one_key = [row for row in layers if (row.cut_key_share or 0.0) > 0.5]
    described = [group for group in report.closest.groups if group.purity is not None]
    purest = sorted(described, key=lambda group: -(group.purity or 0.0))[:MOST_GROUPS]
    kept_pairs, kept_mass = mean_of("distant_pairs_kept"), distant_mass_kept(layers)
    facts: dict[str, Any] = {
        "kind": "layers" if layers[0].head is None else "heads",
        "nmi": fit_means(layers, "nmi"),
        "purity": fit_means(layers, "purity"),
        "higher": sum(row.fit("trained").nmi > row.fit("untrained").nmi for row in layers),
        "common": max(report.class_shares.items(), key=lambda item: item[1]),
        "members": [group for group in described if group in purest],
        "described": described,
        "marks": [group.purity for _, group in report.punctuation if group.purity is not None],
        "dominated": [row.name for row in layers if dominates(row.largest, len(row.groups))],
        "empty": [row.name for row in layers if not row.least],
        "agreement": mean_of("agreement_seeds"),
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


def continuation_findings(record: Record) -> Iterator[str]:
    """What the texts are worth under the base, against full attention's own."""
    losses: dict[tuple[str, str], list[float]] = {}
    for row in record.continuations:
        if row.base_nll is not None:
            losses.setdefault((row.kind, row.attention), []).append(row.base_nll)
    full = next((mean(found) for (kind, _), found in losses.items() if kind == "base"), None)
    for (kind, name), found in losses.items():
        if kind == "hard" and full is not None:
            yield say("continued", name=name, loss=mean(found), full=full)
    yield from tell("continuations", record.continuations)
