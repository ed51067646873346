"""Pictures of a speed record: ratio against length with its bound, and perplexity against ratio by k."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from math import isfinite, log2
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from focus_exp.records.record import Record
from focus_exp.reporting.canvas import COLOURS, canvas, save_figures
from focus_exp.reporting.printed import paper_speedups
from focus_exp.reporting.speed import Timed, break_even, by_top_k, label, quality_row, series, setting, timed
from focus_exp.reporting.speed_notes import ASSIGNMENTS, about, distinct
from focus_exp.reporting.tables import perplexity_text

WIDTHS = {"attention": 2.2, "kernels": 0.9}
MARKERS = {"": "o", "query_topk": "D", "share": "^"}
CLOCKS = {"attention": "with routing", "kernels": "kernels alone"}
BOUND, PAPER, BREAK_EVEN = "bound: pairs of full / pairs of Focus", "paper, H100", "break-even"


def write_speed_figures(record: Record, folder: str | Path) -> dict[str, Path]:
    """Write speed and speed_quality, those for which there are data, into `folder`; returns name -> PNG."""
    return save_figures({"speed": _speed(record), "speed_quality": _speed_quality(record)}, folder)


def _speed(record: Record) -> Figure | None:
    found = {clock: {key: timed(rows) for key, rows in series(record, clock).items()} for clock in WIDTHS}
    keys = sorted({key for lines in found.values() for key, pairs in lines.items() if pairs})
    # the other k have a figure of their own
    least = min((key.top_k for key in keys), default=1)
    keys = [key for key in keys if key.top_k == least]
    if not keys:
        return None
    dtypes = distinct(row.dtype for lines in found.values() for key in keys for row, _ in lines.get(key, []))
    heading = f"{record.experiment}: time of full attention over time of Focus, one layer in {dtypes}, k={least}"
    figure, (upper, lower) = canvas(
        f"{heading}\nmodel on {record.device}", height=7.5, nrows=2, sharex=True, height_ratios=(3, 2)
    )
    colours = dict(zip(keys, cycle(COLOURS), strict=False))
    lengths = [row.tokens for key in keys for lines in found.values() for row, _ in lines.get(key, [])]
    drawn = {CLOCKS[clock] for clock, lines in found.items() if any(lines.get(key) for key in keys)}
    for key, colour in colours.items():
        lines = {clock: found[clock].get(key, []) for clock in WIDTHS}
        for clock, pairs in lines.items():
            _ratios(upper, lower, pairs, clock, colour)
        if bounds := [(row.tokens, row.bound) for row, _ in lines["attention"] or lines["kernels"] if row.bound]:
            upper.plot(*_columns(bounds), color=colour, linestyle="--", linewidth=1.2)
            drawn.add(BOUND)
        name = label(record, key)
        if crossing := _crossing(lines["attention"]):
            upper.plot(crossing, 1, "D", color=colour, markeredgecolor="black", markersize=7, zorder=3)
            drawn.add(BREAK_EVEN)
            name += f", breaks even at {about(crossing)}"
        upper.plot([], [], color=colour, linewidth=2.2, label=name)
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
    styles = [handle for handle in _styles() if handle.get_label() in drawn]
    figure.legend(handles=styles, loc="outside lower right", frameon=False)
    return figure


def _ratios(upper: Axes, lower: Axes, pairs: Timed, clock: str, colour: str) -> None:
    of_bound = [(row.tokens, ratio / row.bound) for row, ratio in pairs if row.bound]
    width = WIDTHS[clock]
    for axes, points in ((upper, [(row.tokens, ratio) for row, ratio in pairs]), (lower, of_bound)):
        axes.plot(*_columns(points), color=colour, linewidth=width, marker="o", markersize=2 * width)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _crossing(pairs: Timed) -> float | None:
    """Where the drawn line rises through 1 for good, if it does so between two measured lengths."""
    found = break_even([(row.tokens, ratio) for row, ratio in pairs]) if pairs else None
    return found.tokens if found and found.slower else None


def _styles() -> list[Line2D]:
    grey = "0.35"
    return [
        *(
            Line2D([], [], color=grey, linewidth=width, marker="o", markersize=2 * width, label=CLOCKS[clock])
            for clock, width in WIDTHS.items()
        ),
        Line2D([], [], color=grey, linestyle="--", linewidth=1.2, label=BOUND),
        Line2D([], [], color=grey, linestyle="", marker="s", markerfacecolor="none", markersize=8, label=PAPER),
        Line2D([], [], color=grey, linestyle="", marker="D", markeredgecolor="black", label=BREAK_EVEN),
    ]


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


def _speed_quality(record: Record) -> Figure | None:
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
    axes.plot(*_columns(claims), "s", markerfacecolor="none", markeredgecolor="0.35", markersize=9, label=claim)
    axes.axvline(1, color="black", linestyle=":", linewidth=1)
    axes.set(xlabel="ratio (above 1: Focus is faster)", ylabel="perplexity (lower is better)", xlim=(0, None))
    axes.margins(y=0.12)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    return figure
