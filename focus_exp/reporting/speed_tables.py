"""Tables of a speed record: one per clock with the paper's table 6 beside, and quality beside speed by k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from focus_exp.records.record import Record
from focus_exp.records.speed import SpeedRow
from focus_exp.reporting.printed import paper_speedups
from focus_exp.reporting.speed import Setting, groups_text, setting
from focus_exp.reporting.speed_notes import (
    ASSIGNMENTS,
    BOUND,
    CASE_FIELDS,
    MEASURED_FIELDS,
    RATIO,
    mebibytes,
    notes,
    number_text,
)
from focus_exp.reporting.speed_top_k import top_k_table
from focus_exp.reporting.tables import ABSENT, Table, identity, share_text

TRAINED = (
    "trained router: the groups of one layer, the one of median evenness, on bench.routed_tokens held-out tokens, "
    "repeated where the row is longer"
)
MEMORY = "peak memory: the most that was held while it ran, inputs included; first the ratio, then both"


@dataclass
class Line:
    """A row of the table's clock and, beside attention, the same case by its kernels alone; one of them may lack."""

    record: Record
    row: SpeedRow | None
    kernels: SpeedRow | None

    @property
    def case(self) -> SpeedRow:
        found = self.row or self.kernels
        assert found is not None
        return found

    @property
    def overhead(self) -> float | None:
        """Share of Focus' attention that is spent outside the kernels: routing, sort, gather, merge."""
        whole, kernels = (row.focus_seconds if row else None for row in (self.row, self.kernels))
        return 1 - kernels / whole if whole and kernels else None

    @property
    def of_bound(self) -> float | None:
        """Measured ratio over its arithmetic bound."""
        return self.row.ratio / self.row.bound if self.row and self.row.ratio and self.row.bound else None

    @property
    def paper(self) -> float | None:
        return paper_speedups(self.case.groups).get(self.case.tokens) if self.case.top_k == 1 else None


Column = tuple[str, Callable[[Line], str]]


def speed_tables(record: Record) -> list[Table]:
    """One table per clock there are rows of, kernels beside attention; then quality and speed by k, if k varies."""
    tables = [_table(record, clock, found) for clock in COLUMNS if (found := lines(record, clock))]
    by_k = top_k_table(record)
    return [*tables, by_k] if by_k else tables


def _table(record: Record, clock: str, found: list[Line]) -> Table:
    timed = [row for line in found for row in (line.row, line.kernels) if row]
    return Table(
        columns=[name for name, _ in COLUMNS[clock]],
        rows=[[cell(line) for _, cell in COLUMNS[clock]] for line in found],
        name=f"speed_{clock.replace(' ', '_')}",
        title=f"{record.experiment}: Focus against full attention, {TITLES[clock]}",
        notes=notes(record, timed, MEANINGS[clock]),
        values=[_values(line, beside=clock == "attention") for line in found],
    )


def lines(record: Record, clock: str) -> list[Line]:
    """The rows of a clock by setting and length; those of "kernels" stand beside "attention", or alone."""
    clocks = (clock, "kernels" if clock == "attention" else None)
    cases: dict[tuple[Setting, int], tuple[list[SpeedRow], list[SpeedRow]]] = {}
    for row in record.speed:
        if row.clock in clocks:
            cases.setdefault((setting(row), row.tokens), ([], []))[clocks.index(row.clock)].append(row)
    pairs = [pair for key in sorted(cases) for pair in zip_longest(*cases[key])]
    return [Line(record, row, kernels) for row, kernels in pairs]


def _values(line: Line, beside: bool) -> dict[str, Any]:
    values = {name: getattr(line.case, name) for name in (*CASE_FIELDS, "pairs_kept", "bound")}
    values |= {name: getattr(line.row, name, None) for name in MEASURED_FIELDS}
    if beside:
        values |= {f"kernels_{name}": getattr(line.kernels, name, None) for name in MEASURED_FIELDS}
        values |= {"overhead": line.overhead, "paper_h100_ratio": line.paper}
    return {
        "experiment": line.record.experiment,
        **values,
        "measured_over_bound": line.of_bound,
        "device": line.record.device,
        **identity(line.record),
    }


def _time(row: SpeedRow | None, name: str, factor: float) -> str:
    if row is None or row.error is not None:
        return ABSENT if row is None else "failed"
    seconds = getattr(row, name)
    return number_text(None if seconds is None else factor * seconds)


def _ratio(row: SpeedRow | None) -> str:
    return number_text(row.ratio if row else None)


def _share(part: float | None, whole: float | None) -> str:
    return share_text(part / whole if part is not None and whole else None)


def _peaks(row: SpeedRow | None) -> str:
    if row is None or not row.full_peak_bytes or row.focus_peak_bytes is None:
        return ABSENT
    focus, full = row.focus_peak_bytes, row.full_peak_bytes
    return f"{number_text(focus / full)} ({mebibytes(focus)} / {mebibytes(full)})"


def _read(row: SpeedRow | None) -> str:
    if row is None or not row.full_bytes_read or row.focus_bytes_read is None:
        return ABSENT
    focus, full = row.focus_bytes_read, row.full_bytes_read
    return f"{number_text(focus / full)} ({mebibytes(focus)} / {mebibytes(full)})"


def _rate(row: SpeedRow | None, name: str) -> str:
    seconds = getattr(row, name, None)
    return number_text(1 / seconds if seconds else None)


def _times(unit: str, focus: str = "Focus") -> list[Column]:
    factor = {"ms": 1e3, "s": 1.0}[unit]
    return [
        (f"full [{unit}]", lambda line: _time(line.case, "full_seconds", factor)),
        (f"{focus} [{unit}]", lambda line: _time(line.row, "focus_seconds", factor)),
        ("ratio", lambda line: _ratio(line.row)),
    ]


CASE: list[Column] = [
    ("tokens", lambda line: f"{line.case.tokens:,}"),
    ("K", lambda line: groups_text(line.record, setting(line.case))),
    ("groups", lambda line: ASSIGNMENTS[line.case.assignment]),
]
PAIRS: list[Column] = [
    ("largest group", lambda line: share_text(line.case.largest_group)),
    ("pairs kept", lambda line: share_text(line.case.pairs_kept)),
]
KERNELS: list[Column] = [
    ("kernels [ms]", lambda line: _time(line.kernels, "focus_seconds", 1e3)),
    ("kernels ratio", lambda line: _ratio(line.kernels)),
]
OF_BOUND: list[Column] = [
    ("bound", lambda line: number_text(line.case.bound)),
    ("measured / bound", lambda line: share_text(line.of_bound)),
]
SHARES: list[Column] = [
    ("attention's share, full", lambda line: _share(line.case.full_attention_seconds, line.case.full_seconds)),
    ("attention's share, Focus", lambda line: _share(line.case.focus_attention_seconds, line.case.focus_seconds)),
]
RUN: list[Column] = [
    ("peak memory, Focus / full [MiB]", lambda line: _peaks(line.row)),
    ("path", lambda line: line.case.path or ABSENT),
]
HELD: list[Column] = [
    ("read per step, Focus / full [MiB]", lambda line: _read(line.row)),
    ("cache held, Focus / full [MiB]", lambda line: _peaks(line.row)),
]
TOKENS: list[Column] = [
    ("full [tokens/s]", lambda line: _rate(line.row, "full_seconds")),
    ("Focus [tokens/s]", lambda line: _rate(line.row, "focus_seconds")),
]
OVERHEAD: Column = ("routing etc.", lambda line: share_text(line.overhead))
PAPER: Column = ("paper, H100", lambda line: ABSENT if line.paper is None else f"{line.paper:.1f}")
FULL, *WITH_ROUTING = _times("ms", "with routing")
COLUMNS = {
    "attention": [*CASE, *PAIRS, FULL, *KERNELS, *WITH_ROUTING, OVERHEAD, *OF_BOUND, *RUN, PAPER],
    "prefill": [*CASE, *_times("s"), *SHARES, *RUN],
    "attention step": [*CASE, *PAIRS, *_times("ms"), *OF_BOUND, *RUN],
    "model step": [*CASE, *_times("s"), *RUN],
    "decode": [*CASE, *PAIRS, *_times("ms"), *OF_BOUND, *HELD],
    "decode model": [*CASE, *PAIRS[1:], *_times("ms"), *TOKENS, *HELD],
}
TITLES = {
    "attention": "one attention layer, forward",
    "prefill": "prefill of the whole model",
    "attention step": "one attention layer, forward and backward",
    "model step": "training step of the whole model",
    "decode": "one attention layer, one more token",
    "decode model": "one more token of the whole model",
}
MEANINGS = {
    "attention": [
        f"{RATIO}; the kernels' ratio is against their own full attention, full [ms] is beside with-routing",
        TRAINED,
        "routing etc.: the share of the with-routing time outside the kernels: routing, sort, gather, merge",
        BOUND,
        MEMORY,
        "paper, H100: table 6 of arXiv 2604.03260 at that length and K, k = 1, against FlashAttention on its device",
    ],
    "prefill": [RATIO, "attention's share: routing and attention over the whole prefill", MEMORY],
    "attention step": [RATIO, TRAINED, BOUND, MEMORY],
    "model step": ["ratio: time of full attention over time of Focus, all weights trained, one step each", MEMORY],
    "decode": [
        "ratio: time of full attention over the faster of transformers' DynamicCache and StaticCache over time of "
        "Focus, routing and storing the token included; the steps alternated in one run, medians after warm-up",
        TRAINED,
        "bound: tokens there are over tokens that the step reads; held: room for tokens to come included",
    ],
    "decode model": [
        "ratio: time of full attention with transformers' DynamicCache over time of Focus with its own, greedy text",
        "held: room for tokens to come included",
    ],
}
