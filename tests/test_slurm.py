"""Sweeps by SLURM, on a cluster of one node: a preemption, a requeue, a time limit, a failure, a sudden death."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from running import outcome, router_steps, run, tiny

from focus_exp.records.metrics import read_metrics
from focus_exp.records.record import Record
from focus_exp.sweeps.frozen import Sweep
from focus_exp.sweeps.status import states

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

CLUSTER = Path(__file__).parent / "slurm_cluster.sh"
LAUNCHER = ("hydra/launcher=slurm", "hydra.launcher.gpus_per_node=null", "hydra.launcher.cpus_per_task=1")
STEPS = router_steps(200)
# the last of the four fails
POINTS = ("data.block_size=32,64", "model.architecture.max_position_embeddings=512,48")
LONG = (STEPS, "seed=3")
# told of it 1 to 31 seconds after the start: the controller looks every 30 seconds
LIMIT = ("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=29")


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("submitit", reason="pip install 'focus_exp[slurm]'")
    # not below pytest's folder: the path of a socket is short
    with pytest.MonkeyPatch.context() as patch:
        state = tempfile.mkdtemp(prefix="slurm-")
        patch.setenv("FOCUS_EXP_SLURM", state)
        started = subprocess.run([CLUSTER, "start"], capture_output=True, text=True)
        if started.returncode == 3:
            pytest.skip(started.stderr.strip())
        assert started.returncode == 0, started.stderr
        patch.setenv("SLURM_CONF", f"{state}/slurm.conf")
        yield
        subprocess.run([CLUSTER, "stop"], check=True)
        shutil.rmtree(state, ignore_errors=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("slurm")


class Submission:
    """A sweep command at work, and the sweep that it submitted."""

    def __init__(self, folder: Path, runs: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "focus_exp", "-m", *tiny(folder, runs), *LAUNCHER, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.runs = folder / runs

    @property
    def sweep(self) -> Sweep | None:
        """Once all of its jobs have their ids."""
        found = [Sweep.load(path.parent) for path in self.runs.glob(".sweeps/*/sweep.json")]
        return found[0] if found and all(job.slurm_id for job in found[0].jobs) else None

    def steps(self, number: int) -> int:
        sweep = self.sweep
        lines = read_metrics(Path(sweep.jobs[number].run) / "metrics.jsonl") if sweep else []
        return lines[-1]["step"] if lines else 0

    def ended(self) -> bool:
        subprocess.run([CLUSTER, "kick"], check=True)
        return self.process.poll() is not None

    def process_of(self, number: int) -> int:
        return json.loads((self.sweep.folder / str(number) / "started.json").read_text())["process"]

    def result(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


def until(what, patience=180):
    deadline = time.monotonic() + patience
    while not what():
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.2)


def described(slurm_id: str) -> str:
    """What SLURM says of a job."""
    return subprocess.run(["scontrol", "show", "job", slurm_id], capture_output=True, text=True, check=True).stdout


def known(slurm_id: str, what: str) -> str:
    return described(slurm_id).split(f"{what}=")[1].split()[0]


def suspend(process: int) -> None:
    with suppress(ProcessLookupError):  # the limit was met before
        os.kill(process, signal.SIGSTOP)


def wake(process: int) -> None:
    with suppress(ProcessLookupError):  # SLURM wakes it too, when it has something to say
        os.kill(process, signal.SIGCONT)


@pytest.fixture(scope="module")
def submissions(cluster, folder):
    """Four jobs, of which one is preempted and one requeued, and one that meets its time limit; all at their end."""
    short, long = Submission(folder, "short", *POINTS, STEPS), Submission(folder, "long", *LONG, *LIMIT)
    try:
        # each as soon as it trains: how long the others take to start is not known
        interruptions = {
            (short, 0): lambda job: subprocess.run(["scancel", "--signal=USR2", job], check=True),
            (short, 2): lambda job: subprocess.run(["scontrol", "requeue", job], check=True),
            (long, 0): lambda _: suspend(long.process_of(0)),  # training takes less than what it has to wait
        }

        def interrupted() -> bool:
            for submission, number in list(interruptions):
                if submission.steps(number) >= 3:
                    interruptions.pop((submission, number))(submission.sweep.jobs[number].slurm_id)
            return not interruptions

        until(interrupted)
        limited = long.sweep.jobs[0].slurm_id
        until(lambda: known(limited, "JobState") != "RUNNING" or known(limited, "RunTime") >= "00:00:32")
        wake(long.process_of(0))
        until(lambda: known(limited, "Restarts") != "0")
        subprocess.run(["scontrol", "update", f"jobid={limited}", "TimeLimit=60"], check=True)

        until(lambda: short.ended() and long.ended())
        yield short, long
    finally:
        short.process.kill()
        long.process.kill()


def test_a_sweep_ends_complete_and_as_it_does_without_slurm(folder, submissions):
    short, _ = submissions
    code, out, err = short.result()
    assert code == 2 and "Traceback" not in err
    assert err.count("error:") == 1 and "data.block_size=64 exceeds the 48 positions" in err
    found = states(short.sweep)
    assert [state.name for state in found] == ["done", "done", "done", "failed"]
    assert all(state.detail.split(";")[0] in " ".join(out.split()) for state in found)
    shown = run("job=sweep_status", f"runs_dir={folder / 'short'}")
    assert shown.code == 0 and shown.out == out[out.index(f"sweep {short.sweep.folder}:") :]

    for number, job in enumerate(short.sweep.jobs):
        alone = [part for part in job.overrides if not part.startswith("runs_dir")]
        result = run(*alone, f"runs_dir={folder / f'alone-{number}'}")
        assert result.code == (2 if number == 3 else 0)
        if number < 3:
            assert outcome(Path(job.run)) == outcome(folder / f"alone-{number}")
        else:
            assert found[3].detail in result.err


def test_preempted_and_requeued_jobs_had_more_than_one_life(submissions):
    short, _ = submissions
    assert [known(job.slurm_id, "Restarts") for job in short.sweep.jobs] == ["1", "0", "1", "0"]
    for number, signum in ((0, signal.SIGUSR2), (2, signal.SIGTERM)):
        log = Path(short.sweep.jobs[number].log).read_text()
        assert f"stopped by {signum.name} at step " in log
        assert [line["step"] for line in read_metrics(Path(short.sweep.jobs[number].run) / "metrics.jsonl")] == [
            *range(1, 201)
        ]


def test_a_job_that_meets_its_time_limit_goes_on_to_the_same_end(folder, submissions):
    _, long = submissions
    code, _, err = long.result()
    (job,) = long.sweep.jobs
    log = Path(job.log).read_text()
    assert code == 0, f"{err}\n{log}\n{described(job.slurm_id)}"
    assert known(job.slurm_id, "Restarts") != "0"
    assert "Caught signal SIGUSR2" in log and "CANCELLED" in log and "DUE TO TIME LIMIT" not in log
    assert run(*tiny(folder, "long-alone"), *LONG).code == 0
    assert outcome(folder / "long") == outcome(folder / "long-alone")


def test_a_killed_job_is_a_failure_with_its_reason_and_what_is_missing_runs_later(cluster, folder):
    killed = Submission(folder, "killed", router_steps(200), "trainer.checkpoint_every=5")
    until(lambda: killed.steps(0) >= 12)
    (job,) = killed.sweep.jobs
    os.kill(killed.process_of(0), signal.SIGKILL)
    until(lambda: killed.process.poll() is not None)
    code, _, err = killed.result()
    assert code == 1 and "ended without a word" in err
    # and the end of the command that submitted a sweep ends nothing else
    again = subprocess.Popen([sys.executable, *killed.sweep.command[1:]], stderr=subprocess.PIPE, text=True)
    until(lambda: len(list(killed.runs.glob(".sweeps/*/sweep.json"))) == 2 and states(newest(killed.runs))[0].open)
    until(lambda: states(newest(killed.runs))[0].name == "running")
    again.send_signal(signal.SIGINT)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 128 + signal.SIGINT and "the jobs stay in SLURM's queue" in err
    until(lambda: not states(newest(killed.runs))[0].open)
    assert states(newest(killed.runs))[0].name == "done"
    assert Record.load(Path(job.run) / "record.json").status == "finished"


def newest(runs: Path) -> Sweep:
    return max((Sweep.load(path.parent) for path in runs.glob(".sweeps/*/sweep.json")), key=lambda each: each.submitted)


def test_two_tasks_of_one_job_train_one_model_and_are_requeued_together(cluster, folder):
    if importlib.util.find_spec("focus_exp.training.processes") is None:
        pytest.skip("trainer.devices is one here: runs of several processes are not in this version")
    steps = router_steps(150)
    pair = Submission(folder, "pair", steps, "trainer.devices=2")
    until(lambda: pair.steps(0) >= 3)
    (job,) = pair.sweep.jobs
    subprocess.run(["scancel", "--signal=USR2", job.slurm_id], check=True)
    until(pair.ended)
    code, _, err = pair.result()
    assert code == 0, err
    assert known(job.slurm_id, "Restarts") == "1"
    log = Path(job.log).read_text()
    assert "over 2 processes" in log and "stopped by SIGUSR2 at step " in log
    assert run(*tiny(folder, "pair-alone"), steps, "trainer.devices=2").code == 0
    assert outcome(folder / "pair") == outcome(folder / "pair-alone")
