"""Tables as LaTeX: a document that compiles, with booktabs and long tables."""

from __future__ import annotations

import unicodedata

from focus_exp.reporting.tables import Table

ESCAPES = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "→": r"$\to$", "←": r"$\gets$",
    "≤": r"$\leq$", "≥": r"$\geq$", "×": r"$\times$", "−": "-", "–": "--", "—": "---", "…": r"\dots{}",
    "‘": "`", "’": "'", "“": "``", "”": "''",
}  # fmt: skip
PREAMBLE = r"""\documentclass{article}
\usepackage[a3paper,landscape,margin=12mm]{geometry}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage{array,booktabs,longtable}
\setlength{\tabcolsep}{3pt}
\begin{document}
\footnotesize"""
# where a long word may end a line: paths, names, commands
BREAKS = (r"\_", "/", "=", "@")


def latex_document(sections: list[tuple[str, list[Table]]]) -> str:
    """Title and tables of each section."""
    parts = [PREAMBLE]
    for title, tables in sections:
        parts += [rf"\section*{{{escaped_latex(title)}}}", *map(latex_table, tables)]
    return "\n".join([*parts, r"\end{document}", ""])


def latex_table(table: Table) -> str:
    """A longtable of equally wide columns; it needs array, booktabs and longtable."""
    width = rf">{{\raggedright\arraybackslash}}p{{{0.94 / len(table.columns):.3f}\linewidth}}"
    lines = [" & ".join(map(_cell, row)) + r" \\" for row in [table.columns, *table.rows]]
    return "\n".join(
        [
            rf"% {' '.join(table.title.split())}", rf"\begin{{longtable}}{{{width * len(table.columns)}}}",
            rf"\caption{{{escaped_latex(table.title)}}}\\", r"\toprule", lines[0],
            r"\midrule", r"\endhead", *lines[1:], r"\bottomrule", r"\end{longtable}",
            *(rf"\noindent {escaped_latex(note)}\par" for note in table.notes), "",
        ]
    )  # fmt: skip


def _cell(text: str) -> str:
    escaped = escaped_latex(text)
    for mark in BREAKS:
        escaped = escaped.replace(mark, mark + r"\allowbreak{}")
    return escaped


def escaped_latex(text: str) -> str:
    """`text` in one line; characters that pdflatex lacks by their nearest Latin ones, else as a question mark."""
    return "".join(ESCAPES.get(character) or _latin(character) for character in " ".join(text.split()))


def _latin(character: str) -> str:
    if ord(character) < 256:
        return character
    near = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return near or "?"
