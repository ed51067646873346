"""A sweep as a SLURM job array, by submitit: requeued before its time limit and when it is preempted."""

from __future__ import annotations

import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError
from submitit.helpers import Checkpointable

from focus_exp.errors import STOP_SIGNALS, UserError
from focus_exp.sweeps.frozen import Job, Sweep, note_end

PATIENCE = 600.0  # seconds between a TERM and the end that SLURM makes
# names that submitit has for every kind of executor; the others are SLURM's own
SHARED = ("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name")


class Task(Checkpointable):
    """The frozen command, run in submitit's own process, which is the one that SLURM signals.

    USR2 announces the time limit or a preemption: the command stops as it does on any signal, with a checkpoint, and
    then submitit's handler, which stood before the command's own, has SLURM start the task again. TERM is the end of
    this life: SLURM kills the task soon, and starts it again unless it was cancelled or has met its limit.
    """

    def __init__(self, place: Path, arguments: list[str]) -> None:
        self.place = place
        self.arguments = arguments

    def __call__(self) -> int:
        handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
        sys.argv = ["focus_exp", *self.arguments]
        code = 0
        try:
            runpy.run_module("focus_exp", run_name="__main__", alter_sys=True)
        except SystemExit as stop:
            code = int(stop.code or 0)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if code == 128 + signal.SIGUSR2:
            try:
                signal.raise_signal(signal.SIGUSR2)
            except UncompletedJobError as refusal:
                note_end(self.place, 1, str(refusal))
                raise
        if code == 128 + signal.SIGTERM:
            time.sleep(PATIENCE)  # to end by oneself would be to have finished
        return code


def submit(sweep: Sweep, jobs: list[Job], settings: dict[str, Any]) -> None:
    """Submit `jobs` and note their ids; UserError where SLURM will not have them."""
    settings = dict(settings)
    folder, timeouts = settings.pop("submitit_folder"), settings.pop("max_num_timeout")
    tasks = [Task(sweep.place(job), sweep.command_of(job)[3:]) for job in jobs]
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster="slurm", slurm_max_num_timeout=timeouts)
        named = {key if key in SHARED else f"slurm_{key}": value for key, value in settings.items()}
        executor.update_parameters(**named)
        submitted = executor.submit_array(tasks)
    except (FailedJobError, RuntimeError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise UserError(
            f"SLURM does not take the sweep: {reason}; see hydra.launcher.partition and .account, or run it on this "
            "machine with hydra/launcher=local"
        ) from error
    for job, there in zip(jobs, submitted, strict=True):
        job.slurm_id, job.log = there.job_id, str(there.paths.stdout)
    sweep.save()
    print(f"SLURM job {jobs[0].slurm_id}" + (f" to {jobs[-1].slurm_id}" if len(jobs) > 1 else ""))
