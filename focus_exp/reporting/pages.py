"""Fill in the templates of README.md, docs/results.md and the conclusions from the tables of the report."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from focus_exp.errors import UserError
from focus_exp.reporting.format import to_percent

TEMPLATES = Path("docs", "templates")
PAGES = {"README.md.j2": Path("README.md"), "results.md.j2": Path("docs", "results.md")}
WIDTH = 120
VERBATIM = ("|", "#", "!", "<", "```")  # first characters of lines that are not of a paragraph
ITEM = re.compile(r"\s*(?:- |\d+\. )")
HEADER = "<!-- Written from docs/templates/{} by job=report runs_dir=runs/records: edit the template. -->\n"


class Tables:
    """Look up rows of the report's tables, by name, and of the GPU measurements below `records`."""

    def __init__(self, tables: dict[str, pd.DataFrame], records: Path) -> None:
        self.tables = tables | {"gpu": read_gpu_rows(records / "gpu")}

    def rows(self, table: str, **conditions: Any) -> list[dict[str, Any]]:
        """Return the rows whose columns have these values.

        Raises:
            UserError: there is no such table or column.
        """
        if table not in self.tables:
            raise UserError(f"{table} is not a table of the report. Use one of: {', '.join(sorted(self.tables))}.")
        found = self.tables[table]
        for column, value in conditions.items():
            if column not in found:
                raise UserError(f"{column} is not a column of {table}. Use one of: {', '.join(found.columns)}.")
            found = found[found[column] == value]
        return found.to_dict("records")

    def row(self, table: str, **conditions: Any) -> dict[str, Any]:
        """Return the only row whose columns have these values.

        Raises:
            UserError: none has them, or several have.
        """
        found = self.rows(table, **conditions)
        if len(found) != 1:
            raise UserError(f"{len(found)} rows of {table} have {conditions}. Name values that one row has alone.")
        return found[0]


def read_gpu_rows(folder: Path) -> pd.DataFrame:
    """Return the rows of all files of `make gpu`, with the name of their file."""
    files = sorted(folder.glob("*.json"))
    return pd.DataFrame(
        [{"file": path.stem, **row} for path in files for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    )


def fixed(value: float, digits: int = 1) -> str:
    """Format a number: 1,234.5."""
    return f"{value:,.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """Format a change: +1.0."""
    return f"{value:+,.{digits}f}"


def percent(fraction: float, digits: int = 1) -> str:
    """Format a fraction in per cent, without the sign: 75.8."""
    return fixed(100 * fraction, digits)


def interval(row: dict[str, Any], unit: str = "") -> str:
    """Format a row's change and its interval: +1.0 % [0.5, 1.5]."""
    return f"{signed(row['change'])}{unit} [{fixed(row['low'])}, {fixed(row['high'])}]"


def render(path: Path, tables: Tables) -> str:
    """Fill a template in; those of its folder can be imported.

    Raises:
        UserError: it asks for a row that is not in the tables, or is not a template.
    """
    environment = Environment(
        loader=FileSystemLoader(path.parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters |= {f.__name__: f for f in (fixed, signed, percent, interval, to_percent)}
    environment.globals |= {"row": tables.row, "rows": tables.rows}
    try:
        return environment.get_template(path.name).render()
    except (UserError, TemplateError) as error:
        raise UserError(f"{path}: {error}") from error


def wrap(text: str) -> str:
    """Wrap the paragraphs and list items of Markdown."""
    lines: list[str] = []
    paragraph: list[str] = []
    is_code = False
    for line in [*text.splitlines(), ""]:
        is_code ^= line.startswith("```")
        is_verbatim = is_code or not line.strip() or line.startswith(VERBATIM)
        if paragraph and (is_verbatim or ITEM.match(line)):
            item = ITEM.match(paragraph[0])
            indent = " " * (item.end() if item else 0)
            joined = " ".join(part.strip() for part in paragraph)
            lines += textwrap.wrap(
                joined.replace(" %", "\0%"), WIDTH, subsequent_indent=indent,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
            paragraph = []
        (lines if is_verbatim else paragraph).append(line)
    return "\n".join(lines).replace("\0", " ")  # a number and its sign stay together


def render_pages(records: Path, tables: dict[str, pd.DataFrame]) -> dict[Path, str]:
    """Return the text of each page that the project of `records` (<project>/runs/records) has a template of."""
    project, numbers = records.absolute().parent.parent, Tables(tables, records)
    templates = {project / page: project / TEMPLATES / name for name, page in PAGES.items()}
    return {
        page: HEADER.format(template.name) + wrap(render(template, numbers))
        for page, template in templates.items()
        if template.exists()
    }
