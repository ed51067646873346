"""A table of text for plans and sweeps."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from focus_exp.reporting.format import ABSENT, to_markdown


@dataclass
class Table:
    """Cells as text in `rows`; the same numbers unrounded in `values`, one dict for each row, for CSV."""

    columns: list[str]
    rows: list[list[str]]
    name: str = "table"
    title: str = ""
    notes: list[str] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)

    def to_markdown(self) -> str:
        """Return title, pipe table and notes."""
        table = to_markdown(pd.DataFrame(self.rows, columns=self.columns))
        return f"### {self.title}\n\n{table}\n" + "".join(f"- {note}\n" for note in self.notes)

    def to_csv(self) -> str:
        """Return header and one line for each row; a missing number is an empty cell."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.values[0]) if self.values else self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.values)
        return text.getvalue()

    def to_console(self) -> Group:
        """Return a rich renderable."""
        table = RichTable(title=Text(self.title), title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(Text(column), justify="right" if index else "left", no_wrap=index == 0)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return Group(table, *(Text(f"  {note}", style="dim") for note in self.notes))


def share_text(share: float | None) -> str:
    """A share 0..1 in per cent."""
    return ABSENT if share is None else f"{100 * share:.1f} %"


def perplexity_text(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """Two decimals below 1000, none above; with its interval."""
    text = ABSENT if value is None else f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
    return text if low is None or high is None else f"{text} [{perplexity_text(low)}, {perplexity_text(high)}]"


def change_text(delta: float | None, low: float | None = None, high: float | None = None) -> str:
    """A difference of losses [nats per token] as a change of perplexity in per cent, with its interval."""
    if delta is None:
        return ABSENT
    value, *bounds = (
        f"{100 * math.expm1(min(bound, 700.0)):+.2f}" for bound in (delta, low, high) if bound is not None
    )
    return f"{value} % [{', '.join(bounds)}]" if len(bounds) == 2 else f"{value} %"


def duration_text(seconds: float | None) -> str:
    """40 s, 12 min, 3.4 h."""
    if seconds is None:
        return ABSENT
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
