"""Progress of long work: a bar on a terminal, a line a minute in a log."""

from __future__ import annotations

import os
import sys
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 60.0


class ProgressBar(tqdm):
    """tqdm whose bar disappears at the end, unless `leave`.

    If stderr is not a terminal, such as a SLURM log, it writes whole lines, one per `LOG_SECONDS`, and none for
    shorter work. Only the first process of a run writes.
    """

    def __init__(self, *args: Any, leave: bool = False, **settings: Any) -> None:
        self.logged = not sys.stderr.isatty()
        if self.logged:
            # miniters: else tqdm's monitor writes in between
            settings |= {"mininterval": LOG_SECONDS, "miniters": 1, "delay": LOG_SECONDS}
        if os.environ.get("RANK", "0") != "0":
            settings["disable"] = True
        super().__init__(*args, leave=leave and not self.logged, dynamic_ncols=not self.logged, **settings)
        self.closing_line = self.logged and leave and not self.disable

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if not self.logged:
            return bool(super().display(msg, pos))
        if msg is None:
            self.fp.write(f"{self}\n")
            self.fp.flush()
        return False

    def close(self) -> None:
        if self.closing_line:
            self.closing_line = False
            self.display()
        super().close()
