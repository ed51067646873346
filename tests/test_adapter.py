"""Adapters: saved and loaded exactly, bound to their base model, refused when damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import compute_logits, make_tokens
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrize import register_parametrization
from transformers import PreTrainedModel

from focus_exp import UserError, attach, detach, load_adapter, save_adapter, set_routing, update_balance
from focus_exp.models import adapter
from focus_exp.models.adapter import DESCRIPTION, WEIGHTS
from focus_exp.models.load import fingerprint, select_numerics
from focus_exp.models.methods import attached_methods

OPTIONS = {
    "groups": 6,
    "routing_dim": 8,
    "window": 2,
    "sinks": 1,
    "top_k": 2,
    "pair_rule": "share",
    "gate_steepness": 4.0,
}


@pytest.fixture
def trained(tiny_model) -> Callable[..., PreTrainedModel]:
    """trained(family, method="focus", seed=3, **options): a tiny model whose routers are no longer as drawn."""

    def factory(family: str, method: str = "focus", seed: int = 3, **options: Any) -> PreTrainedModel:
        torch.manual_seed(seed)
        model = attach(tiny_model(family), method, **(options or OPTIONS)).train()
        model(make_tokens())
        update_balance(model)
        return model.eval()

    return factory


@pytest.fixture
def saved(trained, tmp_path) -> Path:
    return save_adapter(trained("llama"), tmp_path / "adapter")


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_load_adapter_gives_the_saved_logits(tiny_model, trained, tmp_path, family, hard):
    model, base = set_routing(trained(family), hard=hard), tiny_model(family)
    plain = compute_logits(base)
    loaded = load_adapter(base, save_adapter(model, tmp_path), hard=hard)
    assert torch.equal(compute_logits(loaded), compute_logits(model))
    assert not torch.equal(compute_logits(loaded), plain)
    assert all(method.router.potential.any() for method in attached_methods(loaded).values())
    assert torch.equal(compute_logits(detach(loaded)), plain)


def test_load_adapter_keeps_the_shares_of_random_groups(tiny_model, trained, tmp_path):
    model = trained("llama", "random_groups", groups=2, window=2, seed=5, shares=[0.9, 0.1], layers=[1])
    attached_methods(model)[1].shares.copy_(torch.tensor([0.2, 0.8]))
    loaded = load_adapter(tiny_model("llama"), save_adapter(model, tmp_path))
    assert torch.equal(compute_logits(loaded), compute_logits(model))


@pytest.mark.parametrize("assignment", ["balanced", "sinkhorn"])
def test_save_adapter_description_has_all_fields(tiny_model, trained, tmp_path, assignment):
    model = trained("llama", assignment=assignment, **OPTIONS)
    description = json.loads((save_adapter(model, tmp_path, extra={"steps": 60}) / DESCRIPTION).read_text())
    assert description == {
        "format": 1,
        "method": "focus",
        "options": OPTIONS | {"assignment": assignment},
        "layers": [0, 1],
        "causal": assignment == "balanced",
        "trainable_parameters": 2 * (64 * 8 + 6 * 8),
        "base_model": {
            "name": "LlamaForCausalLM",
            "model_type": "llama",
            "revision": None,
            "fingerprint": fingerprint(tiny_model("llama")),
            "arithmetic": select_numerics(tiny_model("llama").config),
        },
        "steps": 60,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [DESCRIPTION, WEIGHTS]


@pytest.mark.parametrize(("place", "name"), [("/home/me/models/mine", "mine"), ("owner/name", "owner/name")])
def test_save_adapter_names_base_without_folder(tmp_path, trained, place, name):
    model = trained("llama")
    model.config.name_or_path = place
    assert json.loads((save_adapter(model, tmp_path) / DESCRIPTION).read_text())["base_model"]["name"] == name


def test_load_adapter_changed_config_warns(tiny_model, saved, caplog):
    load_adapter(tiny_model("llama", torch.bfloat16), saved)
    assert not caplog.records
    other = tiny_model("llama")
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    load_adapter(other, saved)
    assert "trained on these weights with another rope_parameters" in caplog.text
    description = json.loads((saved / DESCRIPTION).read_text())
    del description["base_model"]["arithmetic"]  # as versions before wrote it
    (saved / DESCRIPTION).write_text(json.dumps(description))
    caplog.clear()
    load_adapter(detach(other), saved)
    assert not caplog.records


def assert_refused(model: PreTrainedModel, folder: Path, message: str) -> None:
    """Assert that loading raises `message` and leaves the model unchanged."""
    before = compute_logits(model)
    with pytest.raises(UserError, match=message):
        load_adapter(model, folder)
    assert not attached_methods(model) and not hasattr(model, "focus_attachment")
    assert torch.equal(compute_logits(model), before)


@pytest.mark.parametrize("other", [("llama", 1), ("qwen2", 0), ("gpt2", 0)])
def test_load_adapter_other_base_raises_and_names_both(tiny_model, saved, other):
    family, seed = other
    model = tiny_model(family, seed=seed)
    assert_refused(model, saved, f"belongs to LlamaForCausalLM .*but this model is {type(model).__name__}")


def test_load_adapter_resized_base_raises_with_hint(tiny_model, saved):
    model = tiny_model("llama")
    model.resize_token_embeddings(model.config.vocab_size + 1, mean_resizing=False)
    assert_refused(model, saved, "own base model: give it with model.path=.* or model.hub_id=")


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("loaded", DTYPES, ids=str)
@pytest.mark.parametrize("saved", DTYPES, ids=str)
def test_load_adapter_base_in_another_dtype_is_accepted(tiny_model, tmp_path, saved, loaded):
    save_adapter(attach(tiny_model("llama").to(saved)), tmp_path)
    assert attached_methods(load_adapter(tiny_model("llama").to(loaded), tmp_path))


def test_load_adapter_mixed_dtypes_are_accepted(tiny_model, saved):
    model = tiny_model("llama").half()
    model.model.norm.float()
    assert adapter.read_adapter(model, saved)


@pytest.mark.parametrize(("loaded", "change"), [(torch.float32, 1e-2), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
def test_load_adapter_trained_base_is_refused(tiny_model, saved, loaded, change):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1 + change)
    assert_refused(model.to(loaded), saved, "belongs to LlamaForCausalLM")


@pytest.mark.parametrize("file", [WEIGHTS, DESCRIPTION])
@pytest.mark.parametrize("kept", [None, 0.0, 0.9])
def test_load_adapter_missing_or_truncated_file_raises(tiny_model, saved, file, kept):
    content = (saved / file).read_bytes()
    (saved / file).unlink()
    if kept is not None:
        (saved / file).write_bytes(content[: int(kept * len(content))])
    assert_refused(tiny_model("llama"), saved, f"{file}.*damaged" if kept is not None else file)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d | {"base_model": {}},
        lambda d: {k: v for k, v in d.items() if k != "options"},
        lambda d: d | {"options": ["window"]},
        lambda d: 1,
    ],
)
def test_load_adapter_malformed_description_raises(tiny_model, saved, change):
    path = saved / DESCRIPTION
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    assert_refused(tiny_model("llama"), saved, f"{DESCRIPTION} is damaged")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format must be 1 .got 2"),
        ({"method": "flash"}, "flash"),
        ({"layers": [0, 7]}, r"layers .*\[7\]"),
        ({"options": OPTIONS | {"heads": 2}}, f"{DESCRIPTION}: method focus has no options heads"),
        ({"options": OPTIONS | {"method": "focus", "model": 1, "shape": 2}}, "no options method, model, shape"),
        ({"options": OPTIONS | {"groups": "many"}}, "cannot be attached: .*groups.*many"),
        ({"options": OPTIONS | {"groups": 4}}, "does not fit its own description"),
        ({"layers": [0]}, "does not fit its own description"),
    ],
)
def test_load_adapter_unfitting_description_raises(tiny_model, saved, change, message):
    path = saved / DESCRIPTION
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert_refused(tiny_model("llama"), saved, message)


def test_load_adapter_nan_weights_raise(tiny_model, saved):
    tensors = load_file(saved / WEIGHTS)
    tensors["layers.1.router.centroids"][2, 3] = torch.nan
    save_file(tensors, saved / WEIGHTS)
    assert_refused(tiny_model("llama"), saved, r"damaged .layers.1.router.centroids")


def test_load_adapter_onto_attached_model_raises(trained, saved):
    model = trained("llama", seed=4)
    before = compute_logits(model)
    with pytest.raises(UserError, match="already has"):
        load_adapter(model, saved)
    assert torch.equal(compute_logits(model), before)


@pytest.mark.parametrize("at", ["weights", "description"])
def test_save_adapter_interrupted_keeps_the_old_adapter(tiny_model, trained, saved, monkeypatch, at):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full(tensors: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    other = trained("llama", seed=4, **OPTIONS | {"groups": 5})
    if at == "weights":
        monkeypatch.setattr(adapter, "save_file", full)
    else:
        monkeypatch.setattr(Path, "write_text", lambda path, *_, **__: full(None, path))
    with pytest.raises(OSError, match="No space left"):
        save_adapter(other, saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    monkeypatch.undo()
    assert torch.equal(
        compute_logits(load_adapter(tiny_model("llama"), save_adapter(other, saved), hard=False)), compute_logits(other)
    )


@pytest.mark.parametrize("saved_of", ["wrapper", "base"])
def test_save_adapter_with_peft_adapters_belongs_to_the_base(tiny_model, trained, tmp_path, saved_of):
    model, base = set_routing(trained("llama"), hard=True), tiny_model("llama")
    name, expected = adapter.base_name(base), compute_logits(model)
    options = LoraConfig(target_modules=["q_proj", "v_proj"], use_dora=True, modules_to_save=["lm_head"])
    wrapped = get_peft_model(model, options)
    with pytest.raises(UserError, match="get_base_model"):
        detach(wrapped)
    save_adapter(wrapped if saved_of == "wrapper" else wrapped.get_base_model(), tmp_path)
    description = json.loads((tmp_path / DESCRIPTION).read_text())["base_model"]
    assert (description["name"], description["fingerprint"]) == (name, fingerprint(base))
    assert torch.equal(compute_logits(set_routing(load_adapter(base, tmp_path), hard=True)), expected)


def train_with_peft(model: PreTrainedModel) -> None:
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["router"]))
    for name, parameter in wrapped.named_parameters():
        if "modules_to_save" in name and "centroids" in name:
            parameter.data.mul_(-2)


def train_compiled(model: PreTrainedModel) -> None:
    for method in attached_methods(model).values():
        method.router = torch.compile(method.router)
        method.router.centroids.data.mul_(-2)


def train_checkpointed(model: PreTrainedModel) -> None:
    for method in attached_methods(model).values():
        method.router.centroids.data.mul_(-2)
        method.router = checkpoint_wrapper(method.router)


@pytest.mark.parametrize("train", [train_with_peft, train_compiled, train_checkpointed])
def test_save_adapter_wrapped_router_saves_what_was_trained(tiny_model, trained, tmp_path, train):
    model = set_routing(trained("llama"), hard=True)
    before = compute_logits(model)
    train(model)
    with torch.compiler.set_stance("force_eager"):
        expected = compute_logits(model)
    loaded = load_adapter(tiny_model("llama"), save_adapter(model, tmp_path))
    assert torch.equal(compute_logits(loaded), expected) and not torch.equal(expected, before)
    description = json.loads((tmp_path / DESCRIPTION).read_text())
    assert description["trainable_parameters"] == 2 * (64 * 8 + 6 * 8)


def parametrize_router(model: PreTrainedModel) -> None:
    register_parametrization(attached_methods(model)[1].router, "projection", torch.nn.Identity())


def put_lora_on_router(model: PreTrainedModel) -> None:
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], target_parameters=["router.projection"]))


def put_two_peft_adapters(model: PreTrainedModel) -> None:
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["router"])
    get_peft_model(model, config).add_adapter("second", config)


@pytest.mark.parametrize("wrap", [parametrize_router, put_lora_on_router, put_two_peft_adapters])
def test_save_adapter_that_could_not_be_loaded_raises_and_writes_nothing(trained, tmp_path, wrap):
    model = trained("llama")
    wrap(model)
    with pytest.raises(UserError, match=r"layer \d: the attached method cannot be saved"):
        save_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_attached_methods_wrapped_method_raises(trained):
    model = get_peft_model(trained("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["focus"]))
    with pytest.raises(UserError, match="Remove that wrapper"):
        compute_logits(model)


def test_load_adapter_check_base_off_takes_other_weights_and_warns(tiny_model, saved, caplog):
    model = tiny_model("llama", seed=1)
    with pytest.raises(UserError, match="check_base=False"):
        load_adapter(model, saved)
    assert compute_logits(load_adapter(model, saved, check_base=False)).isfinite().all()
    assert "check_base" in caplog.text


def test_load_adapter_check_base_off_refuses_other_shapes(tiny_model, saved):
    model = tiny_model("llama", hidden_size=32, head_dim=8)
    with pytest.raises(UserError, match="does not fit"):
        load_adapter(model, saved, check_base=False)
    assert not attached_methods(model)


def test_load_adapter_base_on_meta_is_refused(tiny_model, saved):
    with pytest.raises(UserError, match="Load its weights first"):
        load_adapter(tiny_model("llama").to("meta"), saved)
