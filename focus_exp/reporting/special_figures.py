"""Figures with a logic of their own: arms side by side, perplexity against ratio by k, the shares of the groups."""

import math
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from focus_exp.records.answers import dominates, memberships, row_of
from focus_exp.records.benchmarks import telling
from focus_exp.records.record import Record
from focus_exp.reporting.canvas import COLOURS, canvas
from focus_exp.reporting.formats import READS_FUTURE, perplexity_text, share_text
from focus_exp.reporting.frontier import frontier
from focus_exp.reporting.notes import title
from focus_exp.reporting.speed import ASSIGNMENTS, by_top_k, quality_row, setting, timed

WIDEST = 100.0  # per cent of perplexity
MARKERS = {"": "o", "query_topk": "D", "share": "^"}


def speed_quality(record: Record) -> Figure | None:
    scored = [(row, quality_row(record, setting(row))) for row in timed(by_top_k(record))]
    points = [(row, row.ratio or 0.0, quality.perplexity) for row, quality in scored if quality and quality.perplexity]
    points = [point for point in points if math.isfinite(point[2])]
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
    axes.plot(
        *zip(*claims, strict=True), "s", markerfacecolor="none", markeredgecolor="0.35", markersize=9, label=claim
    )
    axes.axvline(1, color="black", linestyle=":", linewidth=1)
    axes.set(xlabel="ratio (above 1: Focus is faster)", ylabel="perplexity (lower is better)", xlim=(0, None))
    axes.margins(y=0.12)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def comparison(record: Record) -> Figure | None:
    """Each arm's change from the base: of perplexity, and of accuracies where there are any, a colour a task."""
    found = {arm.name: row_of(record, arm.name) for arm in record.arms}
    if not any(row and row.delta_nll is not None for row in found.values()):
        return None
    scores = telling([row for row in record.benchmarks if row.difference is not None and row.is_share])
    scores = [row for row in scores if row.attention in found]
    heading = "change from the base, with 95 % intervals; hollow: under 5 % of the pairs removed"
    grid: dict[str, Any] = {"squeeze": False, "ncols": 1 + bool(scores), "sharey": True}
    figure, panels = canvas(f"{title(record)}\n{heading}", 1.8 + 0.32 * len(found), **grid)
    places = {name: -number for number, name in enumerate(found)}
    perplexity, *accuracy = panels.flat
    for name, row in found.items():
        deltas = [row.delta_nll, row.delta_low, row.delta_high] if row and row.scored else [None] * 3
        changes = [None if delta is None else 100 * math.expm1(min(delta, 50.0)) for delta in deltas]
        colour = COLOURS[0 if row is None or row.causal else 1]
        _interval(perplexity, places[name], changes, colour, row is not None and row.engaged is False)
    names = [name if row is None or row.causal else f"{name} ({READS_FUTURE})" for name, row in found.items()]
    perplexity.axvline(0, color="black", linewidth=1)
    perplexity.set_yticks(list(places.values()), names)
    perplexity.set(xlabel="perplexity [%]")
    tasks = list(dict.fromkeys(row.task for row in scores))
    for axes in accuracy:
        for number, (task, colour) in enumerate(zip(tasks, cycle(COLOURS), strict=False)):
            for score in (score for score in scores if score.task == task):
                shares = (score.difference, score.difference_low, score.difference_high)
                points = [None if share is None else 100 * share for share in shares]
                place = places[score.attention] - 0.6 * ((number + 0.5) / len(tasks) - 0.5)
                _interval(axes, place, points, colour, score.engaged is False, widest=math.inf)
            axes.plot([], [], "o", color=colour, label=task)
        axes.axvline(0, color="black", linewidth=1)
        axes.set(xlabel="accuracy [points]")
        figure.legend(ncols=len(tasks), loc="outside lower right", frameon=False)
    return figure


def _interval(
    axes: Axes, place: float, bounds: list[float | None], colour: str, hollow: bool, widest: float = WIDEST
) -> None:
    """Value, low and high in a row of the axes, None where it failed; a value beyond `widest` is named at the edge."""
    value, low, high = bounds
    if value is None:
        axes.annotate("failed", (0, place), (6, 0), textcoords="offset points", color=COLOURS[1], va="center")
    elif value > widest:
        # at the edge of the axes, which end where the others do
        edge, text = axes.get_yaxis_transform(), f"+{value:,.0f} % →"
        axes.annotate(text, (1, place), xycoords=edge, color=COLOURS[1], ha="right", va="center")
    else:
        if low is not None and high is not None:
            axes.plot([low, high], [place, place], color=colour, linewidth=1.4)
        axes.plot(value, place, "o", color=colour, markersize=5, markerfacecolor="white" if hollow else colour)


def group_sizes(record: Record) -> Figure | None:
    if not record.group_shares:
        return None
    groups = max(len(shares) for shares in record.group_shares)
    times = memberships(record)
    several = f", each in {times}" if times > 1 else ""
    subject = f"share of held-out tokens{several} in each group, largest first (orange: one dominates)"
    figure, axes = canvas(f"{title(record)}\n{subject}", 1.8 + 0.3 * len(record.group_shares))
    # a group's number means nothing across layers, so the bars are stacked by size
    ordered = (
        np.array([sorted(shares, reverse=True) + [0.0] * (groups - len(shares)) for shares in record.group_shares])
        * times
    )  # of all memberships
    starts = np.cumsum(ordered, axis=1) - ordered
    names = [str(layer) for layer in (record.layers if len(record.layers) == len(ordered) else range(len(ordered)))]
    for rank in range(groups):
        colours: Any = str(0.55 + 0.35 * rank / groups)
        if rank == 0:
            colours = [COLOURS[1] if dominates(share, groups, times) else COLOURS[0] for share in ordered[:, 0]]
        axes.barh(names, ordered[:, rank], left=starts[:, rank], color=colours, edgecolor="white", height=0.8)
    for index, share in enumerate(ordered[:, 0]):
        axes.text(0.005, index, share_text(share), color="white", va="center", fontsize=8)
    axes.axvline(times / groups, color="black", linestyle="--", linewidth=1.2, label=f"balanced: {times}/{groups}")
    axes.set(xlabel="share of tokens", ylabel="layer", xlim=(0, times), ylim=(len(names) - 0.5, -0.5))
    axes.grid(visible=False)
    figure.legend(loc="outside lower right", frameon=False)
    return figure


SPECIAL: dict[str, Callable[[Record], Figure | None]] = {
    figure.__name__: figure for figure in (comparison, frontier, speed_quality, group_sizes)
}
