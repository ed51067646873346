"""job=report and job=dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from focus_exp.config import Config
from focus_exp.errors import UserError
from focus_exp.reporting.check import find_stale, renew
from focus_exp.reporting.figures import report_figures
from focus_exp.reporting.load import load_results
from focus_exp.reporting.pages import render_pages
from focus_exp.reporting.report import REPORT, report_tables, verdict_table, write_report
from focus_exp.reporting.wandb import build_workspace, log_tables, wandb_mode
from focus_exp.storage import replace_file


def report(config: Config) -> None:
    """Write the report of all runs below runs_dir, with a verdict on every claim of the paper.

    That of runs/records also fills in the numbers of README.md and docs/results.md, from docs/templates.
    report.check=true fails where one of these files no longer follows from the measurements.
    report.renew=true writes the tables and figures of every run again.
    """
    runs = Path(config.runs_dir)
    if config.report.check:
        records = runs / "records" if (runs / "records").is_dir() else runs
        if stale := find_stale(records, config.budget["name"]):
            raise UserError("\n  ".join([f"{len(stale)} published files are stale:", *stale]))
        print(f"every published table below {records} follows from its measurements")
        return
    if config.report.renew:
        renew(runs)
    tables = write_report(load_results(runs, config.budget["name"]), runs / REPORT)
    for page, text in render_pages(runs, tables).items():
        replace_file(page, text.encode())
    print(verdict_table(tables["claims"]).to_string(index=False))
    print(f"report: {runs / REPORT / 'report.md'}")


def dashboard(config: Config) -> None:
    """Log the report's tables and figures as a W&B run, and save a workspace on the server.

    Needs make install-dashboard.
    """
    import wandb

    runs, entity, project = Path(config.runs_dir), config.logger.wandb_entity, config.logger.wandb_project
    mode: Any = wandb_mode(config.logger.wandb)
    workspace = build_workspace(entity or "", project)
    tables = report_tables(load_results(runs, config.budget["name"]))
    live = wandb.init(
        project=project, entity=entity, dir=runs, mode=mode, name="report", group="report",
        job_type="report", settings=wandb.Settings(silent=True),
    )  # fmt: skip
    log_tables(live, tables, report_figures(tables))
    if mode == "online":
        workspace.entity = live.entity
        print(f"saved {workspace.save().url}")
    else:
        print(f"the workspace is not saved with logger.wandb={mode}. Run wandb login.")
    live.finish()
