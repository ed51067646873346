"""The numbers printed in arXiv 2604.03260 v2, as rows; paper_tables.yaml beside this file is their only place."""

from __future__ import annotations

from functools import cache
from typing import Any

from focus_exp.errors import UserError
from focus_exp.reporting.specs import read_yaml

Cell = str | int | float | bool | None


def paper_rows(table: str) -> list[dict[str, Cell]]:
    """The rows of a table of the paper, column -> cell; None is not printed, speeds are ratios, shares are percent.

    A table inside another one is named with a dot: "table8_dominance.two_phase_K8". Raises UserError for other names.
    """
    tables = _tables()
    if table not in tables:
        raise UserError(f"paper table {table!r} is unknown; choose one of {', '.join(tables)}")
    columns, rows = tables[table]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def paper_speedups(groups: int) -> dict[int, float]:
    """Table 6: tokens -> time of FlashAttention over time of Focus (k = 1) on an H100; {} for a K it does not have."""
    rows: list[Any] = paper_rows("table6_speed")
    return {row["tokens"]: row[f"speedup_K{groups}"] for row in rows if f"speedup_K{groups}" in row}


@cache
def _tables() -> dict[str, tuple[list[str], list[list[Cell]]]]:
    content = read_yaml("paper_tables")
    nested = {f"{name}.{key}": part for name, table in content.items() for key, part in table.items()}
    found = {name: part for name, part in {**content, **nested}.items() if isinstance(part, dict) and "columns" in part}
    return {name: (part["columns"], part["rows"]) for name, part in found.items()}
