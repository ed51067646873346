"""Figures: one function for each, from the tables or the measurements."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from focus_exp.reporting.frame import read_yaml
from focus_exp.reporting.paper_specs import paper_rows
from focus_exp.reporting.tables import FAMILIES
from focus_exp.storage import replace_file

# Okabe and Ito's palette, safe for colour-blind readers; black is the base model
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933", "#000000")
FRONTIER_LENGTH = 4096  # tokens
FITTED = ("Focus, two encoders", "Focus, two encoders, short fit")  # families of the frontier
PUBLISHED = "focus_k1"


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
    drawn = {"frontier": draw_frontier, "paper_figure1": perplexity_and_speed, "speed": speed_by_length}
    return {table.removeprefix("paper_"): draw(tables[table]) for table, draw in drawn.items() if table in tables}


def draw_frontier(points: pd.DataFrame) -> Figure | None:
    """Plot perplexity change against pruned pairs at one length: a curve a model, next to Focus made causal."""
    points = points[(points.tokens == FRONTIER_LENGTH) & (points.experiment == "frontier")]
    points = points[points["data"].isin(points["data"].mode()[:1])]
    figure, ax = make_figure("", 4.2)
    names = {value: name for name, value in read_yaml("tables")["names"].items()}
    for (model, rows), color in zip(points.groupby("model", sort=False), COLORS, strict=False):
        fits = [rows[rows.variant.isin(FAMILIES[family])] for family in FITTED]
        curve, published = max(fits, key=len).sort_values("sparsity"), rows[rows.variant == PUBLISHED]
        if curve.empty:
            continue
        x, y = 100 * curve.sparsity.to_numpy(float), curve.change.to_numpy(float)
        bars = np.abs(curve[["low", "high"]].to_numpy(float).T - y)
        ax.errorbar(x, y, bars, color=color, marker="o", linewidth=2, elinewidth=1)
        ax.plot(100 * published.sparsity, published.change, "D", color=color, fillstyle="none")
        ax.annotate(names.get(model, model), (x[-1], y[-1]), (9, -3), textcoords="offset points", color=color)
    if not ax.texts:
        return None
    text = names.get(curve["data"].iloc[0], curve["data"].iloc[0])
    ax.set(xlabel=f"query-key pairs pruned [%], {FRONTIER_LENGTH:,} tokens of {text}", xlim=(None, 100))
    ax.set(ylabel="change of perplexity [%], lower is better")
    ax.axhline(0, color="black", linewidth=1)
    ax.plot([], [], "o-", color="0.35", label="two encoders (95 % CI)")
    ax.plot([], [], "D", color="0.35", fillstyle="none", label="Focus made causal")
    ax.legend(frameon=False, loc="upper left")
    return figure


def perplexity_and_speed(table: pd.DataFrame) -> Figure | None:
    """Plot figure 1 of the paper: perplexity change against the speedup of a layer, on one device at one length."""
    scored = [row for row in table.to_dict("records") if row["ours_ppl_seeds"]]
    rows = [row for row in scored if row["ours_speed_seeds"]]
    if not rows:
        return None
    figure, ax = make_figure(f"Perplexity change and speedup of one attention layer, {describe_timing(table)}", 5.6)
    changes = [row["ours_ppl_change"] if row["ours_ppl_change_seeds"] else 0.0 for row in rows]
    edge = min(20.0, max(changes) + 2)
    for row, change in zip(rows, changes, strict=True):
        causal, at = row["causal"] is not False, (row["ours_speed"], min(change, edge))
        ax.plot(*at, "o", color=COLORS[0] if causal else COLORS[1], markersize=7)
        is_top_k = row["method"].startswith("focus, k")
        name = (
            name_point(row) + (f" ({change:+,.0f} %)" if change > edge else "") + ("" if causal else "\n(non-causal)")
        )
        ax.annotate(name, at, (7, -12 if is_top_k else 5), textcoords="offset points", fontsize=9)
    base = paper_rows("figure1")[0]["ppl"]
    printed = [(row["speed"], 100 * (row["ppl"] / base - 1)) for row in paper_rows("figure1") if row["speed"]]
    ax.plot(*zip(*printed, strict=True), "s", color="0.35", markerfacecolor="none", markersize=10, label="paper")
    ax.axvline(1, color="black", linestyle=":", linewidth=1)
    ax.axhline(0, color="black", linestyle=":", linewidth=1)
    untimed = ", ".join(untimed_methods(table)) or "none"
    label = "\n".join(["speedup over full attention (right is better)", "", *wrap(f"Without a time: {untimed}", 110)])
    fastest = max([*(row["ours_speed"] for row in rows), *(speed for speed, _ in printed)])
    ax.set(xlabel=label, ylabel="perplexity change [%] (up is better)", xscale="log", xlim=(0.3, 3 * fastest))
    ax.set_ylim(edge + 3, min([*changes, *(change for _, change in printed)]) - 3)
    set_ticks(ax.xaxis)
    ax.legend(frameon=False, loc="upper right")
    return figure


def untimed_methods(table: pd.DataFrame) -> list[str]:
    """Return the methods of figure 1 that have a perplexity and no time."""
    untimed = table[(table.ours_ppl_seeds > 0) & (table.ours_speed_seeds == 0)]
    return [name_point(row) for row in untimed.to_dict("records")]


def name_point(row: dict[str, Any]) -> str:
    """Return the variant of a row of figure 1, or its k."""
    is_top_k = row["method"].startswith("focus, k")
    return str(row["method"].removeprefix("focus, ") if is_top_k else row["variant"].replace("_", " "))


def describe_timing(table: pd.DataFrame) -> str:
    """Return device, length and commit of the times in figure 1."""
    timed = table[table.timed_tokens.notna()]
    if timed.empty:
        return "not timed"
    first = timed.iloc[-1]
    return f"{first.timed_device_kind}, {int(first.timed_tokens):,} tokens, kernels of commit {first.timed_commit[:7]}"


def speed_by_length(table: pd.DataFrame) -> Figure | None:
    """Plot the speedup of one layer by sequence length, its bound and the paper's."""
    timed = table[table.clock.isin(["attention", "kernels"]) & (table.method == "focus") & (table.top_k == 1)]
    timed = timed[(timed.metric == "speedup") & timed.value.notna() & (timed.assignment == "balanced")]
    counts = timed.groupby("run", sort=False).tokens.nunique()
    runs = [run for run, count in counts.items() if count > 2]
    if not runs:
        return None
    title = "Speedup of one attention layer over full attention, balanced groups, top-1"
    figure, axes = make_figure(title, 4.2, ncols=len(runs), sharey=True, squeeze=False)
    printed = pd.DataFrame(paper_rows("table6_speed"))
    for ax, run in zip(axes.flat, runs, strict=True):
        rows = timed[timed.run == run]
        paper = printed[printed.tokens.between(rows.tokens.min(), rows.tokens.max())]
        for groups, color in zip(sorted(rows.groups.dropna().unique()), COLORS, strict=False):
            of_groups = rows[rows.groups == groups].sort_values("tokens")
            for clock, style, label in (("attention", "o-", "with routing"), ("kernels", "o:", "kernels only")):
                curve, label = of_groups[of_groups.clock == clock], f"K = {groups}, {label}"
                ax.plot(curve.tokens, curve.value, style, color=color, markersize=4, label=label)
            bound = of_groups.drop_duplicates("tokens")
            ax.plot(bound.tokens, bound.bound, "--", color=color, linewidth=0.9, label=f"K = {groups}, bound")
            label = f"K = {groups}, paper (H100)"
            ax.plot(paper.tokens, paper[f"speedup_K{groups}"], "s", color=color, fillstyle="none", label=label)
        ax.axhline(1, color="black", linewidth=1)
        ax.set(title=str(rows.device.iloc[0]), xlabel="tokens", yscale="log")
        ax.set_xscale("log", base=16)
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.xaxis.set_minor_locator(NullLocator())
        set_ticks(ax.yaxis)
    axes.flat[0].set(ylabel="speedup (above 1: faster)")
    handles = dict(zip(*reversed(axes.flat[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def set_ticks(axis: Axis) -> None:
    """Write the ticks of a logarithmic axis as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


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
        smooth = curve.loss.rolling(window, center=True, min_periods=1).mean()
        ax.plot(steps, curve.loss, color=color, linewidth=0.6, alpha=0.3)
        label = variant if isinstance(variant, str) else "training, smoothed"
        ax.plot(steps, smooth, color=color, linewidth=1.8, label=label)
    ax.set(xlabel="optimizer step", ylabel="loss [nats per token]")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False)
    return figure
