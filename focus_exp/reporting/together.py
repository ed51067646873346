"""What several seeds say together: one line for what was measured under each, with both errors, and what is wanting."""

from __future__ import annotations

import math
import re
from statistics import fmean, geometric_mean

from focus_exp.records.intervals import Estimate, needed, over_seeds, seed_deviation
from focus_exp.records.rows import ENGAGED
from focus_exp.reporting.formats import count_text, decimals_text, listed_text
from focus_exp.reporting.gather import WANTED
from focus_exp.reporting.measured import Line

# what lines of other seeds have in common; a run's name and place are its own
SAME = (
    "of", "measure", "setup", "arm_setup", "arm", "against", "against_setup", "kind", "K", "top_k", "pair_rule", "task",
    "version", "n", "metric", "clock", "tokens", "groups", "assignment", "phase",
)  # fmt: skip
# what is the mean of the seeds
PERPLEXITIES = ("level", "level_against")  # of a difference in nats, whose mean is that of their logarithms
LEVELS = (*PERPLEXITIES, "before", "pairs_kept", "pairs_removed", "removed_against", "distant_pairs_kept")
SMALL = 0.01  # nats a token, or of a share: about 1 %


def together(lines: list[Line]) -> list[Line]:
    """One line for each subject, with the interval by text and seeds, in the order of the first ones.

    A combined line has `found`, of every seed the latest that finished, else the latest, and their `seeds`; `runs`, all
    of them; `deviation`, a unit's of the text, and `deviation_of_seeds`.
    """
    by: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        by.setdefault(subject(line), []).append(line)
    return [_combined(own) for own in by.values()]


def subject(line: Line) -> tuple[object, ...]:
    # a window as wide as a router keeps pairs is another one under every seed
    name = re.sub(r"\d+", "N", line.name or "") if line.method == "window" else line.name
    clocked = (line.method, line.device, line.dtype) if line.clock else ()
    return (name, *clocked, *(getattr(line, column) for column in SAME))


def _combined(lines: list[Line]) -> Line:
    whole = {line.seed for line in lines if line.status == "finished"}  # whose times are of one run
    latest = {line.seed: line for line in lines if line.status == "finished" or line.seed not in whole}
    found = [latest[seed] for seed in sorted(latest, key=lambda seed: seed or 0)]
    first = found[0]
    known = [one for one in found if one.value is not None]
    estimates = [Estimate(one.value, one.stderr, one.freedom) for one in known]
    total = over_seeds(estimates) if estimates else Estimate(float("nan"))
    several = len(estimates) > 1
    # under one seed that of a share is its own, whose middle is another one (intervals.py)
    again = several or (total.stderr is not None and first.unit != "share")
    low, high = total.bounds if again else (first.low, first.high)
    deviations = [one.stderr * one.units**0.5 for one in found if one.stderr is not None and one.units]
    values = {
        "value": total.value if estimates else None, "low": low, "high": high, "stderr": total.stderr,
        "freedom": total.freedom, "found": found, "runs": {line.run for line in lines},
        "seeds": [one.seed for one in known],
        "deviation": rms(deviations) if deviations else None,
        "deviation_of_seeds": seed_deviation(estimates) if several else None,
    }  # fmt: skip
    for level in LEVELS:
        there = [getattr(one, level) for one in found if getattr(one, level) is not None]
        mean = geometric_mean if first.unit == "nats" and level in PERPLEXITIES else fmean
        values[level] = mean(there) if there else None
    shares = [one.pairs_removed for one in found if one.engaged is not None and one.pairs_removed is not None]
    if shares:
        values["engaged"] = fmean(shares) >= ENGAGED
    return Line(**vars(first) | values)


def rms(errors: list[float]) -> float:
    """As errors of several seeds are pooled: by the mean of their squares."""
    return math.sqrt(fmean(error**2 for error in errors))


def wanting(line: Line, size: float | None = None, several: int = 1) -> str:
    """How many units of text, or seeds, would show a difference of `size`, or one of 1 % where there are enough; of one
    of `several` whose intervals are to hold together."""
    for wanted in filter(None, (abs(size) if size else None, SMALL)):
        needs = []
        if line.deviation and (units := needed(line.deviation, wanted, several)) > (line.units or 0):
            needs.append(f"{count_text(units)} {unit_of(line)}")
        if line.deviation_of_seeds and (seeds := needed(line.deviation_of_seeds, wanted, several)) > len(line.seeds):
            needs.append(f"{count_text(seeds)} seeds")
        elif len(line.seeds) < 2:
            needs.append(f"{WANTED} seeds")
        if needs:
            share = math.expm1(wanted) if line.unit == "nats" else wanted
            return f"{listed_text(needs)} for {decimals_text(100 * share, 1)} %"
    return "a difference nearer to the limit than 1 %"


def unit_of(line: Line) -> str:
    """What the text is counted in."""
    if line.of == "benchmarks":
        documents = "texts" if (line.task or "").startswith("perplexity@") else "documents"
        return documents if line.unit == "nats" else "items"
    return line.unit_kind or "windows"
