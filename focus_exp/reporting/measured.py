"""One line of the measurements, and how its value is said."""

from types import SimpleNamespace
from typing import Any

import pandas as pd

from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.reporting.formats import change_text, difference_text


class Line(SimpleNamespace):
    """A line of the measurements, by the names of COLUMNS; what is absent is None."""

    @property
    def change(self) -> str:
        """A difference of losses as a change of perplexity."""
        return change_text(self.value, self.low, self.high)

    @property
    def device_kind(self) -> str:
        """`cpu` of `cpu, 2 threads, float32`, as of a record."""
        return (self.device or "").partition(",")[0]

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
