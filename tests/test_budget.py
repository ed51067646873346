"""budget=auto: paper with the Hub and a GPU, else embedded or first; named in the first line and in the record."""

import pytest
import torch
from running import record_of, succeed, tiny

from focus_exp import UserError
from focus_exp import budget as module
from focus_exp.budget import resolve_budget
from focus_exp.config import register_schemas

RETROFIT = "+experiment=retrofit_124m"


@pytest.fixture
def machine(monkeypatch):
    """machine(gpu, hub): choose what is there; returns the repositories that the Hub was asked for."""

    def choose(gpu: bool, hub: bool) -> list[str]:
        asked: list[str] = []
        monkeypatch.setattr(module, "GPU_DEVICES", ["/dev/null"])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(module, "uses_embedded", lambda policy, kind, name, _: asked.append(name) or not hub)
        return asked

    register_schemas()
    return choose


@pytest.mark.parametrize(
    ("gpu", "hub", "budget", "asked"),
    [
        (True, True, "paper", ["openai-community/gpt2"]),
        (True, False, "first", ["openai-community/gpt2"]),
        (False, True, "first", []),
    ],
)
def test_resolve_budget_follows_gpu_and_hub(machine, gpu, hub, budget, asked):
    names = machine(gpu, hub)
    assert resolve_budget([RETROFIT, "seed=1"]) == [RETROFIT, "seed=1", f"budget={budget}"]
    assert names == asked


@pytest.mark.parametrize(
    ("arguments", "budget"),
    [
        (["budget=auto"], "paper"),
        (["-m", "+experiment=retrofit_124m,compare", "model=choice(gpt2_774m,tiny_llama)"], "paper"),
        (["+experiment=frontier"], "paper"),
        (["model=tiny_llama"], "embedded"),
        ([RETROFIT, "model.path=mine"], "first"),
        (["-m", "+experiment=retrofit_124m,compare", "model.path=mine"], "first"),
        ([RETROFIT, "model.path=mine", "job=evaluate"], "embedded"),
        ([RETROFIT, "model.path=mine", "+variant=shared/two_encoders"], "first"),
        (["+experiment=frontier", "model.path=mine"], "embedded"),
        (["assets=embedded"], "embedded"),
        (["trainer.accelerator=cpu"], "embedded"),
    ],
)
def test_resolve_budget_follows_the_named_model(machine, arguments, budget):
    machine(True, True)
    assert resolve_budget(arguments) == [*(a for a in arguments if a != "budget=auto"), f"budget={budget}"]


@pytest.mark.parametrize("arguments", [["budget=quick"], ["-m", "budget=paper,quick"], ["job=report"], ["nothing=1"]])
def test_resolve_budget_leaves_what_is_typed_or_needs_none(machine, arguments):
    machine(True, True)
    assert resolve_budget(arguments) == arguments


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_resolve_budget_of_several_processes_asks_no_hub(machine, monkeypatch, variable):
    """They could get different answers."""
    monkeypatch.setenv(variable, "2")
    asked = machine(True, True)
    with pytest.raises(UserError, match="budget must be typed"):
        resolve_budget([RETROFIT])
    assert resolve_budget([RETROFIT, "model=tiny_llama"])[-1] == "budget=first" and not asked


def test_resolve_budget_without_a_gpu_composes_nothing(machine, monkeypatch):
    machine(True, True)
    monkeypatch.setattr(module, "GPU_DEVICES", [])
    monkeypatch.setattr(module, "compose", None)
    assert resolve_budget([RETROFIT]) == [RETROFIT, "budget=first"]


def test_resolve_budget_of_slurm_jobs_is_that_of_their_nodes(machine):
    machine(False, True)
    command = ["-m", RETROFIT, "hydra/launcher=slurm"]
    assert resolve_budget(command)[-1] == "budget=paper"
    assert resolve_budget([*command, "hydra.launcher.gpus_per_node=null"])[-1] == "budget=first"


def test_resolve_budget_reads_a_config_dir(machine, tmp_path):
    machine(True, True)
    overlay = tmp_path / "conf of mine" / "experiment" / "mine.yaml"
    overlay.parent.mkdir(parents=True)
    overlay.write_text("# @package _global_\ndefaults: [override /model: gpt2_774m]\n")
    command = ["--config-dir", str(tmp_path / "conf of mine"), "+experiment=mine"]
    assert resolve_budget(command) == [*command, "budget=paper"]


def test_cfg_prints_the_budget_that_runs(machine):
    machine(True, True)
    assert "budget:\n  name: paper\n" in succeed(RETROFIT, "--cfg", "job").out
    machine(False, True)
    assert "budget:\n  name: first\n" in succeed(RETROFIT, "--cfg", "job").out


def test_first_line_and_record_name_the_budget(tmp_path):
    small = [*tiny(tmp_path), RETROFIT, "+variant=retrofit_124m/focus", "data.max_train_tokens=null"]
    first = succeed(*small, "budget=quick").out.splitlines()[0]
    assert all(part in first for part in ("tiny_llama", "texts", "2 of the paper's 4,000 steps", "type budget=paper"))
    paper = succeed(*small, "budget=paper", "recipe.steps=1", f"runs_dir={tmp_path / 'paper'}").out.splitlines()[0]
    assert "budget=paper" in paper and "type budget=embedded" in paper
    assert record_of(tmp_path / "paper").config["budget"]["name"] == "paper"
    printed = succeed(*small, f"runs_dir={tmp_path / 'auto'}").out.splitlines()[0]
    assert record_of(tmp_path / "auto").config["budget"]["name"] == "first"
    assert "budget=first" in record_of(tmp_path / "auto").command
    assert "type budget=embedded for" in printed
