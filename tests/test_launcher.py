"""Variables of torchrun and srun: accepted as these set them, else refused in one sentence before any work."""

import pytest
from running import run, tiny

from focus_exp import UserError
from focus_exp.launcher import SRUN, TORCHRUN, check_launcher

GROUP = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
STEP = dict.fromkeys(SRUN, "0") | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node1"}


@pytest.fixture
def set_variables(monkeypatch):
    """set_variables(values): of torchrun's and srun's variables these alone are set."""

    def set_all(values: dict[str, str]) -> None:
        for name in (*TORCHRUN, *SRUN):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize(
    "values", [{}, GROUP, STEP, {"WORLD_SIZE": "1"}, {"SLURM_PROCID": "0"}, {"MASTER_ADDR": "node1"}], ids=str
)
def test_check_launcher_variables_as_they_are_set_are_accepted(set_variables, values):
    set_variables(values)
    check_launcher()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": ""}, "RANK"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        (GROUP | {"RANK": "2"}, "RANK"),
        (GROUP | {"WORLD_SIZE": "two"}, "WORLD_SIZE"),
        (GROUP | {"MASTER_PORT": "http"}, "MASTER_PORT"),
        (STEP | {"SLURM_PROCID": "first"}, "SLURM_PROCID"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS"),
        *(({key: GROUP[key] for key in GROUP if key != name}, name) for name in GROUP),
        *(({key: STEP[key] for key in STEP if key != name}, name) for name in SRUN[1:]),
    ],
    ids=str,
)
def test_check_launcher_odd_variables_raise(set_variables, values, named):
    set_variables(values)
    with pytest.raises(UserError, match=f"^{named} must"):
        check_launcher()


@pytest.mark.parametrize("job", ["train", "report"])
def test_run_with_odd_variables_is_refused_before_any_work(tmp_path, set_variables, job):
    set_variables({"RANK": "1"})
    result = run(*tiny(tmp_path), f"job={job}")
    assert result.code == 2 and result.err.startswith("error: WORLD_SIZE must") and result.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()
