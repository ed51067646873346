"""Lines of the measurements: how an entry of a data file chooses them, and what it may say of them."""

from fnmatch import fnmatchcase
from functools import cache
from types import SimpleNamespace
from typing import Any

import pandas as pd

from focus_exp.errors import UserError
from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.reporting.formats import change_text, difference_text
from focus_exp.reporting.gather import Runs
from focus_exp.reporting.measures import COLUMNS, measurements


class Line(SimpleNamespace):
    """A line of the measurements, by the names of COLUMNS; what is absent is None."""

    @property
    def change(self) -> str:
        """A difference of losses as a change of perplexity."""
        return change_text(self.value, self.low, self.high)

    @property
    def turned(self) -> str:
        """The same the other way round: theirs from ours."""
        return change_text(*(None if bound is None else -bound for bound in (self.value, self.high, self.low)))

    @property
    def score(self) -> str:
        """A difference of scores, in the unit of its metric."""
        bounds = {"difference": self.value, "difference_low": self.low, "difference_high": self.high}
        return difference_text(BenchmarkRow(attention="", kind="hard", task="", metric=self.metric, **bounds))

    score_name: Any = BenchmarkRow.scored_as


def lines_of(table: pd.DataFrame) -> list[Line]:
    cells = zip(*([None if cell is pd.NA else cell for cell in table[name].tolist()] for name in table), strict=True)
    return [Line(**dict(zip(table, line, strict=True))) for line in cells]


def select(table: pd.DataFrame, cells: dict[str, Any], where: str = "") -> pd.DataFrame:
    """The lines with these cells, one of a list or what * stands for anything in, and on which the condition holds."""
    for column, wanted in cells.items():
        there = table[column].dropna().unique()
        table = table[table[column].isin([cell for cell in there if matches(cell, wanted)])]
    return table.query(where, engine="python") if where else table


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
