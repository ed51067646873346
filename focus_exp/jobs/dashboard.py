"""job=dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from focus_exp.config import Config
from focus_exp.reporting.figures import write_report_figures
from focus_exp.reporting.load import load_results
from focus_exp.reporting.report import report_tables
from focus_exp.reporting.wandb import (
    build_report,
    build_workspace,
    log_tables,
    require_workspaces,
    wandb_mode,
    write_views,
)


def dashboard(config: Config) -> None:
    """Log the report's tables and figures as a W&B run with a saved workspace.

    Needs make install-dashboard. Without a server the workspace is written to runs/report/dashboard.
    """
    require_workspaces()
    import wandb

    runs = Path(config.runs_dir)
    folder = Path(config.report.folder or runs / "report") / "dashboard"
    results = load_results(runs, config.budget.name)
    tables = report_tables(results)
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
        print(
            f"W&B mode is {mode}: views are not saved. Set WANDB_API_KEY and run again with logger.wandb_entity=<you>."
        )
