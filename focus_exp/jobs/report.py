"""job=report."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from focus_exp.config import Config
from focus_exp.errors import UserError
from focus_exp.reporting.load import load_results
from focus_exp.reporting.publish import find_stale
from focus_exp.reporting.report import verdict_table, write_report


def report(config: Config) -> None:
    """Write the report of all runs below runs_dir, with a verdict on every claim of the paper.

    report.check=true fails where a published table, or a number of README.md, no longer follows from the measurements.
    """
    runs = Path(config.runs_dir)
    if config.report.check:
        records = runs / "records" if (runs / "records").is_dir() else runs
        if wrong := find_stale(records, config.budget.name):
            raise UserError("\n  ".join([f"{len(wrong)} published files are stale:", *wrong]))
        print(f"every published table below {records} follows from its measurements")
        return
    folder = Path(config.report.folder or runs / "report")
    claims = verdict_table(write_report(load_results(runs, config.budget.name), folder))
    table = Table(*claims.columns)
    for row in claims.itertuples(index=False):
        table.add_row(*row)
    Console(width=190).print(table)
    print(f"report: {folder / 'report.md'}")
