"""The ledger: the paper's claims of claims.yaml, each judged by the measurements that it selects."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, Literal

import pandas as pd
from jinja2 import TemplateError

from focus_exp.errors import UserError
from focus_exp.records.answers import COLLAPSED, DOMINANT
from focus_exp.records.record import Record
from focus_exp.reporting.comparators import TESTS, Judged
from focus_exp.reporting.formats import (
    ABSENT,
    NOT_HERE,
    NOT_REPRODUCED,
    NOT_RUN,
    OTHER_METHOD,
    RAN,
    REPRODUCED,
    SAME_DIRECTION,
    UNDECIDED,
    VERDICTS,
    commit_text,
)
from focus_exp.reporting.gather import Runs, is_quick, seeds_of
from focus_exp.reporting.measured import Line, lines_of
from focus_exp.reporting.measures import measurements
from focus_exp.reporting.paper import paper_row, paper_speedups
from focus_exp.reporting.selection import check, matches, said_of_runs, select
from focus_exp.reporting.specs import expression, read_specs, template
from focus_exp.reporting.table import Table
from focus_exp.reporting.together import together

MOST = {"longest": "tokens", "trained": "steps"}  # by what a claim picks those lines that have most of it
NUMBERS = ("value", "low", "high", "unit")
UNKNOWN = "not known"
KNOWN = {"log": math.log, "speedups": paper_speedups, "COLLAPSED": COLLAPSED, "DOMINANT": DOMINANT}


@dataclass(frozen=True)
class Claim:
    """An entry of claims.yaml, which says what its keys are."""

    table: str
    says: str
    paper: str
    each: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, list[Any]] = field(default_factory=dict)
    experiments: list[str] = field(default_factory=list)
    select: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    beside: dict[str, Any] = field(default_factory=dict)
    pick: Literal["", "longest", "trained"] = ""
    like: dict[str, Any] = field(default_factory=dict)
    other: str = ""
    test: dict[str, dict[str, Any]] = field(default_factory=dict)
    ours: str = ""
    why: str = ""
    needs: str = ""

    @property
    def known(self) -> dict[str, Any]:
        """What its texts and limits may name."""
        return KNOWN | {name: paper_row(*cells) for name, cells in self.rows.items()}

    def judge(self, lines: list[Line], beside: list[Line]) -> Judged:
        """The verdict on the lines of all records: seeds together, then those that are measured as the paper's are.

        The texts may name what stands `beside` them, which decides nothing.
        """
        ((test, asked),) = self.test.items()
        limits = {key: expression(one)(**self.known) if isinstance(one, str) else one for key, one in asked.items()}
        found = together(lines)
        alike = [line for line in found if all(matches(getattr(line, name), of) for name, of in self.like.items())]
        said = TESTS[test](_picked(alike or found, self.pick), **limits) if found else Judged(NOT_RUN, [])
        if said.word == NOT_RUN:
            cells = [*(f"{column} {cell}" for column, cell in self.select.items()), *filter(None, [self.where])]
            missing = ", ".join(cells)
            return replace(said, word=NOT_HERE if self.needs else NOT_RUN, why=self.needs or f"no line with {missing}")
        by, setups = {line.measure: line for line in said.lines}, {line.setup for line in said.lines}
        known = self.known | {
            "lines": said.lines, "line": said.hangs_on or said.lines[0], "by": by, "found": found,
            "beside": [line for line in together(beside) if line.setup in setups],
            "limits": limits,
        }  # fmt: skip
        ours, why = said.ours or template(self.ours).render(known), template(self.why).render(known)
        if self.other or not alike:
            unlike = "nothing here has " + ", ".join(f"{name} {cell}" for name, cell in self.like.items())
            other = "; ".join(filter(None, (self.other, "" if alike else unlike)))
            why, said = f"{other}; under it: {said.word}; {why}", replace(said, word=OTHER_METHOD)
        shown = tuple(found if self.pick or self.like else said.lines)
        return replace(said, ours=ours, why="; ".join(filter(None, (said.why, why))), shown=shown)


@dataclass(frozen=True)
class Verdict:
    """What the records say of a claim: `ours` is the value, `why` the sentence, `records` what they follow from.

    needs: what would decide it. numbers: `value`, `low`, `high` and `unit` of what it hangs on; {} where of nothing.
    """

    word: str
    ours: str = ""
    why: str = ""
    records: list[Record] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    line: Line | None = None


@cache
def claims() -> list[Claim]:
    """In the order of the paper's tables. UserError for an entry that says what the report does not know."""
    entries = read_specs("claims", list[Claim])
    return [_claim(entry, values) for entry in entries for values in entry.each or [{}]]


def _claim(entry: Claim, values: dict[str, Any]) -> Claim:
    """Of the entry, with the values of `each` for its $names."""

    def filled(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: filled(inner) for key, inner in part.items()}
        if isinstance(part, list):
            return [filled(inner) for inner in part]
        if not isinstance(part, str):
            return part
        return values[part[1:]] if part[:1] == "$" and part[1:] in values else Template(part).safe_substitute(values)

    claim = Claim(**{key: filled(part) for key, part in vars(entry).items() if key != "each"})
    place = f"claims.yaml: {claim.table}, {claim.says}"
    check(place, claim.select | claim.like | claim.beside, claim.where)
    try:
        says, paper, *_ = (template(part) for part in (claim.says, claim.paper, claim.ours, claim.why))
        claim = replace(claim, says=says.render(claim.known), paper=paper.render(claim.known))
    except (TemplateError, UserError) as error:
        raise UserError(f"{place}: {error}") from error
    if len(claim.test) != bool(claim.select) or bool(claim.select) != bool(claim.experiments):
        raise UserError(f"{place}: it takes select, one test and experiments, or none of them")
    for name, limits in claim.test.items():
        try:
            inspect.signature(TESTS[name]).bind([], **limits)
        except (KeyError, TypeError) as error:
            raise UserError(f"{place}: test: {name}: {error}; there are {', '.join(TESTS)}") from error
    return claim


def _picked(lines: list[Line], pick: str) -> list[Line]:
    if not pick:
        return lines
    measured = [getattr(line, MOST[pick]) or 0 for line in lines]
    return [line for line, one in zip(lines, measured, strict=True) if one == max(measured)]


def judged(records: list[Record]) -> list[tuple[Claim, Verdict]]:
    """Every claim with its verdict, from the records whose numbers are whole."""
    return judged_runs(Runs([(Path(str(number)), record) for number, record in enumerate(records)]))


def judged_runs(runs: Runs) -> list[tuple[Claim, Verdict]]:
    table = said_of_runs(measurements(runs))
    return [(claim, _verdict(claim, table, runs)) for claim in claims()]


def _verdict(claim: Claim, table: pd.DataFrame, runs: Runs) -> Verdict:
    if not claim.select:
        return Verdict(NOT_HERE, why=claim.needs)
    table = table[table.experiment.isin(claim.experiments)]
    if table.empty:
        return Verdict(NOT_RUN, why=f"python -m focus_exp +experiment={claim.experiments[0]}")
    failed, table = lines_of(table[table.error.notna()]), table[table.error.isna()]
    beside = lines_of(select(table, claim.beside, claim.where)) if claim.beside else []
    lines = lines_of(select(table, claim.select, claim.where))
    said = _with_failures(claim.judge(lines, beside), claim, lines, failed)
    names = dict.fromkeys(one.run for line in said.shown for one in line.found)
    records = [runs.named[name] for name in names]
    word, line = (RAN if any(map(is_quick, records)) else said.word), said.hangs_on
    numbers = {name: getattr(line, name) for name in NUMBERS} if line is not None and line.value is not None else {}
    return Verdict(word, said.ours, said.why, records, numbers, said.needs, line)


def _with_failures(said: Judged, claim: Claim, lines: list[Line], failed: list[Line]) -> Judged:
    """What a claim on arms says of what failed; where an arm has no line at all nothing is shown of all of them."""
    asked, task = [claim.select[side] for side in ("arm", "against") if side in claim.select], claim.select.get("task")
    # whoever may be anybody is missed by nobody, and so is who would not be judged
    named = [one for one in (claim.like.get("arm", claim.select.get("arm")), claim.select.get("against")) if one != "*"]

    def concerned(one: Line) -> bool:
        """Of an arm that is asked for all of it, or what is asked of it: scores of a task, or else its rows."""
        part = one.of == "arms" or (matches(one.task, task) if task else one.of == "rows")
        return part and matches(one.arm, asked)

    failed = [one for one in failed if concerned(one)]
    broken = {(one.arm, one.run) for one in failed}
    sides = [(arm, line) for line in lines for arm in (line.arm, line.against)]
    whole = {(arm, line.seed) for arm, line in sides if (arm, line.run) not in broken}
    left = [one for one in failed if (one.arm, one.seed) not in whole]
    told = dict.fromkeys(
        f"{', '.join(filter(None, (one.arm, one.task)))}, seed {one.seed}, failed: {one.error}" for one in left
    )
    lost = {one.arm for one in left if matches(one.arm, named)} - {arm for arm, _ in sides}
    if not told:
        return said
    decided = said.word in (REPRODUCED, SAME_DIRECTION, NOT_REPRODUCED, OTHER_METHOD, NOT_RUN, NOT_HERE)
    word = UNDECIDED if lost and decided and not said.stands else said.word
    needs = said.needs or (f"{', '.join(sorted(lost))} to its end" if word == UNDECIDED and lost else "")
    why = "" if said.word == NOT_RUN else said.why
    return replace(said, word=word, needs=needs, why="; ".join(filter(None, (why, *told))))


def claim_table(ledger: list[tuple[Claim, Verdict]], runs: Runs) -> Table:
    """The ledger: one line a claim."""
    counts = Counter(verdict.word for _, verdict in ledger)
    values = [_values(claim, verdict, runs) for claim, verdict in ledger]
    columns = [column for column in values[0] if column not in NUMBERS]
    return Table(
        columns=columns,
        rows=[[line[column] for column in columns] for line in values],
        name="claims",
        title="Claims of arXiv 2604.03260, and what was found here",
        notes=[
            ", ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word]),
            "here: another base model, other text and a small budget wherever SUBSTITUTE stands under a table; Focus: "
            "the causal router of this project, but where it is said to read the future",
            "[ ]: 95 % by Student's t, text and seeds together: Var = text + seeds / number of seeds, for every seed "
            "scores the same text (t by Cochran and Cox); under one seed by the text alone",
            "where one of several scores decides, their intervals are widened until all of them hold together in 95 % "
            "of the cases (Bonferroni); the brackets are each score's own",
            "needs: units and seeds, each as if the other were no limit, that show the paper's own difference, or one "
            "of 1 % where there are enough for that, with 80 % power at 5 %, two-sided",
            "cost: the time of the runs behind a verdict, all their arms included, tries of learning rates not",
        ],
        values=values,
        kinds={"paper": "paper"},
    )


def verdicts_table(ledger: list[tuple[Claim, Verdict]]) -> Table:
    """What the words of the ledger mean, and how often they stand there."""
    counts = Counter(verdict.word for _, verdict in ledger)
    rows = [[word, str(counts[word]), means] for word, means in VERDICTS.items() if counts[word] or word != RAN]
    columns = ["verdict", "claims", "it means"]
    values = [dict(zip(columns, row, strict=True)) for row in rows]
    return Table(columns=columns, rows=rows, name="verdicts", title="What a verdict means", values=values)


def _values(claim: Claim, verdict: Verdict, runs: Runs) -> dict[str, Any]:
    records = verdict.records
    spent = [runs.seconds(record) for record in records]
    by = (f"{r.experiment} {r.config_hash}, seed {r.seed}, {commit_text(r.commit)}" for r in records)
    return {
        **{"table": claim.table, "the paper says": claim.says, "paper": claim.paper, "here": verdict.ours or ABSENT},
        **(dict.fromkeys(NUMBERS) | verdict.numbers),
        **{"verdict": verdict.word, "needs": verdict.needs or ABSENT, "because": verdict.why or ABSENT},
        "seeds": str(len(set(verdict.line.seeds) if verdict.line else seeds_of(records)) or ABSENT),
        "cost": ABSENT if not records else UNKNOWN if None in spent else f"{sum(filter(None, spent)) / 60:,.0f} min",
        "by": "; ".join(by) or ABSENT,
    }
