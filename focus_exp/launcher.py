"""Clean stops of processes that torchrun, srun or submitit started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from focus_exp.errors import STOP_SIGNALS, Interrupted

KILL_WAIT = 600.0  # seconds in which SLURM kills a job that it has sent TERM


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise Interrupted on STOP_SIGNALS within the block, also in a worker of a sweep."""
    handlers = {signum: signal.signal(signum, _interrupt) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _interrupt(signum: int, frame: Any) -> None:
    raise Interrupted(signum, "before or after training")


def requeue_if_stopped(code: int) -> None:
    """Let SLURM run a submitit job again that ended with `code` = 128 + signal, from its checkpoint.

    USR2 announces the time limit or a preemption: submitit's handler requeues the job and exits. TERM comes before
    SLURM kills the job: to return would tell submitit that the job is finished.
    """
    if os.environ.get("SUBMITIT_EXECUTOR") != "slurm":
        return
    if code == 128 + signal.SIGUSR2:
        signal.raise_signal(signal.SIGUSR2)
    if code == 128 + signal.SIGTERM:
        time.sleep(KILL_WAIT)


def count_processes() -> int:
    """Return how many processes torchrun or srun started."""
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


@contextmanager
def quiet_unless_main() -> Iterator[None]:
    """Let only process 0 print, of those that torchrun or srun started."""
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    if int(os.environ.get("RANK", os.environ["SLURM_PROCID"] if tasks else "0")):
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    else:
        yield


def is_requeued() -> bool:
    """Return whether SLURM started this job before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
