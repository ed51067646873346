"""The ledger: the paper's claims of claims.yaml, each judged by the measurements that it selects."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any, Literal

import pandas as pd
from jinja2 import TemplateError

from focus_exp.errors import UserError
from focus_exp.records.answers import COLLAPSED, DOMINANT
from focus_exp.records.record import Record
from focus_exp.reporting.comparators import TESTS, Judged
from focus_exp.reporting.formats import ABSENT, NOT_HERE, NOT_RUN, RAN, UNDECIDED, VERDICTS
from focus_exp.reporting.gather import QUICK, WANTED, Runs, is_quick, seeds_of
from focus_exp.reporting.measures import measurements
from focus_exp.reporting.paper import paper_rows, paper_speedups
from focus_exp.reporting.selection import Line, check, lines_of, select
from focus_exp.reporting.specs import expression, read_specs, template
from focus_exp.reporting.tables import Table

NUMBERS = ("value", "low", "high", "unit")
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
    pick: Literal["all", "least", "longest"] = "all"
    test: dict[str, dict[str, Any]] = field(default_factory=dict)
    ours: str = ""
    why: str = ""
    needs: str = ""

    @property
    def known(self) -> dict[str, Any]:
        """What its texts and limits may name."""
        return KNOWN | {name: _paper_row(*cells) for name, cells in self.rows.items()}

    def judge(self, lines: list[Line]) -> Judged:
        """The verdict on the lines of one record."""
        ((test, asked),) = self.test.items()
        limits = {key: expression(one)(**self.known) if isinstance(one, str) else one for key, one in asked.items()}
        said = TESTS[test](_picked(lines, self.pick), **limits) if lines else Judged(NOT_RUN, [])
        if said.word == NOT_RUN:
            missing = ", ".join(f"{column} {cell}" for column, cell in self.select.items())
            return replace(said, word=NOT_HERE if self.needs else NOT_RUN, why=self.needs or f"no line with {missing}")
        by = {line.measure: line for line in said.lines}
        known = self.known | {"lines": said.lines, "line": said.lines[0], "by": by, "found": lines, "limits": limits}
        return replace(
            said, ours=said.ours or template(self.ours).render(known), why=said.why or template(self.why).render(known)
        )


@dataclass(frozen=True)
class Verdict:
    """What the records say of a claim: `ours` is the value, `why` the sentence, `records` what they follow from.

    numbers: the `value` on which it hangs, the mean of several records'; `low`, `high`, the outermost ends of their
    intervals, or of the values themselves; their `unit`. {} where records have none, or of several units.
    """

    word: str
    ours: str = ""
    why: str = ""
    records: list[Record] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


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
    check(place, claim.select, claim.where)
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


def _paper_row(table: str, *cells: Any) -> dict[str, Any]:
    """The row of a table of the paper that begins with `cells`."""
    rows = (row for row in paper_rows(table) if list(row.values())[: len(cells)] == list(cells))
    if (found := next(rows, None)) is None:
        raise UserError(f"{table} of the paper has no row {' '.join(map(str, cells))}")
    return found


def _picked(lines: list[Line], pick: str) -> list[Line]:
    if pick == "least":
        return sorted(lines, key=lambda line: line.value)[:1]
    return sorted(lines, key=lambda line: line.tokens)[-1:] if pick == "longest" else lines


def judged(records: list[Record]) -> list[tuple[Claim, Verdict]]:
    """Every claim with its verdict, from the finished records alone; seeds and settings have to agree on it."""
    return judged_runs(Runs([(Path(str(number)), record) for number, record in enumerate(records)]))


def judged_runs(runs: Runs) -> list[tuple[Claim, Verdict]]:
    table = select(measurements(runs), {"status": "finished", "is_arm": False}, "error.isna()")
    return [(claim, _verdict(claim, table, runs)) for claim in claims()]


def _verdict(claim: Claim, table: pd.DataFrame, runs: Runs) -> Verdict:
    if not claim.select:
        return Verdict(NOT_HERE, why=claim.needs)
    records = {run: runs.named[run] for run in table.run[table.experiment.isin(claim.experiments)].unique()}
    if not records:
        return Verdict(NOT_RUN, why=f"python -m focus_exp +experiment={claim.experiments[0]}")
    found = lines_of(select(table, {"experiment": claim.experiments, **claim.select}, claim.where))
    said = [(record, claim.judge([line for line in found if line.run == run])) for run, record in records.items()]
    return _together([(record, one) for record, one in said if one.word not in (NOT_RUN, NOT_HERE)] or said[:1])


def _together(said: list[tuple[Record, Judged]]) -> Verdict:
    """One verdict for several records: theirs if they agree."""
    records = [record for record, one in said if one.word != NOT_HERE]
    words = {one.word for _, one in said}
    word = words.pop() if len(words) == 1 else UNDECIDED
    named = len({record.seed for record in records}) > 1
    ours = [f"seed {record.seed}: {one.ours}" if named else one.ours for record, one in said if one.ours]
    return Verdict(
        RAN if word != NOT_RUN and any(map(is_quick, records)) else word,
        "; ".join(dict.fromkeys(ours)),
        "; ".join(filter(None, dict.fromkeys(one.why for _, one in said))),
        records,
        _numbers([one.hangs_on for _, one in said if one.hangs_on], len(said)),
    )


def _numbers(lines: list[Line], wanted: int) -> dict[str, Any]:
    if len(lines) < wanted or len({line.unit for line in lines}) != 1 or any(line.value is None for line in lines):
        return {}
    low, high = lines[0].low, lines[0].high
    if len(lines) > 1:
        low = min(line.value if line.low is None else line.low for line in lines)
        high = max(line.value if line.high is None else line.high for line in lines)
    return {"value": fmean(line.value for line in lines), "low": low, "high": high, "unit": lines[0].unit}


def claim_table(runs: Runs) -> Table:
    """The ledger: one line a claim."""
    lines = judged_runs(runs)
    counts = Counter(verdict.word for _, verdict in lines)
    quick = [f"{RAN}: scale={QUICK} shows that everything runs; no number of it means anything"] if counts[RAN] else []
    values = [_values(claim, verdict, runs) for claim, verdict in lines]
    columns = [column for column in values[0] if column not in NUMBERS]
    return Table(
        columns=columns,
        rows=[[line[column] for column in columns] for line in values],
        name="claims",
        title="Claims of arXiv 2604.03260, and what was found here",
        notes=[
            ", ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word]),
            *quick,
            "here: another base model, other text and a small budget wherever SUBSTITUTE stands under a table",
            "undecided: the interval includes no difference, or the records disagree; not engaged: the mask removed "
            "under 5 % of the pairs",
            f"several records of a claim have to agree on it; {WANTED} seeds are wanted, and with one the verdict is "
            "that seed's; cost: the time of the runs behind a verdict, all their arms included",
        ],
        values=values,
        kinds={"paper": "paper"},
    )


def _values(claim: Claim, verdict: Verdict, runs: Runs) -> dict[str, Any]:
    records = verdict.records
    by = (f"{r.experiment} {r.config_hash}, seed {r.seed}, {(r.commit or 'no commit')[:7]}" for r in records)
    return {
        **{"table": claim.table, "the paper says": claim.says, "paper": claim.paper, "here": verdict.ours or ABSENT},
        **(dict.fromkeys(NUMBERS) | verdict.numbers),
        **{"verdict": verdict.word, "because": verdict.why or ABSENT, "seeds": str(len(seeds_of(records)) or ABSENT)},
        "cost": f"{sum(map(runs.seconds, records)) / 60:,.0f} min" if records else ABSENT,
        "by": "; ".join(by) or ABSENT,
    }
