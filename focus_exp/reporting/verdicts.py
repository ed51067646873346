"""Judges of the paper's claims: what one record says of one claim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from focus_exp.records.answers import answer, row_of
from focus_exp.records.benchmarks import BenchmarkRow, telling
from focus_exp.records.record import Record
from focus_exp.records.rows import Row
from focus_exp.records.speed import SpeedRow
from focus_exp.reporting.benchmarks import difference_text, is_share
from focus_exp.reporting.printed import paper_speedups
from focus_exp.reporting.speed_notes import number_text
from focus_exp.reporting.tables import change_text, perplexity_text, share_text

REPRODUCED, NOT_REPRODUCED, UNDECIDED = "reproduced", "not reproduced", "undecided"
NOT_ENGAGED, NOT_RUN, NOT_HERE = "not engaged", "not run", "not testable here"
RAN = "ran, decides nothing"  # at scale=quick
VERDICTS = (RAN, REPRODUCED, NOT_REPRODUCED, UNDECIDED, NOT_ENGAGED, NOT_RUN, NOT_HERE)
LONG, LONGEST = 65_536, 1_048_576  # tokens that a CPU still times, and the paper's most
MARGIN = 0.01  # nats a token that make no difference
CLAIMED = 0.95  # of a printed speed-up counts as that speed-up


@dataclass(frozen=True)
class Verdict:
    """What the records say of a claim; `ours` is the value, `why` the sentence, `records` what they follow from."""

    word: str
    ours: str = ""
    why: str = ""
    records: list[Record] = field(default_factory=list)


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper with its number, the experiments that test it here, and the judge of their records."""

    table: str
    says: str
    paper: str
    experiments: tuple[str, ...]
    judge: Callable[[Record], Verdict] | None
    out_of_reach: str = ""  # why there is none


def word_of(low: float | None, high: float | None, value: float) -> str:
    """What an interval says of "below 0"."""
    if low is None or high is None or low <= 0 <= high:
        return UNDECIDED
    return REPRODUCED if value < 0 else NOT_REPRODUCED


def lowers_perplexity(record: Record) -> Verdict:
    row = answer(record)
    if row is None or row.delta_nll is None:
        return Verdict(NOT_RUN, why="there is no scored router", records=[record])
    before, after = (perplexity_text(r.perplexity if r else None) for r in (record.base, row))
    change = change_text(row.delta_nll, row.delta_low, row.delta_high)
    ours = f"K={record.setting('attention', 'groups')}, k={row.top_k}: {before} to {after}, {change}"
    if not row.causal:
        return Verdict(UNDECIDED, ours, "it reads the future: its perplexity is not one", [record])
    why = "the paper's assignment reads the future, this one does not"
    return Verdict(word_of(row.delta_low, row.delta_high, row.delta_nll), ours, why, [record])


def _benchmarks(record: Record, arm: str) -> list[BenchmarkRow]:
    return [row for row in telling([r for r in record.benchmarks if r.scored]) if row.attention == arm]


def no_degradation(record: Record) -> Verdict:
    rows = _benchmarks(record, record.arms[0].name)
    acted = [row for row in rows if row.engaged]
    idle = ", ".join(f"{row.task} ({share_text(row.pairs_removed)})" for row in rows if row.engaged is False)
    if not rows:
        return Verdict(NOT_RUN, why="no benchmark was run", records=[record])
    if not acted:
        return Verdict(NOT_ENGAGED, "", f"pairs removed: {idle}", [record])
    said = "; ".join(f"{row.scored_as} {difference_text(row)}" for row in acted)
    lost = [row for row in acted if row.outcome == "worse"]
    losses = [-100 * row.difference_low for row in acted if is_share(row) and row.difference_low is not None]
    why = f"not engaged on {idle}" if idle else ""
    if lost:
        return Verdict(NOT_REPRODUCED, said, why, [record])
    if losses:
        limit = f"losses of up to {max(losses):.1f} points cannot be excluded"
    else:
        limit = "too few texts to compare" if any(row.difference_low is None for row in acted) else ""
    return Verdict(UNDECIDED, said, "; ".join(filter(None, (limit, why))), [record])


def arm_row(record: Record, name: str) -> Row | None:
    arm = next((arm for arm in record.arms if arm.name == name), None)
    return row_of(record, arm.name) if arm else None


def better_than(name: str) -> Callable[[Record], Verdict]:
    def judge(record: Record) -> Verdict:
        row, first = arm_row(record, name), row_of(record, record.arms[0].name)
        if row is None or first is None or row.delta_vs_hard is None:
            return Verdict(NOT_RUN, why=f"arm {name} has no perplexity", records=[record])
        change = change_text(row.delta_vs_hard, row.delta_vs_hard_low, row.delta_vs_hard_high)
        ours = f"{perplexity_text(first.perplexity)} against {perplexity_text(row.perplexity)}, which is {change}"
        if not row.causal:
            return Verdict(UNDECIDED, ours, f"{name} reads the future: its perplexity is not one", [record])
        word = word_of(row.delta_vs_hard_low, row.delta_vs_hard_high, -row.delta_vs_hard)
        return Verdict(word, ours, f"{record.arms[0].tokens_seen:,} tokens of training", [record])

    return judge


def as_good_as(name: str, of: str = "") -> Callable[[Record], Verdict]:
    """Whether arm `name` is no more than MARGIN better than `of`, by its whole interval; one of them is the first."""

    def judge(record: Record) -> Verdict:
        ours = of or record.arms[0].name
        found = between(record, ours, name)
        if found is None:
            return Verdict(NOT_RUN, why=f"arms {ours} and {name} have no paired perplexities", records=[record])
        row, other, delta, low, high = found
        change = change_text(-delta, None if high is None else -high, None if low is None else -low)
        said = f"{perplexity_text(row.perplexity)} against {perplexity_text(other.perplexity)}, which is {change}"
        tokens = next(arm.tokens_seen for arm in record.arms if arm.name == ours)
        why = f"{tokens:,} tokens of training; as good: not better by {MARGIN} nats a token"
        if low is None or high is None:
            return Verdict(UNDECIDED, said, why, [record])
        word = NOT_REPRODUCED if low > MARGIN else REPRODUCED if high < MARGIN else UNDECIDED
        return Verdict(word, said, why, [record])

    return judge


def between(record: Record, ours: str, theirs: str) -> tuple[Row, Row, float, float | None, float | None] | None:
    """Both rows and the paired difference of losses, ours minus theirs, of two arms of which one is the first."""
    row, other = arm_row(record, ours), arm_row(record, theirs)
    if row is None or other is None:
        return None
    first = record.arms[0].name
    if theirs == first and row.delta_vs_hard is not None:
        return row, other, row.delta_vs_hard, row.delta_vs_hard_low, row.delta_vs_hard_high
    if ours == first and other.delta_vs_hard is not None:
        low, high = other.delta_vs_hard_low, other.delta_vs_hard_high
        return row, other, -other.delta_vs_hard, None if high is None else -high, None if low is None else -low
    return None


def _loras(record: Record) -> list[tuple[str, Row]]:
    """Of about as many parameters as the first arm has."""
    first = record.arms[0]
    near = [
        a for a in record.arms if a.name.startswith("lora") and a.trainable_parameters < 2 * first.trainable_parameters
    ]
    return [(arm.name, row) for arm in near if (row := row_of(record, arm.name)) is not None and row.nll is not None]


def lora_is_lower(record: Record) -> Verdict:
    found = _loras(record)
    if not found:
        return Verdict(NOT_RUN, why="no LoRA has a perplexity", records=[record])
    name, row = min(found, key=lambda pair: pair[1].nll or 0.0)
    change = change_text(row.delta_vs_hard, row.delta_vs_hard_low, row.delta_vs_hard_high)
    word = word_of(row.delta_vs_hard_low, row.delta_vs_hard_high, row.delta_vs_hard or 0.0)
    best = f", the best of {len(found)} learning rates" if len(found) > 1 else ""
    ours = f"{name}{best}: {perplexity_text(row.perplexity)}, {change} against {record.arms[0].name}"
    return Verdict(word, ours, "LoRA keeps every pair", [record])


def lora_degrades(record: Record) -> Verdict:
    found = _loras(record)
    rows = [(name, row) for name, _ in found for row in _benchmarks(record, name)]
    if not rows:
        return Verdict(NOT_RUN, why="no benchmark was run", records=[record])
    lost = [f"{name} on {row.task} {difference_text(row)}" for name, row in rows if row.outcome == "worse"]
    items = max(row.n or 0 for _, row in rows)
    if lost:
        return Verdict(REPRODUCED, "; ".join(lost), f"{len(lost)} of {len(rows)} scores beyond the interval", [record])
    return Verdict(UNDECIDED, "no score is worse beyond its interval", f"{items} items a task", [record])


def _timed(record: Record, groups: int) -> list[SpeedRow]:
    rows = [r for r in record.speed if r.clock == "attention" and r.groups == groups and r.top_k == 1 and r.ratio]
    return sorted(rows, key=lambda row: row.tokens)


def fast(groups: int) -> Callable[[Record], Verdict]:
    def judge(record: Record) -> Verdict:
        printed = paper_speedups(groups)
        rows = [row for row in _timed(record, groups) if row.assignment == "balanced"]
        both = [row for row in rows if row.tokens in printed and row.tokens <= LONG]
        if not both:
            return Verdict(NOT_RUN, why=f"K={groups} was not timed", records=[record])
        ours = ", ".join(f"{number_text(row.ratio)}x at {row.tokens:,}" for row in both)
        slower = [row for row in both if (row.ratio or 0.0) < CLAIMED * printed[row.tokens]]
        theirs = ", ".join(f"{printed[row.tokens]}x" for row in both)
        why = f"on {record.device_kind} with balanced groups; the paper prints {theirs}"
        return Verdict(NOT_REPRODUCED if slower else REPRODUCED, ours, why, [record])

    return judge


def fast_at(groups: int, tokens: int) -> Callable[[Record], Verdict]:
    def judge(record: Record) -> Verdict:
        row = next((r for r in _timed(record, groups) if (r.assignment, r.tokens) == ("balanced", tokens)), None)
        if row is None:
            return Verdict(NOT_HERE, why="needs a GPU: full attention alone would take hours on a CPU")
        fast = (row.ratio or 0.0) >= CLAIMED * paper_speedups(groups)[tokens]
        return Verdict(REPRODUCED if fast else NOT_REPRODUCED, f"{number_text(row.ratio)}x", record.device, [record])

    return judge


def as_fast_as(printed: dict[str, Any]) -> Callable[[Record], Verdict]:
    def judge(record: Record) -> Verdict:
        rows = [
            row for row in record.speed
            if row.clock == "attention" and row.ratio and (row.groups, row.top_k) == (4, printed["top_k"])
        ]  # fmt: skip
        if not rows:
            return Verdict(NOT_RUN, why=f"k={printed['top_k']} was not timed", records=[record])
        row = max(rows, key=lambda row: (row.tokens, row.ratio or 0.0))
        fast = (row.ratio or 0.0) >= CLAIMED * printed["claimed_speedup"]
        ours = f"{number_text(row.ratio)}x at {row.tokens:,} tokens"
        why = f"K/k is a count of groups; {share_text(row.pairs_kept)} of the pairs are kept"
        return Verdict(REPRODUCED if fast else NOT_REPRODUCED, ours, why, [record])

    return judge
