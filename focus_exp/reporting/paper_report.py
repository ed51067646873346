"""Every table of the paper with what was measured here beside it, and for each line the runs that made it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from focus_exp.records.record import Record
from focus_exp.reporting.formats import ABSENT, NOT_ENGAGED, NOT_HERE, NOT_RUN, READS_FUTURE, share_text
from focus_exp.reporting.gather import WANTED, Runs, seeds_of, seeds_text
from focus_exp.reporting.measures import BASE, FULL, Line, chosen, lines_of, measurements, select
from focus_exp.reporting.notes import caveats, failures
from focus_exp.reporting.paper import Column, PaperTable, Place, key_text, paper_map, paper_tables
from focus_exp.reporting.specs import expression
from focus_exp.reporting.tables import Table

LARGEST = 50.0  # nats of a change that are written out
PERPLEXITY = Column(heading="PPL", text="perplexity(value)", select={"measure": "perplexity"})
RUN = ("pairs removed", "run", "model and text", "seeds", "made by")


@dataclass(frozen=True)
class Value:
    """A number with its 95 % interval or its standard error, where there is one, and what must be said with it."""

    number: float
    low: float | None = None
    high: float | None = None
    stderr: float | None = None
    mark: str = ""


@dataclass(frozen=True)
class Run:
    """A finished run with its measurements; `own`: the records of its arms, by their names."""

    record: Record
    lines: list[Line]
    own: dict[str, Record]


@lru_cache(maxsize=2)
def finished(runs: Runs) -> list[Run]:
    """Every finished run that is not an arm's, oldest first."""
    lines: dict[str, list[Line]] = {place.as_posix(): [] for place, _ in runs.found}
    for line in lines_of(select(measurements(runs), {"is_arm": False})):
        lines[line.run].append(line)
    return [
        Run(record, lines[place.as_posix()], {a.name: own for a in record.arms if (own := runs.own(a))})
        for place, record in runs.found
        if record.status == "finished"
    ]


@dataclass(frozen=True)
class Entry:
    """A row of the paper at a place, and what was run there: the latest run of each seed of one set-up."""

    table: PaperTable
    paper: dict[str, Any]
    place: Place
    runs: list[Run] = field(default_factory=list)

    def found(self, run: Run, column: Column) -> Value | str:
        """The number that stands in a column, or why there is none."""
        line = self.measured(run, column)
        if not column.origin:
            return (self._value(line, column) if line else None) or self._reason(run, column, line)
        scored = self.found(run, next(one for one in self.table.columns if one.name == column.source))
        return scored if isinstance(scored, str) else (self._value(line, column) if line else None) or ABSENT

    def measured(self, run: Run, column: Column) -> Line | None:
        """The measurement that stands in a column: the first with a number, of the metric a task is known by."""
        found = sorted(chosen(run.lines, self.cells(column)), key=_rank)
        return next((line for line in found if line.value is not None), next(iter(found), None))

    def cells(self, column: Column) -> dict[str, Any]:
        """What is wanted of the measurements in a column."""
        arm = self.place.arms.get(column.source, self.place.arm)
        cells = {
            **self.place.select,
            **column.select,
            **({"kind": BASE} if arm == BASE else {"arm": arm} if arm else {}),
        }
        if column.origin and self.place.select.get("of") == "benchmarks":
            cells |= {"measure": "score_delta", "against": FULL}
        elif column.origin:
            cells["against"] = self.place.arms.get(column.origin, BASE)
        return {key: self.paper[cell[1:]] if str(cell).startswith("$") else cell for key, cell in cells.items()}

    def _value(self, line: Line, column: Column) -> Value | None:
        """In the paper's unit; bounds are those of the value itself, a standard error that of a share."""
        bounds = ("low", "high", "stderr")[: 3 if line.unit == "share" else 2] if "value" in column.value else ()
        found: dict[str, Any] = {}
        for name in ("value", *bounds):
            if (number := getattr(line, name)) is not None:
                found[name] = expression(column.value)(**{**self.paper, **vars(line), "value": number})
                if column.origin:
                    found[name] = 100 * math.expm1(min(number, LARGEST)) + 0.0
        value, idle = found.pop("value", None), line.of == "benchmarks" and line.engaged is False and not column.origin
        mark = NOT_ENGAGED if idle else expression(column.mark)(**vars(line))
        return None if value is None or not math.isfinite(value) else Value(value, **found, mark=mark)

    def _reason(self, run: Run, column: Column, line: Line | None) -> str:
        if line and line.of != "benchmarks":
            return f"failed: {line.error or 'no finite loss'}"
        cells = self.cells(column)
        arm = cells.pop("arm", None)
        lost = [line] if line else chosen(run.lines, cells | {"kind": "missing"})
        failed = [f"failed: {one.error}" for one in chosen(run.lines, {"of": "arms", "arm": arm}) if one.error]
        return next(iter([f"not measured: {one.error}" for one in lost if one.error] + failed), NOT_RUN)

    def behind(self, run: Run) -> list[Line]:
        """What was scored or timed for a line, each once; full attention only where there is nothing else."""
        columns = [one for one in self.table.columns if one.name.startswith(("ppl", "speedup")) and not one.origin]
        found = [self.measured(run, column) for column in columns or [PERPLEXITY]]
        each = {(one.of, one.name, one.arm, one.phase, one.groups): one for one in found if one}
        return [line for line in each.values() if line.kind != BASE] or list(each.values())

    @property
    def records(self) -> list[Record]:
        return [run.record for run in self.runs]

    def own(self, run: Run) -> list[Record]:
        """The records that numbers come from: of the arms, or the run's own."""
        return [own for name, own in run.own.items() if name in self.place.names] or [run.record]

    def what(self, run: Run) -> str:
        """What of a record stands here."""
        timed = "K={groups} {dtype}, {assignment} groups, with routing"
        names = [timed.format(**vars(one)) if one.of == "speed" else str(one.name) for one in self.behind(run)]
        return " / ".join(self.place.names or names) + ("" if self.causal(run) else f" ({READS_FUTURE})")

    def causal(self, run: Run) -> bool:
        return all(line.causal is not False for line in self.behind(run))

    def made_by(self, run: Run) -> str:
        """The command, with the arm where it is one, and the commits of the runs behind a line."""
        arms = [name for name in self.place.names if name != BASE]
        made = dict.fromkeys((record.commit or "no commit")[:7] for record in self.own(run))
        return f"{run.record.command}{f' arm={arms[0]}' if len(arms) == 1 else ''}, {' / '.join(made)}"

    def setting(self) -> str:
        """What was run on what, with how much training, in which number formats, by which seeds may differ."""
        last, timed = self.runs[-1], self.place.select.get("of") == "speed"
        records, arms = self.own(last), [arm for arm in last.record.arms if arm.name in self.place.names]
        seen = {arm.tokens_seen for arm in arms} or {last.record.tokens_seen}
        groups = {r.setting("attention", "groups") for r in records if r.setting("attention", "method") == "focus"}
        tokens = [f"{count:,}" for count in sorted(seen) if any(seen)]
        parts = [" / ".join(dict.fromkeys(map(where, records)))]
        parts += [f"K = {' / '.join(map(str, sorted(groups)))}"] if groups and not timed else []
        parts += [f"{' / '.join(tokens)} tokens trained"] if tokens else []
        formats = dict.fromkeys(own.number_format for run in self.runs for own in self.own(run))
        return ", ".join([*parts, *([] if timed else [" / ".join(formats)])])

    def ran(self) -> list[str]:
        """What every line says of the runs behind it."""
        last = self.runs[-1]
        behind = self.behind(last)
        removed = [share_text(one.pairs_removed if one.pairs_kept is None else 1 - one.pairs_kept) for one in behind]
        idle = f" ({NOT_ENGAGED})" if any(one.engaged is False for one in behind) else ""
        made = "; ".join(dict.fromkeys(map(self.made_by, self.runs)))
        shares, what = (" / ".join(removed) or ABSENT) + idle, f"{last.record.experiment}: {self.what(last)}"
        return [shares, what, self.setting(), seeds_text(self.records), made]


def _rank(line: Line) -> tuple[bool, bool]:
    """An accuracy first, normalised where there is such a one, else the metric that tells."""
    share = line.unit == "share"
    return not share, "acc_norm" not in (line.metric or "") if share else not line.telling


def entries_of(table: PaperTable, runs: Runs) -> list[Entry]:
    """The rows of the paper, each at every place and set-up where there is something, then arms it does not have."""
    found = []
    for name, paper in table.paper.items():
        places = table.places(name)
        here = [entry for place in places for entry in _at(Entry(table, paper, place), runs)]
        found += here or [Entry(table, paper, places[0])]
    return [*found, *(entry for extra in _extras(table, runs) for entry in _at(extra, runs))]


def _at(entry: Entry, runs: Runs) -> list[Entry]:
    """One entry for every set-up."""
    names, setups = entry.place.names, dict[Any, dict[int | None, Run]]()
    there = {"of": "rows", "kind": BASE} if names == [BASE] else {"of": "arms", "arm": names} if names else {}
    cells = there or entry.cells(replace(PERPLEXITY, select={}))
    for run in finished(runs):
        if run.record.experiment in entry.place.experiments and (found := chosen(run.lines, cells)):
            setup = tuple(dict.fromkeys((one.setup, one.arm_setup) for one in found))
            setups.setdefault(setup, {})[run.record.seed] = run
    return [replace(entry, runs=list(seeds.values())) for seeds in setups.values()]


def _extras(table: PaperTable, runs: Runs) -> list[Entry]:
    """Arms of the table's experiments that the paper does not have, or pairs of them, at places of their own."""
    places = [place for places in table.rows.values() for place in places]
    mapped = {name for place in places for name in place.names}
    found, half = dict[str, Place](), "_focus" if table.extra == "pair" else ""
    for record in (run.record for run in finished(runs) if table.extra):
        if any(record.experiment in place.experiments for place in places):
            for name in (arm.name for arm in record.arms if arm.name not in mapped and arm.name.endswith(half)):
                stem = name.removesuffix(half)
                pair = {"ppl_full": f"{stem}_full", "ppl_focus": name} if half else {}
                found[stem] = Place(experiments=(record.experiment,), arm="" if pair else name, arms=pair)
    return [Entry(table, {table.key[0]: f"{stem} (not in the paper)"}, place) for stem, place in found.items()]


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
        notes=_notes([record for entry in entries for record in entry.records]),
        values=list(values),
        kinds={heading: "paper number" if heading.endswith(": paper") else "number" for heading in headings},
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
            found = [entry.found(run, column) for run in entry.runs] or [NOT_HERE if place.needs else NOT_RUN]
            cells.append(shown(column, found))
            numbers = [value for value in found if isinstance(value, Value)]
            low, high = (numbers[0].low, numbers[0].high) if len(numbers) == 1 else (None, None)
            said = {"": mean(numbers), "_low": low, "_high": high, "_seeds": len(numbers)}
            values |= {f"here_{column.name}{part}": number for part, number in said.items()}
    needs = f"needs {place.needs}: " if place.needs else ""
    ran = entry.ran() if entry.runs else [ABSENT] * 4 + [needs + place.command]
    told = ran if entry.runs else [None] * 4 + [place.command]
    return [*cells, *ran], values | dict(zip((name.replace(" ", "_") for name in RUN), told, strict=True))


def mean(numbers: list[Value]) -> float | None:
    return fmean(value.number for value in numbers) if numbers else None


def shown(column: Column, found: list[Value | str]) -> str:
    """One seed's number with its interval, or the mean of several with the least and the most of them."""
    values = [value for value in found if isinstance(value, Value)]
    if not values:
        return next(text for text in found if isinstance(text, str))
    one, numbers = values[0], sorted(value.number for value in values)
    text, (least, most) = column.written(fmean(numbers)) + column.unit, map(column.written, (numbers[0], numbers[-1]))
    if len(values) > 1:
        text += f" ({least} to {most})" if least != most else ""
    elif one.low is not None and one.high is not None:
        text += f" [{column.written(one.low)}, {column.written(one.high)}]"
    elif one.stderr is not None:
        text += f" ± {column.written(one.stderr)}"
    return text + "".join(f" ({mark})" for mark in dict.fromkeys(value.mark for value in values) if mark)


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


def _notes(records: list[Record]) -> list[str]:
    if not records:
        return [f"{NOT_RUN}: there is no record; the last column has the command"]
    seeds = len(seeds_of(records))
    few = [f"{seeds} of the {WANTED} seeds that a claimed difference wants"] if seeds < WANTED else []
    missing = [row for record in records for row in record.benchmarks if row.kind == "missing"]
    said = dict.fromkeys([*(note for record in records for note in caveats(record)), *failures(missing)])
    return [*said, *few, *paper_map()["notes"]]
