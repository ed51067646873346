"""Figure 1 of the paper: what each method costs in perplexity against the speed that was measured for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from focus_exp.records.record import Record
from focus_exp.records.rows import Row
from focus_exp.records.speed import MASKED, MethodSpeedRow
from focus_exp.reporting.canvas import COLOURS, canvas, save_figures
from focus_exp.reporting.formats import ABSENT, READS_FUTURE, number_text
from focus_exp.reporting.gather import Runs, seeds_text
from focus_exp.reporting.notes import caveats
from focus_exp.reporting.paper_measures import NOT_RUN, Measure, Value, change, signed
from focus_exp.reporting.paper_places import PaperTable, Scene, paper_tables, row_name, scenes
from focus_exp.reporting.paper_report import made_by, printed_change, where
from focus_exp.reporting.printed import paper_speedups
from focus_exp.reporting.tables import Table

NAME = "figure1"
LENGTH, GROUPS = 65_536, 4  # of the paper's figure
CHANGE = Measure("change", signed, unit=" %")
WIDEST = 20.0  # per cent of perplexity, beyond which a point is named at the edge
COLUMNS = [
    *("method", "PPL vs pretrained: paper", "PPL vs pretrained: here", "speed: paper", "speed: here", "timed"),
    *("run", "model and text", "seeds", "made by"),
]


@dataclass(frozen=True)
class Speed:
    """A layer that was timed. ratio: over full attention."""

    record: Record
    tokens: int
    ratio: float
    what: str
    dtype: str
    preferred: bool = False

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, {self.what}, {self.dtype}, {self.record.device_kind}"


@dataclass(frozen=True)
class Point:
    """A method of the figure. change: of perplexity from the base [%], a seed each; ratio: over full attention."""

    method: str
    paper: dict[str, Any]
    group: list[Scene]
    changes: list[Value]
    ratio: float | None
    timed: str
    speed: Speed | None = None

    @property
    def change(self) -> float | None:
        return fmean(value.number for value in self.changes) if self.changes else None

    @property
    def label(self) -> str:
        return self.name if self.paper else self.method.partition(", ")[2]

    @property
    def causal(self) -> bool:
        return all(scene.causal for scene in self.group)

    @property
    def name(self) -> str:
        return self.group[-1].name if self.group else self.method


def points(runs: Runs) -> list[Point]:
    """Every method of table 1, then Focus with more groups a query as table 7 has it."""
    one, seven = _table("table1_retrofit"), _table("table7_topk")
    found: list[Point] = []
    for paper, places in one.rows:
        method = row_name(paper, one.key)
        groups = [group for place in places for group in scenes(one, paper, place, runs)]
        found += [_point(method, paper, group, runs) for group in groups]
        found += [] if groups else [Point(method, paper, [], [], None, NOT_RUN)]
    for paper, places in seven.rows:
        groups = [group for place in places for group in scenes(seven, paper, place, runs) if paper["top_k"] > 1]
        found += [point for g in groups if (point := _point(f"focus, k = {paper['top_k']}", {}, g, runs)).ratio]
    return found


def _table(name: str) -> PaperTable:
    return next(table for table in paper_tables() if table.name == name)


def paper_speeds() -> dict[str, float]:
    """Method of table 1 -> its speed, where the paper prints a number or where it is full attention itself."""
    return {"pretrained": 1.0, "full_finetune": 1.0, "focus": paper_speedups(GROUPS)[LENGTH]}


def paper_change(method: str) -> float | None:
    """By how much the paper's perplexity of a method of table 1 is above its base's [%]."""
    table = _table("table1_retrofit")
    paper = next(paper for paper, _ in table.rows if row_name(paper, table.key) == method)
    return 0.0 if method == table.changes["ppl"]["row"] else printed_change(table, paper, "ppl")


def _point(method: str, paper: dict[str, Any], group: list[Scene], runs: Runs) -> Point:
    changes = [value for scene in group if isinstance(value := change(scene, "ppl", ""), Value)]
    row = group[-1].row("ppl")
    if row is None or row.kind in ("base", "trained"):
        # full attention over full attention
        return Point(method, paper, group, changes or [Value(0.0)], 1.0, "the same attention as the base")
    speed = speed_of(group[-1], runs)
    if speed is None:
        return Point(method, paper, group, changes, None, "not timed here")
    return Point(method, paper, group, changes, speed.ratio, str(speed), speed)


def speed_of(scene: Scene, runs: Runs) -> Speed | None:
    """A layer of the same model, at the length at which other methods were timed or else the longest."""
    row = scene.row("ppl")
    if row is None:
        return None
    records = [record for record in runs.finished() if _same_model(record, scene.record)]
    found = _speeds_of_focus(scene, row, records) if row.method == "focus" else _speeds_of(row.method, records)
    common = max((timed.tokens for record in records for timed in record.method_speed), default=0)
    return max(found, key=lambda speed: (speed.tokens == common, speed.tokens, speed.preferred), default=None)


def _speeds_of_focus(scene: Scene, row: Row, records: list[Record]) -> list[Speed]:
    """With as many groups, and as many of them a query."""
    groups = scene.record.setting("attention", "groups")
    return [
        Speed(
            record, timed.tokens, timed.ratio, f"K={timed.groups}, {timed.assignment} groups", timed.dtype,
            preferred=timed.assignment == "balanced",
        )
        for record in records
        for timed in record.speed
        if timed.clock == "attention" and timed.ratio and (timed.groups, timed.top_k) == (groups, row.top_k or 1)
        and (timed.top_k == 1 or timed.pair_rule == row.pair_rule)
    ]  # fmt: skip


def _speeds_of(method: str, records: list[Record]) -> list[Speed]:
    return [
        Speed(record, timed.tokens, timed.ratio, _how(timed), timed.dtype)
        for record in records
        for timed in record.method_speed
        if timed.method == method and timed.ratio
    ]


def _how(timed: MethodSpeedRow) -> str:
    return "computed by masks over all pairs, which saves nothing" if timed.path == MASKED else f"by {timed.path}"


def _same_model(one: Record, other: Record) -> bool:
    return one.model.get("fingerprint") == other.model.get("fingerprint")


def pareto_table(found: list[Point]) -> Table:
    """The points of the figure and what they come from; a method that was not timed here stays without a speed."""
    rows, values = [], []
    for point in found:
        printed = paper_change(point.method) if point.paper else None
        ratio = paper_speeds().get(point.method) if point.paper else None
        record = point.group[-1].record if point.group else None
        made = made_by(point.group[-1]) if point.group else "python -m focus_exp +experiment=compare"
        if point.speed is not None and (timed := point.speed.record) is not record:
            made += f"; speed by {timed.command}, {(timed.commit or 'no commit')[:7]}"
        rows.append(
            [
                point.method,
                ABSENT if printed is None else f"{signed(printed)} %",
                CHANGE.text(list(point.changes)) if point.group else NOT_RUN,
                ABSENT if ratio is None else f"{ratio:.1f}",
                number_text(point.ratio),
                point.timed,
                point.name + ("" if point.causal else f" ({READS_FUTURE})"),
                where(record) if record else ABSENT,
                seeds_text([scene.record for scene in point.group]),
                made,
            ]
        )
        values.append(
            {"method": point.method, "paper_change": printed, "here_change": point.change, "paper_speed": ratio}
            | {"here_speed": point.ratio, "timed": point.timed, "causal": point.causal, "made_by": made}
        )
    records = [scene.record for point in found for scene in point.group]
    return Table(
        columns=COLUMNS,
        rows=rows,
        name=NAME,
        title="Figure 1: perplexity against measured speed",
        notes=[
            *dict.fromkeys(note for record in records for note in caveats(record)),
            f"paper: the speed of table 6 at {LENGTH:,} tokens and K = {GROUPS}; of the other methods it prints none",
            "here: one attention layer with routing over full attention in the same run, at the length at which other "
            "methods were timed, or where it was not timed there at its longest; perplexity in windows of T tokens",
        ],
        values=values,
    )


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
    longest = max((point.speed.tokens for point, _ in shown if point.speed), default=0)
    edge = min(WIDEST, max(cost for _, cost in shown) + 2)
    for point, cost in shown:
        axes, x = timed if point.ratio else untimed, point.ratio or 0.0
        axes.plot(x, min(cost, edge), "o", color=COLOURS[0] if point.causal else COLOURS[1], markersize=8)
        beyond = f" {cost:+,.0f} %" if cost > edge else ""
        future = "" if point.causal else f"\n({READS_FUTURE})"
        length = f" ({point.speed.tokens:,} tokens)" if point.speed and point.speed.tokens != longest else ""
        text, here, beside = (
            f"{point.label}{length}{beyond}{future}",
            (x, min(cost, edge)),
            (7, 5 if point.paper else -15),
        )
        axes.annotate(text, here, beside, textcoords="offset points", fontsize=9)
    best = front([(point.ratio, cost) for point, cost in shown if point.ratio and point.causal])
    timed.plot(*zip(*best, strict=True), color=COLOURS[0], alpha=0.4, zorder=0, label="not beaten in both")
    printed = [(speed, paper_change(method) or 0.0) for method, speed in paper_speeds().items()]
    claim = f"paper: K = {GROUPS}, {LENGTH:,} tokens, H100"
    timed.plot(*zip(*printed, strict=True), "s", color="0.35", markerfacecolor="none", markersize=11, label=claim)
    untimed.set(xlabel="not timed here", xticks=[], xlim=(-0.1, 1), ylabel="change of perplexity [%]")
    ratios = [speed for speed, _ in printed] + [point.ratio for point, _ in shown if point.ratio]
    timed.set(
        xlabel="ratio to full attention (above 1: faster)", xscale="log", xlim=(0.8 * min(ratios), 4 * max(ratios))
    )
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
