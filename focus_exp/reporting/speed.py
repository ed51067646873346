"""Timings that differ in length alone, as one series: where it is faster, why above its bound, what a k is worth."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from focus_exp.records.record import Record
from focus_exp.records.rows import Row
from focus_exp.records.speed import SpeedRow

# clocks whose ratio is bounded by the pairs that Focus keeps; a whole model does more than attend
ATTENTION_CLOCKS = ("kernels", "attention", "attention step", "decode")
ASSIGNMENTS = {"balanced": "balanced", "trained": "trained router"}


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
    slower: tuple[float, ...]
    early: tuple[float, ...]


@dataclass(frozen=True)
class Series:
    """The rows of a setting by one clock, shortest length first, failed ones included. name: in words."""

    clock: str
    setting: Setting
    name: str
    rows: list[SpeedRow]

    @property
    def timed(self) -> list[SpeedRow]:
        return timed(self.rows)

    @property
    def points(self) -> list[tuple[float, float]]:
        """Length [tokens] and ratio."""
        return [(row.tokens, row.ratio or 0.0) for row in self.timed]

    @property
    def bounds(self) -> list[tuple[float, float]]:
        return [(row.tokens, row.bound) for row in self.timed if row.bound]

    @property
    def of_bound(self) -> list[tuple[float, float]]:
        """Length [tokens] and the share of its bound that a ratio reaches."""
        return [(row.tokens, (row.ratio or 0.0) / row.bound) for row in self.timed if row.bound]

    @property
    def even(self) -> BreakEven:
        return break_even(self.points)

    @property
    def best(self) -> SpeedRow:
        return max(self.timed, key=lambda row: row.ratio or 0.0)

    @property
    def bounded(self) -> bool:
        return self.clock in ATTENTION_CLOCKS

    @property
    def is_full(self) -> bool:
        """Whether its Focus is full attention."""
        return all(keeps_every_pair(row) for row in self.timed)


def setting(row: SpeedRow) -> Setting:
    """The setting of a row; with one group a token both pair rules keep the same pairs, so none is named."""
    rule = row.pair_rule if row.top_k > 1 else ""
    return Setting(row.groups, row.assignment, row.top_k, rule, row.window, row.dtype)


def series(record: Record, clock: str) -> list[Series]:
    """The settings of a clock."""
    rows = sorted((row for row in record.speed if row.clock == clock), key=lambda row: (setting(row), row.tokens))
    found = {key: [row for row in rows if setting(row) == key] for key in dict.fromkeys(map(setting, rows))}
    return [Series(clock, key, label(record, key), own) for key, own in found.items()]


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


def timed(rows: Iterable[SpeedRow]) -> list[SpeedRow]:
    """Those that have a ratio."""
    return [row for row in rows if row.ratio and math.isfinite(row.ratio)]


def keeps_every_pair(row: SpeedRow) -> bool:
    """Whether the row's Focus is full attention."""
    return math.isclose(row.pairs_kept or 0.0, 1.0)


def break_even(points: Sequence[tuple[float, float]]) -> BreakEven:
    """The break-even of (length [tokens], ratio) points, at least one."""
    points = sorted(points)
    slower = [index for index, (_, ratio) in enumerate(points) if ratio < 1]
    first = slower[-1] + 1 if slower else 0
    early = tuple(tokens for tokens, ratio in points[:first] if ratio >= 1)
    tokens = None
    if first < len(points):
        tokens = _crossing(points[first - 1], points[first]) if slower else float(points[0][0])
    return BreakEven(tokens, tuple(points[index][0] for index in slower), early)


def _crossing(below: tuple[float, float], above: tuple[float, float]) -> float:
    share = math.log(below[1]) / (math.log(below[1]) - math.log(above[1]))
    return below[0] * (above[0] / below[0]) ** share


def quickest(row: SpeedRow, rows: list[SpeedRow]) -> tuple[SpeedRow, float] | None:
    """The other length at which full attention took least per pair, and how many times as long it takes at `row`'s.

    A ratio that is above its bound by no more than that is explained by full attention's own pace. None without another
    length timed by the same kernel.
    """
    others = [other for other in rows if other.tokens != row.tokens and other.full_kernel == row.full_kernel]
    best = min(others, key=_seconds_per_pair, default=None)
    return None if best is None else (best, _seconds_per_pair(row) / _seconds_per_pair(best))


def _seconds_per_pair(row: SpeedRow) -> float:
    """Full attention's time for one causal pair."""
    pairs = row.tokens + 1 if row.clock == "decode" else row.tokens * (row.tokens + 1) / 2
    return (row.full_seconds or 0.0) / pairs


def by_top_k(record: Record) -> list[SpeedRow]:
    """One row per setting to compare k by, at the longest length that all settings were timed at, if there is one.

    With routing included if k varies there, else by prefill; [] if it varies in neither.
    """
    for clock in ("attention", "prefill"):
        found = series(record, clock)
        if len({each.setting.top_k for each in found}) > 1:
            lengths = [{row.tokens for row in each.timed} for each in found if each.timed]
            common = max(set.intersection(*lengths), default=0) if lengths else 0
            return [next((row for row in each.rows if row.tokens == common), each.rows[-1]) for each in found]
    return []


def quoted(record: Record) -> list[SpeedRow]:
    """Of `by_top_k` the timings to quote: the trained router's, for quality is its; else those of balanced groups."""
    rows = timed(by_top_k(record))
    return [row for row in rows if row.assignment == "trained"] or rows


def speed_of_k(record: Record, top_k: int, pair_rule: str | None) -> SpeedRow | None:
    """The one timing that stands for `top_k` groups a query beside the quality they have under `pair_rule`."""
    wanted = ("trained", top_k, pair_rule if top_k > 1 else "")
    rows = ((row, setting(row)) for row in quoted(record))
    return next((row for row, key in rows if (key.assignment, key.top_k, key.pair_rule) == wanted), None)


def quality_row(record: Record, key: Setting) -> Row | None:
    """The hard row that was scored with this k and pair rule, if the record's model has this K."""
    if key.groups != record.setting("attention", "groups", key.groups):
        return None
    rows = (row for row in record.rows if row.kind == "hard" and row.top_k == key.top_k)
    return next((row for row in rows if key.top_k == 1 or row.pair_rule in (None, key.pair_rule)), None)


@dataclass(frozen=True)
class Timing:
    """A row of a clock and, beside attention, the same case by its kernels alone; one of them may lack."""

    timed: SpeedRow | None
    kernels: SpeedRow | None = None

    @property
    def rows(self) -> list[SpeedRow]:
        return [row for row in (self.timed, self.kernels) if row]

    @property
    def case(self) -> SpeedRow:
        return self.rows[0]

    @property
    def overhead(self) -> float | None:
        """Share of Focus' attention that is spent outside the kernels: routing, sort, gather, merge."""
        whole, kernels = (row.focus_seconds if row else None for row in (self.timed, self.kernels))
        return 1 - kernels / whole if whole and kernels else None

    @property
    def of_bound(self) -> float | None:
        """Measured ratio over its arithmetic bound."""
        return self.timed.ratio / self.timed.bound if self.timed and self.timed.ratio and self.timed.bound else None


def timings(record: Record, clock: str) -> list[Timing]:
    """The rows of a clock by setting and length; those of "kernels" stand beside "attention", or alone."""
    clocks = (clock, "kernels" if clock == "attention" else None)
    cases: dict[tuple[Setting, int], tuple[list[SpeedRow], list[SpeedRow]]] = {}
    for row in record.speed:
        if row.clock in clocks:
            cases.setdefault((setting(row), row.tokens), ([], []))[clocks.index(row.clock)].append(row)
    return [Timing(*pair) for key in sorted(cases) for pair in zip_longest(*cases[key])]
