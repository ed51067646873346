"""Figures: one function for each, from the tables or the measurements."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from focus_exp.reporting.paper_tables import paper_rows
from focus_exp.reporting.tables import FAMILIES
from focus_exp.storage import replace_file

# Okabe and Ito's palette, safe for colour-blind readers; black is the base model
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933")
FRONTIER_LENGTHS, MODEL_LENGTH = (1024, 8192), 4096  # tokens: panels of one model; panels of several


def make_figure(title: str, height: float, **grid: Any) -> tuple[Figure, Any]:
    """Return a figure of 9 inches width and its axes."""
    figure = Figure(figsize=(9, height), layout="constrained")
    figure.suptitle(
        "\n".join(line for part in title.splitlines() for line in wrap(part, 105)), x=0.01, ha="left", fontsize=11
    )
    axes = figure.subplots(**grid)
    for ax in np.ravel(axes):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    return figure, axes


def save_figures(figures: Mapping[str, Figure | None], folder: Path) -> None:
    """Write each figure as <name>.svg, without date and version: the same data give the same bytes."""
    for name, figure in figures.items():
        if figure is not None:
            content = io.BytesIO()
            with rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
                figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
            replace_file(folder / f"{name}.svg", content.getvalue())


def report_figures(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure | None]:
    """Return the figures of the report by name."""
    figures: dict[str, tuple[Callable[[pd.DataFrame], Figure | None], str]] = {
        "frontier": (frontier, "frontier"),
        "figure1": (perplexity_and_speed, "paper_figure1"),
        "speed": (speed_by_length, "speed"),
    }
    return {name: draw(tables[table]) for name, (draw, table) in figures.items() if table in tables}


# --- figures of the report ---


def frontier(points: pd.DataFrame) -> Figure | None:
    """Plot perplexity change against density, a curve a method: a panel a model, or a length where there is one."""
    known = points[points.method.isin(FAMILIES) & (points.sparsity > 0)]
    at = known[(known.tokens == MODEL_LENGTH) & (known.experiment == "frontier")]
    if at.model.nunique() > 1:
        several = at["data"].nunique() > 1
        panels = {
            f"{model}, {data}" if several else model: x
            for (model, data), x in at.groupby(["model", "data"], sort=False)
        }
        where = f" at {MODEL_LENGTH:,} tokens"
    else:
        panels = {f"{n:,} tokens": x for n in FRONTIER_LENGTHS if len(x := known[known.tokens == n])}
        where = ""
    if not panels:
        return None
    title = f"Perplexity change against density of the causal QK pairs{where} (95 % CI; lower left is better)"
    figure, axes = make_figure(title, 4.8, ncols=len(panels), sharey=True, squeeze=False)
    colors = dict(zip(FAMILIES, COLORS, strict=False))
    shown = pd.concat(panels.values())
    top = 1.2 * shown.high.fillna(shown.change).max()
    axes.flat[0].set_yscale("symlog", linthresh=1)
    axes.flat[0].set(ylabel="perplexity change [%]", ylim=(-0.1, top))
    ticks = [tick for tick in (0, 0.5, 1, 2, 5, 10, 20, 50) if tick < top]
    axes.flat[0].set_yticks(ticks, [f"+{tick:g}" if tick else "0" for tick in ticks])
    axes.flat[0].yaxis.set_minor_locator(NullLocator())
    ends: dict[Axes, list[tuple[str, str, float, float]]] = {}
    for ax, (name, panel) in zip(axes.flat, panels.items(), strict=True):
        for method, color in colors.items():
            curve = panel[panel.method == method].sort_values("density")
            if curve.empty:
                continue
            x, y = 100 * curve.density.to_numpy(float), curve.change.to_numpy(float)
            bars = np.abs(curve[["low", "high"]].to_numpy(float).T - y)
            ax.errorbar(x, y, bars, color=color, marker="o", markersize=4.5, linewidth=1.5, elinewidth=0.8)
            ends.setdefault(ax, []).append((method, color, x[-1], y[-1]))
        ax.axhline(0, color="black", linewidth=1)
        ax.set(title=name, xlabel="density of the QK pairs [%]", xlim=(0, 145), xticks=range(0, 101, 20))
    figure.draw_without_rendering()  # the layout decides where the names go
    for ax, curves in ends.items():
        _name_curves(ax, curves)
    return figure


def _name_curves(ax: Axes, curves: list[tuple[str, str, float, float]]) -> None:
    """Write the name of each curve to the right of its end (name, color, x, y), a line apart from the next."""
    heights = {curve: 72 / ax.figure.dpi * ax.transData.transform(curve[2:])[1] for curve in curves}
    lowest = -math.inf
    for curve, height in sorted(heights.items(), key=lambda item: item[1]):
        name, color, x, y = curve
        lowest = max(height, lowest + 10)
        ax.annotate(
            name, (x, y), (7, lowest - height), textcoords="offset points", color=color, fontsize=8, va="center"
        )


def perplexity_and_speed(table: pd.DataFrame) -> Figure | None:
    """Plot figure 1 of the paper: perplexity change against the speedup of a layer."""
    rows = [row for row in table.to_dict("records") if row["ours_ppl_seeds"]]
    if not rows:
        return None
    figure, (untimed, timed) = make_figure(
        "Perplexity change and speedup of one attention layer (upper right is better)", 5.2, ncols=2, sharey=True,
        width_ratios=(1, 3),
    )  # fmt: skip
    changes = [row["ours_ppl_change"] if row["ours_ppl_change_seeds"] else 0.0 for row in rows]
    edge = min(20.0, max(changes) + 2)
    for row, change in zip(rows, changes, strict=True):
        speedup = row["ours_speed"] if row["ours_speed_seeds"] else None
        ax, at = timed if speedup else untimed, (speedup or 0.0, min(change, edge))
        causal = row["causal"] is not False
        ax.plot(*at, "o", color=COLORS[0] if causal else COLORS[1], markersize=7)
        name = row["method"].removeprefix("focus, ") if ", k" in row["method"] else row["variant"].replace("_", " ")
        name += f" ({change:+,.0f} %)" if change > edge else ""
        name += "" if causal else "\n(non-causal)"
        ax.annotate(name, at, (7, -12 if ", k" in row["method"] else 5), textcoords="offset points", fontsize=9)
    base = paper_rows("figure1")[0]["ppl"]
    printed = [(row["speed"], 100 * (row["ppl"] / base - 1)) for row in paper_rows("figure1") if row["speed"]]
    timed.plot(*zip(*printed, strict=True), "s", color="0.35", markerfacecolor="none", markersize=10, label="paper")
    timed.axvline(1, color="black", linestyle=":", linewidth=1)
    timed.set(xlabel="speedup over full attention", xscale="log", xlim=(0.3, 40))
    timed.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    timed.xaxis.set_major_formatter("{x:g}")
    timed.xaxis.set_minor_formatter(NullFormatter())
    untimed.set(xlabel="not timed", xticks=[], xlim=(-0.1, 1), ylabel="perplexity change [%]")
    for ax in (untimed, timed):
        ax.axhline(0, color="black", linestyle=":", linewidth=1)
    timed.set_ylim(edge + 3, min([*changes, *(change for _, change in printed)]) - 3)
    timed.legend(frameon=False, loc="upper right")
    return figure


def speed_by_length(table: pd.DataFrame) -> Figure | None:
    """Plot the speedup of one layer by sequence length, its bound and the paper's."""
    known = table[table.clock.isin(["attention", "kernels"]) & (table.method == "focus") & (table.top_k == 1)]
    known = known[(known.metric == "speedup") & known.value.notna() & (known.assignment == "balanced")]
    counts = known.groupby("run", sort=False).tokens.nunique()
    runs = [run for run, count in counts.items() if count > 2]
    if not runs:
        return None
    figure, axes = make_figure("Speedup of one attention layer over full attention, balanced groups, top-1", 4.2,
                               ncols=len(runs), sharey=True, squeeze=False)  # fmt: skip
    for ax, run in zip(axes.flat, runs, strict=True):
        rows = known[known.run == run]
        for groups, color in zip(sorted(rows.groups.dropna().unique()), COLORS, strict=False):
            for clock, style, label in (("attention", "-", "with routing"), ("kernels", ":", "kernels only")):
                curve = rows[(rows.groups == groups) & (rows.clock == clock)].sort_values("tokens")
                ax.plot(curve.tokens, curve.value, style, color=color, marker="o", markersize=4,
                        label=f"K = {groups}, {label}")  # fmt: skip
            bound = rows[rows.groups == groups].drop_duplicates("tokens").sort_values("tokens")
            ax.plot(bound.tokens, bound.bound, "--", color=color, linewidth=0.9, label=f"K = {groups}, bound")
            paper = pd.DataFrame(paper_rows("table6_speed"))
            paper = paper[paper.tokens.between(rows.tokens.min(), rows.tokens.max())]
            ax.plot(paper.tokens, paper[f"speedup_K{groups}"], "s", color=color, markerfacecolor="none",
                    label=f"K = {groups}, paper (H100)")  # fmt: skip
        ax.axhline(1, color="black", linewidth=1)
        ax.set(title=str(rows.device.iloc[0]), xlabel="tokens", xscale="log", yscale="log")
        _set_log_axes(ax)
    axes.flat[0].set(ylabel="speedup (above 1: faster)")
    handles = dict(zip(*reversed(axes.flat[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _set_log_axes(ax: Axes) -> None:
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(LogLocator(base=4, numticks=16))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(_binary_prefix))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def _binary_prefix(tokens: float, _: object) -> str:
    """Format 16384 as 16K and 2**20 as 1M."""
    return f"{tokens / 2**10:g}K" if tokens < 2**20 else f"{tokens / 2**20:g}M"


# --- figures of a run ---


def loss_curves(log: list[dict[str, Any]], title: str = "") -> Figure | None:
    """Plot the training loss by step, smoothed, for each variant."""
    lines = pd.DataFrame(log, columns=["variant", "phase", "step", "loss"])
    lines = lines[np.isfinite(lines.loss.astype(float))]
    if lines.empty or lines.variant.nunique() > len(COLORS):
        return None
    figure, ax = make_figure(f"{title}\nTraining loss", 4)
    for (variant, curve), color in zip(lines.groupby("variant", dropna=False, sort=False), COLORS, strict=False):
        starts = curve.groupby("phase", sort=False).step.max().cumsum().shift(fill_value=0)
        steps, window = curve.step + curve.phase.map(starts), max(1, len(curve) // 10) | 1
        smooth = curve.groupby("phase", sort=False).loss.transform(
            lambda loss, window=window: loss.rolling(window, center=True, min_periods=1).mean()
        )
        ax.plot(steps, curve.loss, color=color, linewidth=0.6, alpha=0.3)
        label = variant if isinstance(variant, str) else "training, smoothed"
        ax.plot(steps, smooth, color=color, linewidth=1.8, label=label)
    ax.set(xlabel="optimizer step", ylabel="loss [nats per token]")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False)
    return figure
