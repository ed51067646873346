"""Weights & Biases: mode, tables, figures and workspace; imported late."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from focus_exp.errors import UserError
from focus_exp.reporting.frame import filter_rows, to_rows
from focus_exp.reporting.load import Results
from focus_exp.reporting.report import display_table, methods_table, verdict_table
from focus_exp.reporting.run_report import RUN_TABLES, label_metric

CURVES = {"loss": "loss [nats per token]", "tokens_per_second": "tokens per second"}
PROBES = ("dominance", "dead_groups", "assignment_overlap")
OPEN = ("Claims and the paper's tables", "Frontier")  # sections
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
    for row in to_rows(filter_rows(results.rows, {"metric": [*SUMMARIZED]})):
        if row.value is not None:
            place = (row.variant, row.name, row.clock, row.tokens, row.metric, row.reference)
            summary["/".join(str(part) for part in place if part is not None)] = float(row.value)
    run.summary.update(summary)


def dashboard_tables(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return the report's tables as the report shows them, by the names of its CSV files; empty ones are left out."""
    text = {"claims": verdict_table, "methods": methods_table}
    text |= {name: display_table for name, table in tables.items() if "spec" in table.attrs}
    shown = {name: text[name](table) if name in text else table for name, table in tables.items()}
    return {name: table for name, table in shown.items() if not table.empty}


def build_workspace(entity: str, project: str, tables: Sequence[str], figures: Sequence[str]) -> Any:
    """Return a view of a project: the comparison tables and figures that job=dashboard logs, then curves of all runs.

    Args:
        tables: names of those that were logged, of `dashboard_tables`.
        figures: names of those that were logged, below figures/.

    Raises:
        UserError: without the extra `dashboard`.
    """
    try:
        from wandb_workspaces import workspaces as ws
        from wandb_workspaces.reports.v2 import Layout, LinePlot, MediaBrowser, WeavePanelSummaryTable
    except ImportError as error:
        raise UserError("job=dashboard needs wandb-workspaces. Run pip install 'focus_exp[dashboard]'.") from error

    def show_tables(names: Iterable[str]) -> list[Any]:
        return [WeavePanelSummaryTable(table_name=name, layout=Layout(w=24, h=10)) for name in names]

    paper = [name for name in tables if name == "claims" or name.startswith("paper_")]
    pictures = [
        MediaBrowser(title=name, media_keys=[f"figures/{name}"], num_columns=1, layout=Layout(w=24, h=14))
        for name in figures
    ]
    sections: dict[str, list[Any]] = {
        "Claims and the paper's tables": show_tables(paper),
        "Frontier": [*pictures, *show_tables(name for name in tables if name == "frontier")],
        "Training": [LinePlot(title=title, y=[f"train/{key}"]) for key, title in CURVES.items()],
        "Routing": [
            LinePlot(title=label_metric(key), y=[f"probe/{key}"], metric_regex=rf"probe/.*{key}$") for key in PROBES
        ],
        "Runs": show_tables(RUN_TABLES),
        "Further tables": show_tables(name for name in tables if name not in (*paper, "frontier")),
    }
    shown = [ws.Section(name=name, panels=panels, is_open=name in OPEN) for name, panels in sections.items()]
    runs = ws.RunsetSettings(groupby=[ws.Metric("Group")])
    return ws.Workspace(entity, project, "focus_exp: comparison tables", sections=shown, runset_settings=runs)
