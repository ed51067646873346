"""Every table of the paper with what was measured here beside it, and for each line the runs that made it."""

from typing import Any

from focus_exp.reporting.entries import Entry, Value, entries_of, mean
from focus_exp.reporting.formats import ABSENT, NOT_RUN, listed_text
from focus_exp.reporting.gather import WANTED, Runs, seeds_of
from focus_exp.reporting.notes import caveats, failures
from focus_exp.reporting.paper import Column, PaperTable, key_text, paper_map, paper_row, paper_tables
from focus_exp.reporting.specs import template
from focus_exp.reporting.table import Table, column_kinds

RUN = ("pairs removed", "run", "model and text", "seeds", "made by")


def paper_report(runs: Runs) -> list[Table]:
    """One table for each of the paper's, in its order."""
    return [beside(table, runs) for table in paper_tables().values()]


def beside(table: PaperTable, runs: Runs) -> Table:
    """The rows of the paper and ours; a row of the paper that no record fills says what would."""
    entries = entries_of(table, runs)
    cells, values = zip(*map(_cells, entries), strict=True)
    headings = [f"{one.heading}: {side}" for one in table.columns for side in ("paper", "here")[: 1 + bool(one.select)]]
    return Table(
        columns=[*table.key, *headings, *RUN],
        rows=list(cells),
        name=f"paper_{table.name.replace('.', '_')}",
        title=f"{table.label}: {table.title}",
        notes=[*_notes(entries), *(template(note).render(paper=paper_row) for note in table.notes)],
        values=list(values),
        kinds=column_kinds(headings),
    )


def _cells(entry: Entry) -> tuple[list[str], dict[str, Any]]:
    """Cells to read, and the same unrounded."""
    table, place, paper = entry.table, entry.place, entry.paper
    cells = [key_text(paper.get(name)) for name in table.key]
    values: dict[str, Any] = {"table": table.label, **{name: paper.get(name) for name in table.key}}
    for column in table.columns:
        cells.append(table.printed(paper, column))
        values[f"paper_{column.name}"] = table.cell(paper, column)
        if column.select:
            found = [entry.found(run, column) for run in entry.runs] or [entry.missing]
            cells.append(shown(column, found))
            numbers = [value for value in found if isinstance(value, Value)]
            low, high = (numbers[0].low, numbers[0].high) if len(numbers) == 1 else (None, None)
            said = {"": mean(column, numbers) if numbers else None, "_low": low, "_high": high, "_seeds": len(numbers)}
            values |= {f"here_{column.name}{part}": number for part, number in said.items()}
    needs = f"needs {place.needs}: " if place.needs else ""
    ran = entry.ran() if entry.runs else [ABSENT] * 4 + [needs + place.command]
    told = ran if entry.runs else [None] * 4 + [place.command]
    return [*cells, *ran], values | dict(zip((name.replace(" ", "_") for name in RUN), told, strict=True))


def _notes(entries: list[Entry]) -> list[str]:
    records = [record for entry in entries for record in entry.records]
    if not records:
        return [f"{NOT_RUN}: there is no record; the last column has the command"]
    seeds = len(seeds_of(records))
    few = [f"{seeds} of the {WANTED} seeds that a claimed difference wants"] if seeds < WANTED else []
    missing = [row for record in records for row in record.benchmarks if row.kind == "missing"]
    said = [note for entry in entries for note in entry.stand_ins] + [note for one in records for note in caveats(one)]
    return [*dict.fromkeys([*said, *failures(missing)]), *few, *paper_map()["notes"]]


def shown(column: Column, found: list[Value | str]) -> str:
    """One seed's number with its interval, or the mean of several with the least and the most of them, and whether some
    have none."""
    values = [value for value in found if isinstance(value, Value)]
    lost = list(dict.fromkeys(text for text in found if isinstance(text, str)))
    if not values:
        return lost[0]
    one, numbers = values[0], sorted(value.number for value in values)
    least, middle, most = map(column.written, (numbers[0], mean(column, values), numbers[-1]))
    text = f"{column.before}{middle}{column.unit}"
    if len(values) > 1:
        text += f" ({least} to {most})" if least != most else ""
    elif one.low is not None and one.high is not None:
        text += f" [{column.written(one.low)}, {column.written(one.high)}]"
    elif one.stderr is not None:
        text += f" ± {column.written(one.stderr)}"
    marks = [mark for mark in dict.fromkeys(value.mark for value in values) if mark]
    if lost:
        why = [text for text in lost if text != NOT_RUN]
        marks.append(f"{len(values)} of {len(found)} seeds" + (f", others {listed_text(why)}" if why else ""))
    return text + "".join(f" ({mark})" for mark in marks)
