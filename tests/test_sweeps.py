"""Sweeps without SLURM: jobs frozen before they start, run here, and one table of what has become of them."""

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from running import here, metrics_of, only_run, outcome, record_of, router_steps, run, tiny

import focus_exp
from focus_exp.__main__ import conf_dir
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm
from focus_exp.storage import held
from focus_exp.sweeps import status
from focus_exp.sweeps.frozen import Job, Sweep
from focus_exp.sweeps.status import state_of, states, sweep_table
from focus_exp.training.callbacks import Checkpoint, Metrics

STEPS = router_steps(4)
WARM_UP = "regime.warmup_steps=1"  # a phase that is over before its own warns of it
# one runs, one fails when it does, one is refused before
POINTS = ("data.block_size=32,600,1", STEPS, WARM_UP)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sweeps")


@pytest.fixture(scope="module")
def swept(folder):
    """A finished sweep, whose jobs ran in this process."""

    def start(self, sweep, job):
        ended = here(sweep.command_of(job))
        return SimpleNamespace(poll=lambda: ended.returncode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers().LocalLauncher, "start", start)
        return run("-m", *tiny(folder), *POINTS, "hydra.launcher.processes=2")


@pytest.mark.slow
def test_jobs_are_processes_of_their_own(tmp_path):
    done = run("-m", *tiny(tmp_path), STEPS, "seed=0,1", "hydra.launcher.processes=2")
    assert done.code == 0 and "2 done" in done.out
    assert all("measured: " in Path(job.log).read_text() for job in sweep_of(tmp_path).jobs)


def sweep_of(folder, runs="runs"):
    (path,) = (folder / runs / ".sweeps").glob("*/sweep.json")
    return Sweep.load(path.parent)


def launchers():
    """The module, which Hydra finds in a package of its own."""
    folder = str(Path(focus_exp.__file__).parent / "plugins")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("hydra_plugins.focus_exp_launchers")


def frozen(folder, monkeypatch, *arguments):
    """A sweep whose jobs are written down and not started."""
    with monkeypatch.context() as patch:
        patch.setattr(launchers().LocalLauncher, "run", lambda self, sweep, jobs: None)
        run("-m", *tiny(folder), *arguments)
    return sweep_of(folder)


def start(sweep, number=0):
    """The command of a job, in this process."""
    return run(*sweep.command_of(sweep.jobs[number])[3:])


def test_a_sweep_ends_with_a_table_and_goes_on_after_a_job_that_fails(folder, swept):
    assert swept.code == 2
    assert swept.err.count("error:") == 2 and "Traceback" not in swept.err
    found = states(sweep_of(folder))
    assert [(state.name, state.code) for state in found] == [("done", 0), ("failed", 2), ("failed", 2)]
    assert re.fullmatch(r"Focus hard k=1: perplexity [\d.]+ \([+-][\d.]+ % against the base\)", found[0].detail)
    assert "data.block_size=600 exceeds the 512 positions" in found[1].detail
    assert found[2].detail == "data.block_size=1 is impossible; use 2 or more"
    for state in found[1:]:
        assert f"{state.name} (data.block_size=" in swept.err and state.detail in swept.err
        assert state.detail.split(";")[0] in " ".join(swept.out.split())
    assert "1 done, 2 failed" in swept.out


def test_a_job_of_a_sweep_is_the_run_of_its_own_command(folder, swept):
    sweep = sweep_of(folder)
    alone = [part for part in sweep.jobs[0].overrides if not part.startswith("runs_dir")]
    assert run(*alone, f"runs_dir={folder / 'alone'}").code == 0
    (record,) = (Path(sweep.jobs[0].run)).glob("record.json")
    shutil.copytree(record.parent, folder / "copied" / "run")
    assert outcome(folder / "copied") == outcome(folder / "alone")
    record = Record.load(record)
    assert record.command.startswith("python -m focus_exp model=tiny_llama ") and "data.block_size=32" in record.command
    assert record.warnings == [] and record.status == "finished"


def test_what_is_missing_runs_with_the_command_that_the_table_gives(folder, swept, monkeypatch):
    sweep = sweep_of(folder)
    assert sweep.command[:5] == ["python", "-m", "focus_exp", "-m", f"--config-path={sweep.folder / 'conf'}"]
    assert f"runs with: {shlex.join(sweep.command)}"[:100] in " ".join(swept.out.split())
    started = []
    monkeypatch.setattr(
        launchers().LocalLauncher, "run", lambda self, sweep, jobs: started.append([job.number for job in jobs])
    )
    again = run(*sweep.command[3:], f"hydra.sweep.dir={folder / 'again'}")
    assert again.code == 2 and started == [[1]]
    assert [state.name for state in states(Sweep.load(folder / "again"))] == ["done", "missing", "failed"]
    assert states(Sweep.load(folder / "again"))[0].detail == f"{states(sweep)[0].detail} (before)"


def test_sweep_status_shows_the_newest_sweep_or_the_one_that_is_named(folder, swept):
    sweep = sweep_of(folder)
    for choice in (f"runs_dir={folder / 'runs'}", f"sweep={sweep.folder}"):
        shown = run("job=sweep_status", choice)
        assert shown.code == 0
        assert shown.out == swept.out[swept.out.index(f"sweep {sweep.folder}:") :]
    missing = run("job=sweep_status", f"runs_dir={folder / 'texts'}")
    assert missing.code == 2 and "no sweep in" in missing.err
    other = run("job=sweep_status", f"sweep={folder / 'texts'}")
    assert other.code == 2 and f"sweep={folder / 'texts'} is not the folder of a sweep" in other.err


def test_sweep_status_does_not_wait_for_torch(folder, swept):
    command = [sys.executable, "-X", "importtime", "-m", "focus_exp", "job=sweep_status", f"runs_dir={folder / 'runs'}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0
    imported = set(re.findall(r"\| +([\w.]+)$", result.stderr, flags=re.MULTILINE))
    assert "hydra" in imported and not imported & {"torch", "transformers"}


def test_a_job_keeps_the_configuration_of_its_submission(tmp_path, monkeypatch):
    conf = shutil.copytree(conf_dir(), tmp_path / "conf")
    sweep = frozen(tmp_path, monkeypatch, "+experiment=smoke", STEPS, f"--config-path={conf}")
    resolved = OmegaConf.load(sweep.folder / "0" / "config.yaml")
    shutil.rmtree(conf)
    changed = sweep.folder / "conf" / "attention" / "focus.yaml"
    changed.write_text(
        re.sub("temperature: .*", "temperature: 0.7", changed.read_text())
    )  # as another default would be in other code
    assert start(sweep).code == 0
    record = record_of(tmp_path)
    assert record.config == json.loads(json.dumps(OmegaConf.to_container(resolved)))
    assert record.config["regime"]["phases"]["router"]["steps"] == 4
    assert record.config["attention"]["temperature"] != 0.7


def test_a_job_that_starts_with_other_code_says_so(tmp_path, monkeypatch):
    sweep = frozen(tmp_path, monkeypatch, STEPS, WARM_UP)
    sweep.code |= {"source hash": "0", "torch": "1.0"}
    sweep.save()
    started = start(sweep)
    assert started.code == 0
    warnings = record_of(tmp_path).warnings
    assert [line.split(" was ")[0] for line in warnings] == ["source hash", "torch"]
    for line in warnings:
        assert f"WARNING: {line}" in started.err
        assert f"WARNING: {line}" in (only_run(tmp_path) / "table.md").read_text()
        assert f"job 0 ran other code than was submitted: {line}" in sweep_table(sweep, states(sweep)).notes


def test_arms_of_a_frozen_comparison_are_composed_of_the_frozen_files(tmp_path, monkeypatch):
    conf = shutil.copytree(conf_dir(), tmp_path / "conf")
    arms = ('+arms={window: ["attention=window", "regime=none"]}', "job=compare", "eval.controls=false")
    sweep = frozen(tmp_path, monkeypatch, *arms, "arm=window", f"--config-path={conf}")
    shutil.rmtree(conf)
    assert sweep.jobs[0].run is None
    assert start(sweep).code == 0
    assert states(sweep)[0].name == "done" and "perplexity" in states(sweep)[0].detail
    (record,) = tmp_path.rglob("record.json")
    assert Record.load(record).config["attention"]["method"] == "window"


def test_a_comparison_is_finished_before_only_with_all_its_arms(tmp_path, monkeypatch):
    def found(config):
        arm = Arm(name="window", settings=[], status="failed" if config.seed else "finished")
        return Record(status="finished", experiment="mine", arms=[arm])

    monkeypatch.setattr("focus_exp.sweeps.frozen.finished_record", found)
    arms = ('+arms={window: ["attention=window", "regime=none"]}', "job=compare")
    sweep = frozen(tmp_path, monkeypatch, *arms, "seed=0,1")
    assert [job.finished_before for job in sweep.jobs] == [True, False]


def test_the_same_run_twice_in_one_sweep_is_refused(tmp_path, monkeypatch):
    sweep = frozen(tmp_path, monkeypatch, STEPS, "trainer.checkpoint_every=1,2")
    assert sweep.jobs[0].error is None
    assert "the run of job 0" in sweep.jobs[1].error


def test_a_folder_of_another_sweep_is_refused(tmp_path, monkeypatch):
    sweep = frozen(tmp_path, monkeypatch, STEPS)
    again = run("-m", *tiny(tmp_path), f"hydra.sweep.dir={sweep.folder}")
    assert again.code == 2 and f"hydra.sweep.dir={sweep.folder} holds another sweep" in again.err


def test_a_restarted_job_goes_on_even_where_it_was_told_to_overwrite(tmp_path, monkeypatch):
    settings = (router_steps(6), "trainer.checkpoint_every=2")
    assert run(*tiny(tmp_path), *settings).code == 0
    before = outcome(tmp_path / "runs")
    sweep = frozen(tmp_path, monkeypatch, *settings, "overwrite=true")
    assert sweep.jobs[0].waiting
    stop_after(monkeypatch, 3)
    stopped = start(sweep)
    monkeypatch.undo()
    assert stopped.code == 128 + signal.SIGUSR2
    assert [line["step"] for line in metrics_of(tmp_path / "runs")] == [1, 2, 3]
    assert states(sweep)[0].name == "stopped" and "SIGUSR2 at step 3 of 6" in states(sweep)[0].detail
    stop_after(monkeypatch, 2)  # a step that is not taken again
    assert start(sweep).code == 0
    assert outcome(tmp_path / "runs") == before
    assert states(sweep)[0].name == "done"


def stop_after(monkeypatch, step, signum=signal.SIGUSR2):
    """The signal, once `step` optimiser steps are done."""
    whole = Checkpoint.on_train_batch_end

    def batch_end(self, trainer, module, *rest):
        if trainer.global_step == step and self.received is None:
            signal.raise_signal(signum)
        whole(self, trainer, module, *rest)

    monkeypatch.setattr(Checkpoint, "on_train_batch_end", batch_end)


def test_an_error_that_a_signal_brings_about_is_an_interruption(tmp_path, monkeypatch):
    def lost(self, trainer, *rest):
        if trainer.global_step == 3:
            signal.raise_signal(signal.SIGTERM)
            raise ConnectionResetError("the logger's process is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "on_train_batch_end", lost)
        stopped = run(*tiny(tmp_path), STEPS, "trainer.checkpoint_every=2")
    assert stopped.code == 128 + signal.SIGTERM and "stopped by SIGTERM after step 3 of 4" in stopped.err
    assert record_of(tmp_path).status == "interrupted"


@pytest.mark.slow
def test_a_signal_to_a_sweep_stops_its_jobs_and_they_go_on_later(tmp_path):
    command = [sys.executable, "-m", "focus_exp", "-m", *tiny(tmp_path), router_steps(3000), "seed=0,1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        deadline = time.monotonic() + 60
        # a line in it: a step is done, and a signal is from here on answered after a step
        while not any(log.stat().st_size for log in tmp_path.rglob("metrics.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.05)
        running = states(sweep_of(tmp_path))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert [state.name for state in running] == ["running", "pending"]
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in err
    found = states(sweep_of(tmp_path))
    assert [state.name for state in found] == ["stopped", "missing"]
    assert re.fullmatch(r"stopped by SIGTERM at step \d+ of 3000", found[0].detail)
    assert list(tmp_path.rglob("checkpoints/router.ckpt"))


def made_up(folder, **job):
    """A sweep of one job, with its folder."""
    sweep = Sweep(folder, ["python"], "now", {}, [Job(0, ["seed=0"], **job)])
    sweep.save()
    (folder / "0").mkdir()
    return sweep


RUNNING, WAITING = {"7_0": ("RUNNING", "None")}, {"7_0": ("PENDING", "BeginTime")}
# what lies in the job's folder, SLURM's queue (False: not a job of SLURM) -> name and words of its state
STATES = {
    "nothing, launched": ((), False, True, "pending", ""),
    "nothing": ((), False, False, "missing", "not started"),
    "started": (("started",), False, False, "failed", "without a word"),
    "alive": (("started", "alive"), False, True, "running", "starting"),
    "ended": (("started", 0), False, True, "done", ""),
    "failed": (("started", 2), False, True, "failed", "because"),
    "stopped": (("started", 143), False, False, "stopped", "because"),
    "alive after a stop": (("started", 140, "alive"), False, True, "running", ""),
    "queued": ((), WAITING, False, "pending", "PENDING, BeginTime"),
    "requeued": (("started", 140), WAITING, False, "pending", "BeginTime"),
    "on a node": (("started",), RUNNING, False, "running", ""),
    "ended, still listed": (("started", 0), {"7_0": ("COMPLETING", "None")}, False, "done", ""),
    "failed, still listed": (("started", 2), RUNNING, False, "failed", "because"),
    "lost by SLURM": (("started",), {}, True, "failed", "without a word"),
    "never begun by SLURM": ((), {}, True, "missing", ""),
    "cancelled": (("started", 143), {}, False, "stopped", "because"),
    "no SLURM to ask": (("started",), None, False, "pending", "no answer"),
    "ended, no SLURM to ask": (("started", 0), None, False, "done", ""),
}


@pytest.mark.parametrize("case", STATES)
def test_state_follows_from_what_a_job_left_and_the_queue(tmp_path, case):
    left, queue, launching, name, words = STATES[case]
    sweep = made_up(tmp_path, slurm_id=None if queue is False else "7_0")
    place = tmp_path / "0"
    for part in left:
        if part == "started":
            (place / "started.json").write_text('{"changed": []}')
        elif isinstance(part, int):
            (place / "outcome.json").write_text(json.dumps({"code": part, "reason": "because" if part else ""}))
    with held(place / "alive", "it") if "alive" in left else nullcontext():
        state = state_of(sweep, sweep.jobs[0], queue or ({} if queue is False else queue), launching)
    assert state.name == name and words in state.detail
    assert (state.code == 0) == (name in ("pending", "running", "done"))
    assert state.open == (name in ("pending", "running"))


def test_a_job_that_left_no_word_is_shown_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("x" * 10_000 + "\nKilled\n\n")
    sweep = made_up(tmp_path / "sweep", log=str(log))
    (tmp_path / "sweep" / "0" / "started.json").write_text("{}")
    assert "its log ends with: Killed" in states(sweep)[0].detail


def test_a_running_job_shows_its_step_and_what_is_left(folder, swept, tmp_path):
    finished = sweep_of(folder)
    sweep = made_up(tmp_path / "sweep", run=str(tmp_path / "run"))
    shutil.copy(finished.folder / "0" / "config.yaml", tmp_path / "sweep" / "0")
    (tmp_path / "run").mkdir()
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text('{"phase": "router", "step": 3, "tokens": 384, "tokens_per_second": 2.0}\n')
    with held(tmp_path / "sweep" / "0" / "alive", "it"):
        assert states(sweep)[0].detail == "step 3 of 4, 64 s of training left"
        metrics.write_text('{"phase": "router", "step": 4, "tokens": 512, "tokens_per_second": 2.0}\n')
        assert states(sweep)[0].detail == "step 4 of 4, measuring"


def test_squeue_is_asked_for_the_jobs_of_this_user(tmp_path, monkeypatch):
    sweep = made_up(tmp_path / "sweep", slurm_id="7_0")
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\necho '7_0|PENDING|Priority'\necho '8|RUNNING|None'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    assert states(sweep)[0].detail == "PENDING, Priority"
    squeue.write_text("#!/bin/sh\nexit 1\n")
    assert status.slurm_queue() is None


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("refuses", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_task_of_slurm_stops_with_a_checkpoint_and_is_requeued(tmp_path, monkeypatch, refuses):
    submitit = pytest.importorskip("submitit")
    from focus_exp.sweeps.slurm import Task

    sweep = frozen(tmp_path, monkeypatch, STEPS)
    requeued = []

    def requeue(signum, frame):  # as submitit's handler
        assert list(tmp_path.rglob("checkpoints/router.ckpt"))
        requeued.append(signum)
        if refuses:
            raise submitit.core.utils.UncompletedJobError("timed-out too many times")
        raise SystemExit(-1)

    before = sys.argv, {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGUSR2, requeue)
    task = Task(sweep.folder / "0", sweep.command_of(sweep.jobs[0])[3:])
    stop_after(monkeypatch, 2)
    try:
        with pytest.raises((SystemExit, submitit.core.utils.UncompletedJobError)):
            task()
        assert requeued == [signal.SIGUSR2] and signal.getsignal(signal.SIGUSR2) is requeue
        state = states(sweep)[0]
        assert (state.name, "too many times" in state.detail) == (("failed", True) if refuses else ("stopped", False))
        monkeypatch.undo()
        assert task() == 0 and requeued == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        sys.argv = before[0]
        for signum, handler in before[1].items():
            signal.signal(signum, handler)
    assert states(sweep)[0].name == "done"


def test_the_number_of_processes_is_checked(tmp_path):
    refused = run("-m", *tiny(tmp_path), "hydra.launcher.processes=0")
    assert refused.code == 2 and "hydra.launcher.processes=0 is impossible" in refused.err
