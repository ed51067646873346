"""Judges of claims on other sizes, texts and lengths, and on dominance: what one record says of one claim."""

from __future__ import annotations

import math
from collections.abc import Callable

from focus_exp.records.answers import row_of
from focus_exp.records.record import Record
from focus_exp.reporting.tables import change_text
from focus_exp.reporting.verdicts import (
    MARGIN,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    UNDECIDED,
    Verdict,
    between,
)


def _all_below(found: list[tuple[str, float, float | None, float | None]], limit: float, record: Record) -> Verdict:
    """Whether every one of the differences [nats] is below a limit, by its whole interval."""
    if not found:
        return Verdict(NOT_RUN, why="there is no paired perplexity", records=[record])
    ours = "; ".join(f"{name} {change_text(delta, low, high)}" for name, delta, low, high in found)
    bounds = [(delta if low is None else low, math.inf if high is None else high) for _, delta, low, high in found]
    word = UNDECIDED
    if any(low > limit for low, _ in bounds):
        word = NOT_REPRODUCED
    elif all(high < limit for _, high in bounds):
        word = REPRODUCED
    return Verdict(word, ours, f"the limit is {change_text(limit)}", [record])


def costs_at_most(factor: float) -> Callable[[Record], Verdict]:
    """Whether no arm raises the perplexity of its own base by more than `factor`."""

    def judge(record: Record) -> Verdict:
        rows = [(arm.name, row) for arm in record.arms if (row := row_of(record, arm.name)) and row.causal]
        found = [(n, r.delta_nll, r.delta_low, r.delta_high) for n, r in rows if r.delta_nll is not None]
        return _all_below(found, math.log(factor), record)

    return judge


def far_costs_at_most(factor: float) -> Callable[[Record], Verdict]:
    """The same of the longest texts that two groups a query were measured on."""

    def judge(record: Record) -> Verdict:
        rows = [
            row for row in record.benchmarks
            if row.attention == "k_2" and row.task.startswith("perplexity@") and row.value is not None
        ]  # fmt: skip
        longest = max(rows, key=lambda row: int(row.task.partition("@")[2]), default=None)
        if longest is None:
            return _all_below([], math.log(factor), record)
        if longest.difference is None:
            return Verdict(UNDECIDED, f"{longest.task} k=2: {longest.value:.2f}", "too few texts to compare", [record])
        found = (f"{longest.task} k=2", longest.difference, longest.difference_low, longest.difference_high)
        return _all_below([found], math.log(factor), record)

    return judge


def on_other_texts(record: Record) -> Verdict:
    """Whether Focus is as good as full attention on every text that both were trained on; paired with the first arm."""
    stems = [arm.name.removesuffix("_focus") for arm in record.arms if arm.name.endswith("_focus")]
    pairs = [(stem, between(record, f"{stem}_focus", f"{stem}_full")) for stem in stems]
    return _all_below([(stem, *pair[2:]) for stem, pair in pairs if pair], MARGIN, record)
