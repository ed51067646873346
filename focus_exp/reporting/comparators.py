"""What measurements say of a claim: one comparator for each way in which a claim can hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from focus_exp.records.answers import DOMINANT
from focus_exp.reporting.formats import NOT_ENGAGED, NOT_REPRODUCED, NOT_RUN, REPRODUCED, UNDECIDED, share_text
from focus_exp.reporting.selection import Line


@dataclass(frozen=True)
class Judged:
    """A word; the lines that it is said of, that on which it hangs first; what the comparator itself says."""

    word: str
    lines: list[Line]
    hangs_on: Line | None = None
    ours: str = ""
    why: str = ""


def below(lines: list[Line], limit: float) -> Judged:
    """Whether every line is below `limit`, by its whole interval."""
    highest = max(lines, key=lambda line: math.inf if line.high is None else line.high)
    if future := next((line.reads_future for line in lines if line.reads_future), None):
        return Judged(UNDECIDED, lines, why=f"{future} reads the future: its perplexity is not one")
    if any(line.low is None or line.high is None for line in lines):
        return Judged(UNDECIDED, lines, highest, why="too few texts for an interval")
    word = REPRODUCED if highest.high < limit else UNDECIDED
    return Judged(NOT_REPRODUCED if any(line.low > limit for line in lines) else word, lines, highest)


def at_least(lines: list[Line], wanted: float | Mapping[int, float], times: float = 1.0, minus: float = 0.0) -> Judged:
    """Whether every line reaches what is wanted at its length; the first one, where a single number is wanted."""
    if not isinstance(wanted, Mapping):
        reached = lines[0].value >= times * wanted - minus
        return Judged(REPRODUCED if reached else NOT_REPRODUCED, lines, lines[0])
    lines = sorted((line for line in lines if line.tokens in wanted), key=lambda line: line.tokens)
    reached = all(line.value >= times * wanted[line.tokens] - minus for line in lines)
    return Judged(REPRODUCED if reached else NOT_REPRODUCED, lines, lines[-1]) if lines else Judged(NOT_RUN, [])


def within(lines: list[Line], least: float, most: float, margin: float) -> Judged:
    inside = all(least - margin <= line.value <= most + margin for line in lines)
    return Judged(REPRODUCED if inside else NOT_REPRODUCED, lines)


def takes_over(lines: list[Line], share: float, dead: float) -> Judged:
    """Whether one group has this share of the tokens, or this share of the groups is dead."""
    by = {line.measure: line for line in lines}
    largest, gone = by["dominance"], by["dead_groups"].value / by["dead_groups"].K
    if largest.value >= share or gone >= dead:
        return Judged(REPRODUCED, lines, largest)
    return Judged(UNDECIDED if max(largest.value, gone) > DOMINANT else NOT_REPRODUCED, lines, largest)


def stays_even(lines: list[Line], share: float) -> Judged:
    """Whether the largest group stays below this share of the tokens and no group dies."""
    by = {line.measure: line for line in lines}
    largest, gone = by["dominance"], by["dead_groups"].value
    word = NOT_REPRODUCED if largest.value > share else REPRODUCED if gone < 1 else UNDECIDED
    return Judged(word, lines, largest)


def no_loss(lines: list[Line]) -> Judged:
    """Whether no score is lost where the mask acted; that nothing is lost no interval can show."""
    acted = [line for line in lines if line.engaged]
    idle = ", ".join(f"{line.task} ({share_text(line.pairs_removed)})" for line in lines if line.engaged is False)
    if not acted:
        return Judged(NOT_ENGAGED, lines, why=f"pairs removed: {idle}")
    lost = any(line.outcome == "worse" for line in acted)
    losses = [-100 * line.low for line in acted if line.unit == "share" and line.low is not None]
    limit = f"losses of up to {max(losses):.1f} points cannot be excluded" if losses else ""
    if not losses and any(line.low is None for line in acted):
        limit = "too few texts to compare"
    why = [f"not engaged on {idle}"] if idle else []
    return Judged(
        NOT_REPRODUCED if lost else UNDECIDED, acted, acted[0] if len(acted) == 1 else None,
        "; ".join(f"{line.score_name} {line.score}" for line in acted),
        "; ".join(why if lost or not limit else [limit, *why]),
    )  # fmt: skip


def some_loss(lines: list[Line]) -> Judged:
    lost = [line for line in lines if line.outcome == "worse"]
    if lost:
        ours = "; ".join(f"{line.arm} on {line.task} {line.score}" for line in lost)
        return Judged(REPRODUCED, lost, lost[0], ours, f"{len(lost)} of {len(lines)} scores beyond the interval")
    items = max(line.n or 0 for line in lines)
    return Judged(UNDECIDED, lines, None, "no score is worse beyond its interval", f"{items} items a task")


TESTS: dict[str, Callable[..., Judged]] = {
    test.__name__: test for test in (below, at_least, within, takes_over, stays_even, no_loss, some_loss)
}
