"""The tables of arXiv 2604.03260 v2: what they print (paper_tables.yaml), and where it is measured (paper_map.yaml)."""

import math
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from focus_exp.errors import UserError
from focus_exp.reporting.formats import ABSENT
from focus_exp.reporting.specs import checked, expression, read_yaml

Cell = str | int | float | bool | None


def paper_rows(table: str) -> list[dict[str, Cell]]:
    """The rows of a table of the paper, column -> cell; None is not printed, speeds are ratios, shares are percent.

    A table inside another one is named with a dot: "table8_dominance.two_phase_K8". Raises UserError for other names.
    """
    tables = _printed()
    if table not in tables:
        raise UserError(f"paper table {table!r} is unknown; choose one of {', '.join(tables)}")
    return [dict(zip(tables[table]["columns"], row, strict=True)) for row in tables[table]["rows"]]


def paper_row(table: str, *cells: Cell) -> dict[str, Any]:
    """The row of a table that begins with `cells`; UserError where there is none."""
    rows = (row for row in paper_rows(table) if list(row.values())[: len(cells)] == list(cells))
    if (found := next(rows, None)) is None:
        raise UserError(f"{table} of the paper has no row {' '.join(map(str, cells))}")
    return found


def paper_speedups(groups: int, least: float = 0, most: float = math.inf) -> dict[int, float]:
    """Table 6: tokens -> time of FlashAttention over time of Focus (k = 1) on an H100; {} for a K it does not have."""
    rows: list[Any] = paper_rows("table6_speed")
    column = f"speedup_K{groups}"
    return {row["tokens"]: row[column] for row in rows if column in row and least <= row["tokens"] <= most}


@cache
def _printed() -> dict[str, dict[str, Any]]:
    content = read_yaml("paper_tables")
    nested = {f"{name}.{key}": part for name, table in content.items() for key, part in table.items()}
    return {name: part for name, part in {**content, **nested}.items() if isinstance(part, dict) and "columns" in part}


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the paper, `source`, or its change from full attention's in the row or column `origin`."""

    heading: str
    text: str
    select: dict[str, Any] = field(default_factory=dict)
    value: str = "value"
    before: str = ""
    unit: str = ""
    mark: str = "''"
    source: str = ""
    origin: str = ""
    elsewhere: bool = False

    @property
    def name(self) -> str:
        return f"{self.source}_change" if self.origin else self.source

    def written(self, number: float) -> str:
        return str(expression(self.text)(value=number))


@dataclass(frozen=True, kw_only=True)
class Place:
    """What in the records stands beside a row of the paper."""

    experiments: tuple[str, ...]
    arm: str = ""
    arms: dict[str, str] = field(default_factory=dict)
    select: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    settings: tuple[str, ...] = ()
    needs: str = ""

    @property
    def names(self) -> list[str]:
        """The arms, each once."""
        return list(dict.fromkeys([*self.arms.values(), *filter(None, [self.arm])]))

    @property
    def command(self) -> str:
        return " ".join(["python -m focus_exp", f"+experiment={self.experiments[0]}", *self.settings])


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table of the paper and where its rows are measured; of this and the others see paper_map.yaml."""

    label: str
    title: str
    key: tuple[str, ...]
    rows: dict[str, list[Place]]
    changes: dict[str, dict[Literal["heading", "from"], str]] = field(default_factory=dict)
    extra: Literal["", "arm", "pair"] = ""
    notes: tuple[str, ...] = ()
    name: str = ""
    columns: tuple[Column, ...] = ()

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    @property
    def paper(self) -> dict[str, dict[str, Any]]:
        """The rows by their cells in `key`, those that are empty left out: "lora_r4 1e-05"."""
        rows: list[dict[str, Any]] = paper_rows(self.name)
        return {" ".join(key_text(row[key]) for key in self.key if row[key] is not None): row for row in rows}

    @property
    def everywhere(self) -> list[Place]:
        return [place for places in self.rows.values() for place in places]

    def places(self, row: str) -> list[Place]:
        """Where a row is measured; the first has the command."""
        return next(places for pattern, places in self.rows.items() if fnmatchcase(row, pattern))

    def cell(self, row: dict[str, Any], column: Column) -> Any:
        """The paper's cell, or by how much [%] its number is above full attention's."""
        after, full = row.get(column.source), self.paper.get(column.origin)
        if not column.origin:
            return after
        before = full[column.source] if full and full != row else row.get(column.origin)
        return None if before is None or after is None else 100 * (after / before - 1)

    def printed(self, row: dict[str, Any], column: Column) -> str:
        """The cell as text; a number with as many decimals as the column has: 1.50 was read as 1.5."""
        cell = self.cell(row, column)
        if cell is None or isinstance(cell, bool | str):
            return {True: "yes", False: "no", None: ABSENT, "": ABSENT}.get(cell, str(cell))
        if column.text.startswith("signed"):
            return column.written(cell) + column.unit
        decimals = (repr(other[column.source]).partition(".")[2].removesuffix("0") for other in self.paper.values())
        return f"{cell:,.{max(map(len, decimals))}f}"


def key_text(cell: Cell) -> str:
    return ABSENT if cell is None else f"{cell:g}" if isinstance(cell, float) else str(cell)


@cache
def paper_map() -> dict[str, Any]:
    return read_yaml("paper_map")


@cache
def paper_tables() -> dict[str, PaperTable]:
    """In the order of the map, which is the paper's."""
    content = paper_map()
    known = checked("paper_map.yaml: columns", content["columns"], dict[str, Column])
    expanded = {name: _expanded(entry) for name, entry in content["tables"].items()}
    tables = checked("paper_map.yaml: tables", expanded, dict[str, PaperTable])
    for name, table in tables.items():
        columns: list[Column] = []
        for source in [source for source in paper_rows(name)[0] if source not in table.key]:
            rule = table.changes.get(source)
            if rule and any(place.arm != "base" for place in table.rows.get(rule["from"], [])):
                raise UserError(f"paper_map.yaml: {name}: changes: {source}: {rule['from']} is not full attention")
            columns.append(replace(known[source], source=source))
            if rule:
                changed = Column(heading=rule["heading"], text="signed(value)", unit=" %", select={"measure": "delta"})
                columns.append(replace(changed, source=source, origin=rule["from"]))
        tables[name] = replace(table, name=name, columns=tuple(columns))
    return tables


def _expanded(entry: dict[str, Any]) -> dict[str, Any]:
    """What a table says of every place, said of each; a row as the list of its places."""
    common = {key: value for key, value in entry.items() if key in Place.__dataclass_fields__}
    rows = {name: row if isinstance(row, list) else [row] for name, row in entry["rows"].items()}
    places = {
        name: [common | ({"arm": part} if isinstance(part, str) else part) for part in parts]
        for name, parts in rows.items()
    }
    return {key: value for key, value in entry.items() if key not in common} | {"rows": places}
