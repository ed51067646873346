"""Damaged weights, caches and indexes are told or made again, and what cannot be fast says so."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import build
from running import record_of, router_steps, run, tiny, write_texts
from safetensors.torch import load_file, save_file

from focus_exp.config import DataConfig
from focus_exp.data import load_corpus
from focus_exp.jobs.backend import attention_dropout
from focus_exp.models import load as load_module
from focus_exp.models.random import byte_tokenizer
from focus_exp.storage import replace_file

STEPS = router_steps(4)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder that save_pretrained wrote."""
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
    "change, said",
    [(spoil, "holds NaN or infinity"), (drop, "c_fc.weight is missing"), (reshape, "another shape"), (None, "")],
)
def test_damaged_weights_of_a_base_are_refused(base, tmp_path, change, said):
    place = shutil.copytree(base, tmp_path / "model")
    weights = place / "model.safetensors"
    tensors = load_file(weights)
    if change:
        change(tensors)
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        weights.write_bytes(weights.read_bytes()[:-100])
    result = run(*tiny(tmp_path), f"model.path={place}", STEPS)
    assert result.code == 2 and result.err.count("error: ") == 1 and f"{place}: " in result.err
    assert said in result.err and not list(tmp_path.rglob("adapter"))


@pytest.mark.parametrize("family", ["tiny_gpt2", "tiny_llama"])
def test_a_base_without_a_tokenizer_is_refused(tmp_path, family):
    """transformers makes an empty one for some, and none for others."""
    place = tmp_path / "model"
    build(family).save_pretrained(place)
    result = run(*tiny(tmp_path), f"model.path={place}", STEPS)
    assert result.code == 2 and f"error: {place}: it has no tokenizer: tokenizer.json" in result.err
    assert "is missing" in result.err and "hub" not in result.err


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_base_with_half_a_file_is_refused(base, tmp_path, name):
    place = shutil.copytree(base, tmp_path / "model")
    (place / name).write_bytes((place / name).read_bytes()[:40])
    result = run(*tiny(tmp_path), f"model.path={place}", STEPS)
    assert result.code == 2 and f"error: {place}: its {name.split('.')[0]} cannot be read (" in result.err
    assert "model.path=" in result.err and "hub" not in result.err


@pytest.mark.parametrize("name", ["train.bin", "test.starts.npy", "test.documents.json", "provenance.json"])
def test_a_damaged_token_cache_is_made_again(tmp_path, capsys, name):
    data = DataConfig(name="files", source="files", files=str(write_texts(tmp_path / "texts")))

    def load():
        return load_corpus(data, byte_tokenizer(), assets="embedded", cache=tmp_path / "cache")

    before = load()
    tokens = before.train.tokens.copy()  # off the disk
    (path,) = (tmp_path / "cache").rglob(name)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 8 * 4])
    again = load()
    assert f"WARNING: {path.parent} is damaged (" in capsys.readouterr().err
    assert path.read_bytes() == content and again.provenance == before.provenance
    assert np.array_equal(again.train.tokens, tokens) and load().test.documents == before.test.documents
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "files, whole",
    [
        (["model.safetensors"], True),
        (["pytorch_model.bin"], True),
        (["pytorch_model.bin.index.json", "a.bin", "b.bin"], True),
        (["model.safetensors.index.json", "a.bin", "b.bin"], True),
        (["pytorch_model.bin.index.json", "a.bin"], False),
        (["model.safetensors.index.json", "pytorch_model.bin"], True),
        ([], False),
    ],
)
def test_a_sharded_copy_in_the_hubs_cache_is_whole_with_all_its_shards(tmp_path, monkeypatch, files, whole):
    place = tmp_path / "snapshots" / "c0ffee"
    for name in ("config.json", *files):
        replace_file(place / name, json.dumps({"weight_map": {"x": "a.bin", "y": "b.bin", "z": "a.bin"}}).encode())
    there = {path.name: str(path) for path in place.iterdir()}
    monkeypatch.setattr(load_module, "try_to_load_from_cache", lambda hub_id, name, **_: there.get(name))
    assert load_module._cached_revision("owner/model", None) == ("c0ffee" if whole else None)
    for index in place.glob("*.index.json"):
        index.write_text("{")
        assert load_module._cached_revision("owner/model", None) == ("c0ffee" if "pytorch_model.bin" in files else None)


def test_dropped_attention_is_found_whatever_it_is_called():
    fields = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "attention_dropout": 0.0, "attn_config": {"attn_pdrop": 0.2}}
    fields |= {"attention_probs_dropout_prob": 0.3, "id2label": {0: "a"}, "use_attention_dropout": True}
    found = {"attn_pdrop": 0.1, "attn_config.attn_pdrop": 0.2, "attention_probs_dropout_prob": 0.3}
    assert dict(attention_dropout(fields)) == found


@pytest.mark.parametrize(
    "recipe, dropout, warns", [("finetune", "0.1", True), ("retrofit", "0.1", False), ("finetune", "0", False)]
)
def test_hard_training_that_must_compute_all_pairs_says_so(base, tmp_path, recipe, dropout, warns):
    names = ["router", "everything"] if recipe == "finetune" else ["router"]
    phases = [f"recipe.phases.{name}.{setting}" for name in names for setting in ("steps=1", "warmup_steps=0")]
    settings = [f"model.path={base}", f"recipe={recipe}", "attention.train_with=hard", *phases]
    if dropout == "0":  # as the warning says
        settings.append("++model.architecture.attn_pdrop=0")
    result = run(*tiny(tmp_path), *settings, "attention.warm_start_sequences=0")
    assert result.code == 0, result.err
    said = [line for line in result.err.splitlines() if line.startswith("WARNING: attention.train_with=hard")]
    assert len(said) == warns and record_of(tmp_path).warnings == [line.removeprefix("WARNING: ") for line in said]
    assert not warns or ("attn_pdrop=0.1" in said[0] and "++model.architecture.attn_pdrop=0" in said[0])
