"""Progress of long work: a bar on a terminal, ten lines with the time left in a log."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from tqdm import tqdm

LINES = 10  # of a stage in a log
SECONDS_WITHOUT = 5.0  # a shorter stage has none
LINE = "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class ProgressBar(tqdm):
    """tqdm of the first process; in a log, such as SLURM's, it writes a line for every tenth of the work.

    Without a total it writes one a minute.
    """

    def __init__(self, *args: Any, leave: bool = False, **settings: Any) -> None:
        self.is_log = not sys.stderr.isatty()
        if self.is_log:
            settings |= {"mininterval": 60, "maxinterval": math.inf, "miniters": 1, "delay": SECONDS_WITHOUT}
        if os.environ.get("RANK", "0") != "0":
            settings["disable"] = True
        super().__init__(*args, leave=leave and not self.is_log, dynamic_ncols=not self.is_log, **settings)
        if self.is_log and self.total:
            self.miniters, self.mininterval, self.bar_format = math.ceil(self.total / LINES), 0, LINE

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if not self.is_log:
            super().display(msg, pos)
        elif msg is None:  # else it clears the bar, which a log cannot
            self.fp.write(f"{self}\n")
            self.fp.flush()
