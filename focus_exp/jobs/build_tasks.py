"""job=build_tasks."""

from __future__ import annotations

from focus_exp.assets import cache_root
from focus_exp.config import Config
from focus_exp.data.long_range import build_suite


def build_tasks(config: Config) -> None:
    """Write the long-range suite from the held-out books, named by its hash."""
    window = config.eval.long_range_distance or config.attention.window
    suite = build_suite(cache_root(config.cache_dir), window)
    print(f"long-range suite for a window of {window}: {suite.folder}\nsha256 {suite.digest}")
