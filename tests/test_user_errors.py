"""What users of Hydra, Hugging Face and SLURM get wrong in their first hour: one sentence that says what to type."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch
import wandb
from running import fitting, run, tiny
from transformers import T5Config

from focus_exp import __main__ as command_line
from focus_exp.__main__ import conf_dir
from focus_exp.assets import ADAPTER_FILES, find_adapter
from focus_exp.errors import UserError
from focus_exp.explain import arranged
from focus_exp.models.random import byte_tokenizer

# what is typed after the settings of a tiny run -> what the one error says
TYPED = {
    "experiment=retrofit_124m": ["added with a plus, +experiment=retrofit_124m"],
    "+attention.groups=8": ["write it without the plus, attention.groups=..."],
    "modle=gpt2_124m": ["no key modle", "did you mean model"],
    "model=gpt-2": ["no model/gpt-2", "gpt2_124m", "model.hub_id=owner/name"],
    "model=gpt2": ["no model/gpt2", "did you mean", "model.hub_id=owner/name"],
    "model=openai-community/gpt2": ["no model/openai-community/gpt2", "gpt2_124m", "model.hub_id=owner/name"],
    "attention.density=0.2": ["Focus has no option attention.density", "it is one of attention=focus_dual"],
    "attention=lora": ["no attention/lora", "focus"],
    "hydra/launcher=slrum": ["no hydra/launcher/slrum", "did you mean slurm"],
    "+experiment=conf/experiment/smoke": ["no experiment/conf/experiment/smoke", "smoke"],
    "seed=0,1": ["seed=0,1 holds several values", "add -m", "seed=[0,1]"],
    "batch_size=8": ["no key batch_size", "trainer.batch_size"],
    "groups=8": ["no key groups", "did you mean attention.groups"],
    "learning_rate=1": ["no key learning_rate", "did you mean recipe.phases.<phase>.learning_rate"],
    "recipe.learning_rate=1": ["no key recipe.learning_rate", "did you mean recipe.phases.<phase>.learning_rate"],
    "trainer.max_steps=9": ["no key trainer.max_steps", "did you mean recipe.steps or recipe.phases.<phase>.steps"],
    "recipe.phases.router.lr=1": ["no key recipe.phases.router.lr", "recipe.phases.<phase>.learning_rate"],
    "attention.batch_size=8": ["no option attention.batch_size", "did you mean eval.batch_size or trainer.batch_size"],
    "window=64": ["no key window", "attention.window"],
    "recipe.tune.factors=[1": ["recipe.tune.factors=[1 cannot be read"],
    "hydra/launcher=slurm": ["hydra/launcher=slurm", "add -m"],
    "hydra.run.dir=elsewhere": ["hydra.run.dir=elsewhere moves nothing", "runs_dir=elsewhere"],
    "--config-name=retrofit_124m": ["leave the option out", "+experiment="],
    "--config-dir=/nowhere": ["--config-dir=/nowhere", "no such folder"],
    "+experiment=leak +experiment=speed": ["experiment is chosen twice", "-m +experiment=a,b"],
    "--shell-completion": ["install=bash"],
    "--shell-completion install=tcsh": ["install=bash", "install=zsh"],
    "model.hub_id=./weights": ["model.hub_id=./weights is a folder", "model.path=./weights"],
    "--seed=1": ["no option --seed", "seed=1"],
    "retrofit_124m": ["retrofit_124m is no setting", "+experiment=retrofit_124m"],
    "conf/experiment/smoke.yaml": ["+experiment=smoke"],
    "conf/config.yaml": ["chosen by name", "--config-dir="],
    "attention": ["attention is no setting", "without spaces"],
    "=": ["key=value, without spaces"],
    "seed=": ["seed"],
    "trainer.precision=fp16": ["trainer.precision=fp16", "bf16"],
    "trainer.accelerator=gpu": ["trainer.accelerator=gpu", "no CUDA device", "trainer.accelerator=auto"],
    "data.files=texts/*.nothing": ["data.files=texts/*.nothing", "no file matches"],
    "eval.tasks=[hellaswagg@x]": ["hellaswagg@x", "whole number"],
}


def refused(*arguments: str) -> str:
    """The one error of a command that ends with code 2."""
    result = run(*arguments)
    assert result.code == 2 and "Traceback" not in result.err
    assert result.err.startswith("error: ") and result.err.count("error:") == 1, result.err
    return result.err


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("typed"))


@pytest.mark.parametrize("typed", TYPED)
def test_a_mistake_is_answered_with_what_to_type(settings, tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    if "accelerator=gpu" in typed and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    message = refused(*fitting(*settings, *typed.split()))
    for part in TYPED[typed]:
        assert part in message, message
    # nothing of Hydra's own workings
    assert not re.search(r"In 'config'|base_\w+|object_type|in struct|full_key", message), message


ADAPTERS = {
    "runs/nowhere/at/all": ["runs/nowhere/at/all", "has no focus_adapter.json", "no such folder"],
    "./my/adapter": ["/my/adapter has no focus_adapter.json", "no such folder"],
    "~/nowhere": [f"{Path.home()}/nowhere", "no such folder"],
    "my/adapter": ["adapter my/adapter not found", "HF_HUB_OFFLINE"],
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_that_is_not_there_is_named_as_it_was_typed(settings, adapter):
    message = refused(*settings, "job=evaluate", f"adapter={adapter}")
    assert all(part in message for part in ADAPTERS[adapter]), message


def test_an_adapter_is_named_by_its_run_its_folder_or_a_file_in_it(tmp_path):
    adapter = tmp_path / "run" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / ADAPTER_FILES[0]).write_text("")
    for name in (tmp_path / "run", adapter, adapter / ADAPTER_FILES[0]):
        assert find_adapter(name) == adapter


def test_options_may_stand_anywhere():
    conf = Path(conf_dir())
    said = ["seed=0,1", "-m", "job=report", "--cfg", "job", "--config-dir=x", "-i", "defaults", "~data", "a=b=c"]
    expected = ["-m", "--cfg", "job", "--config-dir=x", "-i", "defaults", "seed=0,1", "job=report", "~data", "a=b=c"]
    assert arranged(said, conf) == expected == arranged(expected, conf)
    assert arranged(["-i", "a=b"], conf) == ["-i", "a=b"]


def test_a_sweep_without_slurm_is_one_error(settings, tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    message = refused(*settings, "seed=0,1", "-m", "hydra/launcher=slurm", f"runs_dir={tmp_path / 'runs'}")
    assert "hydra/launcher=slurm" in message


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_too_little_memory_is_one_error(settings, monkeypatch, error):
    def full(config):
        raise error

    monkeypatch.setattr(command_line, "execute", full)
    message = refused(*settings)
    assert "out of memory" in message and "trainer.batch_size=1" in message and "job=plan" in message


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES])
def test_a_folder_that_cannot_be_made_is_one_error(settings, tmp_path, monkeypatch, number):
    make, place = os.mkdir, tmp_path / "none"

    def mkdir(path, mode=0o777):
        if place in (Path(path), *Path(path).parents):
            raise OSError(number, os.strerror(number), str(path))
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    message = refused(*settings, f"runs_dir={place}")
    assert f"cannot write {place}" in message and os.strerror(number) in message and "runs_dir=" in message


def test_an_input_that_is_not_there_is_no_folder_that_cannot_be_made(settings, monkeypatch):
    monkeypatch.setattr(command_line, "execute", lambda config: Path("/nowhere/text").read_text())
    with pytest.raises(FileNotFoundError, match="/nowhere/text"):
        run(*settings)


def test_other_errors_keep_their_stack_trace(settings, monkeypatch):
    def wrong(config):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(command_line, "execute", wrong)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run(*settings)


def test_a_model_that_predicts_no_next_token_is_refused_by_its_kind(settings, tmp_path):
    T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, vocab_size=300).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    message = refused(*settings, f"model.path={tmp_path}")
    assert "is a t5" in message and "does not predict the next token" in message and "model.path" in message


def test_the_hub_that_may_not_be_asked_is_named(settings):
    message = refused(*settings, "model.hub_id=no-one/nothing", "assets=hub")
    assert "no-one/nothing" in message and "HF_HUB_OFFLINE is set" in message and "assets=embedded" in message


def test_who_is_not_logged_in_to_wandb_is_told_how(settings, monkeypatch):
    def refuses(**options):
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuses)
    message = refused(*settings, "logger.wandb=online")
    assert "No API key" in message and "wandb login" in message and "logger.wandb=offline" in message


def test_a_file_of_the_users_that_is_no_yaml_is_named(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "typo.yaml").write_text("name: [typo\n")
    assert "typo.yaml" in refused("model=typo", f"--config-dir={tmp_path}")


def test_help_of_what_is_no_choice_says_where_keys_are():
    assert "nonsense=x" in refused("--help", "nonsense=x")
    assert "attention.groups=4" in refused("--help", "attention.groups=4")


def test_help_finds_the_choices_of_another_folder(tmp_path):
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "narrow.yaml").write_text("# Sixteen back\ndefaults: [focus, _self_]\nwindow: 16\n")
    for option in ([f"--config-dir={tmp_path}"], ["--config-dir", str(tmp_path)], ["-cd", str(tmp_path)]):
        result = run("--help", "attention=narrow", *option)
        assert result.code == 0, result.err
        assert "Sixteen back" in result.out and "window: 16" in result.out
    assert "narrow" in run("--help", f"--config-dir={tmp_path}").out
    assert "no such folder" in refused("--help", "--config-dir=/nowhere")


def test_user_errors_are_ordinary_exceptions():
    with pytest.raises(UserError, match="without spaces"):
        arranged(["attention", "=", "focus"], Path(conf_dir()))
