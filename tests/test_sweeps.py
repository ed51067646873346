"""Sweeps on this machine, by Hydra's launchers; tests/test_slurm.py has those on SLURM."""

import importlib
import os
import signal
import subprocess
import sys
import time

import pytest
from builders import scored
from running import fitting, outcome, record_of, records_of, router_steps, run, succeed, tiny

from focus_exp import launcher
from focus_exp.errors import Interrupted
from focus_exp.training.callbacks import Metrics

STEPS = router_steps(4)
UNTRAINED = ("attention=window", "recipe=none")


def nlls(record):
    return [row.nll for row in scored(record.measurements)]


def test_sweep_jobs_equal_single_runs(tmp_path):
    succeed("-m", *fitting(*tiny(tmp_path), *UNTRAINED), "seed=0,1")
    succeed(*fitting(*tiny(tmp_path, "single"), *UNTRAINED), "seed=1")
    swept = {record.seed: record for record in records_of(tmp_path / "runs")}
    assert nlls(swept[1]) == nlls(record_of(tmp_path / "single"))
    for seed, record in swept.items():  # the command of its own job
        assert f"seed={seed}" in record.command and "-m seed" not in record.command


def test_sweep_failed_job_leaves_the_others_and_exits_with_2(tmp_path):
    points = ("eval.seq_len=64,32", "model.architecture.max_position_embeddings=48")
    result = run("-m", *fitting(*tiny(tmp_path), *UNTRAINED), *points)
    assert result.code == 2
    assert "eval.seq_len" in result.err
    assert sorted(record.status for record in records_of(tmp_path / "runs")) == ["failed", "finished"]


@pytest.mark.slow
def test_sweep_of_parallel_processes_equals_single_runs(tmp_path):
    pytest.importorskip("joblib", reason="pip install 'focus_exp[sweeps]'")
    if importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") is None:
        pytest.skip("pip install 'focus_exp[sweeps]'")
    parallel = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    command = [sys.executable, "-m", "focus_exp", "-m", *tiny(tmp_path), STEPS, "seed=0,1", *parallel]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    succeed(*tiny(tmp_path, "single"), STEPS, "seed=1")
    swept = {record.seed: record for record in records_of(tmp_path / "runs")}
    assert nlls(swept[1]) == nlls(record_of(tmp_path / "single"))


@pytest.mark.slow
def test_sweep_signal_stops_at_a_checkpoint_and_the_command_resumes(tmp_path):
    command = [*tiny(tmp_path), router_steps(60), "seed=0,1", "trainer.checkpoint_every=1000"]
    process = subprocess.Popen([sys.executable, "-m", "focus_exp", "-m", *command], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not any(log.stat().st_size for log in tmp_path.rglob("metrics.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err
    (record,) = records_of(tmp_path / "runs")
    assert record.status == "interrupted"
    assert list(tmp_path.rglob("checkpoints/router.ckpt"))
    succeed("-m", *command)
    succeed(*tiny(tmp_path, "single"), router_steps(60), "seed=0")
    resumed = next(record.path.parent for record in records_of(tmp_path / "runs") if record.seed == 0)
    assert outcome(resumed) == outcome(tmp_path / "single")


def test_requeued_job_resumes_although_overwrite_is_set(tmp_path, monkeypatch):
    settings = [*fitting(*tiny(tmp_path), *UNTRAINED), "overwrite=true"]
    succeed(*settings)
    first = record_of(tmp_path / "runs").started
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    succeed(*settings)
    assert record_of(tmp_path / "runs").started == first
    monkeypatch.delenv("SLURM_RESTART_COUNT")


def test_requeue_passes_usr2_to_the_handler_of_submitit(monkeypatch):
    received = []
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    before = signal.signal(signal.SIGUSR2, lambda signum, frame: received.append(signum))
    try:
        with pytest.raises(Interrupted), launcher.stoppable():
            os.kill(os.getpid(), signal.SIGUSR2)
        assert received == []
        launcher.requeue_if_stopped(128 + signal.SIGUSR2)
        launcher.requeue_if_stopped(0)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert received == [signal.SIGUSR2]


def test_requeue_after_term_waits_for_slurm(monkeypatch):
    waited = []
    monkeypatch.setattr(launcher.time, "sleep", waited.append)
    launcher.requeue_if_stopped(128 + signal.SIGTERM)
    assert waited == []
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    launcher.requeue_if_stopped(128 + signal.SIGTERM)
    assert waited == [launcher.KILL_WAIT]


def test_signal_that_breaks_a_logger_is_an_interruption(tmp_path, monkeypatch):
    def lose_logger(self, trainer, *rest):
        if trainer.global_step == 3:
            signal.raise_signal(signal.SIGTERM)
            raise ConnectionResetError("the logger's process is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "on_train_batch_end", lose_logger)
        stopped = run(*tiny(tmp_path), STEPS, "trainer.checkpoint_every=2")
    assert stopped.code == 128 + signal.SIGTERM
    assert record_of(tmp_path).status == "interrupted"
