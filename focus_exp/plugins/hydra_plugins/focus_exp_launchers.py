"""Hydra launchers that freeze every job of a sweep first, and then run each as a process of its own.

In a package of that name because Hydra takes launchers from no other; focus_exp/plugins is put on the path for it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from focus_exp.errors import Interrupted, UserError
from focus_exp.storage import held
from focus_exp.sweeps.frozen import Job, Sweep, freeze, open_sweep
from focus_exp.sweeps.status import State, complain_about, conclude, watch

POLL = 5.0  # seconds between looks at SLURM's queue


class FreezingLauncher(Launcher):
    """Freezes the jobs, runs those that are not finished yet, shows what becomes of them.

    Raises SystemExit with the largest of their exit codes where one is not 0, after all have had their turn.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        sweep = open_sweep(self.config)
        with held(sweep.folder / "launching", f"the sweep {sweep.folder}"):
            for number, overrides in enumerate(job_overrides):
                composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
                with open_dict(composed):
                    del composed["hydra"]
                sweep.jobs.append(freeze(sweep, number, list(overrides), composed))
            sweep.save()
            print(f"sweep of {len(sweep.jobs)} jobs in {sweep.folder}")
            self.run(sweep, [job for job in sweep.jobs if job.waiting])
        if code := complain_about(sweep, conclude(sweep)):
            raise SystemExit(code)
        return [JobReturn(overrides=list(o), status=JobStatus.COMPLETED) for o in job_overrides]

    def run(self, sweep: Sweep, jobs: list[Job]) -> None:
        """Bring `jobs` to their ends."""
        raise NotImplementedError


class LocalLauncher(FreezingLauncher):
    """Runs `processes` jobs at a time on this machine."""

    def __init__(self, processes: int) -> None:
        self.processes = processes

    def run(self, sweep: Sweep, jobs: list[Job]) -> None:
        if not isinstance(self.processes, int) or self.processes < 1:
            raise UserError(f"hydra.launcher.processes={self.processes} is impossible; use 1 or more")
        waiting, running = list(jobs), list[subprocess.Popen[bytes]]()

        def going(found: list[State]) -> bool:
            running[:] = [process for process in running if process.poll() is None]
            while waiting and len(running) < self.processes:
                running.append(self.start(sweep, waiting.pop(0)))
            return bool(running)

        try:
            watch(sweep, going, every=0.5)
        except BaseException as stop:
            for process in running:
                if isinstance(stop, Interrupted):
                    process.send_signal(stop.signum)
                else:
                    process.terminate()
            for process in running:
                process.wait()
            raise

    def start(self, sweep: Sweep, job: Job) -> subprocess.Popen[bytes]:
        with open(str(job.log), "ab") as log:
            # in a session of its own: Ctrl-C reaches the jobs once, through this process
            return subprocess.Popen(
                sweep.command_of(job), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )


class SlurmLauncher(FreezingLauncher):
    """Submits the jobs as one array, by submitit, and waits for them; they do not need it any more."""

    def __init__(self, **settings: Any) -> None:
        self.settings = {key: OmegaConf.to_object(v) if OmegaConf.is_config(v) else v for key, v in settings.items()}

    def run(self, sweep: Sweep, jobs: list[Job]) -> None:
        from focus_exp.sweeps.slurm import submit  # submitit is an optional extra

        if jobs:
            submit(sweep, jobs, self.settings)
        try:
            watch(sweep, lambda found: any(state.open for state in found), every=POLL)
        except Interrupted:
            shown = f"python -m focus_exp job=sweep_status sweep={sweep.folder}"
            print(f"the jobs stay in SLURM's queue: {shown} shows them", file=sys.stderr)
            raise
