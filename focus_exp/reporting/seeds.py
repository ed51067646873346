"""The same difference under several seeds: it is called one only where the intervals of all seeds agree."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from focus_exp.records.answers import configured_row, row_of
from focus_exp.records.record import Record
from focus_exp.records.rows import Row
from focus_exp.reporting.formats import ABSENT, READS_FUTURE, change_text, difference_word
from focus_exp.reporting.gather import WANTED, Runs, run_of, seeds_of, setup
from focus_exp.reporting.tables import Table

COLUMNS = ["experiment", "what", "against", "seeds", "mean change", "least to most", "each seed [95 %]", "in words"]
DISAGREE = "the seeds disagree"
ITSELF = "itself, reading the future"
Key: TypeAlias = tuple[str, str, Hashable]  # what, against what, set-up


@dataclass(frozen=True)
class Difference:
    """Of losses [nats per token] in one record, with its 95 % interval."""

    record: Record
    delta: float
    low: float | None
    high: float | None
    causal: bool

    @property
    def word(self) -> str:
        return difference_word(self.delta, self.low, self.high, ("better than", "worse than"))


def differences(runs: Runs) -> dict[Key, dict[int, Difference]]:
    """Key -> seed -> the latest difference under it."""
    found: dict[Key, dict[int, Difference]] = {}
    for record in runs.finished():
        if record.seed is None:
            continue
        for key, difference in _of(record):
            found.setdefault(key, {})[record.seed] = difference
    return found


def _of(record: Record) -> list[tuple[Key, Difference]]:
    """Every row against the base; in a comparison against the first arm too, else against the configured hard row, and
    a causal twin against the router that it is the twin of."""
    said: list[tuple[Key, Difference]] = []
    if record.arms:
        first = record.arms[0]
        rows = [(arm.name, run_of(arm), row, first.name) for arm in record.arms if (row := row_of(record, arm.name))]
        common: Hashable = (setup(record), run_of(first))
    else:
        hard = configured_row(record)
        configured = hard.name if hard else ""
        measured = [row for row in record.rows if row.kind != "base"]
        rows = [(row.name, row.name, row, ITSELF if row.kind == "twin" else configured) for row in measured]
        common = (setup(record), record.experiment)
    for name, own, row, reference in rows:
        for against, values in (("base", _bounds(row, "delta")), (reference, _bounds(row, "delta_vs_hard"))):
            if values is not None and against:
                said.append(((name, against, (common, own)), Difference(record, *values, row.causal)))
    return said


def _bounds(row: Row, name: str) -> tuple[float, float | None, float | None] | None:
    delta = row.delta_nll if name == "delta" else row.delta_vs_hard
    return None if delta is None else (delta, getattr(row, f"{name}_low"), getattr(row, f"{name}_high"))


def seeds_table(runs: Runs) -> Table | None:
    """A line for every difference measured under several seeds; which experiments have one alone is in the notes."""
    found = differences(runs)
    if not found:
        return None
    several = {key: by_seed for key, by_seed in found.items() if len(by_seed) > 1}
    lines = [_line(what, against, by_seed) for (what, against, _), by_seed in several.items()]
    return Table(
        columns=COLUMNS,
        rows=[cells for cells, _ in lines],
        name="seeds",
        title="The same differences under several seeds",
        notes=[
            *_few(runs, several),
            f"a difference is called one only where the intervals of all seeds say so; {WANTED} seeds are wanted",
            "change of perplexity, paired on the same tokens within each seed; the seed draws the initial routers and "
            "adapters, the order of the text and the bootstrap",
            *_formats(several),
        ],
        values=[values for _, values in lines],
    )


def _formats(several: dict[Key, dict[int, Difference]]) -> list[str]:
    """Number formats of the arithmetic, if seeds ran on machines that differ in it."""
    found = sorted({difference.record.number_format for by_seed in several.values() for difference in by_seed.values()})
    return [f"seeds were computed in {' or '.join(found)}: see the device of each record"] if len(found) > 1 else []


def _line(what: str, against: str, by_seed: dict[int, Difference]) -> tuple[list[str], dict[str, Any]]:
    seeds = sorted(by_seed)
    each = [by_seed[seed] for seed in seeds]
    deltas = [difference.delta for difference in each]
    experiments = ", ".join(dict.fromkeys(difference.record.experiment for difference in each))
    said = verdict(each)
    cells = [
        *(experiments, what, against, f"{len(seeds)} ({', '.join(map(str, seeds))})", change_text(fmean(deltas))),
        f"{change_text(min(deltas))} to {change_text(max(deltas))}",
        "; ".join(f"{seed}: {change_text(d.delta, d.low, d.high)}" for seed, d in zip(seeds, each, strict=True)),
        said,
    ]
    values = {
        **{"experiment": experiments, "what": what, "against": against, "seeds": " ".join(map(str, seeds))},
        **{"mean_delta_nll": fmean(deltas), "least_delta_nll": min(deltas), "most_delta_nll": max(deltas)},
        "in_words": said,
        "commits": " ".join(dict.fromkeys(d.record.commit or "" for d in each)),
    }
    return cells, values


def verdict(each: list[Difference]) -> str:
    """In the words of a single difference, if all seeds use the same."""
    if not all(difference.causal for difference in each):
        return f"{READS_FUTURE}: compared with nothing"
    words = {difference.word for difference in each}
    said = words.pop() if len(words) == 1 else DISAGREE
    return said if len(each) >= WANTED else f"{said}, by {len(each)} of {WANTED} seeds"


def _few(runs: Runs, several: dict[Key, dict[int, Difference]]) -> list[str]:
    """Experiments with differences under too few seeds, and the command for the rest."""
    said = []
    keys = [(record, {key for key, _ in _of(record)}) for record in runs.finished()]
    alone = [record for record, held in keys if held and held.isdisjoint(several)]
    for experiment in dict.fromkeys(record.experiment for record in alone):
        own = [record for record in alone if record.experiment == experiment]
        seeds = ", ".join(map(str, seeds_of(own))) or ABSENT
        said.append(
            f"{experiment}: one seed ({seeds}) for each set-up, so its differences are that seed's; "
            f"python -m focus_exp -m +experiment={experiment} seed={','.join(map(str, range(WANTED)))}"
        )
    return said
