"""What all figures share: palette, canvas, and files that are never half written."""

import io
from collections.abc import Sequence
from math import log2
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from focus_exp.storage import replace_file

# Okabe and Ito's colour-blind-safe palette; black is kept for the base, wine and olive replace yellow, too pale a line
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933")
LINE = 108  # characters of a heading that fit into the width
# a date or a version in the file would change it without its data having changed
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"dpi": 150, "metadata": {"Software": None}},
    "svg": {"metadata": {"Date": None, "Creator": None}},
}


def canvas(heading: str, height: float, **grid: Any) -> tuple[Figure, Any]:
    """A figure `height` inches high, its heading wrapped, and its axes as Figure.subplots(**grid) returns them."""
    figure = Figure(figsize=(9, height), layout="constrained")
    lines = [part for line in heading.splitlines() for part in wrap(line, LINE)]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=11)
    panels = figure.subplots(**grid)
    for axes in np.ravel(panels):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure, panels


def log_axes(axes: Axes) -> None:
    """Lengths by powers of 2, ratios by the digits that a reader looks for."""
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


def save_figures(
    figures: dict[str, Figure | None], folder: str | Path, formats: Sequence[str] = tuple(FORMATS)
) -> dict[str, Path]:
    """Write the figures there are as <folder>/<name>.png and .svg, each atomically; returns name -> the PNG.

    The same data give the same bytes.
    """
    paths = {}
    for name, figure in figures.items():
        if figure is None:
            continue
        for suffix in formats:
            content = io.BytesIO()
            with rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
                figure.savefig(content, format=suffix, **FORMATS[suffix])
            paths[f"{name}.{suffix}"] = Path(folder) / f"{name}.{suffix}"
            replace_file(paths[f"{name}.{suffix}"], content.getvalue())
    return {name.removesuffix(".png"): path for name, path in paths.items() if path.suffix == ".png"}
