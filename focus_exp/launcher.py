"""Checks and clean stops of processes that torchrun, srun or submitit started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from focus_exp.errors import STOP_SIGNALS, Interrupted, UserError

# variables of a process among others; those of HOSTS are no integers
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SRUN = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")
HOSTS = ("MASTER_ADDR", "SLURM_STEP_NODELIST")
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


def check_launcher() -> None:
    """Raise UserError if variables of torchrun or srun are missing among others of theirs, or no integers."""
    is_torchrun = "RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"
    names = TORCHRUN if is_torchrun else SRUN if os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1" else ()
    for name in names:
        value = os.environ.get(name, "")
        if not (value if name in HOSTS else value.isdecimal()):
            others = ", ".join(other for other in names if other in os.environ)
            raise UserError(
                f"{name} must be as torchrun or srun sets it (got {value!r}). Start with one, or unset {others}."
            )
    if is_torchrun and int(os.environ["RANK"]) >= (count := count_processes()):
        raise UserError(f"RANK must be < WORLD_SIZE={count} (got {os.environ['RANK']}). Start with torchrun.")


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
