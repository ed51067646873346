"""Perplexity against the distant pairs that are kept, a panel for each length of the text, a line for each method."""

import math
import re
from itertools import cycle

import numpy as np
from matplotlib.figure import Figure

from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.record import Record
from focus_exp.reporting.canvas import COLOURS, canvas
from focus_exp.reporting.notes import title

TASK = re.compile(r"perplexity@(\d+)")
NUMBERED = re.compile(r"_\d+$")
MARKERS = "osD^vP*X"
# per cent of perplexity, linear up to the first
LINEAR = 1.0
TICKS = (-1, 0, 1, 2, 5, 10, 20, 50, 100)


def frontier(record: Record) -> Figure | None:
    """Of a comparison whose arms were measured at several lengths; arms that differ by the number at the end of their
    name are points of one line."""
    rows = [row for row in record.benchmarks if TASK.fullmatch(row.task) and row.difference is not None]
    lengths = sorted({length_of(row) for row in rows})
    if not record.arms or len(lengths) < 2:
        return None
    heading = "perplexity above full attention, with 95 % intervals, against the distant pairs kept"
    figure, panels = canvas(f"{title(record)}\n{heading}", 4.6, ncols=len(lengths), sharey=True)
    families = dict.fromkeys(NUMBERED.sub("", arm.name) for arm in record.arms)
    styles = dict(zip(families, cycle([(m, c) for m in MARKERS for c in COLOURS]), strict=False))
    for axes, length in zip(panels.flat, lengths, strict=True):
        there = [row for row in rows if length_of(row) == length]
        distant = distant_share(record, there)
        for family, (marker, colour) in styles.items():
            own = [row for row in there if NUMBERED.sub("", row.attention) == family and row.pairs_removed is not None]
            points = sorted((100 * (1 - (row.pairs_removed or 0) / distant), *changes(row)) for row in own)
            if points:
                kept, value, low, high = np.transpose(points)
                bars = value - low, high - value
                axes.errorbar(kept, value, bars, color=colour, marker=marker, markersize=5, linewidth=1, label=family)
        axes.axhline(0, color="black", linewidth=1)
        axes.set_yscale("symlog", linthresh=LINEAR)
        axes.set(title=f"{length:,} tokens", xlabel="distant pairs kept [%]", xlim=(-5, 105))
        axes.set_yticks(TICKS, [f"{tick:+g}" if tick else "0" for tick in TICKS])
        axes.minorticks_off()
    lows, highs = zip(*(changes(row)[1:] for row in rows), strict=True)
    panels.flat[0].set(ylabel="perplexity [%]", ylim=(min(*lows, 0) - 0.2, 1.3 * max(highs)))
    handles = {name: h for axes in panels.flat for h, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def length_of(row: BenchmarkRow) -> int:
    found = TASK.fullmatch(row.task)
    assert found
    return int(found[1])


def distant_share(record: Record, rows: list[BenchmarkRow]) -> float:
    """Share of all causal pairs that lie beyond the comparison's own window, whatever window an arm has."""
    window = record.setting("attention", "window")
    other = {arm.name for arm in record.arms if any("attention.window=" in text for text in arm.settings)}
    shares = [row.distant_share for row in rows if row.distant_share and row.attention not in other]
    return max(shares, default=1.0) if window is not None else 1.0


def changes(row: BenchmarkRow) -> tuple[float, float, float]:
    """Per cent of perplexity: value, low, high."""
    assert row.difference is not None
    bounds = (row.difference, *(row.difference if x is None else x for x in (row.difference_low, row.difference_high)))
    value, low, high = (100 * math.expm1(min(x, 50.0)) for x in bounds)
    return value, low, high
