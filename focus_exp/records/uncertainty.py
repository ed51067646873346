"""The standard errors behind the intervals of a record, of old records as far as they tell."""

from __future__ import annotations

import math

from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.intervals import NORMAL, student
from focus_exp.records.record import Record
from focus_exp.records.rows import Row

Error = tuple[float | None, float | None, int | None]


def error_of(record: Record, row: Row, low: float | None, high: float | None) -> Error:
    """Standard error by the text, its freedom and the units behind an interval of a row.

    Of a record from before its units were known: of the percentile bootstrap over windows that it has, whose width is
    that of n windows taken for all there are, as if windows of one work were independent.
    """
    if low is None or high is None:
        return None, None, None
    if record.units is not None:
        freedom = record.units.freedom or 1.0
        return (high - low) / 2 / student(freedom), freedom, record.units.count
    windows = bootstrapped(record, row)
    if windows is None:
        return (high - low) / 2 / NORMAL, math.inf, None
    return (high - low) / 2 / NORMAL * math.sqrt(windows / (windows - 1)), windows - 1, windows


def bootstrapped(record: Record, row: Row) -> int | None:
    """The windows behind a row of a record from before: each of them scored all its tokens but the first."""
    return round(row.tokens / (record.setting("eval", "window") - 1)) if row.tokens else None


def error_of_score(row: BenchmarkRow) -> Error:
    """Of the difference of a score: shares of items have a normal interval, others Student's t over documents.

    Older records do not say with which freedom. More documents than windows are parts of windows, which they took for
    documents: the windows count.
    """
    low, high, n = row.difference_low, row.difference_high, row.n or 0
    if low is None or high is None or n < 2:
        return None, None, row.n
    if row.freedom is not None:
        return (high - low) / 2 / student(row.freedom), row.freedom, n
    if row.is_share:
        return (high - low) / 2 / NORMAL, math.inf, n
    stderr, count = (high - low) / 2 / student(n - 1), min(n, row.requests or n)
    return (stderr, count - 1, count) if row.is_perplexity and count > 1 else (stderr, n - 1, n)
