"""What benchmark rows show, in plain words; where the mask did not act, that nothing is shown."""

from __future__ import annotations

from focus_exp.reporting.benchmark_rows import ENGAGED, BenchmarkRow
from focus_exp.reporting.benchmarks import difference_text, failures, named
from focus_exp.reporting.tables import share_text

DOMINANT = 0.5
# the first of these that a task has stands for the task
PRIMARY = ("acc_norm", "acc")


def benchmark_findings(rows: list[BenchmarkRow]) -> list[str]:
    """Sentences on degradation where the mask acted, on where it did not, on the controls, and on what went wrong."""
    scored = primary([row for row in rows if row.scored])
    judged = [row for row in scored if row.kind in ("trained", "hard") or row.attention in standalone(scored)]
    said = []
    for attention in dict.fromkeys(row.attention for row in judged):
        said += _verdict(attention, [row for row in judged if row.attention == attention])
    return [*said, *_controls(scored), *_broken(scored), *failures(rows)]


def primary(rows: list[BenchmarkRow]) -> list[BenchmarkRow]:
    """Of every task and attention the one row that stands for it."""
    chosen: dict[tuple[str, str], BenchmarkRow] = {}
    for row in rows:
        rank = PRIMARY.index(row.metric) if row.metric in PRIMARY else len(PRIMARY)
        before = chosen.get((row.task, row.attention))
        if before is None or rank < (PRIMARY.index(before.metric) if before.metric in PRIMARY else len(PRIMARY)):
            chosen[row.task, row.attention] = row
    return list(chosen.values())


def standalone(rows: list[BenchmarkRow]) -> set[str]:
    """Attentions measured for their own sake: controls where there is no router that they control."""
    routed = any(row.kind == "hard" for row in rows)
    return set() if routed else {row.attention for row in rows if row.kind == "control"}


def outcome(row: BenchmarkRow) -> str:
    """Whether a row is better or worse than full attention, or neither beyond its interval; "" if not compared."""
    low, high = row.difference_low, row.difference_high
    if low is None or high is None:
        return ""
    if low <= 0 <= high:
        return "indistinguishable"
    return "better" if (high > 0) == row.higher_is_better else "worse"


def _verdict(attention: str, rows: list[BenchmarkRow]) -> list[str]:
    said = []
    if not all(row.causal for row in rows):
        said.append(f"{attention} is not causal: its scores may read the answer and must not be compared.")
        return said
    idle = [row for row in rows if row.engaged is False]
    # adapted weights under full attention have no mask that could fail to act
    compared = [row for row in rows if row.engaged is not False and outcome(row)]
    many = "task" if len(compared) == 1 else "tasks"
    where = f"{many} on which its mask acted" if any(row.engaged for row in compared) else many
    if compared:
        groups = {word: [row for row in compared if outcome(row) == word] for word in ("worse", "better")}
        parts = [
            f"{len(found)} {word} than full attention ({', '.join(f'{r.task} {difference_text(r)}' for r in found)})"
            for word, found in groups.items()
            if found
        ]
        same = len(compared) - sum(map(len, groups.values()))
        parts += [f"{same} indistinguishable from it"] if same else []
        said.append(f"{attention}: of {len(compared)} {where}, {'; '.join(parts)}.")
    if idle:
        tasks = ", ".join(f"{row.task} ({share_text(row.pairs_removed)})" for row in idle)
        said.append(
            f"{attention} was not engaged on {tasks}: under {100 * ENGAGED:.0f} % of the pairs were removed there, so "
            "equal scores are no evidence of zero degradation."
        )
    if idle and not compared:
        said.append(f"No task shows whether {attention} degrades anything.")
    return said


def _controls(rows: list[BenchmarkRow]) -> list[str]:
    """Tasks that do not need distant pairs cannot show that a router keeps the right ones."""
    hard = {row.task for row in rows if row.kind == "hard" and row.engaged}
    windows = [row for row in rows if row.kind == "control" and row.method == "window" and row.task in hard]
    easy = [row.task for row in windows if outcome(row) == "indistinguishable"]
    if not easy:
        return []
    return [
        f"On {', '.join(easy)} the window and sinks alone are indistinguishable from full attention: these scores "
        "cannot show whether the right distant pairs are kept."
    ]


def _broken(rows: list[BenchmarkRow]) -> list[str]:
    said = []
    for row in rows:
        if row.kind != "hard" or not row.distant_share:
            continue
        if row.distant_pairs_kept == 1:
            said.append(f"{named(row)} keeps every distant pair: this is full attention, not a result.")
        if row.distant_pairs_kept == 0:
            said.append(f"{named(row)} keeps no distant pair: this is window and sinks alone.")
        if row.largest_group is not None and row.largest_group > DOMINANT:
            said.append(
                f"Warning: one group holds {share_text(row.largest_group)} of a layer's tokens in {named(row)}."
            )
    return said
