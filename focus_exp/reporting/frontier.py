"""Perplexity against the distant pairs that are kept, a panel for each length of the text, a line for each method."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from focus_exp.records.record import Record
from focus_exp.reporting.canvas import COLOURS, canvas
from focus_exp.reporting.notes import title

TASK = re.compile(r"perplexity@(\d+)")
NUMBERED = re.compile(r"_\d+$")
MARKERS = "osD^vP*X"
# per cent of perplexity, linear up to the first
LINEAR = 1.0
TICKS = (-1, 0, 1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Point:
    """An arm on texts of a length: the share of all causal pairs that it removes, that of the distant ones by its own
    window, and its change of perplexity [%] with the bounds."""

    tokens: int
    arm: str
    method: str
    removed: float
    distant: float
    change: tuple[float, float, float]

    @property
    def kept(self) -> float:
        """Share of the distant pairs."""
        return 1 - self.removed / self.distant if self.distant else 1.0

    @property
    def loss(self) -> float:
        """Above full attention [nats]."""
        return math.log1p(self.change[0] / 100)


def points(record: Record) -> list[Point]:
    """Of every arm at the evaluation's own length and at those of perplexity@<tokens>."""
    found = [
        Point(int(task[1]), row.attention, row.method, row.pairs_removed, row.distant_share or 0.0, change)
        for row in record.benchmarks
        if (task := TASK.fullmatch(row.task)) and row.pairs_removed is not None
        and (change := percent(row.difference, row.difference_low, row.difference_high))
    ]  # fmt: skip
    window = record.setting("eval", "window")
    if window not in {point.tokens for point in found}:
        found += [
            Point(window, row.arm, row.method, removed, removed / (1 - kept) if kept < 1 else 0.0, change)
            for row in record.rows
            if row.arm and (removed := row.pairs_removed) is not None and (kept := row.distant_pairs_kept) is not None
            and (change := percent(row.delta_nll, row.delta_low, row.delta_high))
        ]  # fmt: skip
    return found


def ways(record: Record) -> Iterator[dict[str, Any]]:
    """At each length, what share of the loss of the first router the first arm with two encoders wins back, of what
    a choice of as many tokens by the base's own scores would."""
    found = points(record)
    for length in sorted({point.tokens for point in found}):
        first = {point.method: point for point in reversed(found) if point.tokens == length}
        own, published, limit = (first.get(method) for method in ("focus_dual", "focus", "best_tokens"))
        if own and published and limit and published.loss > limit.loss:
            share = (published.loss - own.loss) / (published.loss - limit.loss)
            yield {"own": own, "published": published, "limit": limit, "covered": share}


def frontier(record: Record) -> Figure | None:
    """Of a comparison whose arms were measured at several lengths; arms that differ by the number at the end of their
    name are points of one line."""
    found = points(record) if record.arms else []
    lengths = sorted({point.tokens for point in found})
    if len(lengths) < 2:
        return None
    heading = "perplexity above full attention, with 95 % intervals, against the distant pairs kept"
    figure, panels = canvas(f"{title(record)}\n{heading}", 4.6, ncols=len(lengths), sharey=True)
    families = dict.fromkeys(NUMBERED.sub("", arm.name) for arm in record.arms)
    styles = dict(zip(families, cycle([(m, c) for m in MARKERS for c in COLOURS]), strict=False))
    for axes, length in zip(panels.flat, lengths, strict=True):
        there = [point for point in found if point.tokens == length]
        distant = distant_share(record, there)
        for family, (marker, colour) in styles.items():
            own = [point for point in there if NUMBERED.sub("", point.arm) == family]
            if own:
                kept, value, low, high = np.transpose(
                    sorted((100 * (1 - point.removed / distant), *point.change) for point in own)
                )
                bars = value - low, high - value
                axes.errorbar(kept, value, bars, color=colour, marker=marker, markersize=5, linewidth=1, label=family)
        axes.axhline(0, color="black", linewidth=1)
        axes.set_yscale("symlog", linthresh=LINEAR)
        axes.set(title=f"{length:,} tokens", xlabel="distant pairs kept [%]", xlim=(-5, 105))
        axes.set_yticks(TICKS, [f"{tick:+g}" if tick else "0" for tick in TICKS])
        axes.minorticks_off()
    lows, highs = zip(*(point.change[1:] for point in found), strict=True)
    panels.flat[0].set(ylabel="perplexity [%]", ylim=(min(*lows, 0) - 0.2, 1.3 * max(highs)))
    handles = {name: h for axes in panels.flat for h, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def distant_share(record: Record, there: list[Point]) -> float:
    """Share of all causal pairs that lie beyond the comparison's own window, whatever window an arm has."""
    window = record.setting("attention", "window")
    other = {arm.name for arm in record.arms if any("attention.window=" in text for text in arm.settings)}
    shares = [point.distant for point in there if point.distant and point.arm not in other]
    return max(shares, default=1.0) if window is not None else 1.0


def percent(value: float | None, low: float | None, high: float | None) -> tuple[float, float, float] | None:
    """Of perplexity, by a difference in nats and its bounds."""
    if value is None:
        return None
    first, second, third = (100 * math.expm1(min(value if x is None else x, 50.0)) for x in (value, low, high))
    return first, second, third
