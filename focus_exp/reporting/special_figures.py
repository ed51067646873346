"""Figures with a logic of their own: ratio against length with its bound, perplexity by ratio and k, group sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from math import isfinite, log2
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from focus_exp.records.answers import DOMINANT
from focus_exp.records.record import Record
from focus_exp.reporting.canvas import COLOURS, canvas
from focus_exp.reporting.formats import about_text, distinct_text, perplexity_text, share_text
from focus_exp.reporting.notes import title
from focus_exp.reporting.printed import paper_speedups
from focus_exp.reporting.speed import Setting, Timed, break_even, by_top_k, label, quality_row, series, setting, timed

GREY = "0.35"
WIDTHS = {"attention": 2.2, "kernels": 0.9}
MARKERS = {"": "o", "query_topk": "D", "share": "^"}
ASSIGNMENTS = {"balanced": "balanced", "trained": "trained router"}
STYLES: dict[str, dict[str, Any]] = {
    "with routing": {"linewidth": WIDTHS["attention"], "marker": "o", "markersize": 2 * WIDTHS["attention"]},
    "kernels alone": {"linewidth": WIDTHS["kernels"], "marker": "o", "markersize": 2 * WIDTHS["kernels"]},
    "bound: pairs of full / pairs of Focus": {"linestyle": "--", "linewidth": 1.2},
    "paper, H100": {"linestyle": "", "marker": "s", "markerfacecolor": "none", "markersize": 8},
    "break-even": {"linestyle": "", "marker": "D", "markeredgecolor": "black"},
}
ROUTING, KERNELS, BOUND, PAPER, BREAK_EVEN = STYLES


def speed(record: Record) -> Figure | None:
    found = {clock: {key: timed(rows) for key, rows in series(record, clock).items()} for clock in WIDTHS}
    keys = sorted({key for lines in found.values() for key, pairs in lines.items() if pairs})
    # the other k have a figure of their own
    least = min((key.top_k for key in keys), default=1)
    keys = [key for key in keys if key.top_k == least]
    if not keys:
        return None
    rows = [row for key in keys for lines in found.values() for row, _ in lines.get(key, [])]
    dtypes, lengths = distinct_text(row.dtype for row in rows), [row.tokens for row in rows]
    heading = f"{record.experiment}: time of full attention over time of Focus, one layer in {dtypes}, k={least}"
    figure, (upper, lower) = canvas(
        f"{heading}\nmodel on {record.device}", height=7.5, nrows=2, sharex=True, height_ratios=(3, 2)
    )
    colours = dict(zip(keys, cycle(COLOURS), strict=False))
    drawn: set[str] = set()
    for key, colour in colours.items():
        drawn |= _series(upper, lower, record, key, {clock: found[clock].get(key, []) for clock in WIDTHS}, colour)
    for groups, key in {key.groups: key for key in reversed(keys) if least == 1}.items():
        shown = [(n, ratio) for n, ratio in paper_speedups(groups).items() if min(lengths) <= n <= max(lengths)]
        upper.plot(*_columns(shown), "s", markerfacecolor="none", markeredgecolor=colours[key], markersize=8)
        drawn |= {PAPER} if shown else set()
    for axes in (upper, lower):
        axes.axhline(1, color="black", linewidth=1.2, zorder=1)
    _log_axes(upper)
    upper.set_ylabel("ratio (above 1: Focus is faster)")
    lower.set(ylabel="measured / bound", xlabel="tokens", ylim=(0, None))
    figure.legend(loc="outside lower left", frameon=False)
    styles = [Line2D([], [], color=GREY, label=name, **style) for name, style in STYLES.items() if name in drawn]
    figure.legend(handles=styles, loc="outside lower right", frameon=False)
    return figure


def _series(upper: Axes, lower: Axes, record: Record, key: Setting, lines: dict[str, Timed], colour: str) -> set[str]:
    """Draws the clocks of a setting, their bound and break-even; returns which styles it took."""
    drawn = set()
    for clock, pairs in lines.items():
        of_bound = [(row.tokens, ratio / row.bound) for row, ratio in pairs if row.bound]
        style = {"color": colour, "linewidth": WIDTHS[clock], "marker": "o", "markersize": 2 * WIDTHS[clock]}
        upper.plot(*_columns([(row.tokens, ratio) for row, ratio in pairs]), **style)
        lower.plot(*_columns(of_bound), **style)
        drawn |= {ROUTING if clock == "attention" else KERNELS} if pairs else set()
    if bounds := [(row.tokens, row.bound) for row, _ in lines["attention"] or lines["kernels"] if row.bound]:
        upper.plot(*_columns(bounds), color=colour, linestyle="--", linewidth=1.2)
        drawn.add(BOUND)
    name = label(record, key)
    points = [(row.tokens, ratio) for row, ratio in lines["attention"]]
    even = break_even(points) if points else None
    if even and even.slower and even.tokens:
        upper.plot(even.tokens, 1, "D", color=colour, markeredgecolor="black", markersize=7, zorder=3)
        drawn.add(BREAK_EVEN)
        name += f", breaks even at {about_text(even.tokens)}"
    upper.plot([], [], color=colour, linewidth=2.2, label=name)
    return drawn


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _log_axes(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=32))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _binary(value)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _binary(value: float) -> str:
    """1024 as 1K, 2**20 as 1M."""
    power = max(0, min(2, int(log2(value)) // 10))
    return f"{value / 2 ** (10 * power):g}{('', 'K', 'M')[power]}"


def speed_quality(record: Record) -> Figure | None:
    scored = [(row, ratio, quality_row(record, setting(row))) for row, ratio in timed(by_top_k(record))]
    points = [(row, ratio, found.perplexity) for row, ratio, found in scored if found and found.perplexity]
    points = [point for point in points if isfinite(point[2])]
    if not points:
        return None
    lengths = " and ".join(f"{tokens:,}" for tokens in sorted({row.tokens for row, _, _ in points}))
    clock = "attention with routing" if points[0][0].clock == "attention" else "prefill"
    heading = f"{record.experiment}: perplexity against measured speed, {clock}, {lengths} tokens\n{record.device}"
    figure, axes = canvas(heading, height=5)
    if record.base is not None and record.base.perplexity:
        axes.axhline(record.base.perplexity, color="black", linewidth=1.2, label="base, full attention", zorder=1)
    colours = dict(zip(ASSIGNMENTS, COLOURS, strict=False))
    labels: dict[tuple[str, str], tuple[list[int], float, float]] = {}
    for row, ratio, perplexity in sorted(points, key=lambda point: (setting(point[0]), point[1])):
        rule = setting(row).pair_rule
        name = f"{ASSIGNMENTS[row.assignment]}, {rule or 'k=1'}"
        axes.plot(ratio, perplexity, MARKERS.get(rule, "v"), color=colours[row.assignment], markersize=8, label=name)
        same, *_ = labels.get((rule, perplexity_text(perplexity)), ([],))
        labels[rule, perplexity_text(perplexity)] = ([*same, row.top_k], ratio, perplexity)
    for (rule, _), (ks, ratio, perplexity) in labels.items():
        text = f"k={', '.join(map(str, sorted(set(ks))))}"
        place = (0, -16 if rule == "share" else 7)
        axes.annotate(text, (ratio, perplexity), place, textcoords="offset points", ha="center", fontsize=9)
    claims = sorted({(row.groups / row.top_k, value) for row, _, value in points})
    claim = "the paper's claimed K/k, not a measurement"
    axes.plot(*_columns(claims), "s", markerfacecolor="none", markeredgecolor=GREY, markersize=9, label=claim)
    axes.axvline(1, color="black", linestyle=":", linewidth=1)
    axes.set(xlabel="ratio (above 1: Focus is faster)", ylabel="perplexity (lower is better)", xlim=(0, None))
    axes.margins(y=0.12)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def group_sizes(record: Record) -> Figure | None:
    if not record.group_shares:
        return None
    groups = max(len(shares) for shares in record.group_shares)
    subject = "share of held-out tokens in each group, largest first (orange: above one half)"
    figure, axes = canvas(f"{title(record)}\n{subject}", 1.8 + 0.3 * len(record.group_shares))
    # a group's number means nothing across layers, so the bars are stacked by size
    ordered = np.array(
        [sorted(shares, reverse=True) + [0.0] * (groups - len(shares)) for shares in record.group_shares]
    )
    starts = np.cumsum(ordered, axis=1) - ordered
    names = [str(layer) for layer in (record.layers if len(record.layers) == len(ordered) else range(len(ordered)))]
    for rank in range(groups):
        colours: Any = str(0.55 + 0.35 * rank / groups)
        if rank == 0:
            colours = [COLOURS[1] if share > DOMINANT else COLOURS[0] for share in ordered[:, 0]]
        axes.barh(names, ordered[:, rank], left=starts[:, rank], color=colours, edgecolor="white", height=0.8)
    for index, share in enumerate(ordered[:, 0]):
        axes.text(0.005, index, share_text(share), color="white", va="center", fontsize=8)
    axes.axvline(1 / groups, color="black", linestyle="--", linewidth=1.2, label=f"balanced: 1/{groups}")
    axes.set(xlabel="share of tokens", ylabel="layer", xlim=(0, 1), ylim=(len(names) - 0.5, -0.5))
    axes.grid(visible=False)
    figure.legend(loc="outside lower right", frameon=False)
    return figure


SPECIAL: dict[str, Callable[[Record], Figure | None]] = {
    "speed": speed,
    "speed_quality": speed_quality,
    "group_sizes": group_sizes,
}
