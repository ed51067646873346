"""Launcher variables, seeds and limits of the system: one sentence, exit code 2."""

import os
import resource
from contextlib import contextmanager

import pytest
from running import run, tiny

from focus_exp.errors import UserError
from focus_exp.launcher import NUMBERS, SRUN, TORCHRUN, check_launcher

GROUP = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
STEP = {name: "0" for name in SRUN} | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node1"}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in {*NUMBERS, *TORCHRUN, *SRUN, "SLURM_NTASKS"}:
        monkeypatch.delenv(name, raising=False)


@contextmanager
def limited(kind, value):
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@pytest.mark.parametrize(
    "given",
    [
        {},
        GROUP,
        STEP,
        {"WORLD_SIZE": "1"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
        {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
    ],
)
def test_check_launcher_consistent_variables_are_accepted(monkeypatch, given):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    check_launcher()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "x"}, "RANK"),
        ({"RANK": ""}, "RANK"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        (GROUP | {"RANK": "2"}, "RANK"),
        (GROUP | {"WORLD_SIZE": "two"}, "WORLD_SIZE"),
        (GROUP | {"MASTER_PORT": "http"}, "MASTER_PORT"),
        *[({key: GROUP[key] for key in GROUP if key != name}, name) for name in GROUP],
        *[({key: STEP[key] for key in STEP if key != name}, name) for name in SRUN],
        (STEP | {"SLURM_PROCID": "first"}, "SLURM_PROCID"),
    ],
)
def test_check_launcher_partial_or_wrong_variables_are_refused(monkeypatch, given, named):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=named):
        check_launcher()


@pytest.mark.parametrize("job", ["train", "report"])
def test_run_with_rank_alone_is_refused_before_any_work(tmp_path, monkeypatch, job):
    monkeypatch.setenv("RANK", "1")
    result = run(*tiny(tmp_path), f"job={job}")
    assert result.code == 2 and result.err.count("\n") == 1 and "RANK" in result.err
    assert not (tmp_path / "runs").exists()


def test_run_with_the_largest_seed_is_trained(tmp_path):
    assert run(*tiny(tmp_path), "recipe.steps=1", f"seed={2**32 - 1}").code == 0


@pytest.mark.parametrize("kilobytes", [1, 16])
def test_run_under_a_file_size_limit_is_one_error(tmp_path, kilobytes):
    with limited(resource.RLIMIT_FSIZE, kilobytes * 1024):
        result = run(*tiny(tmp_path), "recipe.steps=2")
    assert result.code == 2, result.err
    assert "ulimit -f" in result.err and result.err.count("error:") == 1
    assert run(*tiny(tmp_path), "recipe.steps=2").code == 0


def test_run_under_a_limit_of_open_files_is_one_error(tmp_path):
    used = len(os.listdir("/proc/self/fd"))
    with limited(resource.RLIMIT_NOFILE, used):
        result = run(*tiny(tmp_path), "recipe.steps=2")
    assert result.code == 2 and "ulimit -n" in result.err
