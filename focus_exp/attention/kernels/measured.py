"""Choices by measurement: timed once, and kept in a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

Times = dict[str, float]  # seconds by name


def read_or_measure(path: Path, key: str, measure: Callable[[], Times]) -> Times:
    """Return what the JSON file `path` has under `key`; else measure it and write it there."""
    known: dict[str, Times] = {}
    with suppress(OSError, ValueError):
        known = json.loads(path.read_text(encoding="utf-8"))
    if key not in known:
        known[key] = measure()
        temporary = path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # a folder that cannot be written costs a measurement
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
            temporary.replace(path)
    return known[key]


def least_seconds(works: Mapping[str, Callable[[], object]], repeats: int) -> Times:
    """Return the least seconds of each work over `repeats` rounds in turn, after one that prepares it."""
    times = dict.fromkeys(works, float("inf"))
    for turn in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if turn:
                times[name] = min(times[name], time.perf_counter() - start)
    return times
