"""Figure 1 of the paper: what each method costs in perplexity against the speed that was measured for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from focus_exp.records.record import Record
from focus_exp.reporting.canvas import COLOURS, canvas, save_figures
from focus_exp.reporting.formats import ABSENT, NOT_RUN, READS_FUTURE, decimals_text, number_text, signed_text
from focus_exp.reporting.gather import Runs, seeds_text
from focus_exp.reporting.paper import change, paper_speedups, paper_tables
from focus_exp.reporting.paper_report import Line, Measurement, Value, finished, lines_of, mean, shown, where
from focus_exp.reporting.speed_methods import MASKED
from focus_exp.reporting.tables import Table, caveats

NAME = "figure1"
LENGTH, GROUPS = 65_536, 4  # of the paper's figure
CHANGE = change("ppl", "pretrained", "change")
WIDEST = 20.0  # per cent of perplexity, beyond which a point is named at the edge
COLUMNS = [
    *("method", "PPL vs pretrained: paper", "PPL vs pretrained: here", "speed: paper", "speed: here", "timed"),
    *("run", "model and text", "seeds", "made by"),
]
NOTES = [
    f"paper: the speed of table 6 at {LENGTH:,} tokens and K = {GROUPS}; of the other methods it prints none",
    "here: one attention layer with routing over full attention in the same run, at the length at which other "
    "methods were timed, or where it was not timed there at its longest; perplexity in windows of T tokens",
]


@dataclass(frozen=True)
class Speed:
    """A layer that was timed, by whom. ratio: over full attention."""

    ratio: float
    said: str
    tokens: int = 0
    record: Record | None = None


@dataclass(frozen=True)
class Point:
    """A method of the figure. changes: of perplexity from the base [%], a seed each."""

    method: str
    line: Line
    changes: list[Value]
    speed: Speed | None

    @property
    def change(self) -> float | None:
        return mean(self.changes)

    @property
    def causal(self) -> bool:
        return all(map(self.line.causal, self.line.runs))

    @property
    def ratio(self) -> float | None:
        return self.speed.ratio if self.speed else None

    @property
    def timed(self) -> str:
        return self.speed.said if self.speed else "not timed here" if self.line.runs else NOT_RUN

    @property
    def extra(self) -> bool:
        """Whether it is of more groups a query, which the paper's figure does not have."""
        return self.line.table.name == "table7_topk"


def points(runs: Runs) -> list[Point]:
    """Every method of table 1, then Focus with more groups a query as table 7 has it."""
    one, seven = (paper_tables()[name] for name in ("table1_retrofit", "table7_topk"))
    methods = [_point(str(line.paper["method"]), line, runs) for line in lines_of(one, runs)]
    several = [line for line in lines_of(seven, runs) if line.runs and line.paper["top_k"] > 1]
    more = [_point(f"focus, k = {line.paper['top_k']}", line, runs) for line in several]
    return [*methods, *(point for point in more if point.ratio)]


def _point(method: str, line: Line, runs: Runs) -> Point:
    if not line.runs:
        return Point(method, line, [], None)
    changes = [value for run in line.runs if isinstance(value := line.found(run, CHANGE), Value)]
    scored = next(iter(line.behind(line.runs[-1])), None)
    if scored is None or scored["kind"] in ("base", "trained"):
        return Point(method, line, changes or [Value(0.0)], Speed(1.0, "the same attention as the base"))
    return Point(method, line, changes, speed_of(line, scored, runs))


def speed_of(line: Line, scored: Measurement, runs: Runs) -> Speed | None:
    """A layer of the same model, at the length at which other methods were timed or else the longest."""
    model = line.runs[-1].record.model.get("fingerprint")
    there = [run for run in finished(runs) if run.record.model.get("fingerprint") == model]
    ratios = {"measure": "ratio", "clock": "attention"}
    others = [(run, timed) for run in there for timed in run.select(ratios | {"of": "method_speed"})]
    found = [(run, timed) for run, timed in others if timed["method"] == scored["method"]]
    if scored["method"] == "focus":
        k = {"top_k": scored["top_k"] or 1} | ({"pair_rule": scored["pair_rule"]} if (scored["top_k"] or 1) > 1 else {})
        focus = ratios | {"of": "speed", "groups": scored["K"]} | k
        found = [(run, timed) for run in there for timed in run.select(focus)]
    common = max((timed["tokens"] for _, timed in others), default=0)
    ranked = [
        ((timed["tokens"] == common, timed["tokens"], timed["assignment"] == "balanced"), run, timed)
        for run, timed in found
        if timed["value"]
    ]
    if not ranked:
        return None
    _, run, timed = max(ranked, key=lambda one: one[0])
    said = f"{timed['tokens']:,} tokens, {_how(timed)}, {timed['dtype']}, {run.record.device_kind}"
    return Speed(timed["value"], said, timed["tokens"], run.record)


def _how(timed: Measurement) -> str:
    if timed["of"] == "speed":
        return f"K={timed['groups']}, {timed['assignment']} groups"
    return "computed by masks over all pairs, which saves nothing" if timed["path"] == MASKED else f"by {timed['path']}"


def paper_speeds() -> dict[str, float]:
    """Method of table 1 -> its speed, where the paper prints a number or where it is full attention itself."""
    return {"pretrained": 1.0, "full_finetune": 1.0, "focus": paper_speedups(GROUPS)[LENGTH]}


def paper_change(method: str) -> float:
    """By how much the paper's perplexity of a method of table 1 is above its base's [%]."""
    table = paper_tables()["table1_retrofit"]
    return table.cell(table.paper[method], CHANGE) or 0.0


def pareto_table(found: list[Point]) -> Table:
    """The points of the figure and what they come from; a method that was not timed here stays without a speed."""
    rows, values = [], []
    for point in found:
        line, runs = point.line, point.line.runs
        printed = None if point.extra else paper_change(point.method)
        ratio = None if point.extra else paper_speeds().get(point.method)
        made = line.made_by(runs[-1]) if runs else line.place.command
        timed = point.speed.record if point.speed else None
        if timed is not None and timed is not runs[-1].record:
            made += f"; speed by {timed.command}, {(timed.commit or 'no commit')[:7]}"
        rows.append(
            [
                point.method,
                ABSENT if printed is None else CHANGE.written(printed) + CHANGE.unit,
                shown(CHANGE, [*point.changes]) if runs else NOT_RUN,
                decimals_text(ratio, 1),
                number_text(point.ratio),
                point.timed,
                line.what(runs[-1]) if runs else point.method,
                where(runs[-1].record) if runs else ABSENT,
                seeds_text(line.records),
                made,
            ]
        )
        values.append(
            {"method": point.method, "paper_change": printed, "here_change": point.change, "paper_speed": ratio}
            | {"here_speed": point.ratio, "timed": point.timed, "causal": point.causal, "made_by": made}
        )
    records = [record for point in found for record in point.line.records]
    notes = [*dict.fromkeys(note for record in records for note in caveats(record)), *NOTES]
    title = "Figure 1: perplexity against measured speed"
    return Table(columns=COLUMNS, rows=rows, name=NAME, title=title, notes=notes, values=values)


def write_pareto(found: list[Point], folder: Path) -> dict[str, Path]:
    """Write figure1.png and .svg into `folder`, if anything was measured; returns name -> PNG."""
    return save_figures({NAME: _figure(found)}, folder)


def front(found: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (ratio, change) points that no other beats in both: faster, and lower in perplexity."""
    best: list[tuple[float, float]] = []
    for ratio, cost in sorted(found, key=lambda point: (-point[0], point[1])):
        if not best or cost < best[-1][1]:
            best.append((ratio, cost))
    return best


def _figure(found: list[Point]) -> Figure | None:
    shown = [(point, point.change) for point in found if point.change is not None]
    if not shown:
        return None
    heading = "Change of perplexity from the base against measured speed: up and to the right is better"
    figure, (untimed, timed) = canvas(heading, height=5.5, ncols=2, sharey=True, width_ratios=(1, 3))
    longest = max(point.speed.tokens for point, _ in shown if point.speed)
    edge = min(WIDEST, max(cost for _, cost in shown) + 2)
    for point, cost in shown:
        axes, x, y = timed if point.ratio else untimed, point.ratio or 0.0, min(cost, edge)
        axes.plot(x, y, "o", color=COLOURS[0] if point.causal else COLOURS[1], markersize=8)
        tokens = point.speed.tokens if point.speed else 0
        text = point.method.partition(", ")[2] if point.extra else point.line.what(point.line.runs[-1])
        text = text.replace(f" ({READS_FUTURE})", "")
        text += f" ({tokens:,} tokens)" if tokens not in (0, longest) else ""
        text += f" {cost:+,.0f} %" if cost > edge else ""
        text += "" if point.causal else f"\n({READS_FUTURE})"
        beside = (7, -15 if point.extra else 5)
        axes.annotate(text, (x, y), beside, textcoords="offset points", fontsize=9)
    best = front([(point.ratio, cost) for point, cost in shown if point.ratio and point.causal])
    timed.plot(*zip(*best, strict=True), color=COLOURS[0], alpha=0.4, zorder=0, label="not beaten in both")
    printed = [(speed, paper_change(method)) for method, speed in paper_speeds().items()]
    claim = f"paper: K = {GROUPS}, {LENGTH:,} tokens, H100"
    timed.plot(*zip(*printed, strict=True), "s", color="0.35", markerfacecolor="none", markersize=11, label=claim)
    untimed.set(xlabel="not timed here", xticks=[], xlim=(-0.1, 1), ylabel="change of perplexity [%]")
    ratios = [speed for speed, _ in printed] + [point.ratio for point, _ in shown if point.ratio]
    limits = 0.8 * min(ratios), 4 * max(ratios)
    timed.set(xlabel="ratio to full attention (above 1: faster)", xscale="log", xlim=limits)
    timed.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    timed.xaxis.set_major_formatter("{x:g}")
    timed.xaxis.set_minor_formatter(NullFormatter())
    timed.axvline(1, color="black", linestyle=":", linewidth=1)
    for axes in (untimed, timed):
        axes.axhline(0, color="black", linestyle=":", linewidth=1)
    lowest = min([cost for _, cost in shown] + [cost for _, cost in printed])
    timed.set_ylim(edge + 3, lowest - 3)  # inverted: better is higher
    timed.legend(frameon=False, loc="upper right")
    return figure
