"""What was measured beside a row of the paper: its numbers with their marks, and the runs that they come from."""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean, geometric_mean
from typing import Any

from focus_exp.records.record import Record
from focus_exp.records.speed import MASKED
from focus_exp.reporting.formats import ABSENT, NOT_ENGAGED, NOT_HERE, NOT_RUN, READS_FUTURE, seeds_text, share_text
from focus_exp.reporting.gather import Runs, seeds_of
from focus_exp.reporting.measured import Line, lines_of
from focus_exp.reporting.measures import measurements
from focus_exp.reporting.notes import command_of, where
from focus_exp.reporting.paper import Column, PaperTable, Place
from focus_exp.reporting.selection import check, matches, select
from focus_exp.reporting.specs import expression
from focus_exp.reporting.subjects import BASE, FULL
from focus_exp.reporting.together import together

ANYTHING = Column(heading="", text="")
LARGEST = 50.0  # nats of a change that are written out
PERPLEXITY = Column(heading="PPL", text="perplexity(value)", select={"measure": "perplexity"})


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
    """A run with its measurements; `own`: the records of its arms, by their names."""

    record: Record
    lines: list[Line]
    own: dict[str, Record]

    def select(self, cells: dict[str, Any]) -> list[Line]:
        """The measurements with these cells; None stands for what is absent."""
        return [line for line in self.lines if all(matches(getattr(line, at), cell) for at, cell in cells.items())]


def finished(runs: Runs, *experiments: str) -> list[Run]:
    """The runs of these experiments, or of all, whose numbers are whole and that are not arms', oldest first."""
    there = [run for run in _all(runs) if run.record.counts]
    return [run for run in there if not experiments or run.record.experiment in experiments]


@lru_cache(maxsize=2)
def _all(runs: Runs) -> list[Run]:
    lines: dict[str, list[Line]] = {place.as_posix(): [] for place, _ in runs.found}
    for line in lines_of(select(measurements(runs), {"is_arm": False})):
        lines[line.run].append(line)
    own = [{arm.name: own for arm in record.arms if (own := runs.own(arm))} for record in runs.records]
    return [Run(record, lines[place.as_posix()], arms) for (place, record), arms in zip(runs.found, own, strict=True)]


@dataclass(frozen=True)
class Entry:
    """A row of the paper at a place, and what was run there: the latest run of each seed of one set-up.

    timers: every finished run that timed something.
    """

    table: PaperTable
    paper: dict[str, Any]
    place: Place
    timers: list[Run]
    runs: list[Run] = field(default_factory=list)

    def found(self, run: Run, column: Column) -> Value | str:
        """The number that stands in a column, or why there is none."""
        if column.elsewhere:
            return self._speed(run)
        line = self.measured(run, column)
        value = self._value(line, column) if line else None
        if not column.origin:
            return value or self._reason(run, column, line)
        scored = self.found(run, self.table.column(column.source))
        return scored if isinstance(scored, str) else value or ABSENT

    def measured(self, run: Run, column: Column) -> Line | None:
        """The measurement that stands in a column: the first with a number, of the metric a task is known by."""
        found = sorted(run.select(self.cells(column)), key=_rank)
        return next((line for line in found if line.value is not None), next(iter(found), None))

    def cells(self, column: Column) -> dict[str, Any]:
        """What is wanted of the measurements in a column."""
        arm = self.place.arms.get(column.source, self.place.arm)
        subject = {"kind": BASE} if arm == BASE else {"arm": arm} if arm else {}
        cells = self.place.select | column.select | subject
        if column.origin:
            scores = {"measure": "score_delta", "against": FULL}
            cells |= (
                scores if cells.get("of") == "benchmarks" else {"against": self.place.arms.get(column.origin, BASE)}
            )
        return {key: self.paper[cell[1:]] if str(cell).startswith("$") else cell for key, cell in cells.items()}

    def _value(self, line: Line, column: Column) -> Value | None:
        """In the paper's unit; bounds are those of the value itself, a standard error that of a share."""

        def number(name: str) -> float | None:
            found = getattr(line, name)
            if found is None or (name != "value" and "value" not in column.value):
                return None
            known = self.paper | vars(line) | {"value": found}
            return 100 * math.expm1(min(found, LARGEST)) + 0.0 if column.origin else expression(column.value)(**known)

        if (value := number("value")) is None or not math.isfinite(value):
            return None
        idle = line.of == "benchmarks" and line.engaged is False and not column.origin
        mark = NOT_ENGAGED if idle else expression(column.mark)(**vars(line))
        return Value(value, number("low"), number("high"), number("stderr") if line.unit == "share" else None, mark)

    def _reason(self, run: Run, column: Column, line: Line | None) -> str:
        if line and line.of != "benchmarks":
            return f"failed: {line.error or 'no finite loss'}"
        cells = self.cells(column)
        arm = cells.pop("arm", None)
        lost = [line] if line else run.select(cells | {"kind": "missing"})
        failed = [f"failed: {one.error}" for one in run.select({"of": "arms", "arm": arm}) if one.error]
        return next(iter([f"not measured: {one.error}" for one in lost if one.error] + failed), NOT_RUN)

    def _speed(self, run: Run) -> Value | str:
        if all(line.kind in (BASE, "trained") for line in self.behind(run)[:1]):
            return Value(1.0, mark="the same attention as the base")
        if (found := self.timed(run)) is None:
            return "not timed here"
        timer, line = found
        how = "computed by masks over all pairs, which saves nothing" if line.path == MASKED else f"by {line.path}"
        how = f"K={line.groups}, {line.assignment} groups" if line.of == "speed" else how
        made = f"{timer.device_kind}; {command_of(timer)}"
        return Value(line.value, mark=f"{line.tokens:,} tokens, {how}, {line.dtype}, {made}")

    def timed(self, run: Run) -> tuple[Record, Line] | None:
        """A layer as this run has it, timed on the same model: at the length of other methods, beside them if it was,
        or else the longest.

        Of several groups a query the one timing that is quoted of them.
        """
        model = run.record.model.get("fingerprint")
        same = [timer for timer in self.timers if timer.record.model.get("fingerprint") == model]
        cells: dict[str, Any] = {"measure": "ratio", "clock": "attention"}
        others = cells | {"of": "method_speed"}
        common = max((line.tokens for one in same for line in one.select(others)), default=0)
        scored = self.behind(run)[0]
        if scored.method == "focus":
            k = scored.top_k or 1
            cells |= {"of": "speed", "groups": scored.K, "top_k": k}
            cells |= {"pair_rule": scored.pair_rule, "answer": True} if k > 1 else {}
        else:
            cells |= {"of": "method_speed", "method": scored.method}
        found = [(one, line) for one in same for line in one.select(cells) if line.value]

        def rank(timed: tuple[Run, Line]) -> tuple[object, ...]:
            one, line = timed
            return line.tokens == common, line.tokens, line.assignment == "balanced", bool(one.select(others))

        best = max(found, key=rank, default=None)
        return best and (best[0].record, best[1])

    def behind(self, run: Run) -> list[Line]:
        """What was scored or timed for a line, each once; full attention only where there is nothing else."""
        columns = [one for one in self.table.columns if one.name.startswith(("ppl", "speedup")) and not one.origin]
        found = [self.measured(run, column) for column in columns or [PERPLEXITY]]
        each = {(one.of, one.name, one.arm, one.phase, one.groups): one for one in found if one}
        return [line for line in each.values() if line.kind != BASE] or list(each.values())

    @property
    def stand_ins(self) -> list[str]:
        """Notes on models that are not the paper's."""
        asked = {own.setting("model", "name") for run in self.runs for own in self.own(run)} if self.place.model else ()
        others = sorted(name for name in asked if name and name != self.place.model)
        return [f"SUBSTITUTE: {name} stands in for the paper's {self.place.model}" for name in others]

    @property
    def records(self) -> list[Record]:
        return [run.record for run in self.runs]

    @property
    def missing(self) -> str:
        """What stands where nothing was run."""
        return NOT_HERE if self.place.needs else NOT_RUN

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
        parts = [" / ".join(dict.fromkeys(where(record, self.place.model) for record in records))]
        parts += [f"K = {' / '.join(map(str, sorted(groups)))}"] if groups and not timed else []
        parts += [f"{' / '.join(tokens)} tokens trained"] if tokens else []
        formats = dict.fromkeys(own.number_format for run in self.runs for own in self.own(run))
        return ", ".join([*parts, *([] if timed else [" / ".join(formats)])])

    def ran(self) -> list[str]:
        """What every line says of the runs behind it."""
        last = self.runs[-1]
        behind = together([line for run in self.runs for line in self.behind(run)])
        removed = [share_text(one.pairs_removed if one.pairs_kept is None else 1 - one.pairs_kept) for one in behind]
        idle = f" ({NOT_ENGAGED})" if any(seed.engaged is False for one in behind for seed in one.found) else ""
        made = "; ".join(dict.fromkeys(map(self.made_by, self.runs)))
        what = ": ".join(filter(None, [last.record.experiment, self.what(last)]))
        return [(" / ".join(removed) or ABSENT) + idle, what, self.setting(), seeds_text(seeds_of(self.records)), made]


def mean(column: Column, values: list[Value]) -> float:
    """Of several seeds: of perplexities and of their changes that of the logarithms, as in the ledger."""
    numbers = [value.number for value in values]
    if column.origin:
        return 100 * (geometric_mean(1 + number / 100 for number in numbers) - 1)
    middle = geometric_mean if column.text.startswith("perplexity") else fmean
    return middle(numbers)


def _rank(line: Line) -> tuple[bool, bool]:
    """An accuracy first, normalised where there is such a one, else the metric that tells."""
    share = line.unit == "share"
    return not share, not (line.usual if share else line.telling)


def entries_of(table: PaperTable, runs: Runs) -> list[Entry]:
    """The rows of the paper, each at every place and set-up where there is something, then arms it does not have."""
    found, timers = [], [run for run in finished(runs) if run.record.is_timed]
    for cells in [*(one.select for one in table.columns), *(place.select for place in table.everywhere)]:
        check(f"paper_map.yaml: {table.name}", cells, "")
    rows = [(paper, table.places(name)) for name, paper in table.paper.items()]
    for paper, places in [*rows, *_extras(table, runs)]:
        here = [entry for place in places for entry in _at(Entry(table, paper, place, timers), runs)]
        found += here or [Entry(table, paper, places[0], timers)]
    return found


def _at(entry: Entry, runs: Runs) -> list[Entry]:
    """One entry for every set-up."""
    names, setups = entry.place.names, dict[Any, dict[int | None, Run]]()
    there = {"of": "rows", "kind": BASE} if names == [BASE] else {"of": "arms", "arm": names} if names else {}
    for run in finished(runs, *entry.place.experiments):
        if found := run.select(there or entry.cells(ANYTHING)):
            setup = tuple(dict.fromkeys((one.setup, one.arm_setup) for one in found))
            setups.setdefault(setup, {})[run.record.seed] = run
    return [replace(entry, runs=list(seeds.values())) for seeds in setups.values()]


def _extras(table: PaperTable, runs: Runs) -> list[tuple[dict[str, Any], list[Place]]]:
    """Arms of the table's experiments that the paper does not have, or pairs of them, at places of their own."""
    places = table.everywhere
    mapped, half = {name for place in places for name in place.names}, "_focus" if table.extra == "pair" else ""
    found: dict[str, Place] = {}
    for run in finished(runs, *(name for place in places for name in place.experiments)) if table.extra else []:
        for name in (arm.name for arm in run.record.arms if arm.name not in mapped and arm.name.endswith(half)):
            stem, experiments = name.removesuffix(half), (run.record.experiment,)
            pair = Place(experiments=experiments, arms={"ppl_full": f"{stem}_full", "ppl_focus": name})
            found[stem] = pair if half else Place(experiments=experiments, arm=name)
    return [({table.key[0]: f"{stem} (not in the paper)"}, [place]) for stem, place in found.items()]
