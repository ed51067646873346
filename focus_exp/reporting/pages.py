"""The report as Markdown, as LaTeX that compiles, and as one HTML page that opens from disk without a network."""

from __future__ import annotations

import os
import re
import unicodedata
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path

from markupsafe import Markup

from focus_exp.reporting.formats import Word, line_text
from focus_exp.reporting.lines import grouped
from focus_exp.reporting.specs import render
from focus_exp.reporting.table import Table

TITLE = "focus_exp: report"
# notes that must not be folded away
LOUD = ("SUBSTITUTE", "This run", "failed")
LONG, LONGEST_NUMBER = 28, 48  # characters, from where on a cell wraps
ESCAPES = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "→": r"$\to$", "←": r"$\gets$",
    "≤": r"$\leq$", "≥": r"$\geq$", "×": r"$\times$", "−": "-", "–": "--", "—": "---", "…": r"\dots{}",
    "‘": "`", "’": "'", "“": "``", "”": "''",
}  # fmt: skip
# where a long word may end a line: paths, names, commands
BREAKS = (r"\_", "/", "=", "@")


@dataclass(frozen=True)
class Section:
    """A heading with what is under it.

    part: the heading above; figures: files, each of them an SVG or beside one; tables_in: the file that has its tables.
    """

    part: str
    title: str
    tables: list[Table]
    findings: list[str] = field(default_factory=list)
    figures: list[Path] = field(default_factory=list)
    tables_in: Path | None = None

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", f"{self.part} {self.title}".lower()).strip("-")


def markdown(sections: list[Section], folder: Path) -> str:
    """The report, to be written into `folder`."""
    return render("report.md", parts=grouped(sections, "part"), link=partial(relative, folder=folder))


def latex_document(sections: list[Section]) -> str:
    """Longtables of equally wide columns."""
    sections = [section for section in sections if section.tables]
    return render("report.tex", parts=grouped(sections, "part"), tex=latex_text, tex_cell=latex_cell)


def page(sections: list[Section], folder: Path) -> str:
    """The page, to be written into `folder`; figures are linked where they lie."""

    style = (files("focus_exp.reporting") / "page.css").read_text(encoding="utf-8")
    parts = grouped(sections, "part")
    link = partial(relative, folder=folder)
    return render("report.html", heading=TITLE, parts=parts, style=style, marked=marked, split=split, link=link)


def relative(path: Path, folder: Path) -> str:
    """`path` as a link from a file in `folder`; of a figure its SVG."""
    drawn = path.with_suffix(".svg") if path.suffix == ".png" else path
    return Path(os.path.relpath(drawn, folder)).as_posix()


def marked(column: str, cell: str) -> Markup:
    """The classes of a cell: what its column holds, and what it says itself."""
    kinds = column.split()
    if isinstance(cell, Word):
        kinds.append(cell.kind)
    elif len(cell) > (LONGEST_NUMBER if "number" in kinds else LONG):
        kinds = [*(kind for kind in kinds if kind != "number"), "long"]
    return Markup(f' class="{" ".join(kinds)}"' if kinds else "")


def split(notes: list[str]) -> tuple[list[str], list[str]]:
    """Those that must not be folded away, and the others."""
    loud = [note for note in notes if note.startswith(LOUD)]
    return loud, [note for note in notes if note not in loud]


def latex_cell(text: str) -> str:
    escaped = latex_text(text)
    for mark in BREAKS:
        escaped = escaped.replace(mark, mark + r"\allowbreak{}")
    return escaped


def latex_text(text: str) -> str:
    """`text` in one line; characters that pdflatex lacks by their nearest Latin ones, else as a question mark."""
    return "".join(ESCAPES.get(character) or _latin(character) for character in line_text(text))


def _latin(character: str) -> str:
    if ord(character) < 256:
        return character
    near = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return near or "?"
