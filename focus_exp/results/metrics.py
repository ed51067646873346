"""The training log of a run, metrics.jsonl."""

import json
import logging
from pathlib import Path
from typing import Any

from focus_exp.storage import replace_file

METRICS = "metrics.jsonl"

log = logging.getLogger(__name__)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl; an incomplete last line and damaged lines are dropped."""
    path = Path(path)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            kept += [json.loads(line)] if line.endswith("\n") else []
        except json.JSONDecodeError:
            log.warning("%s: line %d is damaged and is left out", path, number)
    return kept


def write_metrics(path: str | Path, lines: list[dict[str, Any]]) -> None:
    """Write a metrics.jsonl atomically."""
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
