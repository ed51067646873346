"""All records in one report: the claims, the paper's tables, seeds, traps, every run; Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

from pathlib import Path

from focus_exp.errors import UserError
from focus_exp.reporting.claims import claim_table, judged_runs, verdicts_table
from focus_exp.reporting.figure1 import FIGURE, points, write_pareto
from focus_exp.reporting.gather import Runs, gather
from focus_exp.reporting.measures import measurements
from focus_exp.reporting.pages import Section, latex_document, markdown, page
from focus_exp.reporting.paper_report import paper_report
from focus_exp.reporting.report import all_findings
from focus_exp.reporting.summary import summary
from focus_exp.reporting.table import Table
from focus_exp.reporting.trust import power_table, seeds_table, traps_table
from focus_exp.storage import replace_file

NAME = "report"
# tables of no record: which part of the report names them, and as what
MADE_APART = {
    "speed_gpu.md": ("Speed on a GPU", "Measured"),
}


def sections(runs: Runs, top: Path, folder: Path) -> list[Section]:
    """What the report in `folder` holds, in its order. top: what the runs lie below."""
    figures = [folder / "figures" / FIGURE] if points(runs) else []
    apart = {name: [*top.rglob(name)] for name in MADE_APART}
    seeds, ledger = seeds_table(runs), judged_runs(runs)
    differences = [(claim.says, verdict.line) for claim, verdict in ledger if verdict.line is not None]
    tables = paper_report(runs)
    beside = [
        Section("The paper's tables", table.title, [table], figures=figures if table is tables[-1] else [])
        for table in tables
    ]
    return [
        Section("Claims", "In short", [], summary(runs, ledger, [name for name, paths in apart.items() if paths])),
        Section("Claims", "The ledger", [verdicts_table(ledger), claim_table(ledger, runs)]),
        *beside,
        *(Section(*says, [], tables_in=path) for name, says in MADE_APART.items() for path in apart[name]),
        Section("How far to trust it", "Traps", [traps_table(runs)]),
        Section("How far to trust it", "Power", [power_table(differences)]),
        *([Section("How far to trust it", "Seeds", [seeds])] if seeds else []),
        *(
            Section(
                "Runs", place.relative_to(top).as_posix(), [], all_findings(record),
                sorted((place / "figures").glob("*.svg")), place / "table.md",
            )
            for place, record in runs.found
        ),
    ]  # fmt: skip


def require_records(runs: Runs, top: Path) -> Runs:
    """UserError where there are none."""
    if runs.arms and not runs.found:
        raise UserError(f"all records below {top} are of arms; run their comparison, without arm=")
    if not runs.found:
        raise UserError(f"there is no record.json below {top}; run an experiment first, or give runs_dir=")
    return runs


def write_report_of(top: Path, folder: Path, scale: str = "") -> tuple[Table, list[Path]]:
    """Write the report, a CSV of each table and the measurements into `folder`; returns the ledger and the files."""
    runs = require_records(gather(top, scale), top)
    write_pareto(points(runs), folder / "figures")
    parts = sections(runs, top, folder)
    written = report_files(parts, folder)
    if top.name != "records":  # what is committed can be made from the records
        written["measurements.csv"] = measurements(runs).to_csv(index=False)
    for name, text in written.items():
        replace_file(folder / name, text.encode())
    return parts[1].tables[-1], [folder / name for name in written]


def report_files(parts: list[Section], folder: Path) -> dict[str, str]:
    """Name -> text of the report in `folder`, and of a CSV of each of its tables."""
    tables = [table for part in parts for table in part.tables]
    pages = {"md": markdown(parts, folder), "tex": latex_document(parts), "html": page(parts, folder)}
    return {f"{NAME}.{kind}": text for kind, text in pages.items()} | {f"{t.name}.csv": t.to_csv() for t in tables}
