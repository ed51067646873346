"""Which of a record's rows stand for the run, for an arm, for a phase of an arm, for a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isclose

from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm, ProbeRow, Row

# shares of the tokens in one group, above which it dominates, and from which on the router has collapsed
DOMINANT, COLLAPSED = 0.5, 0.9
# the first of these that a task has stands for the task where its metrics agree
PRIMARY = ("acc_norm", "acc")
OUTCOMES = ("worse", "better", "indistinguishable", "")


def answer(record: Record) -> Row | None:
    """The row that stands for a run: its hard groups as configured, its attention method, or its trained weights."""
    method = record.setting("attention", "method", "full")
    choices: list[Callable[[Row], bool]] = [
        lambda row: is_configured(record, row),
        lambda row: row.kind == "control" and row.method == method,
        lambda row: row.kind == "trained",
    ]
    return next((row for chosen in choices for row in record.rows if chosen(row)), None)


def is_configured(record: Record, row: Row) -> bool:
    """Whether a row is of hard groups at the config's method, top_k and pair rule."""
    # with one group a token both pair rules keep the same pairs
    return (
        row.kind == "hard"
        and row.method == record.setting("attention", "method")
        and row.top_k in (None, record.setting("attention", "top_k"))
        and (row.top_k == 1 or row.pair_rule in (None, record.setting("attention", "pair_rule")))
    )


def configured_row(record: Record) -> Row | None:
    """The configured hard row, if it can be compared with the base."""
    return next((row for row in record.rows if is_configured(record, row) and is_comparable(row)), None)


def is_comparable(row: Row) -> bool:
    return row.scored and row.causal and not keeps_everything(row)


def keeps_everything(row: Row) -> bool:
    """Whether a hard row or control keeps every distant pair, that is, is full attention."""
    return row.kind in ("hard", "control") and isclose(row.distant_pairs_kept or 0.0, 1.0)


def row_of(record: Record, arm: Arm) -> Row | None:
    """The row of a comparison that stands for an arm."""
    return next((row for row in record.rows if row.arm == arm.name), None)


@dataclass(frozen=True)
class Phase:
    """A phase of an arm: its last probe, and its rows where they were measured. `trains`: router or all."""

    arm: Arm
    name: str
    trains: str
    probe: ProbeRow
    soft: Row | None
    hard: Row | None

    @property
    def full(self) -> bool:
        return self.trains == "all"


def phases(record: Record) -> Iterator[Phase]:
    """Every phase of every arm that was probed, in order."""
    trained = record.setting("regime", "phases", {})
    for arm in record.arms:
        last = {probe.phase: probe for probe in record.probes if probe.arm == arm.name}
        for name, probe in last.items():
            rows = {row.kind: row for row in record.phases if (row.arm, row.phase) == (arm.name, name)}
            hard = rows.get("hard") or (row_of(record, arm) if len(last) == 1 else None)
            trains = trained.get(name, {}).get("train", name)
            yield Phase(arm, name, trains, probe, rows.get("soft"), hard)


def phase_of(record: Record, arm: str, *, full: bool) -> Phase | None:
    """The phase of `arm` that trained everything, or the router alone."""
    return next((phase for phase in phases(record) if phase.arm.name == arm and phase.full == full), None)


def outcome(row: BenchmarkRow) -> str:
    """Whether a row is worse or better than full attention, or neither beyond its interval; "" if not compared."""
    low, high = row.difference_low, row.difference_high
    if low is None or high is None:
        return ""
    if low <= 0 <= high:
        return "indistinguishable"
    return "better" if (high > 0) == row.higher_is_better else "worse"


def telling(rows: list[BenchmarkRow]) -> list[BenchmarkRow]:
    """Of every task and attention one row: a metric that is worse, else one that is better, else the usual one.

    A loss in any metric is a loss: that nothing is lost has to be hard to claim.
    """
    chosen: dict[tuple[str, str], BenchmarkRow] = {}
    for row in sorted(rows, key=lambda row: (OUTCOMES.index(outcome(row)), _rank(row))):
        chosen.setdefault((row.task, row.attention), row)
    return [row for row in rows if chosen[row.task, row.attention] is row]


def _rank(row: BenchmarkRow) -> int:
    return PRIMARY.index(row.metric) if row.metric in PRIMARY else len(PRIMARY)
