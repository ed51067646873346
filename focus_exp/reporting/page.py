"""The report as one HTML page that opens from disk without a network; figures are linked where they lie."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from focus_exp.reporting.formats import NOT_RUN, VERDICTS
from focus_exp.reporting.tables import Table

TITLE = "focus_exp: report"
escape: Callable[[str], str] = html.escape
# notes that must not be folded away
LOUD = ("SUBSTITUTE", "This run", "failed")
MANY_NOTES = 3
LONG = 28  # characters
NUMBER = re.compile(r"[-+]?[\d,.]+( %|x)?( [\[(±].*)?")


@dataclass(frozen=True)
class Section:
    """A heading with what is under it. part: the heading above; figures: PNG files, with an SVG beside each."""

    part: str
    title: str
    tables: list[Table]
    findings: list[str] = field(default_factory=list)
    figures: list[Path] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", f"{self.part} {self.title}".lower()).strip("-")


def page(sections: list[Section], folder: Path) -> str:
    """The page, to be written into `folder`."""
    parts = list(dict.fromkeys(section.part for section in sections))
    contents, body = [], []
    for part in parts:
        own = [section for section in sections if section.part == part]
        links = "".join(f'<li><a href="#{s.anchor}">{escape(s.title)}</a></li>' for s in own)
        contents.append(f"<li>{escape(part)}<ol>{links}</ol></li>")
        body.append(f"<h2>{escape(part)}</h2>")
        body += [_section(section, folder) for section in own]
    style = (files("focus_exp.reporting") / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{TITLE}</title><style>\n{style}</style></head><body>\n"
        f"<nav><strong>{TITLE}</strong><ul>{''.join(contents)}</ul></nav>\n<main><h1>{TITLE}</h1>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _section(section: Section, folder: Path) -> str:
    said = "".join(f"<li>{escape(finding)}</li>" for finding in section.findings)
    findings = f'<ul class="findings">{said}</ul>' if said else ""
    figures = "".join(_figure(path, folder) for path in section.figures)
    tables = "".join(html_table(table, table.title != section.title) for table in section.tables)
    return f'<section id="{section.anchor}"><h3>{escape(section.title)}</h3>{findings}{tables}{figures}</section>'


def _figure(path: Path, folder: Path) -> str:
    drawn = path.with_suffix(".svg")
    source = escape(relative(drawn if drawn.exists() else path, folder))
    return (
        f'<figure><a href="{source}"><img src="{source}" alt="{escape(path.stem)}" loading="lazy"></a>'
        f"<figcaption>{escape(path.stem.replace('_', ' '))}</figcaption></figure>"
    )


def relative(path: Path, folder: Path) -> str:
    """`path` as a link from a file in `folder`."""
    return Path(os.path.relpath(path, folder)).as_posix()


def html_table(table: Table, titled: bool = True) -> str:
    head = "".join(f"<th{_class(_column(name))}>{escape(name)}</th>" for name in table.columns)
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{_class(_column(name), _kind(cell))}>{escape(cell)}</td>"
            for name, cell in zip(table.columns, row, strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    body = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    title = f"<h4>{escape(table.title)}</h4>" if titled else ""
    return f'{title}<div class="table"><table>{body}</table></div>{_notes(table.notes)}'


def _class(*names: str) -> str:
    known = " ".join(filter(None, names))
    return f' class="{known}"' if known else ""


def _column(name: str) -> str:
    return "paper" if name.endswith(": paper") or name == "paper" else ""


def _kind(cell: str) -> str:
    """What a cell is coloured or aligned by."""
    if cell in (*VERDICTS, NOT_RUN):
        return cell.replace(" ", "-")
    return "number" if NUMBER.fullmatch(cell) else "long" if len(cell) > LONG else ""


def _notes(notes: list[str]) -> str:
    loud = [note for note in notes if note.startswith(LOUD)]
    quiet = [note for note in notes if note not in loud]
    said = "".join(f'<li class="loud">{escape(note)}</li>' for note in loud)
    more = "".join(f"<li>{escape(note)}</li>" for note in quiet)
    if len(quiet) > MANY_NOTES:
        more = f"<li><details><summary>{len(quiet)} notes</summary><ul>{more}</ul></details></li>"
    return f'<ul class="notes">{said}{more}</ul>' if notes else ""
