"""Damaged weights and folders of models are refused."""

import shutil

import pytest
import torch
from conftest import build
from running import router_steps, run, tiny
from safetensors.torch import load_file, save_file

from focus_exp.models.random import byte_tokenizer

STEPS = router_steps(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model folder with attention dropout."""
    folder = tmp_path_factory.mktemp("base")
    build("tiny_gpt2", attn_pdrop=0.1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def spoil(tensors):
    tensors["transformer.h.1.mlp.c_fc.weight"][0, 0] = torch.nan


def reshape(tensors):
    tensors["transformer.h.1.mlp.c_fc.weight"] = torch.zeros(8, 8)


def drop(tensors):
    del tensors["transformer.h.1.mlp.c_fc.weight"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [(spoil, "NaN"), (drop, "c_fc.weight"), (reshape, "shape"), (None, "")],
)
def test_base_with_damaged_weights_is_refused(base, tmp_path, change, reason):
    place = shutil.copytree(base, tmp_path / "model")
    weights = place / "model.safetensors"
    tensors = load_file(weights)
    if change:
        change(tensors)
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        weights.write_bytes(weights.read_bytes()[:-100])
    result = run(*tiny(tmp_path), f"model.path={place}", STEPS)
    assert result.code == 2
    assert result.err.count("error: ") == 1
    assert str(place) in result.err
    assert reason in result.err
    assert list(tmp_path.rglob("adapter")) == []


@pytest.mark.parametrize("family", ["tiny_gpt2", "tiny_llama"])
def test_base_without_tokenizer_is_refused(tmp_path, family):
    place = tmp_path / "model"
    build(family).save_pretrained(place)
    result = run(*tiny(tmp_path), f"model.path={place}", STEPS)
    assert result.code == 2
    assert f"error: {place}" in result.err
    assert "tokenizer.json" in result.err


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_base_with_truncated_file_is_refused(base, tmp_path, name):
    place = shutil.copytree(base, tmp_path / "model")
    (place / name).write_bytes((place / name).read_bytes()[:40])
    result = run(*tiny(tmp_path), f"model.path={place}", STEPS)
    assert result.code == 2
    assert f"error: {place}" in result.err
    assert name.split(".")[0] in result.err
    assert "model.path=" in result.err
