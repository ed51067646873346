"""Sweeps on a SLURM cluster of one node: a requeue, a preemption, a time limit, a failure, several tasks."""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from running import outcome, router_steps, succeed, tiny

from focus_exp.results.metrics import read_metrics

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

CLUSTER = Path(__file__).parent / "slurm_cluster.sh"
LAUNCHER = ("hydra/launcher=slurm", "hydra.launcher.gpus_per_node=null", "hydra.launcher.cpus_per_task=1")
STEPS = router_steps(200)
# SLURM announces the limit between 1 and 31 s after the start: its controller looks every 30 s
LIMIT = ("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=29")


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install 'focus_exp[slurm]'")
    with pytest.MonkeyPatch.context() as patch:
        state = tempfile.mkdtemp(prefix="slurm-")  # not tmp_path: the path of a socket is short
        patch.setenv("FOCUS_EXP_SLURM", state)
        started = subprocess.run([CLUSTER, "start"], capture_output=True, text=True)
        if started.returncode == 3:
            pytest.skip(started.stderr.strip())
        assert started.returncode == 0, started.stderr
        patch.setenv("SLURM_CONF", f"{state}/slurm.conf")
        patch.setenv("PATH", f"{state}/bin", prepend=":")
        yield
        subprocess.run([CLUSTER, "stop"], check=True)
        shutil.rmtree(state, ignore_errors=True)


class Sweep:
    """A sweep command at work."""

    def __init__(self, folder: Path, runs: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "focus_exp", "-m", *tiny(folder, runs), *LAUNCHER, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.runs = folder / runs

    def step(self, seed: int) -> int:
        """Last logged optimizer step of the run with `seed`."""
        logs = self.runs.rglob(f"*-seed{seed}-*/metrics.jsonl")
        return max((line["step"] for log in logs for line in read_metrics(log)), default=0)

    def job(self, number: int) -> str:
        """SLURM's id of job `number`."""
        names = [path.name for path in self.runs.glob(".sweeps/*/.submitit/*") if path.name[0].isdecimal()]
        tasks = [name for name in names if "_" in name] or names  # next to a folder of the whole array
        return sorted(tasks, key=lambda name: int(name.rpartition("_")[2]))[number]

    def log(self, number: int) -> str:
        return "".join(path.read_text() for path in self.runs.glob(f".sweeps/*/.submitit/{self.job(number)}/*_log.*"))

    def wait(self) -> tuple[int, str]:
        until(self.ended)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err

    def ended(self) -> bool:
        subprocess.run([CLUSTER, "kick"], check=True)
        return self.process.poll() is not None


def until(condition, timeout=240):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.2)


def restarts(job: str) -> int:
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout
    return int(shown.split("Restarts=")[1].split()[0])


@pytest.fixture
def sweep(cluster, tmp_path):
    started = []

    def start(*arguments: str) -> Sweep:
        started.append(Sweep(tmp_path, "runs", *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()


def single(tmp_path: Path, *arguments: str) -> dict:
    folder = f"single-{len(list(tmp_path.glob('single-*')))}"
    succeed(*tiny(tmp_path, folder), *arguments)
    return outcome(tmp_path / folder)


def of_seed(runs: Path, seed: int) -> Path:
    (folder,) = (path.parent for path in runs.rglob(f"*-seed{seed}-*/record.json"))
    return folder


def test_sweep_preempted_and_requeued_jobs_equal_single_runs(sweep, tmp_path):
    sent = sweep(STEPS, "seed=0,1,2")
    until(lambda: sent.step(0) >= 3)
    subprocess.run(["scancel", "--signal=USR2", sent.job(0)], check=True)
    until(lambda: sent.step(2) >= 3)
    subprocess.run(["scontrol", "requeue", sent.job(2)], check=True)
    code, err = sent.wait()
    assert code == 0, err
    assert [restarts(sent.job(number)) for number in range(3)] == [1, 0, 1]
    assert "stopped by SIGUSR2 at step" in sent.log(0)
    for seed in (0, 1, 2):
        assert outcome(of_seed(sent.runs, seed)) == single(tmp_path, STEPS, f"seed={seed}")


def test_sweep_job_resumes_after_its_time_limit(sweep, tmp_path):
    steps = router_steps(3000)  # longer than 31 s on a fast machine
    sent = sweep(steps, "seed=3", "eval.controls=false", *LIMIT)
    until(lambda: sent.step(3) >= 3)
    job = sent.job(0)
    until(lambda: restarts(job) >= 1 or sent.process.poll() is not None)
    assert sent.process.poll() is None, sent.process.communicate()
    subprocess.run(["scontrol", "update", f"jobid={job}", "TimeLimit=60"], check=True)
    code, err = sent.wait()
    assert code == 0, err
    assert "SIGUSR2" in sent.log(0)
    assert outcome(of_seed(sent.runs, 3)) == single(tmp_path, steps, "seed=3", "eval.controls=false")


def test_sweep_failed_job_is_reported(sweep):
    code, err = sweep(STEPS, "seed=5", "data.seq_len=64", "model.architecture.max_position_embeddings=48").wait()
    assert code == 2
    assert "data.seq_len" in err


def test_sweep_killed_job_ends_the_command(sweep):
    sent = sweep(router_steps(4000), "seed=0")
    until(lambda: sent.step(0) >= 3)
    subprocess.run(["scancel", "--signal=KILL", sent.job(0)], check=True)
    code, err = sent.wait()
    assert code == 2
    assert "hydra/launcher=slurm" in err


def test_sweep_tasks_of_one_job_train_one_model(sweep, tmp_path):
    steps = router_steps(150)
    sent = sweep(steps, "seed=0", "trainer.devices=2")
    until(lambda: sent.step(0) >= 3)
    subprocess.run(["scancel", "--signal=USR2", sent.job(0)], check=True)
    code, err = sent.wait()
    assert code == 0, err
    assert restarts(sent.job(0)) == 1
    pair = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "focus_exp"]
    subprocess.run([*pair, *tiny(tmp_path, "pair"), steps, "seed=0", "trainer.devices=2"], check=True)
    assert outcome(sent.runs) == outcome(tmp_path / "pair")
