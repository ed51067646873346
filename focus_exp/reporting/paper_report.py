"""Every table of the paper with what was measured here beside it, and for each line the run that made it."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import Any

from focus_exp.records.record import Record
from focus_exp.reporting.formats import ABSENT, NOT_ENGAGED, READS_FUTURE, share_text
from focus_exp.reporting.gather import WANTED, Runs, seeds_of, seeds_text
from focus_exp.reporting.notes import caveats, failures
from focus_exp.reporting.paper_measures import MEASURES, NOT_RUN, Measure, Value, change, signed
from focus_exp.reporting.paper_places import (
    BASE,
    PaperTable,
    Place,
    Scene,
    extras,
    paper_tables,
    row_name,
    scenes,
)
from focus_exp.reporting.tables import Table

NOT_HERE = "not testable here"
# its name, how it is measured, and the column of the paper that it is about
Column = tuple[str, Measure, str]
RUN = ("pairs_removed", "run", "model_and_text", "seeds", "made_by")


def paper_report(runs: Runs) -> list[Table]:
    """One table for each of the paper's, in its order."""
    return [beside(table, runs) for table in paper_tables()]


def beside(table: PaperTable, runs: Runs) -> Table:
    """The rows of the paper and ours; a row of the paper that no record fills says what would."""
    columns = columns_of(table)
    lines: list[tuple[dict[str, Any], Place, list[Scene]]] = []
    for paper, places in table.rows:
        found = [(place, group) for place in places for group in scenes(table, paper, place, runs)]
        lines += [(paper, place, group) for place, group in found or [(places[0], [])]]
    for name, place in extras(table, runs):
        paper = {table.key[0]: f"{name} (not in the paper)"}
        lines += [(paper, place, group) for group in scenes(table, paper, place, runs)]
    records = [scene.record for _, _, group in lines for scene in group]
    shown = [_line(table, columns, *line) for line in lines]
    return Table(
        columns=[
            *table.key,
            *(f"{measure.heading}: {side}" for _, measure, _ in columns for side in _sides(measure)),
            *("pairs removed", "run", "model and text", "seeds", "made by"),
        ],
        rows=[cells for cells, _ in shown],
        name=f"paper_{table.name.replace('.', '_')}",
        title=f"{table.label}: {table.title}",
        notes=_notes(records),
        values=[values for _, values in shown],
    )


def _sides(measure: Measure) -> tuple[str, ...]:
    return ("paper", "here") if measure.find else ("paper",)


def columns_of(table: PaperTable) -> list[Column]:
    """The paper's columns, and after them the changes from full attention that follow from its numbers."""
    found: list[Column] = []
    for name in table.columns:
        found.append((name, MEASURES[name], name))
        if name in table.changes:
            origin = table.changes[name].get("from", "")
            beside = MEASURES[origin].heading.removeprefix("PPL ") if origin else table.changes[name]["row"]
            heading = f"{MEASURES[name].heading} vs {beside}"
            measure = Measure(heading, signed, partial(change, origin=origin), unit=" %")
            found.append((f"{name}_change", measure, name))
    return found


def printed_change(table: PaperTable, paper: dict[str, Any], column: str) -> float | None:
    """By how much the paper's number in `column` is above its full attention's, in per cent."""
    rule = table.changes[column]
    if "from" in rule:
        before = paper.get(rule["from"])
    elif row_name(paper, table.key) == rule["row"]:
        return None
    else:
        before = next(row[column] for row, _ in table.rows if row_name(row, table.key) == rule["row"])
    after = paper.get(column)
    return None if before is None or after is None else 100 * (after / before - 1)


def decimals(table: PaperTable, column: str) -> int:
    """The most that a number of a column is given with: 1.50 was read as 1.5."""
    texts = [repr(row[column]) for row, _ in table.rows if isinstance(row[column], float) and row[column] < 1e4]
    return max((len(text.partition(".")[2].removesuffix("0")) for text in texts), default=0)


def _line(
    table: PaperTable, columns: list[Column], paper: dict[str, Any], place: Place, group: list[Scene]
) -> tuple[list[str], dict[str, Any]]:
    """Cells to read, and the same unrounded."""
    absent = NOT_HERE if place.needs else NOT_RUN
    cells = [_key(paper.get(name)) for name in table.key]
    values: dict[str, Any] = {"table": table.label, **{name: paper.get(name) for name in table.key}}
    for name, measure, column in columns:
        theirs = printed_change(table, paper, column) if name != column else paper.get(name)
        cells.append(measure.printed(theirs, decimals(table, column)))
        values[f"paper_{name}"] = theirs
        if measure.find is None:
            continue
        found = [measure.find(scene, column) for scene in group]
        cells.append(measure.text(found) if group else absent)
        numbers = [value for value in found if isinstance(value, Value)]
        values[f"here_{name}"] = fmean(value.number for value in numbers) if numbers else None
        bounds = (numbers[0].low, numbers[0].high) if len(numbers) == 1 else (None, None)
        values |= {f"here_{name}_low": bounds[0], f"here_{name}_high": bounds[1]}
        values[f"here_{name}_seeds"] = len(numbers)
    if not group:
        needs = f"needs {place.needs}: " if place.needs else ""
        return [*cells, *[ABSENT] * 4, needs + place.command], values | dict.fromkeys(RUN) | {"made_by": place.command}
    run = _run(group)
    return [*cells, *run.values()], values | run


def _key(cell: Any) -> str:
    return ABSENT if cell is None else f"{cell:g}" if isinstance(cell, float) else str(cell)


def _run(group: list[Scene]) -> dict[str, str]:
    """What every line says of the run behind it."""
    scene = group[-1]
    shares, spoiled, idle = scene.pairs_removed, "" if scene.causal else f" ({READS_FUTURE})", ""
    if any(acted is False for _, acted in shares):
        idle = f" ({NOT_ENGAGED})"
    made = dict.fromkeys(map(made_by, group))
    said = (
        (" / ".join(share_text(share) for share, _ in shares) or ABSENT) + idle,
        f"{scene.record.experiment}: {scene.name}{spoiled}",
        ", ".join(filter(None, [_setting(scene), "" if scene.timed else _formats(group)])),
        seeds_text([found.record for found in group]),
        "; ".join(made),
    )
    return dict(zip(RUN, said, strict=True))


def _setting(scene: Scene) -> str:
    """What was run on what, with how many tokens of training, by whichever of the arms' own records there are."""
    records = own_records(scene)
    parts = dict.fromkeys(where(record) for record in records)
    groups = {r.setting("attention", "groups") for r in records if r.setting("attention", "method") == "focus"}
    trained = {arm.tokens_seen for arm in scene.own} or {scene.record.tokens_seen}
    shown = groups and not scene.timed
    text = " / ".join(parts) + (f", K = {' / '.join(map(str, sorted(groups)))}" if shown else "")
    return f"{text}, {' / '.join(f'{n:,}' for n in sorted(trained))} tokens trained" if any(trained) else text


def _formats(group: list[Scene]) -> str:
    """Number formats of the arithmetic, by which machines and so seeds may differ."""
    return " / ".join(dict.fromkeys(run.number_format for scene in group for run in own_records(scene)))


def own_records(scene: Scene) -> list[Record]:
    """The records that a scene's numbers come from: of its arms, or its own."""
    return [run for arm in scene.own if (run := scene.runs.own(arm))] or [scene.record]


def where(record: Record) -> str:
    """The model and the text that were used, the length and the window."""
    parts = []
    for section in ("model", "data"):
        used = getattr(record, section)
        name = used.get("name") or record.setting(section, "name", section)
        parts.append(f"{name} (SUBSTITUTE)" if used.get("substitution") else str(name))
    shape = f"T = {record.setting('eval', 'window', 0):,}, w = {record.setting('attention', 'window')}"
    device = f", {record.device_kind}" if record.speed else ""
    return f"{' on '.join(parts)}, {shape}{device}"


def command_of(record: Record) -> str:
    """What made a record, and at which commit."""
    name = record.config.get("arm") or ""
    alone = f" arm={name}" if name and f"arm={name}" not in record.command.split() else ""
    return f"{record.command}{alone}, {(record.commit or 'no commit')[:7]}"


def made_by(scene: Scene) -> str:
    """The command, with the arm where it is one, and the commits of the runs behind a scene."""
    arms = [name for name in scene.place.names if name != BASE]
    made = dict.fromkeys((record.commit or "no commit")[:7] for record in own_records(scene))
    alone = f" arm={arms[0]}" if len(arms) == 1 else ""
    return f"{scene.record.command}{alone}, {' / '.join(made)}"


def _notes(records: list[Record]) -> list[str]:
    if not records:
        return [f"{NOT_RUN}: there is no record; the last column has the command"]
    seeds = len(seeds_of(records))
    few = [f"{seeds} of the {WANTED} seeds that a claimed difference wants"] if seeds < WANTED else []
    missing = [row for record in records for row in record.benchmarks if row.kind == "missing"]
    return [
        *dict.fromkeys(note for record in records for note in caveats(record)),
        *dict.fromkeys(failures(missing)),
        *few,
        "here: one seed with its 95 % interval in brackets or its standard error, or the mean over seeds with the "
        "least and the most",
        "paper, vs: follows from its two numbers; here it is paired on the same tokens",
        f"{NOT_ENGAGED}: under 5 % of the pairs were removed, so the number is full attention's by construction",
    ]
