"""Picture of a comparison's training: the loss of every arm that was trained, on one axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from focus_exp.records.record import Record
from focus_exp.reporting.canvas import COLOURS, canvas, save_figures
from focus_exp.reporting.figures import phases_of, smooth
from focus_exp.reporting.tables import title

MOST_ARMS = len(COLOURS)  # more lines than this cannot be told apart


def write_curves(record: Record, metrics: list[dict[str, Any]], folder: str | Path) -> dict[str, Path]:
    """Write the figure training and .svg into `folder`, if few enough arms were trained; returns name -> PNG.

    `metrics` are theirs, each line with its arm.
    """
    return save_figures({"training": _training(record, metrics)}, folder)


def _training(record: Record, metrics: list[dict[str, Any]]) -> Figure | None:
    found = {arm.name: phases_of([line for line in metrics if line.get("arm") == arm.name]) for arm in record.arms}
    arms = {name: phases for name, phases in found.items() if any(curves.get("loss") for curves in phases.values())}
    if not 1 < len(arms) <= MOST_ARMS:
        return None
    figure, axes = canvas(f"{title(record)}\ntraining loss, smoothed; phases one after the other", height=4.2)
    for (name, phases), colour in zip(arms.items(), COLOURS, strict=False):
        for number, curves in enumerate(phases.values()):
            steps, losses = np.array(sorted(curves["loss"].items())).T
            axes.plot(steps, losses, color=colour, linewidth=0.5, alpha=0.25)
            axes.plot(steps, smooth(losses), color=colour, linewidth=1.8, label=None if number else name)
    axes.set(xlabel="optimiser step", ylabel="loss [nats per token]")
    axes.legend(frameon=False)
    return figure
