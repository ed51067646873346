"""All records in one report: the claims, the paper's tables, seeds, traps, every run; Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

from pathlib import Path

from focus_exp.errors import UserError
from focus_exp.reporting.claims import claim_table
from focus_exp.reporting.figure1 import pareto_table, points, write_pareto
from focus_exp.reporting.gather import Runs, gather
from focus_exp.reporting.measures import measurements
from focus_exp.reporting.pages import Section, latex_document, markdown, page
from focus_exp.reporting.paper_report import paper_report
from focus_exp.reporting.report import all_findings
from focus_exp.reporting.tables import Table, all_tables
from focus_exp.reporting.trust import seeds_table, traps_table
from focus_exp.storage import replace_file

NAME = "report"


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
                "Runs", place.relative_to(top).as_posix(), all_tables(record), all_findings(record),
                sorted((place / "figures").glob("*.svg")),
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
    """Write the report, a CSV of each table and the measurements into `folder`; returns the ledger and the files."""
    runs = require_records(gather(top, scale), top)
    parts = sections(runs, top, folder)
    written = {
        f"{NAME}.md": markdown(parts),
        f"{NAME}.tex": latex_document(parts),
        f"{NAME}.html": page(parts, folder),
    }
    for part in parts:
        prefix = f"{part.title.replace('/', '-')}-" if part.part == "Runs" else ""
        written |= {f"{prefix}{table.name}.csv": table.to_csv() for table in part.tables}
    if top.name != "records":  # what is committed can be made from the records
        written["measurements.csv"] = measurements(runs).to_csv(index=False)
    for name, text in written.items():
        replace_file(folder / name, text.encode())
    return parts[0].tables[0], [folder / name for name in written]
