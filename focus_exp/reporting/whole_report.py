"""All records in one report: the claims, the paper's tables, seeds, traps, every run; Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from focus_exp.errors import UserError
from focus_exp.records.record import Record
from focus_exp.reporting.claims import judged
from focus_exp.reporting.gather import QUICK, WANTED, Runs, gather, seeds_of
from focus_exp.reporting.latex import latex_document
from focus_exp.reporting.page import Section, page
from focus_exp.reporting.paper_report import paper_report
from focus_exp.reporting.figure1 import pareto_table, points, write_pareto
from focus_exp.reporting.report import all_tables
from focus_exp.reporting.seeds import seeds_table
from focus_exp.reporting.tables import ABSENT, Table
from focus_exp.reporting.traps import traps_table
from focus_exp.reporting.verdicts import RAN, VERDICTS
from focus_exp.storage import replace_file

NAME = "report"


def claim_table(runs: Runs) -> Table:
    """The ledger: one line a claim."""
    lines = judged(runs.records)
    counts = Counter(verdict.word for _, verdict in lines)
    return Table(
        columns=["table", "the paper says", "paper", "here", "verdict", "because", "seeds", "cost", "by"],
        rows=[
            [
                *(claim.table, claim.says, claim.paper, verdict.ours or ABSENT, verdict.word, verdict.why or ABSENT),
                *(str(len(seeds_of(verdict.records)) or ABSENT), _cost(runs, verdict.records)),
                "; ".join(map(_by, verdict.records)) or ABSENT,
            ]
            for claim, verdict in lines
        ],
        name="claims",
        title="Claims of arXiv 2604.03260, and what was found here",
        notes=[
            ", ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word]),
            *(
                [f"{RAN}: scale={QUICK} shows that everything runs; no number of it means anything"]
                if counts[RAN]
                else []
            ),
            "here: another base model, other text and a small budget wherever SUBSTITUTE stands under a table",
            "undecided: the interval includes no difference, or the records disagree; not engaged: the mask removed "
            "under 5 % of the pairs",
            f"several records of a claim have to agree on it; {WANTED} seeds are wanted, and with one the verdict is "
            "that seed's; cost: the time of the runs behind a verdict, all their arms included",
        ],
    )


def _by(record: Record) -> str:
    return f"{record.experiment} {record.config_hash}, seed {record.seed}, {(record.commit or 'no commit')[:7]}"


def _cost(runs: Runs, records: list[Record]) -> str:
    minutes = sum(runs.seconds(record) for record in records) / 60
    return f"{minutes:,.0f} min" if records else ABSENT


def sections(runs: Runs, top: Path, folder: Path) -> list[Section]:
    """What the report holds, in its order; draws its own figure into `folder`. top: what the runs lie below."""
    found = points(runs)
    figures = list(write_pareto(found, folder / "figures").values())
    seeds = seeds_table(runs)
    tables = [*paper_report(runs), pareto_table(found)]
    beside = [
        Section("The paper's tables", table.title, [table], figures=figures if table is tables[-1] else [])
        for table in tables
    ]
    return [
        Section("Claims", "The ledger", [claim_table(runs)]),
        *beside,
        Section("How far to trust it", "Traps", [traps_table(runs)]),
        *([Section("How far to trust it", "Seeds", [seeds])] if seeds else []),
        *(
            Section(
                "Runs", place.relative_to(top).as_posix(), all_tables(record), record.findings,
                sorted((place / "figures").glob("*.png")),
            )
            for place, record in runs.found
        ),
    ]  # fmt: skip


def require_records(runs: Runs, top: Path) -> Runs:
    """UserError where there are none."""
    if not runs.found:
        raise UserError(f"there is no record.json below {top}; run an experiment first, or give runs_dir=")
    return runs


def write_report_of(top: Path, folder: Path, scale: str = "") -> tuple[Table, list[Path]]:
    """Write report.md, .tex, .html and a CSV a table into `folder`; returns the ledger and the files."""
    runs = require_records(gather(top, scale), top)
    parts = sections(runs, top, folder)
    written = {
        f"{NAME}.md": markdown(parts),
        f"{NAME}.tex": latex_document([(part.title, part.tables) for part in parts]),
        f"{NAME}.html": page(parts, folder),
    }
    for part in parts:
        prefix = f"{part.title.replace('/', '-')}-" if part.part == "Runs" else ""
        written |= {f"{prefix}{table.name}.csv": table.to_csv() for table in part.tables}
    for name, text in written.items():
        replace_file(folder / name, text.encode())
    return parts[0].tables[0], [folder / name for name in written]


def markdown(parts: list[Section]) -> str:
    lines, above = [], ""
    for part in parts:
        lines += [f"# {part.part}", ""] if part.part != above else []
        lines += [f"## {part.title}", "", *(f"- {finding}" for finding in part.findings), ""]
        lines += [table.to_markdown() for table in part.tables]
        above = part.part
    return "\n".join(lines)
