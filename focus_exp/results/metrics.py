"""The training log of a run, metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

from focus_exp.errors import UserError
from focus_exp.storage import replace_file

METRICS = "metrics.jsonl"


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl; an incomplete last line is dropped.

    Raises:
        UserError: if another line is damaged.
    """
    path = Path(path)
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    metrics = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}:{number} must be JSON ({error}). Remove the line.") from error
        if not isinstance(values, dict):
            raise UserError(f"{path}:{number} must be an object (got {line[:40]}). Remove the line.")
        metrics.append(values)
    return metrics


def write_metrics(path: str | Path, lines: list[dict[str, Any]]) -> None:
    """Write a metrics.jsonl atomically."""
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
