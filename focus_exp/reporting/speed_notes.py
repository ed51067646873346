"""What the tables, figures and findings of a speed record share: wording, notes, CSV columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from focus_exp.records.record import Record
from focus_exp.records.speed import MethodSpeedRow, SpeedRow
from focus_exp.reporting.speed import label, setting
from focus_exp.reporting.tables import ABSENT, assets, caveats, facts, origin

ASSIGNMENTS = {"balanced": "balanced", "trained": "trained router"}
RATIO = "ratio: time of full attention over time of Focus, the two alternated in one run; medians after warm-up"
BOUND = "bound: causal pairs of full attention over those that Focus keeps; routing is not in it"
CASE_FIELDS = ("clock", "tokens", "groups", "assignment", "top_k", "pair_rule", "window", "dtype")
MEASURED_FIELDS = (
    "largest_group", "full_kernel", "path", "repeats", "full_seconds", "focus_seconds", "ratio",
    "full_attention_seconds", "focus_attention_seconds", "full_peak_bytes", "focus_peak_bytes",
    "full_bytes_read", "focus_bytes_read", "error",
)  # fmt: skip


def number_text(value: float | None) -> str:
    """Three significant digits, more for whole numbers."""
    if value is None:
        return ABSENT
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f}" if abs(value) >= 0.9995 else f"{value:.3g}"


def about(tokens: float) -> str:
    """Two significant digits."""
    return f"{float(f'{tokens:.1e}'):,.0f}"


def mebibytes(value: float) -> str:
    """Bytes in MiB, without the unit."""
    return number_text(value / 2**20)


def notes(record: Record, rows: list[SpeedRow], meanings: list[str]) -> list[str]:
    """What was really run for `rows`, the failures among them, what the columns mean, and where it all comes from."""
    measured = {
        **(record.config.get("bench") or {}),
        **conditions(rows),
        "window": distinct(row.window for row in rows),
    }
    failed = [row for row in rows if row.error is not None]
    return [
        *caveats(record),
        *(f"{row.clock}, {label(record, setting(row))}, {row.tokens:,} tokens failed: {row.error}" for row in failed),
        *assets(record),
        f"Measured: {facts(measured)}",
        *meanings,
        origin(record),
    ]


def conditions(rows: Sequence[SpeedRow] | Sequence[MethodSpeedRow]) -> dict[str, str]:
    """On what and how often `rows` were measured."""
    return {
        "layer": distinct(row.layer for row in rows),
        "dtype": distinct(row.dtype for row in rows),
        "full attention by": distinct(row.full_kernel for row in rows),
        "repeats": distinct(row.repeats or "" for row in rows),
    }


def distinct(values: Iterable[Any]) -> str:
    """The different values in order, without empty ones."""
    return " and ".join(sorted({str(value) for value in values} - {""}))
