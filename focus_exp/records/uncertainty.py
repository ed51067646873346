"""The standard errors behind the intervals of a record."""

from __future__ import annotations

import math

from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.results.intervals import NORMAL, student
from focus_exp.results.record import Record

Error = tuple[float | None, float | None, int | None]


def error_of(record: Record, low: float | None, high: float | None) -> Error:
    """Standard error by the text, its freedom and the units behind an interval of a row."""
    if low is None or high is None or record.units is None:
        return None, None, None
    freedom = record.units.freedom or 1.0
    return (high - low) / 2 / student(freedom), freedom, record.units.count


def error_of_score(row: BenchmarkRow) -> Error:
    """Of the difference of a score: shares of items have a normal interval, others Student's t over documents.

    Older records do not say with which freedom: of items that are documents of their own.
    """
    low, high, n = row.difference_low, row.difference_high, row.n or 0
    if low is None or high is None or n < 2:
        return None, None, row.n
    if row.freedom is not None:
        return (high - low) / 2 / student(row.freedom), row.freedom, n
    if row.is_share:
        return (high - low) / 2 / NORMAL, math.inf, n
    return (high - low) / 2 / student(n - 1), n - 1, n
