"""Lines of the measurements: how an entry of a data file chooses them."""

from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pandas as pd

from focus_exp.errors import UserError
from focus_exp.reporting.gather import Runs
from focus_exp.reporting.measures import COLUMNS, measurements


def select(table: pd.DataFrame, cells: dict[str, Any], where: str = "") -> pd.DataFrame:
    """The lines with these cells, one of a list or what * stands for anything in, and on which the condition holds."""
    for column, wanted in cells.items():
        there = table[column].dropna().unique()
        table = table[table[column].isin([cell for cell in there if matches(cell, wanted)])]
    return table.query(where, engine="python") if where else table


def said_of_runs(table: pd.DataFrame) -> pd.DataFrame:
    """The lines on which claims are judged and sentences rest: of runs whose numbers are whole, not of their arms."""
    table = select(table, {"counts": True, "is_arm": False})
    # a time of emulated arithmetic is the emulation's
    emulated = table["dtype"].eq("bfloat16") & table.device.str.contains("no native bfloat16")
    return table[~emulated.fillna(False)]


def check(place: str, cells: dict[str, Any], where: str) -> None:
    """UserError for a column that is none and a condition that cannot be asked."""
    if unknown := sorted(set(cells) - set(COLUMNS)):
        raise UserError(f"{place}: select: measurements have no column {', '.join(unknown)}")
    try:
        select(_nothing(), {}, where)
    except (NameError, SyntaxError, TypeError, ValueError) as error:
        raise UserError(f"{place}: where: {error}") from error


@cache
def _nothing() -> pd.DataFrame:
    return measurements(Runs())


def matches(cell: Any, wanted: Any) -> bool:
    """Whether a cell is what is wanted, one of a list, or what * stands for anything in."""
    if isinstance(wanted, list):
        return any(matches(cell, one) for one in wanted)
    return bool(cell == wanted) or (isinstance(cell, str) and isinstance(wanted, str) and fnmatchcase(cell, wanted))
