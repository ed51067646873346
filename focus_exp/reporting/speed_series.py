"""Speed rows that differ in length alone, as one series, and the length from which a series is faster than full."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from focus_exp.records.record import Record
from focus_exp.records.speed import SpeedRow

# clocks whose ratio is bounded by the pairs that Focus keeps; a whole model does more than attend
ATTENTION_CLOCKS = ("kernels", "attention", "attention step", "decode")

Timed = list[tuple[SpeedRow, float]]


class Setting(NamedTuple):
    """What the rows of a series share, beside their clock."""

    groups: int
    assignment: str
    top_k: int
    pair_rule: str
    window: int
    dtype: str


@dataclass(frozen=True)
class BreakEven:
    """From where on a series is at least as fast as full attention.

    tokens: no measured length from here on is slower; None where the longest one is. Between two measured lengths it
        lies where log ratio, linear in log length, passes 0; no length is invented below the shortest measured one.
    slower: the measured lengths with a ratio below 1.
    early: measured lengths with a ratio of 1 or more that have a slower one after them.
    """

    tokens: float | None
    slower: tuple[int, ...]
    early: tuple[int, ...]


def setting(row: SpeedRow) -> Setting:
    """The setting of a row; with one group a token both pair rules keep the same pairs, so none is named."""
    rule = row.pair_rule if row.top_k > 1 else ""
    return Setting(row.groups, row.assignment, row.top_k, rule, row.window, row.dtype)


def series(record: Record, clock: str) -> dict[Setting, list[SpeedRow]]:
    """The rows of a clock by setting, shortest length first; failed rows included."""
    found: dict[Setting, list[SpeedRow]] = {}
    for row in sorted(record.speed, key=lambda row: (setting(row), row.tokens)):
        if row.clock == clock:
            found.setdefault(setting(row), []).append(row)
    return found


def label(record: Record, key: Setting) -> str:
    """A setting in words; window and dtype are named only where the record has several."""
    groups = "balanced groups" if key.assignment == "balanced" else "a trained router"
    return f"K={groups_text(record, key)} with {groups}"


def groups_text(record: Record, key: Setting) -> str:
    """K, and whatever else tells this setting from the others: "8", "4 (k=2, share)"."""
    settings = {setting(row) for row in record.speed}
    marks = [f"k={key.top_k}", key.pair_rule] if key.top_k > 1 else []
    marks += [f"window {key.window}"] if len({other.window for other in settings}) > 1 else []
    marks += [key.dtype] if key.dtype and len({other.dtype for other in settings} - {""}) > 1 else []
    return f"{key.groups} ({', '.join(marks)})" if marks else str(key.groups)


def timed(rows: Iterable[SpeedRow]) -> Timed:
    """The rows that have a ratio, each with it."""
    return [(row, row.ratio) for row in rows if row.ratio and math.isfinite(row.ratio)]


def keeps_every_pair(row: SpeedRow) -> bool:
    """Whether the row's Focus is full attention."""
    return math.isclose(row.pairs_kept or 0.0, 1.0)


def break_even(points: Sequence[tuple[int, float]]) -> BreakEven:
    """The break-even of (length [tokens], ratio) points, at least one."""
    points = sorted(points)
    slower = [index for index, (_, ratio) in enumerate(points) if ratio < 1]
    first = slower[-1] + 1 if slower else 0
    early = tuple(tokens for tokens, ratio in points[:first] if ratio >= 1)
    tokens = None
    if first < len(points):
        tokens = _crossing(points[first - 1], points[first]) if slower else float(points[0][0])
    return BreakEven(tokens, tuple(points[index][0] for index in slower), early)


def _crossing(below: tuple[int, float], above: tuple[int, float]) -> float:
    share = math.log(below[1]) / (math.log(below[1]) - math.log(above[1]))
    return below[0] * (above[0] / below[0]) ** share
