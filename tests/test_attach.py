"""attach and detach: causality, exactness when disabled, padding, training."""

import copy
from collections.abc import Callable

import pytest
import torch
from builders import attach_focus, compute_logits, make_tokens
from conftest import FAMILIES
from peft import LoraConfig, get_peft_model
from test_contract import describe_state
from transformers import LlamaForSequenceClassification, PreTrainedModel

from focus_exp import UserError, attach, detach, disable_method, freeze, set_routing, update_balance
from focus_exp.models.methods import attached_methods, observe_selections

TINY = {"window": 2, "sinks": 1}
EVERYTHING = {
    "focus": {"top_k": 4},
    "random_groups": {"top_k": 4},
    "focus_dual": {"top_k": 32},
    "window": {"window": 200},
}
families = pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gemma3"])


@pytest.fixture
def attached(tiny_model) -> Callable[..., PreTrainedModel]:
    """attached(family, **options): a tiny model with a mask that matters at 40 tokens."""
    return lambda family, **options: attach_focus(tiny_model(family), **TINY | options)


@families
@pytest.mark.parametrize("method", EVERYTHING)
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_logits_all_pairs_kept_equal_base(tiny_model, family, method, hard):
    base, tokens = tiny_model(family), make_tokens()
    keeps_all = EVERYTHING[method] if hard else {"window": 200}
    model = set_routing(attach(tiny_model(family), method, **TINY | keeps_all), hard=hard)
    torch.testing.assert_close(compute_logits(model, tokens), compute_logits(base, tokens), atol=2e-5, rtol=1e-5)


@families
@pytest.mark.parametrize("side", ["left", "right"])
def test_train_padding_changes_no_potential_and_no_pair_count(attached, family, side):
    text, padding, found = make_tokens(1, 25), torch.full((1, 15), 5), []
    parts = [(padding, 0), (text, 1)] if side == "left" else [(text, 1), (padding, 0)]
    mask = torch.cat([torch.full_like(part, inside) for part, inside in parts], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = {"attention_mask": mask, "position_ids": positions}
    for tokens, options in ((text, {}), (torch.cat([part for part, _ in parts], 1), padded)):
        model, counts = attached(family).train(), []
        with observe_selections(
            model, lambda *args, counts=counts: counts.append(args[1].count_pairs(*args[2:]).total)
        ):
            model(tokens, **options)
        update_balance(model)
        found.append((counts, torch.stack([m.router.potential for m in attached_methods(model).values()])))
    assert found[0][0] == found[1][0] and found[0][1].any()
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-5, rtol=1e-4)


@families
def test_freeze_leaves_gradients_of_routers_alone(attached, family):
    model, tokens = attached(family, hard=False).train(), make_tokens()
    names = freeze(model)
    assert len(names) == 4 and all(".focus.router." in name for name in names)
    model(tokens, labels=tokens).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == set(names)
    assert all(grad.isfinite().all() and grad.any() for grad in gradients.values())

    assert len(freeze(model, "all")) == len(list(model.parameters()))
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@families
def test_attach_some_layers_keeps_the_others(tiny_model, family):
    tokens = make_tokens()
    base = tiny_model(family)(tokens, output_hidden_states=True).hidden_states
    model = set_routing(attach(tiny_model(family), layers=[1], **TINY), hard=True)
    hidden = model(tokens, output_hidden_states=True).hidden_states
    assert list(attached_methods(model)) == [1]
    torch.testing.assert_close(hidden[1], base[1], atol=2e-5, rtol=1e-5)
    assert (hidden[2] - base[2]).abs().max() > 1e-3


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma2"])
@pytest.mark.parametrize("method", ["focus", "focus_dual"])
def test_autocast_sparse_path_equals_masked_path(tiny_model, family, method):
    """With rotary positions q and k stay in float32, and v is bfloat16."""
    found = []
    for backend in ("masked", "cpu"):
        torch.manual_seed(1)
        model = attach(tiny_model(family), method, layers=[0], top_k=1, **TINY)
        set_routing(model, hard=True, backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(make_tokens(), labels=make_tokens(), use_cache=False)
        out.loss.backward()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            step = model(make_tokens()[:, :1], past_key_values=model(make_tokens()).past_key_values)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append([out.logits.float().flatten(), gradient, step.logits.float().flatten()])
    for masked, sparse in zip(*found, strict=True):
        assert (masked - sparse).norm() < 0.05 * masked.norm()


def test_deepcopy_is_attached_and_independent(tiny_model, attached):
    model, tokens = attached("llama"), make_tokens()
    expected, base = compute_logits(model, tokens), compute_logits(tiny_model("llama"), tokens)
    twin = copy.deepcopy(model)
    assert torch.equal(compute_logits(twin, tokens), expected)
    set_routing(twin, hard=False)
    assert not torch.equal(compute_logits(twin, tokens), expected) and torch.equal(
        compute_logits(model, tokens), expected
    )
    detach(twin)
    assert torch.equal(compute_logits(twin, tokens), base) and torch.equal(compute_logits(model, tokens), expected)
    assert describe_state(twin) == describe_state(tiny_model("llama"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "flash"}, "focus_dual, .*'flash'"),
        ({"method": "window", "groups": 4}, "groups.*window, sinks"),
        ({"pair_rule": "any"}, "pair_rule.*any"),
        ({"window": -5}, "window.*-5"),
        ({"sinks": True}, "sinks.*True"),
        ({"top_k": 5}, "top_k.*groups.*5"),
        ({"temperature": float("nan")}, "temperature.*nan"),
        ({"tempreature": 0.1}, "tempreature.*temperature"),
        ({"layers": [1, 2]}, r"layers must be in 0 to 1 \(got \[2\]\)"),
        ({"layers": 1}, "layers.*1"),
        ({"gate": "multiplicative"}, "gate_threshold"),
    ],
)
def test_attach_bad_option_raises_and_leaves_no_trace(tiny_model, wrong, message):
    model = tiny_model("llama")
    with pytest.raises(UserError, match=message):
        attach(model, **wrong)
    assert describe_state(model) == describe_state(tiny_model("llama"))


def test_set_routing_unsupported_kernel_raises_on_use(attached):
    model = set_routing(attached("gemma2"), hard=True, backend="triton")
    with pytest.raises(UserError, match="triton.*CUDA"):
        compute_logits(model, make_tokens())


def test_set_attn_implementation_while_attached_raises(attached):
    model = attached("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(UserError, match="set to sdpa on a model with a method attached"):
        compute_logits(model, make_tokens())
    with disable_method(model):
        base = compute_logits(model, make_tokens())
    assert torch.equal(base, compute_logits(detach(model), make_tokens()))


def test_attach_other_model_raises(tiny_model):
    llama = tiny_model("llama")
    for other in (llama.model, LlamaForSequenceClassification(llama.config), "llama"):
        with pytest.raises(UserError, match=f"with AutoModelForCausalLM, and this is a {type(other).__name__}$"):
            attach(other)
    with pytest.raises(UserError, match=r"this is a PeftModel; .*get_base_model\(\)"):
        attach(get_peft_model(llama, LoraConfig(target_modules=["q_proj"])))


def test_bad_call_raises_user_error(tiny_model, attached):
    with pytest.raises(UserError, match="already has"):
        attach(attached("llama"))
    for setting in ({"pair_rule": "any"}, {"top_k": 0}, {"top_k": 9}, {"top_k": 1.5}):
        with pytest.raises(UserError, match=next(iter(setting))):
            set_routing(attached("llama"), **{"hard": True} | setting)
    with pytest.raises(UserError, match="train.*'routers'"):
        freeze(attached("llama"), "routers")
    unrouted = (
        detach,
        freeze,
        lambda model: set_routing(model, hard=True),
        lambda model: disable_method(model).__enter__(),
    )
    for use in unrouted:
        with pytest.raises(UserError, match="no attention method attached"):
            use(tiny_model("llama"))


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_attach_routers_stay_in_float32(tiny_model, default):
    model, before = tiny_model("llama", torch.bfloat16), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        attach(model)
    finally:
        torch.set_default_dtype(before)
    model.half()
    assert {p.dtype for method in attached_methods(model).values() for p in method.parameters()} == {torch.float32}
