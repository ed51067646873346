"""Where a row of the paper is measured here: paper_map.yaml as places, and what the records hold at a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from focus_exp.records.answers import Phase, phase_of, row_of
from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm, Row
from focus_exp.records.speed import SpeedRow
from focus_exp.reporting.gather import Runs, run_of, setup
from focus_exp.reporting.printed import paper_names, paper_rows
from focus_exp.reporting.specs import read_yaml

BASE = "base"
ROUTER_TRAINED, ALL_TRAINED = ("_centroid",), ("_finetuned", "_full_ft")  # how columns end


@dataclass(frozen=True, kw_only=True)
class Place:
    """What in a record stands beside a row of the paper: see paper_map.yaml."""

    experiments: tuple[str, ...]
    arm: str = ""
    arms: dict[str, str] = field(default_factory=dict)
    rule: str = ""
    model: str = ""
    settings: tuple[str, ...] = ()
    needs: str = ""

    def arm_of(self, column: str) -> str:
        return self.arms.get(column, self.arm)

    @property
    def names(self) -> list[str]:
        """The arms, each once."""
        return list(dict.fromkeys([*self.arms.values(), *([self.arm] if self.arm else [])]))

    @property
    def command(self) -> str:
        return " ".join(["python -m focus_exp", f"+experiment={self.experiments[0]}", *self.settings])


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper with the places of its rows.

    key: the columns that name a row; groups: the paper's K, where records have others; changes, extra: see the map.
    """

    name: str
    label: str
    title: str
    key: tuple[str, ...]
    rows: list[tuple[dict[str, Any], list[Place]]]
    groups: int | None = None
    changes: dict[str, dict[str, str]] = field(default_factory=dict)
    extra: str = ""

    @property
    def columns(self) -> list[str]:
        """Those with numbers."""
        return [column for column in self.rows[0][0] if column not in self.key]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(place.model for _, places in self.rows for place in places if place.model))

    @property
    def places(self) -> list[Place]:
        return [place for _, places in self.rows for place in places]


@dataclass(frozen=True)
class Scene:
    """A record at a place, beside a row of the paper."""

    record: Record
    place: Place
    paper: dict[str, Any]
    runs: Runs

    def row(self, column: str) -> Row | None:
        """The row of quality that a column is about."""
        if "top_k" in self.paper:
            k, rule = self.paper["top_k"], self.place.rule
            hard = (row for row in self.record.rows if row.kind == "hard" and row.top_k == k)
            return next((row for row in hard if row.pair_rule in (None, rule)), None)
        name = self.place.arm_of(column)
        if name == BASE:
            return self.record.base
        arm = self.arm(name)
        return self.after_phase(arm, column) if arm else None

    def after_phase(self, arm: Arm, column: str) -> Row | None:
        """The row that stands for an arm; for a column about a router alone, or all trained, that phase's."""
        row, run = row_of(self.record, arm.name), self.runs.own(arm) or self.record
        phases: dict[str, dict[str, Any]] = run.setting("regime", "phases") or {}
        everything = any(phase.get("train") == "all" for phase in phases.values())
        if column.endswith(ALL_TRAINED):
            return row if everything else None
        if not column.endswith(ROUTER_TRAINED) or not everything:
            return row
        phase = phase_of(self.record, arm.name, full=False)
        return phase.hard if phase else None

    def phase(self, column: str) -> Phase | None:
        """The phase of an arm that a column is about."""
        return phase_of(self.record, self.place.arm_of(column), full=not column.endswith(ROUTER_TRAINED))

    def arm(self, name: str) -> Arm | None:
        return next((arm for arm in self.record.arms if arm.name == name), None)

    def benchmarks(self, column: str, task: str) -> list[BenchmarkRow]:
        """All metrics of a task for the arm that a column is about; a row without a score says why there is none."""
        name = self.place.arm_of(column)
        rows = [row for row in self.record.benchmarks if row.task == task]
        kind = (row for row in rows if row.kind == BASE) if name == BASE else (r for r in rows if r.attention == name)
        return list(kind) or [row for row in rows if row.kind == "missing"]

    @property
    def quality(self) -> list[Row]:
        """The rows of quality behind a line, each once; full attention's only where there is no other."""
        columns = [name for name in self.paper if name.startswith("ppl")] or ["ppl"]
        found = {id(row): row for name in columns if (row := self.row(name)) is not None}
        return [row for row in found.values() if row.kind != BASE] or list(found.values())

    @property
    def timed(self) -> list[SpeedRow]:
        """The rows of a layer's attention at the paper's length, with balanced groups as there, smallest K first."""
        wanted = ("attention", "balanced", 1, self.paper.get("tokens"))
        rows = (r for r in self.record.speed if (r.clock, r.assignment, r.top_k, r.tokens) == wanted)
        return sorted(rows, key=lambda row: row.groups)

    @property
    def texts(self) -> list[BenchmarkRow]:
        """The rows of perplexity at the paper's length, of the arms in their order."""
        task, names = f"perplexity@{self.paper.get('tokens')}", self.place.names
        rows = [row for row in self.record.benchmarks if row.task == task and row.attention in names]
        return sorted(rows, key=lambda row: names.index(row.attention))

    @property
    def pairs_removed(self) -> list[tuple[float | None, bool | None]]:
        """Of each row behind a line the share, and whether the mask was engaged."""
        if "tokens" not in self.paper:
            return [(row.pairs_removed, row.engaged) for row in self.quality]
        if self.place.names:
            return [(row.pairs_removed, row.engaged) for row in self.texts]
        return [(None if row.pairs_kept is None else 1 - row.pairs_kept, None) for row in self.timed]

    @property
    def causal(self) -> bool:
        return all(row.causal for row in self.quality) and all(row.causal for row in self.texts)

    @property
    def name(self) -> str:
        """What of the record stands here."""
        if self.place.names:
            return " / ".join(self.place.names)
        rows = [f"K={row.groups} {row.dtype}, balanced groups, with routing" for row in self.timed]
        return " / ".join(rows or [row.name for row in self.quality])

    @property
    def own(self) -> list[Arm]:
        """The arms of this place."""
        return [arm for arm in self.record.arms if arm.name in self.place.names]


@cache
def paper_tables() -> list[PaperTable]:
    """In the order of the map, which is the paper's."""
    return [_table(name, entry) for name, entry in read_yaml("paper_map").items()]


def unmapped() -> list[str]:
    """Tables of the paper that no entry of the map has."""
    return sorted(set(paper_names()) - {table.name for table in paper_tables()})


def _table(name: str, entry: dict[str, Any]) -> PaperTable:
    common: dict[str, Any] = {key: entry[key] for key in ("experiments", "settings", "needs") if key in entry}
    rows = []
    for row in paper_rows(name):
        key = row_name(row, entry["key"])
        found = next(value for pattern, value in entry["rows"].items() if fnmatchcase(key, pattern))
        rows.append((row, [_place(part, common) for part in (found if isinstance(found, list) else [found])]))
    optional = {key: entry[key] for key in ("groups", "changes", "extra") if key in entry}
    return PaperTable(name, entry["label"], entry["title"], tuple(entry["key"]), rows, **optional)


def row_name(row: dict[str, Any], key: Sequence[str]) -> str:
    """The cells that name a row of the paper, those that are empty left out: "lora_r4 1e-05"."""
    cells = [row[column] for column in key if row.get(column) is not None]
    return " ".join(f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in cells)


def _place(part: str | dict[str, Any], common: dict[str, Any]) -> Place:
    values = {**common, **({"arm": part} if isinstance(part, str) else part)}
    for key in ("experiments", "settings"):
        values[key] = tuple(values.get(key, ()))
    return Place(**values)


def scenes(table: PaperTable, paper: dict[str, Any], place: Place, runs: Runs) -> list[list[Scene]]:
    """What there is at a place, one list for every set-up: its records under several seeds, the latest of each seed."""
    groups: dict[Any, dict[int | None, Scene]] = {}
    for record in runs.finished(*place.experiments):
        scene = Scene(record, place, paper, runs)
        if not _is_there(scene) or not _of_this_table(table, scene):
            continue
        key = (setup(record), *(run_of(arm) for arm in scene.own), None if record.arms else record.experiment)
        groups.setdefault(key, {})[record.seed] = scene
    return [list(seeds.values()) for seeds in groups.values()]


def _is_there(scene: Scene) -> bool:
    record, place = scene.record, scene.place
    if place.names == [BASE]:
        return record.base is not None
    if place.names:
        return any(arm.name in place.names for arm in record.arms)
    if "top_k" in scene.paper:
        return scene.row("ppl") is not None
    if {"quantity", "affinity"} & set(scene.paper):
        return record.groups is not None
    return "tokens" in scene.paper and bool(scene.timed)


def _of_this_table(table: PaperTable, scene: Scene) -> bool:
    """A record of a model that the table does not have stands beside its first model, and says so in its line."""
    if table.groups is not None and scene.record.setting("attention", "groups") != table.groups:
        return False
    wanted, asked = scene.place.model, scene.record.setting("model", "name")
    return not wanted or asked == wanted or (asked not in table.models and wanted == table.models[0])


def extras(table: PaperTable, runs: Runs) -> list[tuple[str, Place]]:
    """Arms of the table's experiments that the paper does not have, as places of their own."""
    mapped = {name for place in table.places for name in place.names}
    experiments = dict.fromkeys(name for place in table.places for name in place.experiments)
    found: dict[str, Place] = {}
    for record in runs.finished(*experiments) if table.extra else []:
        for name in (arm.name for arm in record.arms if arm.name not in mapped):
            stem, _, half = name.rpartition("_")
            if table.extra == "arm":
                found[name] = Place(experiments=(record.experiment,), arm=name)
            elif half == "focus":
                arms = {"ppl_full": f"{stem}_full", "ppl_focus": name}
                found[stem] = Place(experiments=(record.experiment,), arms=arms)
    return list(found.items())
