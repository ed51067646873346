"""What benchmark rows show, in plain words; where the mask did not act, that nothing is shown."""

from __future__ import annotations

from focus_exp.records.answers import DOMINANT
from focus_exp.records.benchmarks import BenchmarkRow, telling
from focus_exp.records.rows import ENGAGED
from focus_exp.reporting.benchmarks import difference_text, failures, is_share, named
from focus_exp.reporting.tables import share_text

# the first of these that a task has stands for the task where its metrics agree


def benchmark_findings(rows: list[BenchmarkRow]) -> list[str]:
    """Sentences on degradation where the mask acted, on where it did not, on the controls, and on what went wrong."""
    scored = telling([row for row in rows if row.scored])
    routed = any(row.kind == "hard" for row in scored)
    # a control is judged for its own sake where there is no router that it controls
    judged = [row for row in scored if row.kind in ("trained", "hard") or (row.kind == "control" and not routed)]
    said = []
    for attention in dict.fromkeys(row.attention for row in judged):
        said += _verdict(attention, [row for row in judged if row.attention == attention])
    return [*said, *_controls(scored), *_broken(scored), *failures(rows)]


def _verdict(attention: str, rows: list[BenchmarkRow]) -> list[str]:
    if not all(row.causal for row in rows):
        return [f"{attention} is not causal: its scores may read the answer and must not be compared."]
    said = []
    idle = [row for row in rows if row.engaged is False]
    # adapted weights under full attention have no mask that could fail to act
    compared = [row for row in rows if row.engaged is not False and row.outcome]
    if compared:
        many = "task" if len(compared) == 1 else "tasks"
        where = f"{many} on which its mask acted" if any(row.engaged for row in compared) else many
        said.append(f"{attention}: of {len(compared)} {where}, {'; '.join(_groups(compared))}.")
    if idle:
        tasks = ", ".join(f"{row.task} ({share_text(row.pairs_removed)})" for row in idle)
        said.append(
            f"{attention} was not engaged on {tasks}: under {100 * ENGAGED:.0f} % of the pairs were removed there, so "
            "equal scores are no evidence of zero degradation."
        )
    if idle and not compared:
        said.append(f"No task shows whether {attention} degrades anything.")
    return said


def _groups(rows: list[BenchmarkRow]) -> list[str]:
    said = []
    for word in ("worse", "better"):
        if found := [row for row in rows if row.outcome == word]:
            listed = ", ".join(f"{score_name(row)} {difference_text(row)}" for row in found)
            said.append(f"{len(found)} {word} than full attention ({listed})")
    if same := [row for row in rows if row.outcome == "indistinguishable"]:
        losses = [100 * -(row.difference_low or 0) for row in same if is_share(row)]
        limit = f", where losses of up to {max(losses):.1f} points cannot be excluded" if losses else ""
        said.append(f"{len(same)} indistinguishable from it{limit}")
    return said


def score_name(row: BenchmarkRow) -> str:
    """Task and metric, the metric once."""
    return row.task if row.task.startswith(row.metric) else f"{row.task} {row.metric}"


def _controls(rows: list[BenchmarkRow]) -> list[str]:
    """Tasks that do not need distant pairs cannot show that a router keeps the right ones."""
    hard = {row.task for row in rows if row.kind == "hard" and row.engaged}
    windows = [row for row in rows if row.kind == "control" and row.method == "window" and row.task in hard]
    easy = [row.task for row in windows if row.outcome == "indistinguishable"]
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
