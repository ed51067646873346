"""job=dashboard: the report's tables and figures as a W&B run, with workspaces and a report that show them.

Needs make install-dashboard. The views are pushed where a server is reachable, else written to runs/report/dashboard.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from focus_exp.config import Config
from focus_exp.reporting.figure1 import points, write_pareto
from focus_exp.reporting.gather import gather
from focus_exp.reporting.tables import all_tables
from focus_exp.reporting.wandb import log_tables, wandb_mode
from focus_exp.reporting.whole_report import require_records, sections
from focus_exp.reporting.workspace import REPORT, need_library, push, report, workspaces, write_specs

NOWHERE = "your-entity"


def dashboard(config: Config) -> None:
    """Push them where a server is reachable; everywhere else write them to disk, and say how to push them."""
    need_library()
    top = Path(config.runs_dir)
    folder = Path(config.report.folder or top / "report") / "dashboard"
    runs = require_records(gather(top, config.scale.name), top)
    tables = [table for part in sections(runs, top, folder) for table in part.tables]
    experiments: dict[str, list[str]] = {}
    for record in runs.records:
        names = experiments.setdefault(record.experiment, [])
        names += [table.name for table in all_tables(record) if table.name not in names]
    figures = write_pareto(points(runs), folder / "figures")
    mode, project = wandb_mode(config.logger.wandb), config.logger.wandb_project
    entity = config.logger.wandb_entity or (default_entity() if mode == "online" else NOWHERE)
    views = workspaces(entity, project)
    written = report(entity, project, experiments, [table.name for table in tables])
    paths = write_specs(folder, views, written)
    logged = log_report(tables, figures, folder, mode, project, entity)
    print("\n".join(f"wrote {path}" for path in paths))
    if mode == "online":
        print("\n".join(f"pushed {address}" for address in push(views, written)))
        return
    print(f"{len(tables)} tables and {len(figures)} figures are in the W&B run {logged}" if logged else "no W&B run")
    print(
        "No W&B server was used (logger.wandb="
        f"{config.logger.wandb}, which is {mode} here). Where one can be reached: set WANDB_API_KEY, send the runs "
        f"with `wandb sync --include-offline {top}/**/wandb/offline-run-*`, and run this command again with "
        f"logger.wandb_entity=<entity>; the files are what it will send, for the entity {entity}."
    )


def default_entity() -> str:
    import wandb

    return str(wandb.Api().default_entity)


def log_report(
    tables: list[Any], figures: dict[str, Path], folder: Path, mode: str, project: str, entity: str
) -> str | None:
    """A W&B run with the tables of the report; returns its folder, None with W&B disabled."""
    if mode == "disabled":
        return None
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    live = wandb.init(
        project=project,
        entity=os.environ.get("WANDB_ENTITY") if entity == NOWHERE else entity,
        dir=folder,
        mode=mode,  # type: ignore[arg-type]
        name=REPORT,
        group=REPORT,
        job_type=REPORT,
        settings=wandb.Settings(silent=True),
    )
    log_tables(live, tables, figures)
    place = live.dir
    live.finish()
    return str(Path(place).parent)
