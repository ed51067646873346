"""The trained part on disk: it comes back bit for bit, knows its base model, and damage is told, not guessed around."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp import UserError, attach, detach, load_adapter, save_adapter, set_routing
from focus_exp.config_hash import content
from focus_exp.models import adapter
from focus_exp.models.adapter import DESCRIPTION, WEIGHTS
from focus_exp.models.load import arithmetic_of, fingerprint
from focus_exp.models.modules import attached_methods

OPTIONS = {
    "groups": 6,
    "routing_dim": 8,
    "window": 2,
    "sinks": 1,
    "top_k": 2,
    "pair_rule": "share",
    "gate_steepness": 4.0,
}
TOKENS = torch.arange(80).view(2, 40) * 7 % 256


def logits_of(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture
def trained(tiny_model) -> Callable[..., PreTrainedModel]:
    """trained(family, method="focus", seed=3, **options): a tiny model whose routers are no longer as drawn."""

    def factory(family: str, method: str = "focus", seed: int = 3, **options: Any) -> PreTrainedModel:
        torch.manual_seed(seed)
        model = attach(tiny_model(family), method, **(options or OPTIONS)).train()
        model(TOKENS)  # moves the balance
        return model.eval()

    return factory


@pytest.fixture
def saved(trained, tmp_path) -> Path:
    return save_adapter(trained("llama"), tmp_path / "adapter")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_what_is_loaded_is_what_was_saved_bit_for_bit(tiny_model, trained, tmp_path, family, hard):
    model, base = set_routing(trained(family), hard=hard), tiny_model(family)
    plain = logits_of(base)
    loaded = load_adapter(base, save_adapter(model, tmp_path), hard=hard)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert not torch.equal(logits_of(loaded), plain)
    assert all(method.router.potential.any() for method in attached_methods(loaded).values())
    assert torch.equal(logits_of(detach(loaded)), plain)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("window", {"window": 3, "layers": [1]}),
        ("random_groups", {"groups": 2, "window": 2, "seed": 5, "shares": torch.tensor([0.9, 0.1])}),
        ("random_groups", {"groups": 2, "window": 2, "seed": 5, "shares": [0.9, 0.1]}),
    ],
    ids=["window", "tensor", "list"],
)
def test_controls_are_saved_with_all_that_makes_them(tiny_model, trained, tmp_path, method, options):
    model = trained("llama", method, **options)
    if method == "random_groups":
        attached_methods(model)[1].shares.copy_(torch.tensor([0.2, 0.8]))
    loaded = load_adapter(tiny_model("llama"), save_adapter(model, tmp_path))
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert not torch.equal(logits_of(loaded), logits_of(tiny_model("llama")))


def test_an_adapter_knows_how_many_groups_a_query_was_set_to_reach(tiny_model, tmp_path):
    model = attach(tiny_model("llama"), "focus", groups=4)
    set_routing(model, hard=True, top_k=2, pair_rule="share")
    again = load_adapter(tiny_model("llama"), save_adapter(model, tmp_path / "adapter"))
    assert {(m.top_k, m.pair_rule) for m in attached_methods(again).values()} == {(2, "share")}


def test_adapters_of_the_same_numbers_under_other_options_are_other_ones(tiny_model, tmp_path):
    model = attach(tiny_model("llama"), "focus", groups=4)
    found = []
    for top_k in (1, 2, 1):
        set_routing(model, hard=True, top_k=top_k)
        found.append(content(save_adapter(model, tmp_path / f"{len(found)}")))
    assert found[0] == found[2] != found[1]


def test_hard_groups_are_what_an_adapter_is_loaded_for(tiny_model, saved):
    assert all(method.hard for method in attached_methods(load_adapter(tiny_model("llama"), saved)).values())


@pytest.mark.parametrize("assignment", ["balanced", "sinkhorn"])
def test_the_description_tells_what_the_weights_are(tiny_model, trained, tmp_path, assignment):
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
            "arithmetic": arithmetic_of(tiny_model("llama").config),
        },
        "steps": 60,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [DESCRIPTION, WEIGHTS]


@pytest.mark.parametrize(("place", "name"), [("/home/me/models/mine", "mine"), ("owner/name", "owner/name")])
def test_no_folder_of_this_machine_goes_out_with_an_adapter(tmp_path, trained, place, name):
    model = trained("llama")
    model.config.name_or_path = place
    assert json.loads((save_adapter(model, tmp_path) / DESCRIPTION).read_text())["base_model"]["name"] == name


def test_only_routers_and_their_balance_are_saved(saved):
    assert {name: tuple(tensor.shape) for name, tensor in load_file(saved / WEIGHTS).items()} == {
        f"layers.{layer}.router.{name}": shape
        for layer in range(2)
        for name, shape in {"projection": (64, 8), "centroids": (6, 8), "potential": (6,)}.items()
    }


def test_an_adapter_of_a_float32_base_fits_the_same_base_in_bfloat16(tiny_model, saved):
    assert logits_of(load_adapter(tiny_model("llama", torch.bfloat16), saved)).isfinite().all()


def test_routers_have_their_precision_where_half_is_the_default(tiny_model, saved):
    model, expected = tiny_model("llama"), logits_of(load_adapter(tiny_model("llama"), saved, hard=False))
    torch.set_default_dtype(torch.bfloat16)
    try:
        load_adapter(model, saved, hard=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert logits_of(model).equal(expected)


def test_a_base_of_the_same_weights_and_other_arithmetic_is_told_of(tiny_model, saved, caplog):
    load_adapter(tiny_model("llama", torch.bfloat16), saved)
    assert not caplog.records
    other = tiny_model("llama")
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    load_adapter(other, saved)
    assert "trained on these weights under another rope_parameters" in caplog.text
    description = json.loads((saved / DESCRIPTION).read_text())
    del description["base_model"]["arithmetic"]  # as versions before wrote it
    (saved / DESCRIPTION).write_text(json.dumps(description))
    caplog.clear()
    load_adapter(detach(other), saved)
    assert not caplog.records


def refuse(model: PreTrainedModel, folder: Path, message: str) -> None:
    """Loading says `message` and leaves the model as it was."""
    before = logits_of(model)
    with pytest.raises(UserError, match=message):
        load_adapter(model, folder)
    assert not attached_methods(model) and not hasattr(model, "focus_attachment")
    assert torch.equal(logits_of(model), before)


@pytest.mark.parametrize("other", [("llama", 1), ("qwen2", 0), ("gpt2", 0)])
def test_another_base_is_refused_and_both_are_named(tiny_model, saved, other):
    family, seed = other
    model = tiny_model(family, seed=seed)
    refuse(model, saved, f"belongs to LlamaForCausalLM .*but this model is {type(model).__name__}")


def test_the_same_base_with_other_weights_is_told_apart(tiny_model, saved):
    model = tiny_model("llama")
    model.resize_token_embeddings(model.config.vocab_size + 1, mean_resizing=False)
    refuse(model, saved, "own base model: same name, other weights; call load_adapter before resize_token_embeddings")
    with pytest.raises(UserError, match="own base model; the command line takes it by model.path=.* or model.hub_id="):
        load_adapter(tiny_model("gpt2"), saved)


def test_one_changed_weight_makes_another_base(tiny_model, saved):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    refuse(model, saved, "load the adapter's own base model")


@pytest.mark.parametrize("file", [WEIGHTS, DESCRIPTION])
def test_a_missing_file_is_named(tiny_model, saved, file):
    (saved / file).unlink()
    refuse(tiny_model("llama"), saved, file)


@pytest.mark.parametrize("file", [WEIGHTS, DESCRIPTION])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.9])
def test_a_truncated_file_is_named(tiny_model, saved, file, kept):
    content = (saved / file).read_bytes()
    (saved / file).write_bytes(content[: int(kept * len(content))])
    refuse(tiny_model("llama"), saved, f"{file} is .*damaged")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: [],
        lambda d: d | {"base_model": {}},
        lambda d: d | {"base_model": None},
        lambda d: {k: v for k, v in d.items() if k != "options"},
        lambda d: {k: v for k, v in d.items() if k != "format"},
        lambda d: d | {"options": ["window"]},
        lambda d: d | {"layers": "all"},
        lambda d: d | {"layers": [[0]]},
        lambda d: d | {"layers": ["0", "1"]},
        lambda d: d | {"layers": [False, True]},
        lambda d: d | {"base_model": d["base_model"] | {"fingerprint": 5}},
        lambda d: d | {"base_model": d["base_model"] | {"name": None}},
        lambda d: d | {"base_model": d["base_model"] | {"arithmetic": 5}},
        lambda d: {k: v for k, v in d.items() if k != "trainable_parameters"},
        lambda d: "focus",
        lambda d: 1,
    ],
)
def test_a_description_with_something_missing_or_mistaken_is_damaged(tiny_model, saved, change):
    path = saved / DESCRIPTION
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    refuse(tiny_model("llama"), saved, f"{DESCRIPTION} is damaged")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2, this version reads format 1"),
        ({"method": "flash"}, "'flash' is not known"),
        ({"layers": [0, 7]}, r"layers \[7\] do not exist"),
        ({"options": OPTIONS | {"heads": 2}}, f"{DESCRIPTION}: method focus has no options heads; copy"),
        ({"options": OPTIONS | {"layers": [0]}}, "no options layers"),
        ({"options": OPTIONS | {"method": "focus", "model": 1, "shape": 2}}, "no options method, model, shape"),
        ({"options": OPTIONS | {"groups": "many"}}, "cannot be attached: .*groups='many' is not a whole number"),
        ({"options": OPTIONS | {"groups": 4}}, "does not fit its own description"),
        ({"layers": [0]}, "does not fit its own description"),
    ],
)
def test_a_description_of_something_else_is_refused(tiny_model, saved, change, message):
    path = saved / DESCRIPTION
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refuse(tiny_model("llama"), saved, message)


def test_weights_that_are_no_numbers_are_damaged(tiny_model, saved):
    tensors = load_file(saved / WEIGHTS)
    tensors["layers.1.router.centroids"][2, 3] = torch.nan
    save_file(tensors, saved / WEIGHTS)
    refuse(tiny_model("llama"), saved, r"damaged \(layers.1.router.centroids holds NaN\)")


@pytest.mark.parametrize("name", ["layers.0.router.centroids", "layers.1.router.potential"])
@pytest.mark.parametrize("change", [lambda tensor: tensor[:2].clone(), lambda tensor: None], ids=["shape", "missing"])
def test_weights_of_another_shape_are_refused(tiny_model, saved, name, change):
    tensors = load_file(saved / WEIGHTS)
    tensors[name] = change(tensors[name])
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, saved / WEIGHTS)
    refuse(tiny_model("llama"), saved, "does not fit its own description")


def test_loading_onto_an_attached_model_leaves_it_attached_as_it_was(trained, saved):
    model = trained("llama", seed=4)
    before = logits_of(model)
    with pytest.raises(UserError, match="already has"):
        load_adapter(model, saved)
    assert torch.equal(logits_of(model), before)


@pytest.mark.parametrize("at", ["weights", "description"])
def test_an_interrupted_write_leaves_the_old_adapter(tiny_model, trained, saved, monkeypatch, at):
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
        logits_of(load_adapter(tiny_model("llama"), save_adapter(other, saved), hard=False)), logits_of(other)
    )


@pytest.mark.parametrize("saved_of", ["wrapper", "base"])
def test_an_adapter_beside_those_of_peft_belongs_to_the_same_base(tiny_model, trained, tmp_path, saved_of):
    model, base = set_routing(trained("llama"), hard=True), tiny_model("llama")
    name, expected = adapter.base_name(base), logits_of(model)
    options = LoraConfig(target_modules=["q_proj", "v_proj"], use_dora=True, modules_to_save=["lm_head"])
    wrapped = get_peft_model(model, options)
    with pytest.raises(UserError, match=r"PeftModel wraps the model .* get_base_model\(\)"):
        detach(wrapped)
    save_adapter(wrapped if saved_of == "wrapper" else wrapped.get_base_model(), tmp_path)
    assert json.loads((tmp_path / DESCRIPTION).read_text())["base_model"]["name"] == name
    assert torch.equal(logits_of(set_routing(load_adapter(base, tmp_path), hard=True)), expected)
