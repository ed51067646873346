"""The lines that a run writes while it trains."""

import json
from pathlib import Path
from typing import Any

from focus_exp.errors import UserError
from focus_exp.storage import replace_file

METRICS = "metrics.jsonl"


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; [] if there is no file. A torn last line is dropped, any other is a UserError."""
    path = Path(path)
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    metrics = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(values, dict):
            raise UserError(f"{path}:{number}: expected an object, found {line[:40]}")
        metrics.append(values)
    return metrics


def write_metrics(path: str | Path, lines: list[dict[str, Any]]) -> None:
    """A metrics.jsonl of these lines, atomically."""
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
