"""Weights & Biases: mode, tables, figures and workspace; imported late."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pandas as pd

from focus_exp.errors import UserError
from focus_exp.reporting.load import Results
from focus_exp.reporting.run_report import RUN_TABLES, label_metric

CURVES = {"loss": "loss [nats per token]", "tokens_per_second": "tokens per second"}
PROBES = ("dominance", "dead_groups", "assignment_overlap")
FIGURES = ("frontier", "figure1", "speed")  # of job=dashboard
RUN_FIELDS = ("status", "seed", "commit", "config_hash", "device", "train_tokens", "steps", "seconds")
SUMMARIZED = ("perplexity", "nll", "nll_change", "speedup")


def wandb_mode(requested: str) -> str:
    """Return the mode for wandb.init; auto: WANDB_MODE if set, else online where a key is configured."""
    if mode := requested if requested != "auto" else os.environ.get("WANDB_MODE"):
        return mode
    import wandb

    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def init_options(config: dict[str, Any]) -> dict[str, Any]:
    """Return group, job type and tags for wandb.init; workspaces filter by them."""
    parts = (config.get(section) or {} for section in ("model", "attention", "recipe", "data", "budget"))
    variant, tags = config.get("variant"), [part["name"] for part in parts if part.get("name")]
    tags += [f"variant:{variant}"] if variant else []
    job_type = "variant" if variant else config.get("job")
    return {"group": config.get("experiment"), "job_type": job_type, "tags": [*tags, f"seed:{config.get('seed')}"]}


def log_tables(run: Any, tables: Mapping[str, pd.DataFrame], figures: Mapping[str, Any]) -> None:
    """Log tables as wandb.Table and Matplotlib figures as images to a live run."""
    import matplotlib.pyplot  # noqa: F401  # wandb.Image looks for it
    import wandb

    logged: dict[str, Any] = {f"figures/{name}": wandb.Image(figure) for name, figure in figures.items() if figure}
    for name, table in tables.items():
        rows = table.astype(object).where(table.notna(), None)
        columns: list[Any] = list(map(str, rows.columns))
        logged[name] = wandb.Table(columns=columns, data=rows.values.tolist(), allow_mixed_types=True)
    run.log(logged)


def log_run(run: Any, results: Results, tables: Mapping[str, pd.DataFrame]) -> None:
    """Log tables, metadata and main measurements of a finished run."""
    log_tables(run, tables, {})
    facts = results.runs.iloc[0]
    summary = {name: facts[name] for name in RUN_FIELDS if name in facts and not pd.isna(facts[name])}
    for row in results.rows:
        if row.metric in SUMMARIZED and row.value is not None:
            place = (row.variant, row.name, row.clock, row.tokens, row.metric, row.reference)
            summary["/".join(str(part) for part in place if part is not None)] = float(row.value)
    run.summary.update(summary)


def build_workspace(entity: str, project: str) -> Any:
    """Return a saved view of all runs: curves, probes, tables and figures.

    Raises:
        UserError: without the extra `dashboard`.
    """
    try:
        from wandb_workspaces import workspaces as ws
        from wandb_workspaces.reports.v2 import Layout, LinePlot, MediaBrowser, WeavePanelSummaryTable
    except ImportError as error:
        raise UserError("job=dashboard needs wandb-workspaces. Run pip install 'focus_exp[dashboard]'.") from error

    sections: dict[str, list[Any]] = {
        "Training": [LinePlot(title=title, y=[f"train/{key}"]) for key, title in CURVES.items()],
        "Routing": [
            LinePlot(title=label_metric(key), y=[f"probe/{key}"], metric_regex=rf"probe/.*{key}$") for key in PROBES
        ],
        "Tables": [WeavePanelSummaryTable(table_name=name, layout=Layout(w=24, h=10)) for name in RUN_TABLES],
        "Figures": [MediaBrowser(media_keys=[f"figures/{name}"], num_columns=2) for name in FIGURES],
    }
    shown = [ws.Section(name=name, panels=panels, is_open=name != "Figures") for name, panels in sections.items()]
    runs = ws.RunsetSettings(groupby=[ws.Metric("Group")])
    return ws.Workspace(entity, project, "focus_exp: runs by experiment", sections=shown, runset_settings=runs)
