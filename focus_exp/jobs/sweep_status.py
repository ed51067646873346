"""job=sweep_status: what has become of the jobs of a sweep, and how to run those that are missing.

-m freezes every job of a sweep (configuration, command, code version) before the first one starts: it keeps the
configuration of its submission whatever is edited since, and says in its record if other code ran it. One that is
preempted or meets its time limit writes a checkpoint, is requeued and ends with the numbers of one that never
stopped; one that fails leaves its reason, and the others go on.
"""

from __future__ import annotations

import sys
from pathlib import Path

from focus_exp.config import Config
from focus_exp.errors import UserError
from focus_exp.sweeps.frozen import Sweep
from focus_exp.sweeps.status import conclude, watch


def sweep_status(config: Config) -> None:
    """The table of `config.sweep`, by default the newest; on a terminal until nothing is pending or running."""
    sweep = Sweep.load(Path(config.sweep).resolve() if config.sweep else newest(Path(config.runs_dir).resolve()))
    watch(sweep, lambda found: sys.stdout.isatty() and any(state.open for state in found), every=5.0)
    conclude(sweep)


def newest(runs: Path) -> Path:
    """The sweep below `runs` that was submitted last."""
    found = list(runs.glob(".sweeps/*/sweep.json"))
    if not found:
        raise UserError(
            f"there is no sweep in {runs}/.sweeps; python -m focus_exp -m ... makes one, sweep=... names one"
        )
    return max(found, key=lambda path: Sweep.load(path.parent).submitted).parent
