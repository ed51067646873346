"""What measurements say of a claim: one comparator for each way in which a claim can hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from focus_exp.records.answers import DOMINANT
from focus_exp.records.intervals import student
from focus_exp.reporting.formats import (
    NOT_ENGAGED,
    NOT_HERE,
    NOT_REPRODUCED,
    REPRODUCED,
    SAME_DIRECTION,
    UNDECIDED,
    count_text,
    listed_text,
    share_text,
)
from focus_exp.reporting.gather import WANTED
from focus_exp.reporting.measured import Line
from focus_exp.reporting.together import wanting

SHOWN, REFUTED, OPEN = 1, -1, 0
ONE_READS = "reads the future: its perplexity is not one"
BOTH_READ = "read the future: their perplexities are none"


@dataclass(frozen=True)
class Judged:
    """A word; the lines that it is said of, that on which it hangs first; what the comparator itself says, and asks.

    stands: whatever else there might be to judge. shown: the lines that the texts may name, where they are more.
    """

    word: str
    lines: list[Line]
    hangs_on: Line | None = None
    ours: str = ""
    why: str = ""
    needs: str = ""
    stands: bool = False
    shown: tuple[Line, ...] = ()


def below(lines: list[Line], limit: float, size: float | None = None) -> Judged:
    """Whether every line is below `limit`, by its whole interval; `size`: the paper's own number.

    An interval that holds the paper's number holds it by its width alone where it holds twice the difference as well.
    Who reads the future has an advantage: if it loses all the same it loses, otherwise its perplexity says nothing; and
    so does one under a mask that removes hardly any pairs.
    """
    sides = [_side(line, limit) for line in lines]
    if refuted := [line for line, side in zip(lines, sides, strict=True) if side == REFUTED]:
        most = max(refuted, key=lambda line: (len(line.seeds), line.units or 0))
        return Judged(NOT_REPRODUCED, lines, most, stands=True)
    worst = max(lines, key=lambda line: (line.value is None, line.high is None, line.high or line.value or 0.0))
    left = (_readers(line) for line, side in zip(lines, sides, strict=True) if side != SHOWN)
    readers: list[str] = next(filter(None, left), [])
    if readers:
        return Judged(NOT_HERE, lines, why=f"{listed_text(readers)} {BOTH_READ if len(readers) > 1 else ONE_READS}")
    if idle := [line for line in lines if line.engaged is False]:
        why = f"{NOT_ENGAGED}: {listed_text([_removed(line) for line in idle])}"
        if len(idle) == len(lines):
            return Judged(NOT_ENGAGED, lines, worst, why=why)
        said = below([line for line in lines if line not in idle], limit, size)
        return replace(said, why="; ".join(filter(None, (said.why, why))))
    if OPEN in sides:
        why = "too few texts for an interval" if worst.high is None else ""
        return Judged(UNDECIDED, lines, worst, why=why, needs=wanting(worst, limit if size is None else size - limit))
    if size is None:
        return Judged(REPRODUCED, lines, worst)
    twice = limit + 2 * (size - limit)
    agrees = worst.low <= size <= worst.high and not worst.low <= twice <= worst.high
    return Judged(REPRODUCED if agrees else SAME_DIRECTION, lines, worst)


def _side(line: Line, limit: float) -> int:
    """On which side of a limit a difference is; who reads the future can only lose, unless both do."""
    if line.high is not None and line.high < limit:
        return OPEN if line.causal is False else SHOWN
    if line.low is not None and line.low > limit:
        return OPEN if line.against_causal is False else REFUTED
    return OPEN


def _removed(line: Line) -> str:
    return f"{line.task or line.arm or line.name} removes {share_text(line.pairs_removed)} of the pairs"


def _readers(line: Line) -> list[str]:
    """Who of the two sides of a difference reads the future."""
    sides = ((line.causal, line.arm or line.name), (line.against_causal, line.against))
    return [name for causal, name in sides if causal is False]


def at_least(
    lines: list[Line],
    wanted: float | Mapping[int, float],
    times: float = 1.0,
    minus: float = 0.0,
    gpu: bool = False,
    most: float = math.inf,
) -> Judged:
    """Whether every line reaches what is wanted, at every length for which it is, by its whole interval if it has one.

    Where the paper has a GPU (`gpu`) what was timed on its kind, or on any, is judged, if anything was. Faster than
    full attention, but not as fast, not on a GPU, or more than `most`: the same direction. Runs of one length of which
    some reach it and some do not decide nothing, nor does a length at which the paper is slower, where at others it is
    faster.
    """
    if gpu:
        papers = [line for line in lines if "H100" in line.device_kind]
        lines = papers or [line for line in lines if line.device_kind != "cpu"] or lines
    limits = wanted if isinstance(wanted, Mapping) else {line.tokens: wanted for line in lines}
    asked = sorted((line for line in lines if line.tokens in limits), key=lambda line: line.tokens or 0)
    slow = {tokens for tokens, limit in limits.items() if limit < 1 < max(limits.values())}
    sides: dict[int | None, set[int]] = {}  # of each length those of all its runs
    for line in asked:
        if line.tokens in slow:
            continue
        limit = times * limits[line.tokens] - minus
        side = SHOWN if _low(line) >= limit else REFUTED if _high(line) < limit else OPEN
        sides.setdefault(line.tokens, set()).add(side)
    if lost := [line for line in asked if sides.get(line.tokens) == {REFUTED}]:
        faster = all(line.measure == "ratio" and line.value > 1 for line in lost)
        return Judged(SAME_DIRECTION if faster else NOT_REPRODUCED, asked, lost[-1], stands=not faster)
    if missing := [count_text(tokens) for tokens in sorted(limits.keys() - {line.tokens for line in asked})]:
        there = asked or lines
        return Judged(UNDECIDED, there, there[-1], needs=f"timings at {listed_text(missing)} tokens")
    if any(side != {SHOWN} for side in sides.values()):
        needs = "runs that agree" if asked[-1].measure == "ratio" else wanting(asked[-1])
        return Judged(UNDECIDED, asked, asked[-1], needs=needs)
    elsewhere = gpu and any(line.device_kind == "cpu" for line in asked)
    another_size = elsewhere or any(_low(line) > most for line in asked)
    return Judged(SAME_DIRECTION if another_size else REPRODUCED, asked, asked[-1])


def within(lines: list[Line], least: float, most: float, margin: float) -> Judged:
    """Whether every line lies between the two, give or take the margin; by its whole interval, where it has one."""
    if all(_low(line) >= least - margin and _high(line) <= most + margin for line in lines):
        return Judged(REPRODUCED, lines)
    outside = any(_high(line) < least - margin or _low(line) > most + margin for line in lines)
    return Judged(NOT_REPRODUCED, lines) if outside else Judged(UNDECIDED, lines, needs=wanting(lines[0]))


def takes_over(lines: list[Line], share: float, dead: float, steps: int) -> Judged:
    """Whether one group has this share of the tokens, or this share of the groups is dead, within so many steps.

    Several seeds show it by a whole interval, and that it does not happen by both; what has no interval shows it by its
    value, and the contrary by at most half of both.
    """

    def side(largest: Line, gone: Line) -> int:
        if _low(largest) >= share or _low(gone) / gone.K >= dead:
            return SHOWN
        if largest.high is None or gone.high is None:
            return REFUTED if max(largest.value, gone.value / gone.K) <= DOMINANT else OPEN
        return REFUTED if largest.high < share and gone.high / gone.K < dead else OPEN

    return _of_groups(lines, side, steps, happened=SHOWN)


def stays_even(lines: list[Line], share: float, steps: int, size: float, margin: float) -> Judged:
    """Whether the largest group stays below this share of the tokens and fewer than one group of a layer dies, in the
    mean over layers, for so many steps.

    Less even than the paper's, whose largest group has `size` of the tokens, by more than the margin is the same
    direction.
    """

    def side(largest: Line, gone: Line) -> int:
        if _low(largest) > share:
            return REFUTED
        return SHOWN if _high(largest) < share and _high(gone) < 1 else OPEN

    said = _of_groups(lines, side, steps, happened=REFUTED)
    less_even = said.word == REPRODUCED and said.hangs_on is not None and _low(said.hangs_on) > size + margin
    return replace(said, word=SAME_DIRECTION) if less_even else said


def _of_groups(lines: list[Line], side: Callable[[Line, Line], int], steps: int, happened: int) -> Judged:
    """By what was most in any phase. Of several set-ups all have to agree; what has not happened may still do so until
    `steps` are done."""
    by: dict[tuple[str, str, str], dict[str, dict[str, Line]]] = {}
    for line in lines:
        by.setdefault((line.setup, line.arm, line.arm_setup), {}).setdefault(line.phase, {})[line.measure] = line
    found = [{side(one["dominance_most"], one["dead_groups_most"]) for one in own.values()} for own in by.values()]
    sides = {next(one for one in (happened, OPEN, -happened) if one in own) for own in found}
    largest, ran = (line for line in lines if line.measure == "dominance_most"), min(line.step or 0 for line in lines)
    widest = max(largest, key=lambda line: line.value)
    if sides != {happened} and ran < steps:
        why = f"only {count_text(ran)} steps with everything trained"
        return Judged(UNDECIDED, lines, widest, why=why, needs=f"{count_text(steps)} steps")
    if sides not in ({SHOWN}, {REFUTED}):
        few = any(len(line.seeds) < WANTED for line in lines)
        needs = f"{WANTED} seeds of each" if few else "more seeds, or longer training"
        return Judged(UNDECIDED, lines, widest, needs=needs)
    return Judged(REPRODUCED if sides == {SHOWN} else NOT_REPRODUCED, lines, widest)


def _low(line: Line) -> float:
    """The lower end of what a line says; of one run its value."""
    return float(line.value if line.low is None else line.low)


def _high(line: Line) -> float:
    return float(line.value if line.high is None else line.high)


def no_loss(lines: list[Line]) -> Judged:
    """Whether no score is lost where the mask acted; that nothing is lost no interval can show."""
    acted = [line for line in lines if line.engaged]
    idle = ", ".join(f"{line.task} ({share_text(line.pairs_removed)})" for line in lines if line.engaged is False)
    if not acted:
        return Judged(NOT_ENGAGED, lines, why=f"pairs removed: {idle}")
    lost = [line for line in acted if _lost(line, len(acted))]
    ours = "; ".join(f"{line.score_name} {line.score}" for line in acted)
    why = f"not engaged on {idle}" if idle else ""
    if lost:
        return Judged(NOT_REPRODUCED, acted, lost[0], ours, why, stands=True)
    return Judged(UNDECIDED, acted, acted[0], ours, why, needs=wanting(acted[0], several=len(acted)))


def some_loss(lines: list[Line], size: float) -> Judged:
    """Whether a score is lost by a method that keeps every pair; size: what the paper lost most."""
    why = (
        f"{len(lines)} scores, whose intervals are to hold together; {max(line.n or 0 for line in lines)} items a task"
    )
    if lost := [line for line in lines if _lost(line, len(lines))]:
        ours = "; ".join(f"{line.arm} on {line.task} {line.score}" for line in lost)
        return Judged(REPRODUCED, lost, lost[0], ours, why, stands=True)
    hardest = max(lines, key=lambda line: line.deviation or 0.0)
    needs = wanting(hardest, size, len(lines))
    return Judged(UNDECIDED, lines, hardest, "no score is worse once their intervals hold together", why, needs)


def _lost(line: Line, together: int) -> bool:
    """Whether a score is worse, in an interval so wide that `together` such ones all hold in 95 % of the cases."""
    if line.low is None:
        return False
    freedom = line.freedom or math.inf
    wider = student(freedom, together) / student(freedom)
    middle, half = (line.low + line.high) / 2, wider * (line.high - line.low) / 2
    return bool(middle - half > 0 if line.unit == "nats" else middle + half < 0)


TESTS: dict[str, Callable[..., Judged]] = {
    test.__name__: test for test in (below, at_least, within, takes_over, stays_even, no_loss, some_loss)
}
