"""Figures of a record: lines as figures.yaml declares them, and those that are drawn by hand."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from focus_exp.records.record import Record
from focus_exp.reporting import curves
from focus_exp.reporting.canvas import COLOURS, canvas, log_axes, save_figures
from focus_exp.reporting.curves import Drawing, Mark, Metrics
from focus_exp.reporting.notes import title
from focus_exp.reporting.special_figures import SPECIAL
from focus_exp.reporting.specs import read_specs, template

DASHES = ("-", "--", ":")


@dataclass(frozen=True)
class Layer:
    """Of every line the curve `y`, times `scale`; label: its name in the legend, {} that of the line; named: how the
    layer stands in a legend of its own, whatever the colour."""

    y: str
    scale: float = 1.0
    label: str = ""
    named: dict[str, Any] = field(default_factory=dict)
    style: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """One axes. level: a line across."""

    axes: dict[str, Any]
    layers: list[Layer]
    whole_steps: bool = False
    plain_y: bool = False
    log: bool = False
    level: float | None = None


@dataclass(frozen=True)
class FigureSpec:
    draws: Literal["losses", "losses_of_arms", "positions", "probes", "ratios"]
    heading: str
    height: list[float]
    panels: list[Panel]
    of: Literal["all", "runs", "comparisons"] = "all"
    grid: dict[str, Any] = field(default_factory=dict)
    legend: dict[str, Any] | None = None


@cache
def figure_specs() -> dict[str, FigureSpec]:
    return read_specs("figures", dict[str, FigureSpec])


def figure_names() -> list[str]:
    """Every figure that there is of a record."""
    return [*figure_specs(), *SPECIAL]


def write_figures(record: Record, metrics: Metrics, folder: str | Path) -> dict[str, Path]:
    """Write the figures for which there are data into `folder`, as PNG and SVG; returns name -> PNG.

    `metrics` are the lines of metrics.jsonl with step, phase, loss [nats per token], and maybe val_loss and
    tokens_per_second; in a comparison those of all arms, each with its arm.
    """
    return save_figures(figures(record, metrics), folder)


def figures(record: Record, metrics: Metrics) -> dict[str, Figure | None]:
    """Every figure by its name, None where there are no data."""
    kinds = ("all", "comparisons" if record.arms else "runs")
    declared = {name: spec for name, spec in figure_specs().items() if spec.of in kinds}
    drawn = {name: draw(spec, record, getattr(curves, spec.draws)(record, metrics)) for name, spec in declared.items()}
    return drawn | {name: special(record) for name, special in SPECIAL.items()}


def draw(spec: FigureSpec, record: Record, drawing: Drawing | None) -> Figure | None:
    """Lines in panels one above the other."""
    if drawing is None:
        return None
    facts = {"record": record, "title": title(record), **drawing.facts}
    inches, *more = spec.height
    height = inches + sum(more) * len(drawing.lines)
    grid = {"squeeze": False, "nrows": len(spec.panels), "sharex": True, **spec.grid}
    figure, panels = canvas(_filled(spec.heading, facts), height, **grid)
    for number, (axes, panel) in enumerate(zip(panels.flat, spec.panels, strict=True)):
        _lines(axes, panel, drawing)
        axes.set(**{key: _filled(value, facts) for key, value in panel.axes.items()})
        _scale(axes, panel)
        for mark in drawing.marks:
            _mark(axes, mark, named=number == 0)
    labels = [label for axes in panels.flat for label in axes.get_legend_handles_labels()[1]]
    if spec.legend is not None and labels:
        holder = figure if "loc" in spec.legend else panels[0, 0]
        holder.legend(**spec.legend, frameon=False)
    _legend_of_layers(figure, drawing, [layer for panel in spec.panels for layer in panel.layers if layer.named])
    return figure


def _mark(axes: Axes, mark: Mark, named: bool) -> None:
    if mark.x:
        axes.axvline(mark.x, color="grey", linestyle="--", linewidth=1)
    if named:
        where, va = axes.get_xaxis_transform(), "top" if mark.text_y < 1 else "bottom"
        axes.text(mark.text_x, mark.text_y, mark.text, color="grey", va=va, transform=where)


def _legend_of_layers(figure: Figure, drawing: Drawing, layers: list[Layer]) -> None:
    drawn = {name for line in drawing.lines for name, points in line.curves.items() if points}
    styles = [{"color": "0.35", **layer.style, **layer.named} for layer in layers if layer.y in drawn]
    if styles:
        handles = [Line2D([], [], **style) for style in styles]
        figure.legend(handles=handles, loc="outside lower right", frameon=False)


def _filled(text: Any, facts: dict[str, Any]) -> Any:
    return template(text).render(facts) if isinstance(text, str) else text


def _scale(axes: Axes, panel: Panel) -> None:
    if panel.log:
        log_axes(axes)
    if panel.whole_steps:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.plain_y:
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _lines(axes: Axes, panel: Panel, drawing: Drawing) -> None:
    styles = _styles()
    for line in drawing.lines:
        own = {**({} if "color" in line.style else next(styles)), **line.style}
        for layer in panel.layers:
            if layer.y in line.curves:
                steps, values = [x for x, _ in line.curves[layer.y]], [layer.scale * y for _, y in line.curves[layer.y]]
                label = layer.label.format(line.label) if line.label else ""
                axes.plot(steps, values, **{**own, **layer.style}, label=label or None)
    if panel.level is not None:
        axes.axhline(panel.level, color="black", linewidth=1.2, zorder=1)


def _styles() -> Iterator[dict[str, Any]]:
    return cycle([{"color": colour, "linestyle": dash} for dash in DASHES for colour in COLOURS])
