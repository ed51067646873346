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

from focus_exp.errors import UserError
from focus_exp.records.answers import COLLAPSED, DOMINANT
from focus_exp.records.record import Record
from focus_exp.reporting.comparators import TESTS, Judged
from focus_exp.reporting.formats import ABSENT, NOT_HERE, NOT_RUN, RAN, UNDECIDED, VERDICTS
from focus_exp.reporting.gather import QUICK, WANTED, Runs, is_quick, seeds_of
from focus_exp.reporting.measures import COLUMNS, Line, lines_of, measurements, select
from focus_exp.reporting.printed import paper_rows, paper_speedups
from focus_exp.reporting.specs import environment, expression, read_specs
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

    @property
    def limits(self) -> dict[str, Any]:
        (limits,) = self.test.values()
        return {key: expression(v)(**self.known) if isinstance(v, str) else v for key, v in limits.items()}


@dataclass(frozen=True)
class Verdict:
    """What the records say of a claim: `ours` is the value, `why` the sentence, `records` what they follow from.

    value: on which it hangs, the mean of several records'; low, high: the outermost ends of their intervals.
    """

    word: str
    ours: str = ""
    why: str = ""
    records: list[Record] = field(default_factory=list)
    value: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""


@cache
def claims() -> list[Claim]:
    """In the order of the paper's tables. UserError for an entry that says what the report does not know."""
    found = []
    for entry in read_specs("claims", list[Claim]):
        for values in entry.each or [{}]:
            said = {key: _filled(value, values) for key, value in vars(entry).items() if key != "each"}
            claim = Claim(**said)
            found.append(replace(claim, says=_text(claim.says, **claim.known), paper=_text(claim.paper, **claim.known)))
            _check(found[-1])
    return found


def _filled(value: Any, values: dict[str, Any]) -> Any:
    """With the values of `each` for their $names."""
    if isinstance(value, dict):
        return {key: _filled(part, values) for key, part in value.items()}
    if isinstance(value, list):
        return [_filled(part, values) for part in value]
    if not isinstance(value, str):
        return value
    return values[value[1:]] if value[1:] in values and value[0] == "$" else Template(value).safe_substitute(values)


def _check(claim: Claim) -> None:
    place = f"claims.yaml: {claim.table}, {claim.says}"
    if unknown := set(claim.select) - set(COLUMNS):
        raise UserError(f"{place}: select: measurements have no column {', '.join(sorted(unknown))}")
    for name, limits in claim.test.items():
        if name not in TESTS:
            raise UserError(f"{place}: test: {name} is no comparator; choose one of {', '.join(TESTS)}")
        try:
            inspect.signature(TESTS[name]).bind([], **limits)
        except TypeError as error:
            raise UserError(f"{place}: test: {name}: {error}") from error
    if len(claim.test) != bool(claim.select) or (not claim.select and not claim.needs):
        raise UserError(f"{place}: it takes select, one test and experiments, or needs")


def _paper_row(table: str, *cells: Any) -> dict[str, Any]:
    """The row of a table of the paper that begins with `cells`."""
    rows = (row for row in paper_rows(table) if list(row.values())[: len(cells)] == list(cells))
    if (found := next(rows, None)) is None:
        raise UserError(f"claims.yaml: {table} of the paper has no row {' '.join(map(str, cells))}")
    return found


def _text(template: str, **known: Any) -> str:
    return _template(template).render(known)


@cache
def _template(text: str) -> Any:
    return environment().from_string(text)


def judged(records: list[Record]) -> list[tuple[Claim, Verdict]]:
    """Every claim with its verdict, from the finished records alone; seeds and settings have to agree on it."""
    return judged_runs(Runs([(Path(str(number)), record) for number, record in enumerate(records)]))


def judged_runs(runs: Runs) -> list[tuple[Claim, Verdict]]:
    table = measurements(runs)
    table = table[(table.status == "finished") & ~table.is_arm & table.error.isna()]
    return [(claim, _verdict(claim, table, runs)) for claim in claims()]


def _verdict(claim: Claim, table: pd.DataFrame, runs: Runs) -> Verdict:
    if not claim.select:
        return Verdict(NOT_HERE, why=claim.needs)
    records = {folder.as_posix(): record for folder, record in runs.found if record.status == "finished"}
    records = {name: record for name, record in records.items() if record.experiment in claim.experiments}
    if not records:
        return Verdict(NOT_RUN, why=f"python -m focus_exp +experiment={claim.experiments[0]}")
    found = lines_of(select(table, {"experiment": claim.experiments, **claim.select}, claim.where))
    verdict = together(
        [_judge(claim, [line for line in found if line.run == name], record) for name, record in records.items()]
    )
    quick = verdict.word != NOT_RUN and any(map(is_quick, verdict.records))
    return replace(verdict, word=RAN) if quick else verdict


def _judge(claim: Claim, lines: list[Line], record: Record) -> Verdict:
    ((name, _),) = claim.test.items()
    chosen, limits = _chosen(lines, claim.pick), claim.limits
    said = TESTS[name](chosen, **limits) if chosen else Judged(NOT_RUN, [])
    if said.word == NOT_RUN:
        what = ", ".join(f"{key} {value}" for key, value in claim.select.items())
        missing = Verdict(NOT_RUN, why=f"it has no measurement with {what}", records=[record])
        return Verdict(NOT_HERE, why=claim.needs) if claim.needs else missing
    by, line, on = {line.measure: line for line in said.lines}, said.lines[0], said.hangs_on
    known = claim.known | {"lines": said.lines, "line": line, "by": by, "found": len(lines), "limits": limits}
    numbers = (on.value, on.low, on.high, on.unit) if on else (None, None, None, "")
    ours, why = said.ours or _text(claim.ours, **known), said.why or _text(claim.why, **known)
    return Verdict(said.word, ours, why, [record], *numbers)


def _chosen(lines: list[Line], pick: str) -> list[Line]:
    if pick == "least":
        return sorted(lines, key=lambda line: line.value)[:1]
    return sorted(lines, key=lambda line: (line.tokens, line.value or 0.0))[-1:] if pick == "longest" else lines


def together(verdicts: list[Verdict]) -> Verdict:
    """One verdict for several records: theirs if those that say anything agree."""
    telling = [verdict for verdict in verdicts if verdict.word not in (NOT_RUN, NOT_HERE)] or verdicts[:1]
    words, records = {verdict.word for verdict in telling}, [record for v in telling for record in v.records]
    several = len({record.seed for record in records}) > 1
    return Verdict(
        telling[0].word if len(words) == 1 else UNDECIDED,
        "; ".join(dict.fromkeys(_named(verdict) if several else verdict.ours for verdict in telling if verdict.ours)),
        "; ".join(dict.fromkeys(verdict.why for verdict in telling if verdict.why)),
        records,
        *_numbers(telling),
    )


def _named(verdict: Verdict) -> str:
    seeds = seeds_of(verdict.records)
    return f"seed {', '.join(map(str, seeds))}: {verdict.ours}" if seeds else verdict.ours


def _numbers(verdicts: list[Verdict]) -> tuple[float | None, float | None, float | None, str]:
    """The mean, and the outermost ends; nothing where a record has none, or another unit."""
    values = [verdict.value for verdict in verdicts if verdict.value is not None]
    if len(values) < len(verdicts) or len({verdict.unit for verdict in verdicts}) > 1:
        return None, None, None, ""
    lows = [verdict.low for verdict in verdicts if verdict.low is not None] or (values if len(values) > 1 else [])
    highs = [verdict.high for verdict in verdicts if verdict.high is not None] or (values if len(values) > 1 else [])
    return fmean(values), min(lows, default=None), max(highs, default=None), verdicts[0].unit


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
        **{name: getattr(verdict, name) for name in NUMBERS},
        **{"verdict": verdict.word, "because": verdict.why or ABSENT, "seeds": str(len(seeds_of(records)) or ABSENT)},
        "cost": f"{sum(map(runs.seconds, records)) / 60:,.0f} min" if records else ABSENT,
        "by": "; ".join(by) or ABSENT,
    }
