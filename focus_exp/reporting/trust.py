"""How far to trust the numbers: the same differences under several seeds, and what they could be mistaken for."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pandas as pd

from focus_exp.records.record import Record
from focus_exp.reporting.formats import (
    ABSENT,
    NOT_RUN,
    READS_FUTURE,
    change_text,
    count_text,
    difference_word,
    seeds_text,
)
from focus_exp.reporting.gather import WANTED, Runs
from focus_exp.reporting.measures import BASE, SOFT_GATE, measurements
from focus_exp.reporting.notes import caveats, command_of, where
from focus_exp.reporting.selection import Line, check, lines_of, select
from focus_exp.reporting.specs import read_specs, template
from focus_exp.reporting.tables import Table

DISAGREE = "the seeds disagree"
IDENTICAL = 1e-3  # nats a token: what float32 and another order of sums leave
GROUPED = ("focus", "random_groups")  # methods that have K groups
KEY = ["setup", "arm_setup", "what", "against"]
SEEDS = ["experiment", "K", "what", "against", "seeds", "mean change", "least to most", "each seed [95 %]", "in words"]
NUMBERS = {"difference": "value", "low": "low", "high": "high", "unit": "unit"}
TRAPS = ["trap", "what was measured", "value", "difference [95 %]", "in words", "model and text", "made by"]


def seeds_table(runs: Runs) -> Table | None:
    """A line for every difference measured under several seeds; which experiments have one alone is in the notes.

    Every row against the base; in a comparison against the first arm too, else against the configured hard row, and a
    causal twin against the router that it is the twin of.
    """
    found = select(measurements(runs), {"of": "rows", "measure": "delta", "status": "finished", "is_arm": False})
    # between two arms it stands in both directions
    told = (found.against == BASE) | (found.arm != found["first"]).fillna(True)
    found = found[told & (found.against != SOFT_GATE)]
    if found.empty:
        return None
    found = found.assign(what=found.arm.fillna(found["name"]), arm_setup=found.arm_setup.fillna(""))
    alone = found.groupby(KEY).seed.transform("nunique") < 2
    groups: dict[tuple[Any, ...], dict[int, Line]] = {}
    for line in lines_of(found[~alone]):
        # the latest of a seed
        groups.setdefault(tuple(getattr(line, name) for name in KEY), {})[line.seed] = line
    several = [[by_seed[seed] for seed in sorted(by_seed)] for by_seed in groups.values()]
    formats = sorted({line.number_format for lines in several for line in lines})
    return Table(
        columns=SEEDS,
        rows=[_line(lines)[0] for lines in several],
        name="seeds",
        title="The same differences under several seeds",
        notes=[
            *_few(found[found.run.isin(set(found.run) - set(found.run[~alone]))]),
            f"a difference is called one only where the intervals of all seeds say so; {WANTED} seeds are wanted",
            "change of perplexity, paired on the same tokens within each seed; the seed draws the initial routers and "
            "adapters, the order of the text and the bootstrap",
            *(f"seeds were computed in {' or '.join(formats)}: see the device of each record" for _ in formats[1:2]),
        ],
        values=[_line(lines)[1] for lines in several],
        kinds=dict.fromkeys(("K", "mean change", "least to most"), "number"),
    )


def _line(lines: list[Line]) -> tuple[list[str], dict[str, Any]]:
    """Of a difference under several seeds: to read, and unrounded."""
    deltas, said, first = [line.value for line in lines], verdict(lines), lines[0]
    experiments, seeds, commits = (
        list(dict.fromkeys(getattr(line, column) for line in lines)) for column in ("experiment", "seed", "commit")
    )
    groups = first.K if first.attention in GROUPED else None
    what = [", ".join(experiments), count_text(groups), first.what, first.against]
    cells = [
        *(*what, seeds_text(seeds), change_text(fmean(deltas))),
        f"{change_text(min(deltas))} to {change_text(max(deltas))}",
        *("; ".join(f"{line.seed}: {line.change}" for line in lines), said),
    ]
    values = {
        **dict(zip(SEEDS, what, strict=False)),
        "K": groups,
        **{"seeds": " ".join(map(str, seeds)), "mean_delta_nll": fmean(deltas), "least_delta_nll": min(deltas)},
        **{"most_delta_nll": max(deltas), "in_words": said, "commits": " ".join(commit or "" for commit in commits)},
    }
    return cells, values


def verdict(lines: list[Line]) -> str:
    """In the words of a single difference, if all seeds use the same."""
    if not all(line.causal for line in lines):
        return f"{READS_FUTURE}: compared with nothing"
    words = {difference_word(line.value, line.low, line.high, ("better than", "worse than")) for line in lines}
    said = words.pop() if len(words) == 1 else DISAGREE
    return said if len(lines) >= WANTED else f"{said}, by {len(lines)} of {WANTED} seeds"


def _few(alone: pd.DataFrame) -> list[str]:
    """Experiments with differences under too few seeds, and the command for the rest."""
    seeds = {str(name): sorted(set(lines.seed.dropna())) for name, lines in alone.groupby("experiment", sort=False)}
    return [
        f"{name}: one seed ({', '.join(map(str, own)) or ABSENT}) for each set-up, so its differences are that seed's; "
        f"python -m focus_exp -m +experiment={name} seed={','.join(map(str, range(WANTED)))}"
        for name, own in seeds.items()
    ]


@dataclass(frozen=True)
class Trap:
    """An entry of traps.yaml, which says what its keys are."""

    trap: str
    experiment: str
    select: dict[str, Any]
    what: str
    value: str
    words: str
    where: str = ""


def traps_table(runs: Runs) -> Table:
    """Traps 1, 2, 3 and 5; one that no record measures says which command would."""
    table = measurements(runs)
    table = table[table.status == "finished"].sort_values("started", kind="stable")
    values: list[dict[str, Any]] = []
    shown: list[Record] = []
    for trap in read_specs("traps", list[Trap]):
        check(f"traps.yaml: {trap.trap}", trap.select, trap.where)
        lines = lines_of(select(table, trap.select, trap.where))
        shown += (records := [runs.named[line.run] for line in lines])
        for line, record in zip(lines, records, strict=True):
            said = [trap.trap, *_said(trap, line), where(record), command_of(record)]
            values.append(
                dict(zip(TRAPS, said, strict=True)) | {name: getattr(line, column) for name, column in NUMBERS.items()}
            )
        if not lines:
            said = [trap.trap, NOT_RUN, *[ABSENT] * 4, f"python -m focus_exp +experiment={trap.experiment}"]
            values.append(dict(zip(TRAPS, said, strict=True)) | dict.fromkeys(NUMBERS))
    return Table(
        columns=TRAPS,
        rows=[[line[column] for column in TRAPS] for line in values],
        name="traps",
        title="Traps: what the paper's numbers could be mistaken for",
        notes=[
            *dict.fromkeys(note for record in shown for note in caveats(record)),
            "reads the future: the same trained router once as it is and once with an assignment that looks at a token "
            "alone, on the same tokens",
            "gate: the soft gate of training against the hard mask of inference, the same router on the same tokens",
            f"full attention: every distant pair kept, and a loss within {IDENTICAL} nats a token of the base's",
        ],
        values=values,
        kinds=dict.fromkeys(("value", "difference [95 %]"), "number"),
    )


def _said(trap: Trap, line: Line) -> list[str]:
    """What was measured, its value, the difference, and what it means."""
    router = f"{line.experiment}{f' {line.arm}' if line.is_arm else ''}, seed {line.seed}"
    word = difference_word(line.value or 0.0, line.low, line.high, ("better than", "worse than"))
    known = {"line": line, "router": router, "word": word, "IDENTICAL": IDENTICAL}
    what, value, words = (template(part).render(known) for part in (trap.what, trap.value, trap.words))
    return [what, value, line.score if line.measure == "score_delta" else line.change, words]
