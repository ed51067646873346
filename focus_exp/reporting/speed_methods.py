"""The speed of other methods' layers, as they are computed here: table and sentences."""

from __future__ import annotations

from focus_exp.reporting.record import Record
from focus_exp.reporting.rows import MethodSpeedRow
from focus_exp.reporting.speed_notes import distinct, number_text
from focus_exp.reporting.tables import ABSENT, Table, assets, caveats, facts, identity, origin

MASKED = "masked"
COLUMNS = ["method", "tokens", "full [ms]", "method [ms]", "ratio", "computed by"]


def method_table(record: Record) -> Table:
    """A line a method and length; a failure keeps its reason."""
    rows = record.method_speed
    measured = {
        "layer": distinct(row.layer for row in rows),
        "dtype": distinct(row.dtype for row in rows),
        "full attention by": distinct(row.full_kernel for row in rows),
        "repeats": distinct(row.repeats or "" for row in rows),
    }
    return Table(
        columns=COLUMNS,
        rows=[
            [
                *(row.method, f"{row.tokens:,}", _milliseconds(row.full_seconds), _milliseconds(row.seconds)),
                *(number_text(row.ratio), row.path if row.error is None else f"failed: {row.error}"),
            ]
            for row in rows
        ],
        name="speed_methods",
        title=f"{record.experiment}: a layer of other methods against full attention",
        notes=[
            *caveats(record),
            *assets(record),
            f"Measured: {facts(measured)}",
            "ratio: time of full attention over that of the method with its routing, all alternated in one run",
            f"computed by {MASKED}: every pair is computed and those a method drops are masked, so nothing can be "
            "saved; a kernel of its own might, which is not to be seen here",
            origin(record),
        ],
        values=[_values(row) | identity(record) for row in rows],
    )


def method_findings(record: Record) -> list[str]:
    """Per length, what is faster than full attention, what is not, and what could not be."""
    said = []
    for tokens in dict.fromkeys(row.tokens for row in record.method_speed):
        rows = [row for row in record.method_speed if row.tokens == tokens and row.ratio]
        parts = {
            "by kernels that skip pairs": [row for row in rows if row.path != MASKED],
            "by masks over all pairs, which cannot save any": [row for row in rows if row.path == MASKED],
        }
        listed = "; ".join(
            f"{how}: {', '.join(f'{row.method} {number_text(row.ratio)}' for row in found)}"
            for how, found in parts.items()
            if found
        )
        if listed:
            said.append(
                f"At {tokens:,} tokens, time of full attention over that of a layer of other methods, {listed}."
            )
    return said


def _milliseconds(seconds: float | None) -> str:
    return number_text(seconds * 1e3) if seconds is not None else ABSENT


def _values(row: MethodSpeedRow) -> dict[str, object]:
    return {
        **{"method": row.method, "tokens": row.tokens, "layer": row.layer, "dtype": row.dtype},
        **{"full_kernel": row.full_kernel, "path": row.path, "repeats": row.repeats},
        **{"full_seconds": row.full_seconds, "seconds": row.seconds, "ratio": row.ratio, "error": row.error},
    }
