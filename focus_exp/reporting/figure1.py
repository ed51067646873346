"""Figure 1 of the paper: what each method costs in perplexity against the speed that was measured for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from focus_exp.records.record import Record
from focus_exp.records.speed import MASKED
from focus_exp.reporting.canvas import COLOURS, canvas, save_figures
from focus_exp.reporting.entries import Entry, Value, entries_of, finished, mean, shown
from focus_exp.reporting.formats import ABSENT, NOT_RUN, READS_FUTURE, decimals_text, number_text
from focus_exp.reporting.gather import Runs, seeds_text
from focus_exp.reporting.notes import caveats, where
from focus_exp.reporting.paper import change, paper_speedups, paper_tables
from focus_exp.reporting.selection import Line
from focus_exp.reporting.tables import Table, column_kinds

NAME = "figure1"
FIGURE = f"{NAME}.svg"
LENGTH, GROUPS = 65_536, 4  # of the paper's figure
CHANGE = change("ppl", "pretrained", "change")
WIDEST = 20.0  # per cent of perplexity, beyond which a point is named at the edge
NOTES = [
    f"paper: the speed of table 6 at {LENGTH:,} tokens and K = {GROUPS}; of the other methods it prints none",
    "here: one attention layer with routing over full attention in the same run, at the length at which other "
    "methods were timed, or where it was not timed there at its longest; of several groups a query (k) the speed that "
    "table 7 quotes; perplexity in windows of T tokens",
]


@dataclass(frozen=True)
class Point:
    """A method of the figure. changes: of perplexity from the base [%], a seed each; ratio: over full attention.

    timed, tokens, timer: how, at which length and by which record the layer was timed.
    """

    method: str
    entry: Entry
    changes: list[Value]
    ratio: float | None = None
    timed: str = NOT_RUN
    tokens: int | None = None
    timer: Record | None = None

    @property
    def change(self) -> float | None:
        return mean(self.changes)

    @property
    def causal(self) -> bool:
        return all(map(self.entry.causal, self.entry.runs))


@lru_cache(maxsize=2)
def points(runs: Runs) -> list[Point]:
    """Every method of table 1, then Focus with more groups a query as table 7 has it."""
    one, seven = (paper_tables()[name] for name in ("table1_retrofit", "table7_topk"))
    several = [entry for entry in entries_of(seven, runs) if entry.runs and entry.paper["top_k"] > 1]
    more = [_point(f"focus, k = {entry.paper['top_k']}", entry, runs) for entry in several]
    methods = [_point(entry.paper["method"], entry, runs) for entry in entries_of(one, runs)]
    return [*methods, *(point for point in more if point.ratio)]


def _point(method: str, entry: Entry, runs: Runs) -> Point:
    if not entry.runs:
        return Point(method, entry, [])
    changes = [value for run in entry.runs if isinstance(value := entry.found(run, CHANGE), Value)]
    scored = next(iter(entry.behind(entry.runs[-1])), None)
    if scored is None or scored.kind in ("base", "trained"):
        return Point(method, entry, changes or [Value(0.0)], 1.0, "the same attention as the base")
    if (found := _timed(entry, scored, runs)) is None:
        return Point(method, entry, changes, timed="not timed here")
    record, line = found
    how = "computed by masks over all pairs, which saves nothing" if line.path == MASKED else f"by {line.path}"
    how = f"K={line.groups}, {line.assignment} groups" if line.of == "speed" else how
    said = f"{line.tokens:,} tokens, {how}, {line.dtype}, {record.device_kind}"
    return Point(method, entry, changes, line.value, said, line.tokens, record)


def _timed(entry: Entry, scored: Line, runs: Runs) -> tuple[Record, Line] | None:
    """A layer of the same model, at the length of other methods or else the longest; for a k what table 7 quotes."""
    model = entry.runs[-1].record.model.get("fingerprint")
    there = [run for run in finished(runs) if run.record.model.get("fingerprint") == model]
    common = max((line.tokens for run in there for line in run.select({"of": "method_speed"})), default=0)
    cells = {"of": "method_speed", "measure": "ratio", "method": scored.method}
    if entry.table.name == "table7_topk":
        there, cells = entry.runs[-1:], entry.cells(entry.table.column("claimed_speedup"))
    elif scored.method == "focus":
        k, rule = scored.top_k or 1, {"pair_rule": scored.pair_rule} if (scored.top_k or 1) > 1 else {}
        cells = {"of": "speed", "measure": "ratio", "clock": "attention", "groups": scored.K, "top_k": k} | rule
    found = [(run.record, line) for run in there for line in run.select(cells) if line.value]
    ranks = [(line.tokens == common, line.tokens, line.assignment == "balanced") for _, line in found]
    return found[ranks.index(max(ranks))] if found else None


def printed() -> dict[str, tuple[float, float | None]]:
    """Method of table 1 -> the paper's change of perplexity [%], and its speed if one is printed, or follows."""
    table = paper_tables()["table1_retrofit"]
    speeds = {"pretrained": 1.0, "full_finetune": 1.0, "focus": paper_speedups(GROUPS)[LENGTH]}
    return {name: (table.cell(row, CHANGE) or 0.0, speeds.get(name)) for name, row in table.paper.items()}


def pareto_table(found: list[Point]) -> Table:
    """The points of the figure and what they come from; a method that was not timed here stays without a speed."""
    rows, values = [], []
    for point in found:
        entry, (theirs, speed) = point.entry, printed().get(point.method, (None, None))
        last = entry.runs[-1] if entry.runs else None
        made = entry.made_by(last) if last else entry.place.command
        if last and point.timer not in (None, last.record):
            made += f"; speed by {point.timer.command}, {(point.timer.commit or 'no commit')[:7]}"
        rows.append(
            {
                "method": point.method,
                "PPL vs pretrained: paper": ABSENT if theirs is None else CHANGE.written(theirs) + CHANGE.unit,
                "PPL vs pretrained: here": shown(CHANGE, [*point.changes, NOT_RUN]),
                "speed: paper": decimals_text(speed, 1),
                "speed: here": number_text(point.ratio),
                "timed": point.timed,
                "run": entry.what(last) if last else point.method,
                "model and text": where(last.record, entry.place.model) if last else ABSENT,
                "seeds": seeds_text(entry.records),
                "made by": made,
            }
        )
        values.append(
            {"method": point.method, "paper_change": theirs, "here_change": point.change, "paper_speed": speed}
            | {"here_speed": point.ratio, "timed": point.timed, "causal": point.causal, "made_by": made}
        )
    notes = dict.fromkeys(note for point in found for record in point.entry.records for note in caveats(record))
    return Table(
        columns=list(rows[0]),
        rows=[list(row.values()) for row in rows],
        name=NAME,
        title="Figure 1: perplexity against measured speed",
        notes=[*notes, *NOTES],
        values=values,
        kinds=column_kinds(list(rows[0])),
    )


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
    measured = [(point, point.change) for point in found if point.change is not None]
    if not measured:
        return None
    heading = "Change of perplexity from the base against measured speed: up and to the right is better"
    figure, (untimed, timed) = canvas(heading, height=5.5, ncols=2, sharey=True, width_ratios=(1, 3))
    longest = max((point.tokens or 0 for point, _ in measured), default=0)
    edge = min(WIDEST, max(cost for _, cost in measured) + 2)
    for point, cost in measured:
        axes, at = timed if point.ratio else untimed, (point.ratio or 0.0, min(cost, edge))
        axes.plot(*at, "o", color=COLOURS[0] if point.causal else COLOURS[1], markersize=8)
        several = point.method.partition(", ")[2]
        text = several or " / ".join(point.entry.place.names)
        text += f" ({point.tokens:,} tokens)" if point.tokens not in (None, longest) else ""
        text += (f" {cost:+,.0f} %" if cost > edge else "") + ("" if point.causal else f"\n({READS_FUTURE})")
        axes.annotate(text, at, (7, -15 if several else 5), textcoords="offset points", fontsize=9)
    best = front([(point.ratio, cost) for point, cost in measured if point.ratio and point.causal])
    timed.plot(*zip(*best, strict=True), color=COLOURS[0], alpha=0.4, zorder=0, label="not beaten in both")
    theirs = [(speed, cost) for cost, speed in printed().values() if speed]
    claim = f"paper: K = {GROUPS}, {LENGTH:,} tokens, H100"
    timed.plot(*zip(*theirs, strict=True), "s", color="0.35", markerfacecolor="none", markersize=11, label=claim)
    untimed.set(xlabel="not timed here", xticks=[], xlim=(-0.1, 1), ylabel="change of perplexity [%]")
    ratios = [speed for speed, _ in theirs] + [point.ratio for point, _ in measured if point.ratio]
    limits = 0.8 * min(ratios), 4 * max(ratios)
    timed.set(xlabel="ratio to full attention (above 1: faster)", xscale="log", xlim=limits)
    timed.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    timed.xaxis.set_major_formatter("{x:g}")
    timed.xaxis.set_minor_formatter(NullFormatter())
    timed.axvline(1, color="black", linestyle=":", linewidth=1)
    for axes in (untimed, timed):
        axes.axhline(0, color="black", linestyle=":", linewidth=1)
    lowest = min([cost for _, cost in measured] + [cost for _, cost in theirs])
    timed.set_ylim(edge + 3, lowest - 3)  # inverted: better is higher
    timed.legend(frameon=False, loc="upper right")
    return figure
