"""`fit`: two encoders from Python are those of the command line."""

import json
from pathlib import Path

import pytest
import torch
from running import only_run, run, tiny, without_attention, write_texts
from safetensors.torch import load_file

from focus_exp import UserError, fit, save_adapter
from focus_exp.models.methods import active_methods
from focus_exp.models.random import byte_tokenizer

ATTENTION = {"window": 8, "sinks": 1, "groups": 4, "top_k": 1}
FIT = {"sequences": 4, "validation_sequences": 1, "steps": 10}
SMALL = ATTENTION | FIT


@pytest.fixture
def texts(tmp_path):
    return [path.read_text() for path in sorted(write_texts(tmp_path / "mine").iterdir())]


def test_fit_gives_the_adapter_of_the_command_line(tiny_model, tmp_path):
    options = [f"attention.{key}={value}" for key, value in ATTENTION.items()]
    options += [f"recipe.fit.{key}={value}" for key, value in FIT.items()]
    fitted = ["attention=focus_dual", "attention.density=0.3", "recipe.fit.learning_rate=0.02", "recipe=none"]
    result = run(*without_attention(tiny(tmp_path)), *fitted, *options)
    assert result.code == 0, result.err
    (names,) = (tmp_path / "cache").rglob("train.documents.json")
    texts = [(tmp_path / "texts" / Path(name).name).read_text() for name in json.loads(names.read_text())]
    model = tiny_model("llama")
    fit(model, texts, 0.3, tokenizer=byte_tokenizer(), seq_len=32, cache_dir=str(tmp_path / "own"), **SMALL)
    save_adapter(model, str(tmp_path / "adapter"))
    mine, theirs = (load_file(folder / "focus_adapter.safetensors") for folder in
                    (tmp_path / "adapter", only_run(tmp_path / "runs") / "adapter"))  # fmt: skip
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name


def test_fit_attaches_hard_routing_and_keeps_the_generator(tiny_model, texts, tmp_path):
    model = tiny_model("llama")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fit(model, texts, 0.3, tokenizer=byte_tokenizer(), seq_len=64, cache_dir=str(tmp_path), **SMALL)
    assert active_methods(model) and not model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_fit_of_short_texts_leaves_the_model_as_it_was(tiny_model, texts, tmp_path):
    model = tiny_model("llama")
    with pytest.raises(UserError, match="validation_sequences"):
        fit(model, texts[:1], tokenizer=byte_tokenizer(), seq_len=800, cache_dir=str(tmp_path), **SMALL)
    assert not active_methods(model)


@pytest.mark.parametrize("options", [{"windw": 8}, {"density": 1.5}, {"steps": 1}])
def test_fit_names_the_option_that_is_wrong(tiny_model, texts, options):
    with pytest.raises(UserError, match=next(iter(options))):
        fit(tiny_model("llama"), texts, tokenizer=byte_tokenizer(), **options)
