"""job=report: all records below runs_dir in one report, with a verdict on every claim of the paper.

Every table of the paper stands beside what was measured here, with intervals, seeds, command and commit of each line;
a cell that nothing fills says why. report.check=true fails where a published table, or the README, no longer follows
from its record.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from focus_exp.config import Config
from focus_exp.errors import UserError
from focus_exp.reporting.gather import gather
from focus_exp.reporting.published import stale
from focus_exp.reporting.run_index import write_pages
from focus_exp.reporting.run_page import PAGE
from focus_exp.reporting.whole_report import require_records, write_report_of


def report(config: Config) -> None:
    """Write it into `report.folder`; with `report.check`, fail where a published table does not follow any more."""
    runs = Path(config.runs_dir)
    if config.report.check:
        published = runs / "records" if (runs / "records").is_dir() else runs
        require_records(gather(published, config.scale.name), published)
        if wrong := stale(published, config.scale.name):
            raise UserError("\n  ".join([f"{len(wrong)} things do not follow from their records:", *wrong]))
        print(f"every published table below {published} follows from its record")
        return
    folder = Path(config.report.folder or runs / "report")
    ledger, written = write_report_of(runs, folder, config.scale.name)
    console = Console()
    console.width = max(console.width, 190)
    console.print(ledger.to_console())
    write_pages(runs)
    print(f"{len(written)} files in {folder}, of them report.md, report.tex and report.html")
    print(f"page: {runs / PAGE} lists all runs")
