"""All records in one report: the claims with their verdicts, then every table; Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from focus_exp.errors import UserError
from focus_exp.reporting.claims import judged
from focus_exp.reporting.record import Record, replace_file
from focus_exp.reporting.report import all_findings, all_tables
from focus_exp.reporting.tables import ABSENT, Table
from focus_exp.reporting.verdicts import VERDICTS

NAME = "report"
LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "→": r"$\to$",
}  # fmt: skip
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}th,td{padding:.3rem .6rem;
border-bottom:1px solid #ddd;text-align:left;vertical-align:top}th{border-bottom:2px solid #444}
ul{color:#555;font-size:13px}h2{margin-top:2.5rem}figure{margin:1rem 0}img{max-width:100%}"""


@dataclass(frozen=True)
class Section:
    """A record's part of the report, under its folder relative to the runs."""

    place: str
    record: Record
    tables: list[Table]


def find_records(runs: Path) -> list[tuple[Path, Record]]:
    """Folder and record of every run below `runs`, oldest first; a run that was copied into records/ counts once.

    The arms of a comparison are in its own record. UserError for a record that cannot be read.
    """
    found: dict[tuple[str, str, str], tuple[Path, Record]] = {}
    # committed copies first: they are what a report should point at
    for path in sorted(runs.rglob("record.json"), key=lambda path: ("records" not in path.parts, str(path))):
        record = Record.load(path)
        if record.config.get("arm"):
            continue
        found.setdefault((record.experiment, record.config_hash, record.started), (path.parent, record))
    return sorted(found.values(), key=lambda pair: pair[1].started)


def claim_table(records: list[Record]) -> Table:
    """The ledger: one line a claim."""
    lines = judged(records)
    counts = Counter(verdict.word for _, verdict in lines)
    return Table(
        columns=["table", "the paper says", "paper", "here", "verdict", "because", "by"],
        rows=[
            [
                *(claim.table, claim.says, claim.paper, verdict.ours or ABSENT, verdict.word, verdict.why or ABSENT),
                "; ".join(
                    f"{r.experiment} {r.config_hash}, seed {r.seed}, {(r.commit or 'no commit')[:7]}"
                    for r in verdict.records
                )
                or ABSENT,
            ]
            for claim, verdict in lines
        ],
        name="claims",
        title="Claims of arXiv 2604.03260, and what was found here",
        notes=[
            ", ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word]),
            "here: another base model, other text and a small budget wherever SUBSTITUTE stands under a table",
            "undecided: the interval includes no difference, or the records disagree; not engaged: the mask removed "
            "under 5 % of the pairs",
        ],
    )


def sections(found: list[tuple[Path, Record]], runs: Path) -> list[Section]:
    return [Section(folder.relative_to(runs).as_posix(), record, all_tables(record)) for folder, record in found]


def write_report_of(runs: Path, folder: Path) -> tuple[Table, list[Path]]:
    """Write report.md, .tex, .html and a CSV a table into `folder`; returns the ledger and the files."""
    found = find_records(runs)
    if not found:
        raise UserError(f"there is no record.json below {runs}; run an experiment first, or give runs_dir=")
    ledger, parts = claim_table([record for _, record in found]), sections(found, runs)
    written = {
        f"{NAME}.md": markdown(ledger, parts),
        f"{NAME}.tex": latex(ledger, parts),
        f"{NAME}.html": page(ledger, parts, [f for f, _ in found], folder),
        "claims.csv": ledger.to_csv(),
    }
    for part in parts:
        written |= {f"{part.place.replace('/', '-')}-{table.name}.csv": table.to_csv() for table in part.tables}
    for name, text in written.items():
        replace_file(folder / name, text.encode())
    return ledger, [folder / name for name in written]


def stale(runs: Path) -> list[str]:
    """What no longer follows from its record below `runs`: published tables, and findings."""
    said = []
    for path in sorted(runs.rglob("record.json")):
        record, published = Record.load(path), path.parent / "table.md"
        if not published.exists() or record.status != "finished":
            continue
        if published.read_text(encoding="utf-8") != "\n".join(table.to_markdown() for table in all_tables(record)):
            said.append(f"{published} does not follow from its record")
        if record.findings != all_findings(record):
            said.append(f"{path}: its findings do not follow from its numbers")
    return said


def markdown(ledger: Table, parts: list[Section]) -> str:
    lines = [ledger.to_markdown()]
    for part in parts:
        lines += [f"## {part.place}", "", *(f"- {finding}" for finding in part.record.findings), ""]
        lines += [table.to_markdown() for table in part.tables]
    return "\n".join(lines)


def latex(ledger: Table, parts: list[Section]) -> str:
    """A file to \\input; it needs the packages booktabs and longtable."""
    return "\n".join(latex_table(table) for table in [ledger, *(table for part in parts for table in part.tables)])


def latex_table(table: Table) -> str:
    width = f"p{{{0.95 / len(table.columns):.3f}\\linewidth}}"
    lines = [" & ".join(map(escaped_latex, row)) + r" \\" for row in [table.columns, *table.rows]]
    return "\n".join(
        [
            rf"% {' '.join(table.title.split())}", rf"\begin{{longtable}}{{{width * len(table.columns)}}}",
            rf"\caption{{{escaped_latex(table.title)}}}\\", r"\toprule", lines[0], r"\midrule", r"\endhead",
            *lines[1:], r"\bottomrule", r"\end{longtable}", "",
        ]
    )  # fmt: skip


def escaped_latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in " ".join(text.split()))


def page(ledger: Table, parts: list[Section], folders: list[Path], target: Path) -> str:
    """One page that opens from disk without a network; figures are linked where they lie."""
    escape: Callable[[str], str] = html.escape
    body = ["<h1>focus_exp: report</h1>", html_table(ledger)]
    for part, folder in zip(parts, folders, strict=True):
        findings = "".join(f"<li>{escape(finding)}</li>" for finding in part.record.findings)
        body += [f"<h2>{escape(part.place)}</h2>", f"<ul>{findings}</ul>", *map(html_table, part.tables)]
        for figure in sorted((folder / "figures").glob("*.png")):
            source = relative(figure, target)
            body.append(f'<figure><img src="{escape(source)}" alt="{escape(figure.stem)}" loading="lazy"></figure>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>focus_exp: report</title>'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def relative(path: Path, folder: Path) -> str:
    """`path` as a link from a file in `folder`."""
    return Path(os.path.relpath(path, folder)).as_posix()


def html_table(table: Table) -> str:
    escape: Callable[[str], str] = html.escape
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return (
        f"<h3>{escape(table.title)}</h3><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"<ul>{notes}</ul>"
    )
