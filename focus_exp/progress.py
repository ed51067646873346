"""Progress of long work: a bar on a terminal, a line a minute in a log."""

from __future__ import annotations

import os
import sys
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 60.0


class ProgressBar(tqdm):
    """tqdm of the first process; in a log, such as SLURM's, it writes once a minute, and nothing of shorter work."""

    def __init__(self, *args: Any, leave: bool = False, **settings: Any) -> None:
        is_log = not sys.stderr.isatty()
        if is_log:
            settings |= {"mininterval": LOG_SECONDS, "miniters": 1, "delay": LOG_SECONDS}
        if os.environ.get("RANK", "0") != "0":
            settings["disable"] = True
        super().__init__(*args, leave=leave and not is_log, dynamic_ncols=not is_log, **settings)
