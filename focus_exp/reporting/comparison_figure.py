"""Picture of a comparison: each arm's change from the base, in perplexity and on benchmarks, with its interval."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from focus_exp.records.answers import row_of
from focus_exp.records.benchmarks import telling
from focus_exp.records.record import Record
from focus_exp.reporting.benchmarks import is_share
from focus_exp.reporting.canvas import COLOURS, canvas, save_figures
from focus_exp.reporting.comparison import NON_CAUSAL
from focus_exp.reporting.tables import title

WIDEST = 100.0  # per cent of perplexity, beyond which an arm is named at the edge


def write_comparison_figure(record: Record, folder: str | Path) -> dict[str, Path]:
    """Write comparison.png and .svg into `folder`; returns name -> path."""
    return save_figures({"comparison": _comparison(record)}, folder)


def _comparison(record: Record) -> Figure | None:
    if not any(row.arm and row.delta_nll is not None for row in record.rows):
        return None
    rows = telling([row for row in record.benchmarks if row.difference is not None and is_share(row)])
    tasks = list(dict.fromkeys(row.task for row in rows))
    height = 1.8 + 0.32 * len(record.arms)
    heading = f"{title(record)}\nchange from the base, with 95 % intervals; hollow: under 5 % of the pairs removed"
    figure, panels = canvas(heading, height=height, ncols=2 if tasks else 1, sharey=True)
    left: Axes = panels[0] if tasks else panels
    places = {arm.name: -index for index, arm in enumerate(record.arms)}
    _perplexities(left, record, places)
    if tasks:
        right: Axes = panels[1]
        for number, task in enumerate(tasks):
            colour = COLOURS[number % len(COLOURS)]
            shift = 0.6 * ((number + 0.5) / len(tasks) - 0.5)
            for row in rows:
                if row.task == task and row.attention in places and row.difference is not None:
                    bounds = (row.difference_low, row.difference_high)
                    _point(right, places[row.attention] - shift, row.difference, bounds, colour, row.engaged, 100)
            right.plot([], [], "o", color=colour, label=task)
        right.axvline(0, color="black", linewidth=1)
        right.set_xlabel("accuracy [points]")
        figure.legend(loc="outside lower right", frameon=False, ncols=len(tasks))
    return figure


def _perplexities(axes: Axes, record: Record, places: dict[str, int]) -> None:
    labels = []
    for arm in record.arms:
        row = row_of(record, arm.name)
        labels.append(f"{arm.name} ({NON_CAUSAL})" if row and not row.causal else arm.name)
        place = places[arm.name]
        if row is None or not row.scored or row.delta_nll is None:
            axes.annotate(
                "failed", (0, place), color=COLOURS[1], va="center", xytext=(6, 0), textcoords="offset points"
            )
            continue
        change = 100 * math.expm1(min(row.delta_nll, 50.0))
        if change > WIDEST:
            axes.annotate(f"+{change:,.0f} % →", (WIDEST, place), ha="right", va="center", color=COLOURS[1])
            continue
        bounds = [None if b is None else math.expm1(b) for b in (row.delta_low, row.delta_high)]
        colour = COLOURS[0] if row.causal else COLOURS[1]
        _point(axes, place, math.expm1(row.delta_nll), (bounds[0], bounds[1]), colour, row.engaged, 100)
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(list(places.values()), labels)
    axes.set_xlabel("perplexity [%]")


def _point(
    axes: Axes,
    place: float,
    value: float,
    bounds: tuple[float | None, float | None],
    colour: str,
    acted: bool | None,
    factor: float,
) -> None:
    low, high = bounds
    if low is not None and high is not None:
        axes.plot([factor * low, factor * high], [place, place], color=colour, linewidth=1.4)
    axes.plot(
        factor * value, place, "o", color=colour, markersize=5, markerfacecolor="white" if acted is False else colour
    )
