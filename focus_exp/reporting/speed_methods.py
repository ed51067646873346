"""The speed of other methods' layers, as they are computed here: table and sentences."""

from __future__ import annotations

from focus_exp.records.record import Record
from focus_exp.reporting.speed_notes import conditions, number_text
from focus_exp.reporting.tables import Table, assets, caveats, facts, identity, origin

MASKED = "masked"
FIELDS = (
    *("method", "tokens", "layer", "dtype", "full_kernel", "path", "repeats"),
    *("full_seconds", "seconds", "ratio", "error"),
)
COLUMNS = ["method", "tokens", "full [ms]", "method [ms]", "ratio", "computed by"]


def method_table(record: Record) -> Table:
    """A line a method and length; a failure keeps its reason."""
    rows = record.method_speed
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
            f"Measured: {facts(conditions(rows))}",
            "ratio: time of full attention over that of the method with its routing, all alternated in one run",
            f"computed by {MASKED}: every pair is computed and those a method drops are masked, so nothing can be "
            "saved; a kernel of its own might, which is not to be seen here",
            origin(record),
        ],
        values=[{name: getattr(row, name) for name in FIELDS} | identity(record) for row in rows],
    )


def _milliseconds(seconds: float | None) -> str:
    return number_text(None if seconds is None else seconds * 1e3)
