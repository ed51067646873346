"""What the tables of one record have a line for, where it is more than a row of the record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import mean, median
from typing import Any, get_args

from focus_exp.records.answers import Phase, phases, row_of
from focus_exp.records.benchmarks import BenchmarkRow, telling
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm, Row
from focus_exp.records.speed import Clock, SpeedRow
from focus_exp.reporting.printed import paper_rows, paper_speedups
from focus_exp.reporting.specs import read_yaml
from focus_exp.reporting.speed import by_top_k, quality_row, setting

PHASES_IN_PAPER = ("table8_dominance.two_phase_K8", "table8_dominance", "table9_ablation")
PAPER_GROUPS = 4  # K of every row of the paper's table 7


@dataclass(frozen=True)
class ArmLine:
    """An arm of a comparison, and what stands for it; a row without numbers where nothing was scored."""

    arm: Arm
    row: Row


def base_and_arms(record: Record) -> list[ArmLine]:
    """Full attention without any training, then the arms."""
    if not record.arms:
        return []
    base = record.base or _unscored("base")
    shown = replace(base, name="full attention", distant_pairs_kept=1.0, pairs_removed=0.0, delta_vs_hard=None)
    return [ArmLine(Arm(name="base", settings=[]), shown), *arms(record)]


def arms(record: Record) -> list[ArmLine]:
    return [ArmLine(arm, row_of(record, arm.name) or _unscored("")) for arm in record.arms]


def _unscored(name: str) -> Row:
    return Row(name=name, kind="control", method="", causal=True)


def by_task(record: Record) -> list[BenchmarkRow]:
    """Tasks and metrics together, full attention first."""
    tasks, metrics = (list(dict.fromkeys(getattr(row, key) for row in record.benchmarks)) for key in ("task", "metric"))
    return sorted(record.benchmarks, key=lambda row: (tasks.index(row.task), metrics.index(row.metric)))


def told_tasks(record: Record) -> list[BenchmarkRow]:
    """Of a comparison's tasks, for every arm, the metric in which it lost, if it did."""
    return telling([row for row in record.benchmarks if row.kind != "missing"]) if record.arms else []


@dataclass(frozen=True)
class PhaseLine:
    """A phase of an arm beside what the paper prints of it, "" for nothing."""

    phase: Phase
    paper: str

    @property
    def causal(self) -> bool:
        row = self.phase.hard or self.phase.soft
        return row is None or row.causal


def phase_lines(record: Record) -> list[PhaseLine]:
    return [PhaseLine(phase, paper_of(record, phase)) for phase in phases(record)]


@dataclass(frozen=True)
class TextLine:
    """All continuations under one attention. losses: nats per token under the base; shares 0..1, of a record's means."""

    attention: str
    prompts: int
    losses: list[float]
    tokens: int
    agrees: float | None = None
    read: float | None = None
    share: float | None = None
    rate: float | None = None
    cache_bytes: float | None = None


def texts(record: Record) -> Iterator[TextLine]:
    """One line per attention, over all prompts."""
    for name in dict.fromkeys(row.attention for row in record.continuations):
        rows = [row for row in record.continuations if row.attention == name]
        reads = [(row.read, row.prompt_tokens + row.tokens) for row in rows if row.read is not None]
        yield TextLine(
            attention=name,
            prompts=len(rows),
            losses=[row.base_nll for row in rows if row.base_nll is not None],
            tokens=rows[0].tokens,
            agrees=_of(median, (row.agrees for row in rows)),
            read=_of(mean, (read for read, _ in reads)),
            share=_of(mean, (read / there for read, there in reads)),
            rate=_of(median, (row.tokens / row.seconds if row.seconds else None for row in rows)),
            cache_bytes=_of(mean, (row.cache_bytes for row in rows)),
        )


def _of(summary: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return summary(known) if known else None


def paper_of(record: Record, phase: Phase) -> str:
    """What the paper prints of this arm after such a phase; "" for nothing."""
    suffix, perplexity = ("full_ft", "ppl_finetuned") if phase.full else ("centroid", "ppl_centroid")
    texts = {perplexity: "perplexity {}", f"dominance_{suffix}": "largest group {} %"}
    texts |= {f"stability_{suffix}": "stability {}"} | ({"outcome": "{}"} if phase.full else {})
    tables = PHASES_IN_PAPER if record.experiment in ("stability", "ablation") else ()
    rows = (paper_row_of(phase.arm.name, table) for table in tables)
    return ", ".join(text.format(row[name]) for row in rows for name, text in texts.items() if name in row)


def paper_row_of(arm: str, table: str) -> dict[str, Any]:
    """The first row of a table of the paper that an arm stands for by itself, {} if there is none."""
    content = read_yaml("paper_map")
    standing = content.get("tables", content)[table]
    names = (
        name for name, place in standing["rows"].items() if arm == (place[0] if isinstance(place, list) else place)
    )
    wanted = next(names, None)
    rows: list[dict[str, Any]] = paper_rows(table)
    return next((row for row in rows if " ".join(f"{row[key]}" for key in standing["key"]) == wanted), {})


@dataclass(frozen=True)
class SpeedLine:
    """A row of a clock and, beside attention, the same case by its kernels alone; one of them may lack."""

    timed: SpeedRow | None
    kernels: SpeedRow | None = None

    @property
    def rows(self) -> list[SpeedRow]:
        return [row for row in (self.timed, self.kernels) if row]

    @property
    def case(self) -> SpeedRow:
        return self.rows[0]

    @property
    def overhead(self) -> float | None:
        """Share of Focus' attention that is spent outside the kernels: routing, sort, gather, merge."""
        whole, kernels = (row.focus_seconds if row else None for row in (self.timed, self.kernels))
        return 1 - kernels / whole if whole and kernels else None

    @property
    def of_bound(self) -> float | None:
        """Measured ratio over its arithmetic bound."""
        return self.timed.ratio / self.timed.bound if self.timed and self.timed.ratio and self.timed.bound else None

    @property
    def paper(self) -> float | None:
        return paper_speedups(self.case.groups).get(self.case.tokens) if self.case.top_k == 1 else None


def timings(clock: str) -> Callable[[Record], list[SpeedLine]]:
    """The rows of a clock by setting and length; those of "kernels" stand beside "attention", or alone."""
    clocks = (clock, "kernels" if clock == "attention" else None)

    def lines(record: Record) -> list[SpeedLine]:
        cases: dict[Any, tuple[list[SpeedRow], list[SpeedRow]]] = {}
        for row in record.speed:
            if row.clock in clocks:
                cases.setdefault((setting(row), row.tokens), ([], []))[clocks.index(row.clock)].append(row)
        return [SpeedLine(*pair) for key in sorted(cases) for pair in zip_longest(*cases[key])]

    return lines


@dataclass(frozen=True)
class TopLine:
    """The time of some groups a query beside what they cost in perplexity, and what the paper says of both."""

    case: SpeedRow
    quality: Row | None
    paper: dict[str, Any]

    @property
    def rows(self) -> list[SpeedRow]:
        return [self.case]

    @property
    def pairs_retained(self) -> float | None:
        """The paper's share of the distant pairs."""
        percent = self.paper.get("pairs_retained_percent")
        return percent / 100 if percent else None


def by_groups_a_query(record: Record) -> Iterator[TopLine]:
    printed: list[dict[str, Any]] = paper_rows("table7_topk")
    for row in by_top_k(record):
        wanted = ("gpt2_124m", row.top_k, row.groups)
        paper = next((line for line in printed if (line["model"], line["top_k"], PAPER_GROUPS) == wanted), {})
        yield TopLine(row, quality_row(record, setting(row)), paper)


Lines = Callable[[Record], Iterable[Any]]
LINES: dict[str, Lines] = {
    **{
        found.__name__: found
        for found in (base_and_arms, arms, by_task, told_tasks, phase_lines, texts, by_groups_a_query)
    },
    **{clock: timings(clock) for clock in get_args(Clock) if clock != "kernels"},
}
