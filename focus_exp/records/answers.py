"""Which row of a record stands for its run."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose

from focus_exp.records.record import Record
from focus_exp.records.rows import Row


def answer(record: Record) -> Row | None:
    """The row that stands for a run: its hard groups as configured, its attention method, or its trained weights."""
    method = record.setting("attention", "method", "full")
    choices: list[Callable[[Row], bool]] = [
        lambda row: is_configured(record, row),
        lambda row: row.kind == "control" and row.method == method,
        lambda row: row.kind == "trained",
    ]
    return next((row for chosen in choices for row in record.rows if chosen(row)), None)


def configured_row(record: Record) -> Row | None:
    """The scored hard row at the config's method, top_k and pair rule, if it can be compared with the base."""
    return next((row for row in record.rows if is_configured(record, row) and is_comparable(row)), None)


def is_configured(record: Record, row: Row) -> bool:
    # with one group a token both pair rules keep the same pairs
    return (
        row.kind == "hard"
        and row.method == record.setting("attention", "method")
        and row.top_k in (None, record.setting("attention", "top_k"))
        and (row.top_k == 1 or row.pair_rule in (None, record.setting("attention", "pair_rule")))
    )


def is_comparable(row: Row) -> bool:
    """Whether its loss is one, and not full attention's."""
    return row.scored and row.causal and not keeps_everything(row)


def keeps_everything(row: Row) -> bool:
    """Whether a hard row or control keeps every distant pair, that is, is full attention."""
    return row.kind in ("hard", "control") and isclose(row.distant_pairs_kept or 0.0, 1.0)


def row_of(record: Record, arm: str) -> Row | None:
    """The row of a comparison that stands for an arm."""
    return next((row for row in record.rows if row.arm == arm), None)
