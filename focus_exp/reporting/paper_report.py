"""Every table of the paper with what was measured here beside it, and for each line the runs that made it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from focus_exp.records.record import Record
from focus_exp.reporting.benchmarks import failures
from focus_exp.reporting.formats import ABSENT, NOT_ENGAGED, NOT_HERE, NOT_RUN, READS_FUTURE, share_text
from focus_exp.reporting.gather import WANTED, Runs, seeds_of, seeds_text
from focus_exp.reporting.measures import BASE, FULL, measurements
from focus_exp.reporting.paper import Column, PaperTable, Place, key_text, paper_tables
from focus_exp.reporting.specs import expression, read_yaml
from focus_exp.reporting.tables import Table, caveats

Measurement = dict[str, Any]
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
    """A finished run, with its measurements. own: the records that those of an arm come from, by the arm's name."""

    record: Record
    lines: list[Measurement]
    own: dict[str, Record]

    def select(self, wanted: dict[str, Any]) -> list[Measurement]:
        """The measurements that have in every column what is wanted there."""
        return [line for line in self.lines if all(_is(line[column], value) for column, value in wanted.items())]


def _is(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(_is(value, one) for one in wanted)
    return value != wanted[1:] if isinstance(wanted, str) and wanted.startswith("!") else value == wanted


@lru_cache(maxsize=2)
def finished(runs: Runs) -> list[Run]:
    """Every finished run that is not an arm's, oldest first."""
    table = measurements(runs).astype(object)
    lines = {name: part.to_dict("records") for name, part in table.where(table.notna(), None).groupby("run")}
    return [
        Run(record, lines.get(place.as_posix(), []), {a.name: own for a in record.arms if (own := runs.own(a))})
        for place, record in runs.found
        if record.status == "finished"
    ]


@dataclass(frozen=True)
class Line:
    """A row of the paper at a place, and what was run there: the latest run of each seed of one set-up."""

    table: PaperTable
    paper: dict[str, Any]
    place: Place
    runs: list[Run] = field(default_factory=list)

    def found(self, run: Run, column: Column) -> Value | str:
        """The number that stands in a column, or why there is none."""
        line = self.measured(run, column)
        if column.origin:
            scored = self.found(run, next(one for one in self.table.columns if one.name == column.source))
            return scored if isinstance(scored, str) else self._change(run, column) or ABSENT
        return (self._value(line, column) if line else None) or self._reason(run, column, line)

    def measured(self, run: Run, column: Column, **more: Any) -> Measurement | None:
        """The measurement that stands in a column: the first with a number, of the metric a task is known by."""
        found = sorted(run.select(self.wanted(column) | more), key=_rank)
        return next((line for line in found if line["value"] is not None), next(iter(found), None))

    def wanted(self, column: Column | None = None) -> dict[str, Any]:
        arm = self.arm_of(column) if column else ""
        subject = {"kind": BASE} if arm == BASE else {"arm": arm} if arm else {}
        wanted = {**self.place.select, **(column.select if column else {}), **subject}
        return {key: self.paper[value[1:]] if str(value).startswith("$") else value for key, value in wanted.items()}

    def arm_of(self, column: Column) -> str:
        return self.place.arms.get(column.source, self.place.arm)

    def _value(self, line: Measurement, column: Column) -> Value | None:
        """In the paper's unit; bounds are those of the value itself, a standard error that of a share."""

        def number(name: str) -> float | None:
            other = name != "value" and "value" not in column.value
            if line[name] is None or other or (name == "stderr" and line["unit"] != "share"):
                return None
            found = expression(column.value)(**{**self.paper, **line, "value": line[name]})
            return 100 * math.expm1(min(found, LARGEST)) + 0.0 if column.origin else found

        idle = line["of"] == "benchmarks" and line["engaged"] is False and not column.origin
        mark = NOT_ENGAGED if idle else expression(column.mark)(**line)
        value, low, high, stderr = map(number, ("value", "low", "high", "stderr"))
        return None if value is None or not math.isfinite(value) else Value(value, low, high, stderr, mark)

    def _change(self, run: Run, column: Column) -> Value | None:
        """Paired; where no difference from an arm is measured, that of the losses."""
        other = self.place.arms.get(column.origin, BASE)
        on_texts = {"measure": "score_delta", "against": FULL} if self.place.select.get("of") == "benchmarks" else {}
        line = self.measured(run, column, **{"against": other, **on_texts})
        if line is None and other != BASE:
            losses = [self.measured(run, replace(column, source=name), measure="nll") for name in (column.source, column.origin)]
            ours, theirs = losses
            line = {**ours, "value": ours["value"] - theirs["value"]} if ours and theirs else None
        return self._value(line, column) if line else None

    def _reason(self, run: Run, column: Column, line: Measurement | None) -> str:
        if line is not None and line["of"] != "benchmarks":
            return f"failed: {line['error'] or 'no finite loss'}"
        wanted = self.wanted(column)
        missing = {key: value for key, value in wanted.items() if key != "arm"} | {"kind": "missing"}
        lost = [line] if line is not None else run.select(missing)
        arms = run.select({"of": "arms", "arm": self.arm_of(column)})
        reasons = [f"not measured: {line['error']}" for line in lost if line["error"]]
        reasons += [f"failed: {arm['error']}" for arm in arms if arm["error"]]
        return next(iter(reasons), NOT_RUN)

    def behind(self, run: Run) -> list[Measurement]:
        """What was scored or timed for a line, each once; full attention only where there is nothing else."""
        columns = [one for one in self.table.columns if one.name.startswith(("ppl", "speedup")) and not one.origin]
        found = [self.measured(run, column) for column in columns or [PERPLEXITY]]
        each = {tuple(map(line.get, ("of", "name", "arm", "phase", "groups"))): line for line in found if line}
        return [line for line in each.values() if line["kind"] != BASE] or list(each.values())

    @property
    def records(self) -> list[Record]:
        return [run.record for run in self.runs]

    def own(self, run: Run) -> list[Record]:
        """The records that numbers come from: of the arms, or the run's own."""
        return [own for name, own in run.own.items() if name in self.place.names] or [run.record]

    def what(self, run: Run) -> str:
        """What of a record stands here."""
        behind = self.behind(run)
        timed = "K={groups} {dtype}, {assignment} groups, with routing"
        names = [timed.format_map(line) if line["of"] == "speed" else str(line["name"]) for line in behind]
        spoiled = "" if self.causal(run) else f" ({READS_FUTURE})"
        return " / ".join(self.place.names or names) + spoiled

    def causal(self, run: Run) -> bool:
        return all(line["causal"] is not False for line in self.behind(run))

    def made_by(self, run: Run) -> str:
        """The command, with the arm where it is one, and the commits of the runs behind a line."""
        arms = [name for name in self.place.names if name != BASE]
        made = dict.fromkeys((record.commit or "no commit")[:7] for record in self.own(run))
        return f"{run.record.command}{f' arm={arms[0]}' if len(arms) == 1 else ''}, {' / '.join(made)}"


def _rank(line: Measurement) -> tuple[bool, bool]:
    """An accuracy first, normalised where there is such a one, else the metric that tells."""
    share = line["unit"] == "share"
    return not share, "acc_norm" not in (line["metric"] or "") if share else not line["telling"]


def lines_of(table: PaperTable, runs: Runs) -> list[Line]:
    """The rows of the paper, each at every place and set-up where there is something, then arms it does not have."""
    found = []
    for name, paper in table.paper.items():
        places = table.places(name)
        here = [line for place in places for line in _at(Line(table, paper, place), runs)]
        found += here or [Line(table, paper, places[0])]
    return [*found, *(line for extra in _extras(table, runs) for line in _at(extra, runs))]


def _at(line: Line, runs: Runs) -> list[Line]:
    """One line for every set-up."""
    names, setups = line.place.names, dict[Any, dict[int | None, Run]]()
    there = {"of": "rows", "kind": BASE} if names == [BASE] else {"of": "arms", "arm": names} if names else {}
    for run in finished(runs):
        if run.record.experiment in line.place.experiments:
            found = run.select(there or line.wanted())
            setup = tuple(dict.fromkeys((one["setup"], one["arm_setup"]) for one in found))
            setups.setdefault(setup, {})[run.record.seed] = run
    return [replace(line, runs=list(seeds.values())) for setup, seeds in setups.items() if setup]


def _extras(table: PaperTable, runs: Runs) -> Iterator[Line]:
    """Arms of the table's experiments that the paper does not have, at places of their own."""
    places = [place for places in table.rows.values() for place in places]
    mapped = {name for place in places for name in place.names}
    experiments = {name for place in places for name in place.experiments}
    found = {}
    for record in [run.record for run in finished(runs) if run.record.experiment in experiments]:
        for name in (arm.name for arm in record.arms if arm.name not in mapped):
            stem, pair = name.removesuffix("_focus"), table.extra == "pair"
            if table.extra == "arm":
                found[name] = Place(experiments=(record.experiment,), arm=name)
            elif pair and stem != name:
                arms = {"ppl_full": f"{stem}_full", "ppl_focus": name}
                found[stem] = Place(experiments=(record.experiment,), arms=arms)
    for name, place in found.items():
        yield Line(table, {table.key[0]: f"{name} (not in the paper)"}, place)


def paper_report(runs: Runs) -> list[Table]:
    """One table for each of the paper's, in its order."""
    return [beside(table, runs) for table in paper_tables().values()]


def beside(table: PaperTable, runs: Runs) -> Table:
    """The rows of the paper and ours; a row of the paper that no record fills says what would."""
    lines = lines_of(table, runs)
    cells, values = zip(*map(_cells, lines), strict=True)
    here = [f"{one.heading}: {side}" for one in table.columns for side in ("paper", "here") if one.select or side == "paper"]
    return Table(
        columns=[*table.key, *here, *RUN],
        rows=list(cells),
        name=f"paper_{table.name.replace('.', '_')}",
        title=f"{table.label}: {table.title}",
        notes=_notes([record for line in lines for record in line.records]),
        values=list(values),
    )


def _cells(line: Line) -> tuple[list[str], dict[str, Any]]:
    """Cells to read, and the same unrounded."""
    table, place, paper = line.table, line.place, line.paper
    cells = [key_text(paper.get(name)) for name in table.key]
    values: dict[str, Any] = {"table": table.label, **{name: paper.get(name) for name in table.key}}
    for column in table.columns:
        cells.append(table.printed(paper, column))
        values[f"paper_{column.name}"] = table.cell(paper, column)
        if column.select:
            found = [line.found(run, column) for run in line.runs] or [NOT_HERE if place.needs else NOT_RUN]
            cells.append(shown(column, found))
            numbers = [value for value in found if isinstance(value, Value)]
            one = numbers[0] if len(numbers) == 1 else None
            bounds = {"": mean(numbers), "_low": one and one.low, "_high": one and one.high, "_seeds": len(numbers)}
            values |= {f"here_{column.name}{part}": number for part, number in bounds.items()}
    needs = f"needs {place.needs}: " if place.needs else ""
    run = _run(line) if line.runs else [ABSENT] * 4 + [needs + place.command]
    said = run if line.runs else [None] * 4 + [place.command]
    return [*cells, *run], values | dict(zip((name.replace(" ", "_") for name in RUN), said, strict=True))


def mean(numbers: list[Value]) -> float | None:
    return fmean(value.number for value in numbers) if numbers else None


def shown(column: Column, found: list[Value | str]) -> str:
    """One seed's number with its interval, or the mean of several with the least and the most of them."""
    values = [value for value in found if isinstance(value, Value)]
    if not values:
        return str(found[0])
    one, numbers = values[0], sorted(value.number for value in values)
    text, (least, most) = column.written(fmean(numbers)) + column.unit, map(column.written, (numbers[0], numbers[-1]))
    if len(values) > 1:
        text += f" ({least} to {most})" if least != most else ""
    elif one.low is not None and one.high is not None:
        text += f" [{column.written(one.low)}, {column.written(one.high)}]"
    elif one.stderr is not None:
        text += f" ± {column.written(one.stderr)}"
    return text + "".join(f" ({mark})" for mark in dict.fromkeys(value.mark for value in values) if mark)


def _run(line: Line) -> list[str]:
    """What every line says of the runs behind it."""
    last = line.runs[-1]
    behind = line.behind(last)
    removed = [one["pairs_removed"] if one["pairs_kept"] is None else 1 - one["pairs_kept"] for one in behind]
    idle = f" ({NOT_ENGAGED})" if any(one["engaged"] is False for one in behind) else ""
    return [
        (" / ".join(map(share_text, removed)) or ABSENT) + idle,
        f"{last.record.experiment}: {line.what(last)}",
        _setting(line),
        seeds_text(line.records),
        "; ".join(dict.fromkeys(map(line.made_by, line.runs))),
    ]


def _setting(line: Line) -> str:
    """What was run on what, with how many tokens of training, and in which number formats, by which seeds may differ."""
    last, timed = line.runs[-1], line.place.select.get("of") == "speed"
    records = line.own(last)
    groups = {r.setting("attention", "groups") for r in records if r.setting("attention", "method") == "focus"}
    trained = {arm.tokens_seen for arm in last.record.arms if arm.name in line.place.names} or {last.record.tokens_seen}
    formats = dict.fromkeys(own.number_format for run in line.runs for own in line.own(run))
    said = [
        " / ".join(dict.fromkeys(map(where, records))),
        f"K = {' / '.join(map(str, sorted(groups)))}" if groups and not timed else "",
        f"{' / '.join(f'{tokens:,}' for tokens in sorted(trained))} tokens trained" if any(trained) else "",
        "" if timed else " / ".join(formats),
    ]
    return ", ".join(filter(None, said))


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
    return [
        *dict.fromkeys(note for record in records for note in caveats(record)),
        *dict.fromkeys(failures(missing)),
        *few,
        *read_yaml("paper_map")["notes"],
    ]
