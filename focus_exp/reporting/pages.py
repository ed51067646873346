"""Fill in the numbers of pages that are written by hand, from the tables of the report.

A number stands between a marker and <!--/-->. The marker names a table, the cells of one row, and a format:

    <!--= frontier variant=dual_20 tokens=4096 {change:+.1f} -->+1.0<!--/-->

Before a Markdown table it gives, for each of its columns, either the report's column that the labels name, or a format;
the last one serves for all columns that remain. A column before a format is named by the head of the Markdown column.

    <!--= frontier tokens=4096 | variant | model {change:+.1f} -->

Of a label counts what is in backticks, if there are any. A cell with `-` may lack its row. {count} counts rows.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pandas as pd

from focus_exp.errors import UserError
from focus_exp.reporting.frame import read_yaml

PAGES = (Path("README.md"), Path("docs", "results.md"), Path("runs", "records", "conclusions.md"))
MARKER = re.compile(r"(<!--= (\w+)(.*?) -->)(.*?)(<!--/-->)", re.DOTALL)


class Cell(str):
    """Text of a cell; a number where a format is given, and never empty."""

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec or not self else str(self)


def fill(text: str, tables: Mapping[str, pd.DataFrame]) -> str:
    """Return a page with the numbers of these tables between its markers.

    Raises:
        UserError: a marker names a table, a column or a row that is not there, or several rows.
    """

    @cache
    def read(name: str) -> pd.DataFrame:
        return pd.read_csv(io.StringIO(tables[name].to_csv(index=False)), dtype=str, keep_default_na=False)

    def fill_marker(match: re.Match[str]) -> str:
        opening, name, arguments, content, closing = match.groups()
        conditions, *columns = re.split(r"\s*\|\s*", arguments)
        conditions, brace, form = conditions.partition("{")
        try:
            row = dict(word.split("=", 1) for word in shlex.split(conditions))
            if columns:
                return opening + fill_table(content, read(name), row, columns) + closing
            return opening + look_up(read(name), row, brace + form, content) + closing
        except (KeyError, ValueError) as error:
            raise UserError(f"{opening}: {error}") from error

    return MARKER.sub(fill_marker, text)


def fill_table(markdown: str, table: pd.DataFrame, fixed: dict[str, str], columns: list[str]) -> str:
    """Fill in the cells of a Markdown table whose columns are formats; keep the labels."""
    head, rule, *body = markdown.strip().splitlines()
    heads, *rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in (head, *body)]
    columns = columns + columns[-1:] * (len(heads) - len(columns))
    lines = ["", head, rule]
    for cells in rows:
        row = fixed | {name: cell for name, cell in zip(columns, cells, strict=True) if "{" not in name}
        for index, (name, brace, form) in enumerate(column.partition("{") for column in columns):
            if brace:
                cells[index] = look_up(table, row | {name.strip(): heads[index]}, brace + form, cells[index])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def look_up(table: pd.DataFrame, conditions: dict[str, str], form: str, current: str) -> str:
    """Format the one row whose columns have the values that these labels name; a column without a name has none."""
    names = read_yaml("tables")["names"]
    for column in filter(None, conditions):
        quoted = re.search("`(.*?)`", conditions[column])
        label = quoted[1] if quoted else re.sub(r"(?<=\d),(?=\d)|[*¹²³‡]", "", conditions[column]).strip()
        table = table[table[column].str.removesuffix(".0").isin([label, names.get(label)])]
    if form == "{count}":
        return str(len(table))
    try:
        if len(table) != 1:
            raise ValueError(f"{len(table)} rows have {conditions}")
        return re.sub(r"(?<=\d)%", " %", form.format_map({name: Cell(cell) for name, cell in table.iloc[0].items()}))
    except ValueError:
        if current == "-":
            return current
        raise


def fill_pages(records: Path, tables: Mapping[str, pd.DataFrame]) -> dict[Path, str]:
    """Return the filled pages of the project whose runs are in `records`, <project>/runs/records; none elsewhere."""
    *project, runs, name = records.absolute().parts
    pages = [Path(*project, page) for page in PAGES] if (runs, name) == ("runs", "records") else []
    return {page: fill(page.read_text(encoding="utf-8"), tables) for page in pages if page.exists()}
