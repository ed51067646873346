"""The training log of a run, metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

from focus_exp.storage import replace_file

METRICS = "metrics.jsonl"


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl; an incomplete last line is dropped."""
    path = Path(path)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_metrics(path: str | Path, lines: list[dict[str, Any]]) -> None:
    """Write a metrics.jsonl atomically."""
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
