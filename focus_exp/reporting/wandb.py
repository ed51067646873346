"""Weights & Biases: mode, tables, figures and workspace; imported late."""

from __future__ import annotations

import http.client
import netrc
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import SplitResult, urlsplit

import pandas as pd

from focus_exp.errors import UserError
from focus_exp.reporting.format import is_missing
from focus_exp.reporting.load import load_run
from focus_exp.storage import replace_file

MODES = ("online", "offline", "disabled", "shared")
CURVES = {
    "loss": "loss [nats per token]",
    "val_loss": "validation loss [nats per token]",
    "tokens_per_second": "tokens per second",
}
PROBES = {"dominance": "largest group", "dead_groups": "empty groups", "stability": "assignment stability"}
RUN_TABLES = ("Quality", "Benchmarks", "Speed", "Routing", "Groups", "Cost by word class", "Generation")
FIGURES = ("loss_curve", "perplexity_by_position", "router_load")
RUN_FIELDS = ("status", "seed", "commit", "config_hash", "device", "train_tokens", "steps", "seconds")
SUMMARIZED = ("perplexity", "nll", "nll_change", "speedup")


def wandb_mode(requested: str, timeout: float = 2.0) -> str:
    """Return the mode for wandb.init, after at most about `timeout` seconds.

    auto: WANDB_MODE if set; else online if a key is configured and the server answers, else offline.
    """
    mode = requested if requested != "auto" else os.environ.get("WANDB_MODE")
    if mode:
        if mode not in MODES:
            raise UserError(f"logger.wandb must be auto, online, offline or disabled (got {mode}).")
        return mode
    import wandb

    server = urlsplit(wandb.setup().settings.base_url)
    return "online" if _has_key(server) and _answers(server, timeout) else "offline"


def _has_key(server: SplitResult) -> bool:
    try:
        keys = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        keys = None
    return bool(os.environ.get("WANDB_API_KEY") or (keys and keys.authenticators(server.hostname or "")))


def _answers(server: SplitResult, timeout: float) -> bool:
    """Return whether the server answers HTTP; a proxy accepts any TCP connection."""
    connect = http.client.HTTPSConnection if server.scheme == "https" else http.client.HTTPConnection
    statuses: list[int] = []

    def probe() -> None:
        try:
            connection = connect(server.hostname or "", server.port, timeout=timeout)
            connection.request("GET", "/")
            statuses.append(connection.getresponse().status)
        except (OSError, http.client.HTTPException):
            return

    thread = threading.Thread(target=probe, daemon=True)  # name look-ups ignore socket timeouts
    thread.start()
    thread.join(timeout)
    return any(status < 500 for status in statuses)


def init_options(config: dict[str, Any]) -> dict[str, Any]:
    """Return group, job type and tags for wandb.init; workspaces filter by them."""
    parts = (config.get(section) or {} for section in ("model", "attention", "recipe", "data", "budget"))
    variant, tags = config.get("variant"), [part["name"] for part in parts if part.get("name")]
    tags += [f"variant:{variant}"] if variant else []
    job_type = "variant" if variant else config.get("job")
    return {"group": config.get("experiment"), "job_type": job_type, "tags": [*tags, f"seed:{config.get('seed')}"]}


def log_tables(run: Any, tables: Mapping[str, pd.DataFrame], figures: Mapping[str, Path]) -> None:
    """Log tables as wandb.Table and figures as images to a live run."""
    import wandb

    logged: dict[str, Any] = {f"figures/{name}": wandb.Image(str(path)) for name, path in figures.items()}
    for name, table in tables.items():
        rows = table.astype(object).where(table.notna(), None)
        columns: list[Any] = list(map(str, rows.columns))
        logged[name] = wandb.Table(columns=columns, data=rows.values.tolist(), allow_mixed_types=True)
    run.log(logged)


def log_run(run: Any, run_dir: Path, tables: Mapping[str, pd.DataFrame], figures: Mapping[str, Path]) -> None:
    """Log tables, figures, metadata and main measurements of a finished run."""
    log_tables(run, tables, figures)
    results = load_run(run_dir)
    facts = results.runs.iloc[0]
    summary = {name: facts[name] for name in RUN_FIELDS if name in facts and not is_missing(facts[name])}
    for row in results.rows:
        if row.metric in SUMMARIZED and row.value is not None:
            place = (row.variant, row.name, row.clock, row.tokens, row.metric, row.reference)
            summary["/".join(str(part) for part in place if part is not None)] = float(row.value)
    run.summary.update(summary)


# --- a workspace and a report, for job=dashboard ---


def require_workspaces() -> None:
    """Raise UserError without the extra `dashboard`."""
    try:
        import wandb_workspaces  # noqa: F401
    except ImportError as error:
        raise UserError("job=dashboard needs wandb-workspaces. Run pip install 'focus_exp[dashboard]'.") from error


def build_workspace(entity: str, project: str) -> Any:
    """Return a saved view of all runs: curves, probes, tables and figures."""
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports.v2 import LinePlot, MediaBrowser

    sections = {
        "Training": [LinePlot(title=title, y=[f"train/{key}"]) for key, title in CURVES.items()],
        "Routing": [
            LinePlot(title=title, y=[f"probe/{key}"], metric_regex=rf"probe/.*{key}$") for key, title in PROBES.items()
        ],
        "Tables": _table_panels(RUN_TABLES),
        "Figures": [MediaBrowser(media_keys=[f"figures/{name}"], num_columns=2) for name in FIGURES],
    }
    runs = ws.RunsetSettings(
        groupby=[ws.Metric("Group")], order=[ws.Ordering(ws.Metric("CreatedTimestamp"), ascending=False)]
    )
    shown = [ws.Section(name=name, panels=panels, is_open=name != "Figures") for name, panels in sections.items()]
    settings = ws.WorkspaceSettings(max_runs=20)
    return ws.Workspace(
        entity, project, "focus_exp: runs by experiment", sections=shown, settings=settings, runset_settings=runs
    )


def build_report(entity: str, project: str, tables: list[str]) -> Any:
    """Return a W&B report with claims and paper tables of the latest dashboard."""
    from wandb_workspaces.reports import v2 as wr

    runs = wr.Runset(entity, project, name="report", filters="JobType == 'report'")
    panels = [*_table_panels(tables), wr.MediaBrowser(media_keys=["figures/frontier", "figures/figure1"])]
    blocks: list[Any] = [wr.H1("Claims and the paper's tables"), wr.PanelGrid(runsets=[runs], panels=panels)]
    title, description = "focus_exp", "Learned sparse attention: measurements next to the paper's numbers"
    return wr.Report(project=project, entity=entity, title=title, description=description, blocks=blocks, width="fluid")


def _table_panels(names: Any) -> list[Any]:
    from wandb_workspaces.reports.v2 import Layout, WeavePanelSummaryTable

    return [WeavePanelSummaryTable(table_name=name, layout=Layout(w=24, h=10)) for name in names]


def write_views(folder: Path, views: Mapping[str, Any]) -> list[Path]:
    """Write the JSON that the server would receive; no server is asked."""
    with _offline():
        texts = {name: view._to_model().model_dump_json(by_alias=True) for name, view in views.items()}
    for name, text in texts.items():
        replace_file(folder / f"{name}.json", text.encode())
    return [folder / f"{name}.json" for name in texts]


@contextmanager
def _offline() -> Iterator[None]:
    """Replace the request for the project's id on the server."""
    answer = {"project": {"internalId": "offline"}}
    interface = "wandb_workspaces.reports.v2.interface"
    with patch(f"{interface}._get_api", lambda: None), patch(f"{interface}.execute_graphql", lambda *_, **__: answer):
        yield
