"""A table, whatever it is of: Markdown to read, CSV to compute with, the console to look at."""

import csv
import io
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from focus_exp.reporting.specs import render


@dataclass
class Table:
    """Cells as read by people in `rows`; the same numbers unrounded in `values`, one dict per row, for CSV.

    `name` tells the tables of one record apart, for instance as files. kinds: what a page shows of a column by its
    heading: "number", "paper", "paper number".
    """

    columns: list[str]
    rows: list[list[str]]
    name: str = "table"
    title: str = ""
    notes: list[str] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)

    def to_markdown(self) -> str:
        """Title, pipe table, notes as a list."""
        return render("table.md", table=self)

    def to_csv(self) -> str:
        """Header and one line per row with full-precision numbers; an absent number is an empty cell."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.values[0]) if self.values else self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.values)
        return text.getvalue()

    def to_console(self) -> Group:
        """A rich renderable: `Console().print(table.to_console())`."""
        table = RichTable(title=Text(self.title), title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(Text(column), justify="right" if index else "left", no_wrap=index == 0)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return Group(table, *(Text(f"  {note}", style="dim") for note in self.notes))


def column_kinds(headings: list[str]) -> dict[str, str]:
    """Kinds of columns of numbers that are of the paper or from here, as "PPL: paper" says."""
    sides = {"paper": "paper number", "here": "number"}
    return {name: sides[side] for name in headings if (side := name.rpartition(": ")[2]) in sides}
