"""How far to trust the numbers: the same differences under several seeds, and what they could be mistaken for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from focus_exp.records.intervals import deviation_bounds, needed, student
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
from focus_exp.reporting.measured import Line, lines_of
from focus_exp.reporting.measures import measurements
from focus_exp.reporting.notes import caveats, command_of, where
from focus_exp.reporting.selection import check, select
from focus_exp.reporting.specs import read_specs, template
from focus_exp.reporting.subjects import SOFT_GATE
from focus_exp.reporting.table import Table
from focus_exp.reporting.together import SMALL, rms, subject, together

IDENTICAL = 1e-3  # nats a token: what float32 and another order of sums leave
GROUPED = ("focus", "random_groups")  # methods that have K groups
SEEDS = [
    *("experiment", "K", "steps", "what", "against"),
    *("seeds", "mean change [95 %]", "each seed", "in words", "versions"),
]
POWER = [
    *("experiment", "comparison", "units", "mean change [95 %]", "SD of a unit", "SD of seeds"),
    *("± by the text", "± by the seeds", "units for 1 %", "seeds for 1 %"),
]
ENDS = (("low", "low"), ("high", "high"))
NUMBERS = {"difference": "value", "low": "low", "high": "high", "unit": "unit"}
TRAPS = ["trap", "what was measured", "value", "difference [95 %]", "in words", "model and text", "made by"]


def seeds_table(runs: Runs) -> Table | None:
    """A line for every difference measured under several seeds; which experiments have one alone is in the notes.

    Every row against the base; in a comparison against the arms that it names too, else against the configured hard
    row, and a causal twin against the router that it is the twin of.
    """
    found = select(measurements(runs), {"of": "rows", "measure": "delta", "counts": True, "is_arm": False})
    found = found[~found.turned.fillna(False) & (found.against != SOFT_GATE)]
    if found.empty:
        return None
    lines = together(lines_of(found))
    several = [line for line in lines if len(line.seeds) > 1]
    mixed = len({(line.model, line.data) for line in several}) > 1
    formats = sorted({one.number_format for line in several for one in line.found})
    versions = {one.own_commit or one.commit for line in several for one in line.found}
    measured = {run for line in several for run in line.runs}
    return Table(
        columns=SEEDS,
        rows=[_line(line, mixed)[0] for line in several],
        name="seeds",
        title="The same differences under several seeds",
        notes=[
            *_few(found[~found.run.isin(measured)]),
            f"change of perplexity, paired on the same tokens within each seed; {WANTED} seeds are wanted; [ ]: text "
            "and seeds together, as under the ledger",
            "the seed draws the initial routers and adapters, and the order of the text",
            *(f"records of {len(versions)} versions of the code are compared here" for _ in [*versions][1:2]),
            *(f"seeds were computed in {' or '.join(formats)}: see the device of each record" for _ in formats[1:2]),
        ],
        values=[_line(line, mixed)[1] for line in several],
        kinds=dict.fromkeys(("K", "steps", "mean change [95 %]", "versions"), "number"),
    )


def _line(line: Line, mixed: bool) -> tuple[list[str], dict[str, Any]]:
    """Of a difference under several seeds: to read, and unrounded. `mixed`: there are other models or texts beside."""
    said = verdict(line)
    experiments, commits = (
        list(dict.fromkeys(getattr(one, column) for one in line.found)) for column in ("experiment", "own_commit")
    )
    groups = line.K if line.attention in GROUPED else None
    where = f" ({line.model} on {line.data})" if mixed else ""
    what = [
        ", ".join(experiments) + where,
        count_text(groups),
        count_text(line.steps),
        line.arm or line.name,
        line.against,
    ]
    each = "; ".join(f"{one.seed}: {change_text(one.value)}" for one in line.found)
    cells = [*what, seeds_text(line.seeds), line.change, each, said, str(len(commits))]
    values = {
        **dict(zip(SEEDS, what, strict=False)),
        "K": groups,
        "steps": line.steps,
        "seeds": " ".join(map(str, line.seeds)),
        **{f"{name}_delta_nll": getattr(line, column) for name, column in (("mean", "value"), *ENDS)},
        **{"in_words": said, "versions": len(commits), "commits": " ".join(commit or "" for commit in commits)},
    }
    return cells, values


def verdict(line: Line) -> str:
    """In the words of a single difference, by the interval of text and seeds."""
    if not all(one.causal for one in line.found):
        return f"{READS_FUTURE}: compared with nothing"
    said = difference_word(line.value, line.low, line.high, ("better than", "worse than"))
    return said if len(line.seeds) >= WANTED else f"{said}, by {len(line.seeds)} of {WANTED} seeds"


def power_table(judged: list[tuple[str, Line]]) -> Table:
    """What the differences behind the ledger could show: how text and seeds vary, and how much would show 1 %."""
    told = {(subject(line), line.run): (says, line) for says, line in judged if line.of == "rows" and line.deviation}
    values = [_power(says, line) for says, line in told.values()]
    return Table(
        columns=POWER,
        rows=[
            [
                *(str(value[name]) for name in POWER[:3]),
                value["mean change [95 %]"],
                *(ABSENT if value[name] is None else f"{100 * value[name]:.2f} %" for name in POWER[4:8]),
                *(count_text(value[name]) for name in POWER[8:]),
            ]
            for value in values
        ],
        name="power",
        title="What the measurements can show",
        notes=[
            "SD: standard deviation of the paired difference of losses, 0.01 nats a token being 1 %; ±: half of a 95 % "
            "interval by each of the two alone",
            "for 1 %: with 80 % power at 5 %, two-sided, each as if the other were no limit",
            *(
                "an SD of {} seeds may be {:.2g} to {:.2g} times as large (95 %)".format(
                    count, *deviation_bounds(count)
                )
                for count in sorted({len(line.seeds) for _, line in told.values()} - {0, 1})
            ),
        ],
        values=values,
        kinds=dict.fromkeys(POWER[2:], "number"),
    )


def _power(says: str, line: Line) -> dict[str, Any]:
    seeds, spread = len(line.seeds), line.deviation_of_seeds
    text = [one.stderr * student(one.freedom) for one in line.found if one.stderr is not None]
    return {
        "experiment": ", ".join(dict.fromkeys(one.experiment for one in line.found)),
        "comparison": f"{line.arm or line.name} against {line.against}",
        "units": f"{line.units} {line.unit_kind}",
        "mean change [95 %]": line.change,
        "SD of a unit": line.deviation,
        "SD of seeds": spread,
        "± by the text": rms(text),
        "± by the seeds": spread and student(seeds - 1) * spread / seeds**0.5,
        "units for 1 %": needed(line.deviation, SMALL),
        "seeds for 1 %": spread and needed(spread, SMALL),
        "claim": says,
    }


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
    table = table[table.counts].sort_values("started", kind="stable")
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
