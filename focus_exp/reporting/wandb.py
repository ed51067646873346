"""Weights & Biases: decide between online and offline without hanging, and log a record. wandb is imported late."""

import http.client
import math
import netrc
import os
import threading
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from focus_exp.errors import UserError
from focus_exp.records.record import Record
from focus_exp.reporting.findings import all_findings
from focus_exp.reporting.table import Table

MODES = ("online", "offline", "disabled", "shared")
ROW_SCALARS = (
    "nll", "perplexity", "delta_nll", "distant_pairs_kept", "pairs_removed", "largest_group",
    "perplexity_inside_window", "perplexity_beyond_window",
)  # fmt: skip
RUN_SCALARS = (
    "status", "seed", "commit", "config_hash", "device", "tokens_seen", "steps", "wall_seconds", "train_seconds",
    "peak_memory_bytes",
)  # fmt: skip


def wandb_mode(requested: str, timeout: float = 2.0) -> str:
    """The mode for wandb.init. "auto": WANDB_MODE if set; else online if a key is configured and the server answers.

    Waits at most about `timeout` seconds. An explicit mode is returned as it is. Raises UserError for an unknown mode.
    """
    mode = requested if requested != "auto" else os.environ.get("WANDB_MODE")
    if mode:
        if mode not in MODES:
            raise UserError(f"wandb mode {mode!r} is unknown: choose auto, online, offline or disabled")
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
    """Whether the server answers HTTP; a proxy may accept any TCP connection, so connecting proves nothing."""
    connect = http.client.HTTPSConnection if server.scheme == "https" else http.client.HTTPConnection
    statuses: list[int] = []

    def probe() -> None:
        try:
            connection = connect(server.hostname or "", server.port, timeout=timeout)
            connection.request("GET", "/")
            statuses.append(connection.getresponse().status)
        except (OSError, http.client.HTTPException):
            return

    # a thread, because name look-ups ignore socket timeouts
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(timeout)
    return any(status < 500 for status in statuses)


def init_options(config: dict[str, Any]) -> dict[str, Any]:
    """What wandb.init takes and cannot be given later; workspaces filter by it.

    group: the experiment; job_type: what the run did, "arm" for a part of a comparison; tags: the names of its parts.
    """
    parts = (config.get(section) or {} for section in ("model", "attention", "regime", "data", "scale"))
    arm, tags = config.get("arm"), [part["name"] for part in parts if part.get("name")]
    tags += [f"arm:{arm}"] if arm else []
    kind = "arm" if arm else config.get("job")
    return {"group": config.get("experiment"), "job_type": kind, "tags": [*tags, f"seed:{config.get('seed')}"]}


def log_record(run: Any, record: Record, tables: list[Table], figures: dict[str, Path]) -> None:
    """Log the tables (unrounded), the figures, the findings and one scalar per row and metric to a live run."""
    log_tables(run, tables, figures)
    run.tags = tuple(dict.fromkeys((*(run.tags or ()), *init_options(record.config)["tags"], record.status)))
    run.summary.update(_scalars(record))


def log_tables(run: Any, tables: list[Table], figures: dict[str, Path]) -> None:
    """Tables as W&B tables under their names, unrounded where they have such values, and figures as images."""
    import wandb

    logged: dict[str, Any] = {f"figures/{name}": wandb.Image(str(path)) for name, path in figures.items()}
    for table in tables:
        lines = table.values or [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        columns, data = [*(lines[0] if lines else table.columns)], [[*line.values()] for line in lines]
        logged[table.name] = wandb.Table(columns=columns, data=data, allow_mixed_types=True)
    run.log(logged)


def _scalars(record: Record) -> dict[str, Any]:
    scalars = {name: getattr(record, name) for name in RUN_SCALARS}
    scalars |= {"findings": "\n".join(all_findings(record))}
    scalars |= {"trainable_parameters": record.method.get("trainable_parameters")}
    for row in record.rows:
        if row.error is None:
            scalars |= {f"{row.name}/{name}": getattr(row, name) for name in ROW_SCALARS}
    for timed in record.speed:
        key = f"speed/{timed.clock}/K={timed.groups} k={timed.top_k} {timed.assignment}/{timed.tokens}"
        scalars[key] = timed.ratio
    nan = {name for name, value in scalars.items() if isinstance(value, float) and math.isnan(value)}
    return {name: value for name, value in scalars.items() if value is not None and name not in nan}
