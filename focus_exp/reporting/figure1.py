"""Figure 1 of the paper: what each method costs in perplexity against the speed that was measured for it."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from focus_exp.reporting.canvas import COLOURS, canvas, save_figures
from focus_exp.reporting.entries import Value, entries_of, mean
from focus_exp.reporting.formats import READS_FUTURE
from focus_exp.reporting.gather import Runs
from focus_exp.reporting.paper import paper_tables
from focus_exp.reporting.subjects import BASE

NAME = "figure1"
FIGURE = f"{NAME}.svg"
WIDEST = 20.0  # per cent of perplexity, beyond which a point is named at the edge


@dataclass(frozen=True)
class Point:
    """A measured method. change: of perplexity from the base [%]; ratio: over full attention, timed at `tokens`.

    below: where its name stands.
    """

    name: str
    change: float
    ratio: float | None
    tokens: int | None
    causal: bool
    below: bool


@lru_cache(maxsize=2)
def points(runs: Runs) -> list[Point]:
    """Every line of the table of the figure that has a perplexity."""
    table, found = paper_tables()[NAME], []
    for entry in entries_of(table, runs):
        values = {
            name: [value for run in entry.runs if isinstance(value := entry.found(run, column), Value)]
            for name, column in ((one.name, one) for one in table.columns)
        }
        # the base has no change from itself
        if changes := values["ppl_change"] or [Value(0.0) for _ in values["ppl"] if entry.place.arm == BASE]:
            several = entry.paper["method"].partition(", ")[2]
            name, causal = several or " / ".join(entry.place.names), all(map(entry.causal, entry.runs))
            timing = entry.timed(entry.runs[-1])
            ratio = values["speed"][-1].number if values["speed"] else None
            change = mean(table.column("ppl_change"), changes)
            found.append(Point(name, change, ratio, timing and timing[1].tokens, causal, bool(several)))
    return found


def printed() -> list[tuple[float, float]]:
    """The speed and the change of perplexity [%] of what the paper prints both for."""
    table = paper_tables()[NAME]
    cost = table.column("ppl_change")
    return [(row["speed"], table.cell(row, cost) or 0.0) for row in table.paper.values() if row["speed"]]


def write_pareto(found: list[Point], folder: Path) -> dict[str, Path]:
    """Write figure1.svg into `folder`, if anything was measured; returns name -> file."""
    return save_figures({NAME: _figure(found)}, folder)


def front(found: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (ratio, change) points that no other beats in both: faster, and lower in perplexity."""
    best: list[tuple[float, float]] = []
    for ratio, cost in sorted(found, key=lambda point: (-point[0], point[1])):
        if not best or cost < best[-1][1]:
            best.append((ratio, cost))
    return best


def _figure(found: list[Point]) -> Figure | None:
    if not found:
        return None
    heading = "Change of perplexity from the base against measured speed: up and to the right is better"
    figure, (untimed, timed) = canvas(heading, height=5.5, ncols=2, sharey=True, width_ratios=(1, 3))
    longest = max(point.tokens or 0 for point in found)
    edge = min(WIDEST, max(point.change for point in found) + 2)
    for point in found:
        axes, at = timed if point.ratio else untimed, (point.ratio or 0.0, min(point.change, edge))
        axes.plot(*at, "o", color=COLOURS[0] if point.causal else COLOURS[1], markersize=8)
        text = point.name + (f" ({point.tokens:,} tokens)" if point.tokens not in (None, longest) else "")
        text += (f" {point.change:+,.0f} %" if point.change > edge else "") + (
            "" if point.causal else f"\n({READS_FUTURE})"
        )
        axes.annotate(text, at, (7, -15 if point.below else 5), textcoords="offset points", fontsize=9)
    best = front([(point.ratio, point.change) for point in found if point.ratio and point.causal])
    timed.plot(*zip(*best, strict=True), color=COLOURS[0], alpha=0.4, zorder=0, label="not beaten in both")
    theirs, claim = printed(), "paper: K = 4, 65,536 tokens, H100"
    timed.plot(*zip(*theirs, strict=True), "s", color="0.35", markerfacecolor="none", markersize=11, label=claim)
    untimed.set(xlabel="not timed here", xticks=[], xlim=(-0.1, 1), ylabel="change of perplexity [%]")
    ratios = [speed for speed, _ in theirs] + [point.ratio for point in found if point.ratio]
    limits = 0.8 * min(ratios), 4 * max(ratios)
    timed.set(xlabel="ratio to full attention (above 1: faster)", xscale="log", xlim=limits)
    timed.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    timed.xaxis.set_major_formatter("{x:g}")
    timed.xaxis.set_minor_formatter(NullFormatter())
    timed.axvline(1, color="black", linestyle=":", linewidth=1)
    for axes in (untimed, timed):
        axes.axhline(0, color="black", linestyle=":", linewidth=1)
    lowest = min([point.change for point in found] + [cost for _, cost in theirs])
    timed.set_ylim(edge + 3, lowest - 3)  # inverted: better is higher
    timed.legend(frameon=False, loc="upper right")
    return figure
