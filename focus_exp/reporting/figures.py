"""Pictures of a record: how the loss fell, where in the window quality is lost, how the groups share the tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from focus_exp.records.answers import DOMINANT
from focus_exp.records.record import Record
from focus_exp.records.rows import Row
from focus_exp.reporting.canvas import COLOURS, canvas, save_figures
from focus_exp.reporting.tables import share_text, title

STYLES = {"base": "-", "trained": "-.", "hard": "-", "soft": ":", "control": "--", "twin": (0, (1, 3))}


def write_figures(record: Record, metrics: list[dict[str, Any]], folder: str | Path) -> dict[str, Path]:
    """Write the figures for which there are data into `folder`, as PNG and SVG; returns name -> PNG.

    `metrics` are the lines of metrics.jsonl with step, phase, loss [nats per token], and maybe val_loss and
    tokens_per_second.
    """
    figures = {
        "loss_curve": _loss_curve(record, metrics),
        "perplexity_by_position": _perplexity_by_position(record),
        "group_sizes": _group_sizes(record),
    }
    return save_figures(figures, folder)


def _loss_curve(record: Record, metrics: list[dict[str, Any]]) -> Figure | None:
    phases = phases_of(metrics)
    if not any(curves.get("loss") for curves in phases.values()):
        return None
    speeds = [line["tokens_per_second"] for line in metrics if line.get("tokens_per_second")]
    speed = f", median {np.median(speeds):,.0f} tokens/s" if speeds else ""
    figure, axes = canvas(f"{title(record)}\ntraining loss{speed}", height=4.2)
    for index, (phase, curves) in enumerate(phases.items()):
        colour = COLOURS[index % len(COLOURS)]
        if curves.get("loss"):
            steps, losses = np.array(sorted(curves["loss"].items())).T
            axes.plot(steps, losses, color=colour, linewidth=0.7, alpha=0.35)
            axes.plot(steps, smooth(losses), color=colour, linewidth=2, label=f"{phase} (smoothed)")
        if curves.get("val_loss"):
            steps, losses = np.array(sorted(curves["val_loss"].items())).T
            axes.plot(steps, losses, "o", color=colour, markeredgecolor="black", label=f"{phase}, held-out text")
    axes.set(xlabel="optimiser step", ylabel="loss [nats per token]")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    return figure


def phases_of(metrics: list[dict[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """phase -> name -> step -> finite value, phases in sequence even where each restarts its steps.

    A step logged twice, before and after a resume, counts once: the later line wins.
    """
    phases: dict[str, dict[str, dict[int, float]]] = {}
    offset = last = 0
    for line in metrics:
        phase = str(line.get("phase", "train"))
        if phase not in phases and line["step"] < last:
            offset = last
        last = max(last, offset + line["step"])
        curves = phases.setdefault(phase, {})
        for name in ("loss", "val_loss"):
            if line.get(name) is not None and math.isfinite(line[name]):
                curves.setdefault(name, {})[offset + line["step"]] = line[name]
    return phases


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred mean over a tenth of the curve."""
    window = np.ones(max(1, len(values) // 10) | 1)
    if len(window) > len(values):
        return values
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")


def _perplexity_by_position(record: Record) -> Figure | None:
    rows = [row for row in record.rows if row.scored and row.by_position]
    if not rows:
        return None
    figure, (upper, lower) = canvas(
        f"{title(record)}\nperplexity by position", height=7, nrows=2, sharex=True, height_ratios=(3, 2)
    )
    base = next((row for row in rows if row.kind == "base"), None)
    colours = iter(COLOURS * len(rows))
    for row in rows:
        style = {"color": "black", "linewidth": 3.0} if row is base else {"color": next(colours), "linewidth": 1.6}
        label = row.name if row.causal else f"{row.name} (reads the future)"
        upper.plot(*_curve(row), linestyle=STYLES[row.kind], marker="o", markersize=3, label=label, **style)
        if base is not None:
            lower.plot(*_curve(row, base), linestyle=STYLES[row.kind], marker="o", markersize=3, **style)
    upper.set_yscale("log")
    for axis in (upper.yaxis.set_major_formatter, upper.yaxis.set_minor_formatter):
        axis(FuncFormatter(lambda value, _: f"{value:g}"))
    upper.set(ylabel="perplexity")
    lower.set(ylabel="ratio to the base" if base else "no base row", xlabel="position in the window [tokens]")
    _mark_window(record, (upper, lower))
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _curve(row: Row, base: Row | None = None) -> tuple[list[float], list[float]]:
    """Bin centres and perplexities, divided by the base's where `base` is given."""
    reference = {(part["start"], part["end"]): part["nll"] for part in base.by_position} if base else {}
    parts = [part for part in row.by_position if base is None or (part["start"], part["end"]) in reference]
    centres = [(part["start"] + part["end"]) / 2 for part in parts]
    losses = [part["nll"] - reference.get((part["start"], part["end"]), 0.0) for part in parts]
    return centres, np.exp(losses).tolist()


def _mark_window(record: Record, panels: tuple[Axes, ...]) -> None:
    window = record.setting("attention", "window")
    if window is None:
        return
    for axes in panels:
        axes.axvline(window, color="grey", linestyle="--", linewidth=1)
    panels[0].text(window, 0.98, f" window {window}", color="grey", va="top", transform=panels[0].get_xaxis_transform())


def _group_sizes(record: Record) -> Figure | None:
    if not record.group_shares:
        return None
    groups = max(len(shares) for shares in record.group_shares)
    height = 1.8 + 0.3 * len(record.group_shares)
    subject = "share of held-out tokens in each group, largest first (orange: above one half)"
    figure, axes = canvas(f"{title(record)}\n{subject}", height)
    # a group's number means nothing across layers, so the bars are stacked by size
    ordered = np.array(
        [sorted(shares, reverse=True) + [0.0] * (groups - len(shares)) for shares in record.group_shares]
    )
    starts = np.cumsum(ordered, axis=1) - ordered
    layers = record.layers if len(record.layers) == len(ordered) else range(len(ordered))
    names = [str(layer) for layer in layers]
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
