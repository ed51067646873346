"""Check that published tables follow from their measurements, and write them again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from focus_exp.reporting.load import load_results, load_run
from focus_exp.reporting.pages import fill_pages
from focus_exp.reporting.report import REPORT, check_report, render_markdown, report_tables
from focus_exp.reporting.run_report import TABLE, render_run, run_tables, write_run_report
from focus_exp.results.comparison import compare_variants
from focus_exp.results.losses import LOSSES, find_inconsistent, is_same_change, read_losses
from focus_exp.results.record import RECORD, Record


def find_stale(records: Path, budget: str = "") -> list[str]:
    """Return what no longer follows from the measurements below `records`.

    Checks the intervals against the losses, the table of each run, the tables of the report (within a tolerance),
    report.md, README.md and docs/results.md.
    """
    wrong = check_runs(sorted(path.parent for path in records.rglob(RECORD)))
    report = records / REPORT
    if report.is_dir():
        results = load_results(records, budget)
        tables = report_tables(results)
        wrong += [f"{report / name} does not follow from the measurements" for name in check_report(tables, report)]
        pages = {report / f"{REPORT}.md": render_markdown(results, tables)} | fill_pages(records, tables)
        for page, text in pages.items():
            if not page.exists() or page.read_text(encoding="utf-8") != text:
                wrong.append(f"{page} does not have the numbers of the measurements")
    return wrong


def check_runs(folders: list[Path]) -> list[str]:
    """Return the files of runs that do not follow from losses and measurements."""
    wrong = [
        f"{folder / RECORD}: {name} does not follow from {LOSSES}"
        for folder in folders
        for name in find_inconsistent_run(folder)
    ]
    for folder in folders:
        if (folder / TABLE).exists():
            results = load_run(folder)
            if (folder / TABLE).read_text(encoding="utf-8") != render_run(results, run_tables(results.rows)):
                wrong.append(f"{folder / TABLE} does not follow from its measurements")
    return wrong


def find_inconsistent_run(folder: Path) -> list[str]:
    """Return the measurements of a run that do not follow from its losses."""
    record = Record.load(folder / RECORD)
    if not record.variants:
        return find_inconsistent(record.measurements, read_losses(folder / LOSSES))
    again = replace(record, path=None)
    compare_variants(again, folder, record.config.get("references", []))
    made = {(m.variant, m.reference): m for m in again.measurements}
    changes = [m for m in record.measurements if m.metric == "nll_change"]
    return [
        f"{m.variant} against {m.reference}"
        for m in changes
        if not is_same_change(m, made.get((m.variant, m.reference)))
    ]


def renew(records: Path) -> None:
    """Write the tables and figures of all runs below `records` again."""
    for path in sorted(records.rglob(TABLE)):
        write_run_report(path.parent)
