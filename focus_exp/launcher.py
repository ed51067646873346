"""Checks and clean stops of processes that torchrun, srun or submitit started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from focus_exp.errors import STOP_SIGNALS, Interrupted, UserError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "SLURM_STEP_NUM_TASKS", *SRUN[:-1])
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


def check_launcher() -> None:
    """Raise UserError if the variables of torchrun or srun are partial or no numbers."""
    for name in NUMBERS:
        if not (value := os.environ.get(name, "0")).isdecimal():
            raise UserError(f"{name} must be a whole number (got {value!r}). Start with torchrun or srun, or unset it.")
    if "RANK" in os.environ:
        _require(TORCHRUN, "RANK", "torchrun")
        number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if number >= count:
            raise UserError(f"RANK must be below WORLD_SIZE={count} (got {number}). Start with torchrun.")
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        _require(SRUN, "SLURM_STEP_NUM_TASKS", "srun")
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _require(TORCHRUN, "WORLD_SIZE", "torchrun")


def _require(names: tuple[str, ...], name: str, launcher: str) -> None:
    if missing := [other for other in names if other not in os.environ]:
        raise UserError(
            f"{name}={os.environ[name]} must come with {', '.join(missing)} (not set). Start with {launcher}, or unset "
            f"{name}."
        )
