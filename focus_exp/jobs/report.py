"""job=report and job=dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from focus_exp.config import Config
from focus_exp.errors import UserError
from focus_exp.jobs.run import print_table
from focus_exp.reporting.figures import write_report_figures
from focus_exp.reporting.load import load_results
from focus_exp.reporting.publish import find_stale
from focus_exp.reporting.report import report_tables, verdict_table, write_report
from focus_exp.reporting.wandb import (
    build_report,
    build_workspace,
    log_tables,
    require_workspaces,
    wandb_mode,
    write_views,
)


def report(config: Config) -> None:
    """Write the report of all runs below runs_dir, with a verdict on every claim of the paper.

    report.check=true fails where a published table, or a number of README.md, no longer follows from the measurements.
    """
    runs = Path(config.runs_dir)
    if config.report.check:
        records = runs / "records" if (runs / "records").is_dir() else runs
        if stale := find_stale(records, config.budget["name"]):
            raise UserError("\n  ".join([f"{len(stale)} published files are stale:", *stale]))
        print(f"every published table below {records} follows from its measurements")
        return
    folder = Path(config.report.folder or runs / "report")
    print_table(verdict_table(write_report(load_results(runs, config.budget["name"]), folder)))
    print(f"report: {folder / 'report.md'}")


def dashboard(config: Config) -> None:
    """Log the report's tables and figures as a W&B run with a saved workspace.

    Needs make install-dashboard. Without a server the workspace is written to runs/report/dashboard.
    """
    require_workspaces()
    import wandb

    runs = Path(config.runs_dir)
    folder = Path(config.report.folder or runs / "report") / "dashboard"
    tables = report_tables(load_results(runs, config.budget["name"]))
    figures = write_report_figures(tables, folder / "figures")
    mode: Any = wandb_mode(config.logger.wandb)
    entity = config.logger.wandb_entity or (str(wandb.Api().default_entity) if mode == "online" else "your-entity")
    project = config.logger.wandb_project
    views = {"workspace": build_workspace(entity, project), "report": build_report(entity, project, list(tables))}
    for path in write_views(folder, views):
        print(f"wrote {path}")
    if mode != "disabled":
        live = wandb.init(
            project=project, entity=config.logger.wandb_entity, dir=folder, mode=mode, name="report", group="report",
            job_type="report", settings=wandb.Settings(silent=True),
        )  # fmt: skip
        log_tables(live, tables, figures)
        live.finish()
    if mode == "online":
        print("\n".join(f"saved {view.save().url}" for view in views.values()))
    else:
        print(f"views are not saved with logger.wandb={mode}. Set WANDB_API_KEY and type logger.wandb_entity=<you>.")
