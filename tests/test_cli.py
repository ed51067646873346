"""What a user sees: one clear error for bad input, and what a run leaves behind."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from bad_input import BAD_INPUT, CHOICES
from running import fitting, only_run, record_of, router_steps, run, tiny, without_attention
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from focus_exp import assets
from focus_exp.errors import EXTRAS
from focus_exp.jobs import run as run_module
from focus_exp.models import adapter as adapter_module
from focus_exp.training.module import LanguageModelTask

STEPS = router_steps(4)
RUN_FILES = {
    *("config.yaml", "metrics.jsonl", "record.json", "table.md", "quality.csv"),
    *("adapter/focus_adapter.safetensors", "adapter/focus_adapter.json"),
    *("figures/loss_curve.png", "figures/perplexity_by_position.png", "figures/group_sizes.png"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the finished retrofit of this module lives."""
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def retrofit(folder):
    """The command of a finished retrofit."""
    command = [*tiny(folder), STEPS]
    assert run(*command).code == 0
    return command


@pytest.fixture(scope="module")
def adapter(folder, retrofit):
    return only_run(folder / "runs") / "adapter"


def refused(*arguments):
    """The one error of a command that ends with code 2, whatever it was warned of before."""
    result = run(*arguments)
    assert result.code == 2
    assert "Traceback" not in result.err
    said = [line for line in result.err.splitlines() if not line.startswith("WARNING: ")]
    assert result.err.count("error:") == 1 and said[0].startswith("error: ")
    return result.err


def test_a_package_of_an_extra_that_is_missing_is_asked_for_before_anything_runs(tmp_path, monkeypatch):
    with monkeypatch.context() as without:
        without.setattr("focus_exp.checks.find_spec", lambda name: None)
        assert "install-evaluation" in refused(*tiny(tmp_path), "job=train", "eval.tasks=[lambada_openai]")
        assert run(*tiny(tmp_path), "job=plan", "eval.tasks=[lambada_openai]", "--cfg", "job").code == 0
    for name in [name for name in sys.modules if name in ("focus_exp.jobs.analyze", "focus_exp.evaluation.groups")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "focus_exp.evaluation.groups_passage", None)
    monkeypatch.setitem(EXTRAS, "focus_exp.evaluation.groups_passage", "evaluation")
    assert "focus_exp[evaluation]" in refused(*tiny(tmp_path), "job=analyze")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("override", BAD_INPUT)
def test_bad_input_is_one_error_that_names_key_value_and_fix(tmp_path, override):
    message = refused(*fitting(*tiny(tmp_path), override))
    for part in BAD_INPUT[override]:
        assert part in message


@pytest.mark.parametrize("key", CHOICES)
def test_a_choice_that_does_not_exist_is_answered_with_those_that_do(tmp_path, key):
    message = refused(*tiny(tmp_path), f"{key}=nonsense")
    assert f"{key}=nonsense" in message and all(choice in message for choice in CHOICES[key])


SHOWN = {
    "--help": ["attention= ", "focus_paper", "+experiment=", "--cfg job"],
    "--cfg job": ["job: train", "groups: 4"],
}


@pytest.mark.parametrize("option", SHOWN)
def test_help_and_configuration_are_shown_without_waiting_for_torch(option):
    command = [sys.executable, "-X", "importtime", "-m", "focus_exp", *option.split()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and all(part in result.stdout for part in SHOWN[option])
    imported = set(re.findall(r"\| +([\w.]+)$", result.stderr, flags=re.MULTILINE))
    assert "hydra" in imported and not imported & {"torch", "transformers"}


def test_a_reader_that_leaves_early_is_no_error():
    command = [sys.executable, "-u", "-m", "focus_exp", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 128 + signal.SIGPIPE


def test_bad_input_as_a_process_prints_no_stack_trace(tmp_path):
    command = [sys.executable, "-m", "focus_exp", f"runs_dir={tmp_path}", "attention.groups=0"]
    result = subprocess.run(command, capture_output=True, text=True)
    message = "error: attention.groups must be >= 1 (got 0)\n"
    assert (result.returncode, result.stderr, result.stdout) == (2, message, "")
    assert not list(tmp_path.iterdir())


def test_text_that_cannot_be_used_is_named(tmp_path):
    empty, short, latin = tmp_path / "empty", tmp_path / "short.txt", tmp_path / "latin.txt"
    empty.mkdir()
    short.write_text("a few words")
    latin.write_bytes("café".encode("latin-1"))
    assert f"data.files={empty}" in refused(*tiny(tmp_path), f"data.files={empty}")
    message = refused(*tiny(tmp_path), f"data.files={short}")
    assert str(short) in message and "one sequence of 32" in message and "data.seq_len" in message
    message = refused(*tiny(tmp_path), f"data.files={latin}")
    assert f"{latin}: not UTF-8 at byte 3" in message and "iconv" in message


def test_wrong_texts_are_named_before_a_model_is_loaded(tmp_path, monkeypatch):
    def loads(*_, **__):
        raise AssertionError("a model was loaded")

    def denied(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("focus_exp.jobs.prepare.load_model", loads)
    assert "no file matches" in refused(*tiny(tmp_path), f"data.files={tmp_path}/*.nothing")
    with pytest.raises(AssertionError, match="a model was loaded"):
        run(*tiny(tmp_path))
    closed = tmp_path / "closed.txt"
    closed.write_text("some words")
    monkeypatch.setattr(Path, "read_bytes", denied)
    message = refused(*tiny(tmp_path), f"data.files={closed}")
    assert f"error: {closed}: it cannot be read (Permission denied)" in message and "data.files" in message


def test_only_the_adapter_of_this_very_model_is_accepted(tmp_path, retrofit, adapter):
    def evaluate(place, *more):
        command = [*without_attention(retrofit), f"runs_dir={tmp_path}", "job=evaluate"]
        return refused(*command, f"adapter={place}", *more)

    message = evaluate(adapter, "seed=1")
    assert "belongs to" in message and str(adapter) in message
    assert "has no focus_adapter.json" in evaluate(tmp_path / "nowhere")
    damaged = shutil.copytree(adapter, tmp_path / "damaged")
    weights = damaged / "focus_adapter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    message = evaluate(damaged)
    assert str(weights) in message and "damaged" in message
    (damaged / "focus_adapter.json").write_text("{")
    assert "focus_adapter.json is damaged" in evaluate(damaged)


@pytest.mark.parametrize("key", ["runs_dir", "cache_dir"])
def test_a_folder_that_cannot_be_made_is_one_error(tmp_path, key):
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "below"):
        message = refused(*tiny(tmp_path), f"{key}={place}")
        assert str(file) in message and f"{key}=" in message


def test_a_read_only_run_folder_is_one_error(tmp_path, monkeypatch):
    def read_only(path, content):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(run_module, "replace_file", read_only)
    message = refused(*tiny(tmp_path))
    assert f"cannot write {tmp_path}" in message and "Read-only" in message and "runs_dir=" in message


def test_a_full_disk_in_mid_training_is_one_error(tmp_path, monkeypatch):
    def full(self, path, *rest):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", full)
    message = refused(*tiny(tmp_path), STEPS)
    assert "router.ckpt: No space left on device; free some space, the same command goes on" in message
    assert record_of(tmp_path).status == "failed"


@pytest.mark.parametrize("writer", [(adapter_module, "save_file"), (PreTrainedModel, "save_pretrained")])
def test_a_full_disk_when_weights_are_saved_is_one_error(tmp_path, monkeypatch, writer):
    def full(*arguments, **options):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(*writer, full)
    phases = ("recipe=finetune", router_steps(1), "recipe.phases.everything.steps=1")
    message = refused(*tiny(tmp_path), *phases)
    assert f"cannot write {only_run(tmp_path)}" in message and "No space left" in message and "free some" in message


def test_hub_assets_without_a_network_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "hub_reachable", lambda: False)
    message = refused(*tiny(tmp_path), "model.hub_id=no-one/nothing", "assets=hub")
    assert "no-one/nothing" in message and "cannot be reached" in message and "assets=embedded" in message


def test_a_loss_that_is_not_finite_stops_the_run_at_its_last_good_state(tmp_path, monkeypatch):
    step = LanguageModelTask.training_step
    seen = []

    def poisoned(self, batch, index):
        routers = [p for name, p in self.model.named_parameters() if name.endswith("router.projection")]
        seen.append((self.global_step, [p.detach().clone() for p in routers]))
        if self.global_step == 2:  # as an update that is far too large would
            for parameter in routers:
                parameter.data.fill_(float("nan"))
        return step(self, batch, index)

    monkeypatch.setattr(LanguageModelTask, "training_step", poisoned)
    message = refused(*tiny(tmp_path), STEPS)
    kept = only_run(tmp_path) / "adapter"
    assert "the loss is nan at step 3 of phase router" in message and f"the last good state is in {kept}" in message
    assert "recipe.phases.*.learning_rate" in message
    saved = load_file(kept / "focus_adapter.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    # the weights that step 2 began with gave the last finite loss
    good = next(routers for number, routers in seen if number == 1)
    assert all(map(torch.equal, good, [value for name, value in sorted(saved.items()) if "projection" in name]))
    record = record_of(tmp_path)
    assert record.status == "failed" and "step 3" in record.error
