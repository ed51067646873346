"""Messages for bad input, each the one line of a command that exits with code 2.

`tests/golden/messages.yaml` holds them: what is typed after the settings of a tiny run, or the name of a situation, and
the message. After a change of wording: REGENERATE=1 pytest -n 0 tests/test_messages.py, then read the diff.
"""

import errno
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import wandb
import yaml
from running import fitting, only_run, router_steps, run, tiny, without_attention
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase, T5Config

from focus_exp import __main__ as command_line
from focus_exp import assets
from focus_exp.models import adapter as adapter_module
from focus_exp.models.random import byte_tokenizer
from focus_exp.runs import open as run_module

GOLDEN = Path(__file__).parent / "golden" / "messages.yaml"
MESSAGES: dict[str, dict[str, str]] = yaml.safe_load(GOLDEN.read_text(encoding="utf-8"))
REGENERATE = bool(os.environ.get("REGENERATE"))
HYDRA_INTERNALS = re.compile(r"base_\w+|object_type|in struct|Traceback")


class Dumper(yaml.SafeDumper):
    """Write messages of several lines as blocks."""


Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("messages")


@pytest.fixture(scope="module")
def settings(folder):
    return tiny(folder)


@pytest.fixture
def expect(folder, tmp_path):
    """expect(situation, *arguments, section="situations"): run the command and compare its message."""

    def compare(key: str, *arguments: str, section: str = "situations") -> None:
        result = run(*arguments)
        assert result.code == 2
        (message,) = re.findall(r"^error: ([\s\S]*)", result.err, flags=re.MULTILINE)
        assert not HYDRA_INTERNALS.search(result.err)
        for place, name in ((tmp_path, "TMP"), (folder, "TMP"), (Path.home(), "HOME")):
            message = message.replace(str(place), name)
        message = re.sub(r"-seed0-[0-9a-f]{8}", "-seed0-HASH", message).rstrip("\n")
        message = re.sub(r"\b[0-9a-f]{12}\b", "FINGERPRINT", message)
        if REGENERATE:
            MESSAGES[section][key] = message
            text = yaml.dump(MESSAGES, Dumper=Dumper, width=float("inf"), sort_keys=False, allow_unicode=True)
            GOLDEN.write_text(text, encoding="utf-8")
        assert message == MESSAGES[section][key]

    return compare


@pytest.mark.parametrize("typed", MESSAGES["typed"])
def test_typed_mistake_gets_its_message(settings, expect, tmp_path, monkeypatch, typed):
    if "GPU" in MESSAGES["typed"][typed] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    alone = typed.startswith("--help")
    arguments = shlex.split(typed)
    expect(typed, *(arguments if alone else fitting(*settings, *arguments)), section="typed")
    assert not list(tmp_path.iterdir())


DISK_OF_SAFETENSORS = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
# situation, what raises, and the error
FAILURES = [
    ("out of memory, cuda", (command_line, "execute"),
     torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has")),
    ("out of memory, cpu", (command_line, "execute"),
     RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")),
    ("out of memory, python", (command_line, "execute"), MemoryError()),
    ("read-only run folder", (run_module, "replace_file"), OSError(errno.EROFS, "Read-only file system")),
    ("full disk at a checkpoint", (pl.Trainer, "save_checkpoint"), OSError(errno.ENOSPC, "No space left on device")),
    ("full disk at weights, save_file", (adapter_module, "save_file"), DISK_OF_SAFETENSORS),
    ("full disk at weights, save_pretrained", (PreTrainedTokenizerBase, "save_pretrained"), DISK_OF_SAFETENSORS),
    ("logger.wandb=online without login", (wandb, "init"),
     wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")),
]  # fmt: skip


@pytest.mark.parametrize(("situation", "place", "error"), FAILURES, ids=[situation for situation, *_ in FAILURES])
def test_failure_gets_its_message_and_leaves_no_part_of_weights(expect, tmp_path, monkeypatch, situation, place, error):
    def fail(*arguments, **options):
        if isinstance(error, OSError):
            error.filename = next(str(value) for value in arguments if isinstance(value, Path))
        raise error

    monkeypatch.setattr(*place, fail)
    phases = ("recipe=finetune", router_steps(1), "recipe.phases.everything.steps=1")
    wandb_mode = ["logger.wandb=online"] if place[0] is wandb else []
    expect(situation, *tiny(tmp_path), *phases, *wandb_mode)
    assert not list((tmp_path / "runs").rglob("*model*"))


def test_folder_that_cannot_be_created_gets_its_message(settings, expect, tmp_path, monkeypatch):
    make, place = os.mkdir, tmp_path / "none"

    def mkdir(path, mode=0o777):
        if place in (Path(path), *Path(path).parents):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    expect("runs_dir cannot be created, EACCES", *settings, f"runs_dir={place}")


@pytest.mark.parametrize("key", ["runs_dir", "cache_dir"])
def test_folder_that_is_a_file_gets_its_message(settings, expect, tmp_path, key):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        expect(f"{key} is {place}", *settings, f"{key}={tmp_path / place}")


def test_unusable_text_gets_its_message(settings, expect, tmp_path):
    empty, short, latin = tmp_path / "empty", tmp_path / "short.txt", tmp_path / "latin.txt"
    empty.mkdir()
    short.write_text("a few words")
    latin.write_bytes("café".encode("latin-1"))
    for place in (empty, short, latin):
        expect(f"data.files is {place.stem}", *settings, f"data.files={place}")
    (closed := tmp_path / "closed.txt").symlink_to(tmp_path / "nothing")
    expect("data.files is unreadable", *settings, f"data.files={closed}")


def test_adapter_that_does_not_fit_gets_its_message(settings, expect, tmp_path, finished_run):
    adapter = shutil.copytree(only_run(finished_run) / "adapter", tmp_path / "adapter")
    command = [*without_attention(settings), "job=evaluate"]
    expect("adapter of other weights", *command, f"adapter={adapter}", "seed=1")
    damaged = shutil.copytree(adapter, tmp_path / "damaged")
    weights = damaged / "focus_adapter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    expect("adapter with damaged weights", *command, f"adapter={damaged}")
    (damaged / "focus_adapter.json").write_text("{")
    expect("adapter with damaged description", *command, f"adapter={damaged}")


def test_model_that_does_not_predict_tokens_gets_its_message(settings, expect, tmp_path):
    T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, vocab_size=300).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    expect("model.path is a T5", *settings, f"model.path={tmp_path}")


def test_hub_without_network_gets_its_message(settings, expect, monkeypatch):
    command = [*settings, "model.hub_id=no-one/nothing", "assets=hub"]
    expect("assets=hub with HF_HUB_OFFLINE", *command)
    monkeypatch.setattr(assets, "hub_reachable", lambda: False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    expect("assets=hub without network", *command)


def test_sweep_without_slurm_gets_its_message(settings, expect, tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    expect("hydra/launcher=slurm without SLURM", *settings, "seed=0,1", "-m", "hydra/launcher=slurm")


def test_missing_extra_gets_its_message(settings, expect, monkeypatch):
    monkeypatch.setattr("focus_exp.checks.find_spec", lambda name: None)
    expect("lm_eval is not installed", *settings, "eval.tasks=[lambada_openai]")


def test_file_of_the_user_that_is_not_yaml_gets_its_message(expect, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "typo.yaml").write_text("name: [typo\n")
    expect("--config-dir with a file that is not YAML", "model=typo", f"--config-dir={tmp_path}")
