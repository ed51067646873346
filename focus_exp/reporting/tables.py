"""Tables: of one record as tables.yaml declares them; Markdown to read, CSV to compute with, the console to look at."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jinja2 import UndefinedError

from focus_exp.errors import UserError
from focus_exp.records import answers, benchmarks, groups
from focus_exp.records.record import Record
from focus_exp.reporting import lines, notes, speed
from focus_exp.reporting.formats import ABSENT
from focus_exp.reporting.notes import identity, title
from focus_exp.reporting.specs import SpecError, expression, public, read_specs, template
from focus_exp.reporting.table import Table

VOCABULARY = public(answers, benchmarks, groups, speed, lines, notes)


@dataclass(frozen=True, kw_only=True)
class Pivot:
    """Lines of a table that has a column for every value of an expression."""

    lines: str
    columns: str
    heading: str


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """An entry of tables.yaml, whose head says what the keys mean."""

    lines: str
    title: str
    columns: dict[str, str] | list[dict[str, str]]
    words: list[str] = field(default_factory=list)
    paper: list[str] = field(default_factory=list)
    notes: list[str]
    values: str
    values_of: str = "lines"
    when: str = "lines"
    pivot: Pivot | None = None

    @property
    def cells(self) -> list[tuple[str, str]]:
        parts = self.columns if isinstance(self.columns, list) else [self.columns]
        return [cell for part in parts for cell in part.items()]

    def kind(self, heading: str) -> str:
        return " ".join(["paper"] * (heading in self.paper) + ["number"] * (heading not in self.words))


@cache
def table_specs() -> dict[str, TableSpec]:
    """Of every table its spec. UserError for one that cannot be."""
    specs = read_specs("tables", dict[str, TableSpec])
    for name, spec in specs.items():
        headings = {heading for heading, _ in spec.cells} | ({spec.pivot.heading} if spec.pivot else set())
        for key in ("words", "paper"):
            if unknown := set(getattr(spec, key)) - headings:
                raise UserError(f"tables.yaml: {name}: {key}: there is no column {', '.join(sorted(unknown))}")
    return specs


def all_tables(record: Record) -> list[Table]:
    """Every table that the record has lines for."""
    return [table for name in table_specs() if (table := table_of(record, name))]


def table_of(record: Record, name: str) -> Table | None:
    """The table of this name, None where the record has nothing for it. UserError where its spec is wrong."""
    try:
        return _made(record, name, table_specs()[name])
    except (SpecError, UndefinedError) as error:
        raise UserError(f"tables.yaml: {name}: {error}") from error


def _made(record: Record, name: str, spec: TableSpec) -> Table | None:
    known = VOCABULARY | {
        "record": record,
        "title": title(record),
        "window": record.setting("eval", "window"),
        "first": record.arms[0].name if record.arms else "",
        "experiment": {"experiment": record.experiment},
        "identity": identity(record),
    }
    known["lines"] = lines = expression(spec.lines)(known)
    if not expression(spec.when)(known):
        return None
    cells = [[str(expression(text)(known, line=line)) for _, text in spec.cells] for line in lines]
    columns = [template(heading).render(known) for heading, _ in spec.cells]
    if spec.pivot:
        columns, cells = _pivoted(spec.pivot, lines, cells)
    return Table(
        columns=columns,
        rows=cells,
        name=name,
        title=template(spec.title).render(known),
        notes=[line for note in spec.notes for line in template(note).render(known).splitlines()],
        values=[expression(spec.values)(known, line=line) for line in expression(spec.values_of)(known)],
        kinds={heading: spec.kind(heading) for heading in columns},
    )


def _pivoted(pivot: Pivot, lines: list[Any], cells: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows, for one cell a line; "-" where there is no line."""
    names, tasks = ([expression(text)(line=line) for line in lines] for text in (pivot.lines, pivot.columns))
    found = dict(zip(zip(names, tasks, strict=True), (cell for (cell,) in cells), strict=True))
    columns = list(dict.fromkeys(tasks))
    return [pivot.heading, *columns], [
        [name, *(found.get((name, task), ABSENT) for task in columns)] for name in dict.fromkeys(names)
    ]
