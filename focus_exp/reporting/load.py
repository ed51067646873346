"""Load the measurements of all runs below a directory, and select rows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import pandas as pd
import yaml

from focus_exp.errors import UserError
from focus_exp.reporting.aggregate import Row, to_rows

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Results:
    """runs: one row for each run, by its name; measurements: one row for each run, subject and metric."""

    runs: pd.DataFrame
    measurements: pd.DataFrame
    is_quick: bool = False
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    def complete(self) -> pd.DataFrame:
        """Return the measurements of complete runs; variants as rows of their comparisons."""
        table = self.measurements
        return table[table.complete & ~table.is_variant]

    def rows_by_run(self) -> dict[str, list[Row]]:
        """Return the rows of every complete run, oldest first."""
        table = self.complete()
        return {str(run): to_rows(rows) for run, rows in table.groupby("run", sort=False)}

    def cached(self, make: Callable[[Results], T]) -> T:
        """Return make(self), made once."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    def minutes(self, runs: Iterable[str]) -> float | None:
        """Return the wall time of runs and of the variants of comparisons; None where one is unknown."""
        return None


def select(table: pd.DataFrame, cells: dict[str, Any], query: str = "") -> pd.DataFrame:
    """Return the rows with these cells: a value, one of a list, or a pattern with *; and on which `query` holds."""
    for column, wanted in cells.items():
        present = table[column].dropna().unique()
        table = table[table[column].isin([cell for cell in present if matches(cell, wanted)])]
    return table.query(query, engine="python") if query else table


def matches(cell: Any, wanted: Any) -> bool:
    """Return whether a cell equals `wanted`, one of a list, or a pattern with *."""
    if isinstance(wanted, list):
        return any(matches(cell, one) for one in wanted)
    return bool(cell == wanted) or (isinstance(cell, str) and isinstance(wanted, str) and fnmatchcase(cell, wanted))


@cache
def read_yaml(name: str) -> Any:
    """Return the content of a YAML file of this package. Raises UserError for malformed YAML."""
    try:
        return yaml.safe_load((files("focus_exp.reporting") / f"{name}.yaml").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{name}.yaml: {error}.") from error
