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
from pathlib import Path

import pandas as pd

from focus_exp.errors import UserError
from focus_exp.reporting.load import read_yaml

PAGES = (Path("README.md"), Path("docs", "results.md"), Path("runs", "records", "conclusions.md"))
MARKER = re.compile(r"(<!--= (\w+)(.*?) -->)(.*?)(<!--/-->)", re.DOTALL)
NAMES: dict[str, str] = read_yaml("tables")["names"]


def fill(text: str, tables: Mapping[str, pd.DataFrame]) -> str:
    """Return a page with the numbers of these tables between its markers.

    Raises:
        UserError: a marker names a table, a column or a row that is not there, or several rows.
    """
    cells = {
        name: pd.read_csv(io.StringIO(table.to_csv(index=False)), dtype=str, keep_default_na=False)
        for name, table in tables.items()
    }

    def fill_marker(match: re.Match[str]) -> str:
        opening, name, arguments, content, closing = match.groups()
        conditions, *columns = re.split(r"\s*\|\s*", arguments)
        conditions, brace, form = conditions.partition("{")
        try:
            fixed = dict(word.split("=", 1) for word in shlex.split(conditions))
            if columns:
                return opening + fill_table(content, cells[name], fixed, columns) + closing
            return opening + look_up(cells[name], fixed, brace + form, content) + closing
        except (KeyError, ValueError) as error:
            raise UserError(f"{opening}: {error}") from error

    return MARKER.sub(fill_marker, text)


def fill_table(markdown: str, table: pd.DataFrame, fixed: dict[str, str], columns: list[str]) -> str:
    """Fill in the cells of a Markdown table whose columns are formats; keep the labels."""
    head, rule, *body = markdown.strip().splitlines()
    heads = [cell.strip() for cell in head.strip("| ").split("|")]
    columns = columns + columns[-1:] * (len(heads) - len(columns))
    lines = ["", head, rule]
    for line in body:
        labels = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
        row = fixed | {column: label for column, label in zip(columns, labels, strict=True) if "{" not in column}
        row.pop("", None)
        for index, (column, brace, form) in enumerate(column.partition("{") for column in columns):
            if brace:
                named = {column.strip(): heads[index]} if column.strip() else {}
                labels[index] = look_up(table, row | named, brace + form, labels[index])
        lines.append(f"| {' | '.join(labels)} |")
    return "\n".join([*lines, ""])


def look_up(table: pd.DataFrame, conditions: dict[str, str], form: str, current: str) -> str:
    """Format the one row whose columns have the values that these labels name."""
    for column, label in conditions.items():
        quoted = re.search("`(.*?)`", label)
        plain = quoted[1] if quoted else re.sub(r"(?<=\d),(?=\d)|[*¹²³‡]", "", label).strip()
        table = table[table[column] == NAMES.get(plain, plain)]
    if form == "{count}":
        return str(len(table))
    try:
        if len(table) != 1:
            raise ValueError(f"{len(table)} rows have {conditions}")
        text = form.format_map({name: parse_cell(cell) for name, cell in table.iloc[0].items()})
        return re.sub(r"(?<=\d)%", " %", text)
    except ValueError:
        if current == "-":
            return current
        raise


def parse_cell(cell: str) -> float | str:
    """Return the number of a cell, or its text."""
    try:
        return float(cell)
    except ValueError:
        return cell


def fill_pages(records: Path, tables: Mapping[str, pd.DataFrame]) -> dict[Path, str]:
    """Return the filled pages of the project whose runs are in `records` (<project>/runs/records)."""
    project = records.absolute().parent.parent
    pages = [project / page for page in PAGES if (project / page).exists()]
    return {page: fill(page.read_text(encoding="utf-8"), tables) for page in pages}
