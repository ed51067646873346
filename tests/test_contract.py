"""The contract of every method on models: off means off, causality, rows alone, one pass, gradients, adapters."""

import copy
from typing import Any

import pytest
import torch
from builders import compute_logits, make_tokens
from conftest import FAMILIES
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp import (
    UserError,
    attach,
    detach,
    disable_method,
    freeze,
    is_causal,
    load_adapter,
    save_adapter,
    update_balance,
)
from focus_exp.attention.kernels.cpu_sparse import unavailable_reason
from focus_exp.attention.registry import METHODS
from focus_exp.models.methods import attached_methods, set_routing

NEAR = {"window": 2, "sinks": 1}
DUAL = {"groups": 6, "top_k": 2}
# way -> method, options that prune pairs of 40 tokens, routing
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "focus soft": ("focus", NEAR, {"hard": False}),
    "focus": ("focus", NEAR, {"top_k": 1}),
    "focus share": ("focus", NEAR, {"pair_rule": "share"}),
    "focus sinkhorn": ("focus", NEAR | {"assignment": "sinkhorn"}, {"hard": False}),
    "focus_dual": ("focus_dual", NEAR | DUAL, {}),
    "focus_dual pair": ("focus_dual", NEAR | DUAL | {"counts": "pair"}, {}),
    "focus_dual layer": ("focus_dual", NEAR | DUAL | {"heads": "layer"}, {}),
    "focus_dual budget": ("focus_dual", NEAR | DUAL | {"groups_per_layer": ["full", 3]}, {}),
    "focus_dual window": ("focus_dual", NEAR | DUAL | {"groups_per_layer": [4, "window"]}, {}),
    "key_gate": ("key_gate", NEAR, {}),
    "window": ("window", NEAR, {}),
    "random_groups": ("random_groups", NEAR | {"top_k": 1}, {}),
    "longformer": ("longformer", {"window": 3, "global_tokens": 2}, {}),
    "longformer dilated": ("longformer", {"window": 3, "global_tokens": 1, "dilation": 3, "dilated_heads": 1}, {}),
    "performer": ("performer", {"features": 24}, {}),
    "routing_transformer": ("routing_transformer", NEAR | {"groups": 4}, {}),
    "sparq": ("sparq", {"components": 5, "tokens_kept": 6, "recent_tokens": 2}, {}),
    "sparq mean": ("sparq", {"components": 5, "tokens_kept": 6, "recent_tokens": 2, "reallocate": True}, {}),
    "magicpig": ("magicpig", {"hash_bits": 4, "hash_tables": 12, "recent_tokens": 3, "sinks": 1}, {}),
    "best_tokens": ("best_tokens", NEAR | {"density": 0.2}, {}),
    "token_indexer": ("token_indexer", NEAR | {"tokens_kept": 3}, {}),
    "block_means": ("block_means", NEAR | {"density": 0.4, "keys_per_block": 4}, {}),
    "block_gate": ("block_gate", NEAR | {"density": 0.4, "keys_per_block": 4}, {}),
}
GROUPED = ("focus", "key_gate", "window", "random_groups", "longformer")  # which the sparse kernels serve
NON_MASKED = ("focus soft", "focus sinkhorn", "longformer dilated")
MOVING = ("focus soft", "routing_transformer")  # whose buffers training moves
NON_CAUSAL = ("focus sinkhorn", "routing_transformer")
ways = pytest.mark.parametrize("way", WAYS)
# MHA, GQA, softcap and sliding layers, its own norms of q and k
families = pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gemma3"])


@pytest.fixture
def attached(tiny_model):
    """attached(family, way, dtype): a tiny model on which the method changes the logits of 40 tokens."""

    def factory(family: str, way: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        method, options, routing = WAYS[way]
        if method == "performer" and family == "gemma2":
            pytest.skip("performer refuses a softcap")
        torch.manual_seed(1)
        model = attach(tiny_model(family, dtype), method, **options)
        fit(model)
        return set_routing(model, **{"hard": True} | routing)

    return factory


@torch.no_grad()
def fit(model: PreTrainedModel) -> None:
    """Let queries of FocusDual read different numbers of groups, as a fit does."""
    for method in attached_methods(model).values():
        if hasattr(method, "worth"):
            method.mean.normal_()
            method.worth.normal_()
            method.thresholds.copy_(torch.linspace(1, -8, method.thresholds.shape[-1]).expand_as(method.thresholds))


def describe_state(model: PreTrainedModel) -> dict[str, object]:
    return {
        "names": list(model.state_dict()),
        "modules": [name for name, _ in model.named_modules()],
        "hooks": [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
        "implementation": model.config._attn_implementation,
        "attributes": set(vars(model)),
    }


def test_ways_have_every_method():
    assert {method for method, *_ in WAYS.values()} >= METHODS.keys()


@pytest.mark.parametrize("family", FAMILIES)
@ways
def test_disable_method_and_detach_give_the_base_logits(tiny_model, attached, family, way):
    base, model = tiny_model(family), attached(family, way)
    expected = compute_logits(base)
    assert (compute_logits(model) - expected).abs().max() > 1e-3
    with disable_method(model):
        with disable_method(model):
            assert torch.equal(compute_logits(model), expected)
        assert torch.equal(compute_logits(model), expected)
    with pytest.raises(ZeroDivisionError), disable_method(model):
        raise ZeroDivisionError
    assert (compute_logits(model) - expected).abs().max() > 1e-3
    detach(model)
    assert torch.equal(compute_logits(model), expected)
    assert describe_state(model) == describe_state(base)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@ways
def test_future_tokens_change_no_earlier_logit_of_a_causal_method(attached, family, dtype, way):
    model, tokens = attached(family, way, dtype), make_tokens()
    other = torch.cat([tokens[:, :23], (tokens[:, 23:] + 7) % 256], 1)
    changed = compute_logits(model, tokens) != compute_logits(model, other)
    assert changed[:, 23:].any()
    assert bool(changed[:, :23].any()) is not is_causal(model)
    assert is_causal(model) is (way not in NON_CAUSAL)


@families
@ways
@pytest.mark.parametrize("side", ["left", "left without positions", "right", "inside"])
def test_padded_batch_equals_rows(attached, family, way, side):
    if family == "gpt2" and side == "left without positions":
        pytest.skip("its positions are absolute: the base model needs them too")
    if side == "left without positions" and not way.startswith(("focus", "key", "window", "random")):
        pytest.skip("its features, hashes or chosen tokens depend on rotated queries and keys")
    if family.startswith("gemma") and side == "inside":
        pytest.skip("its sliding layers count padding inside a row, as the base's: see the next test")
    model, lengths, longest = attached(family, way), (40, 17, 1), 40
    batch, mask = torch.full((3, longest), 5), torch.zeros(3, longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        inside = slice(longest - length, None) if "left" in side else slice(length)
        if side == "inside":  # as after two turns
            inside = torch.cat([torch.arange(length // 2), torch.arange(longest - length + length // 2, longest)])
        batch[row, inside], mask[row, inside] = make_tokens(1, length)[0], 1
    positions = None if side == "left without positions" else (mask.cumsum(-1) - 1).clamp(min=0)
    together = compute_logits(model, batch, attention_mask=mask, position_ids=positions)
    assert together.isfinite().all()
    for row, length in enumerate(lengths):
        alone = compute_logits(model, make_tokens(1, length))[0]
        torch.testing.assert_close(together[row, mask[row].bool()], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral"])
def test_padding_inside_a_row_counts_in_the_sliding_window_of_the_base(tiny_model, family):
    """Windows there are of places, not of tokens, so that a row alone gives other logits; attached layers follow."""
    base, mask, tokens = tiny_model(family), torch.ones(2, 40, dtype=torch.long), make_tokens()
    mask[:, 15:25] = 0
    given, real = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}, mask[0].bool()
    expected = compute_logits(base, tokens, **given)[:, real]
    assert (expected - compute_logits(base, tokens[:, real])).abs().max() > 1e-2
    model = set_routing(attach(base, "focus", window=40), hard=True)
    torch.testing.assert_close(compute_logits(model, tokens, **given)[:, real], expected, atol=1e-5, rtol=1e-5)


@families
@ways
def test_packed_positions_equal_documents(attached, family, way):
    if way == "focus sinkhorn":
        pytest.skip("it balances the groups over all documents of a batch")
    model, packed = attached(family, way), torch.arange(42)[None] * 5 + 3  # equal tokens would tie in a first layer
    positions = torch.cat([torch.arange(19), torch.arange(23)])[None]
    first, second = packed.split([19, 23], 1)
    alone = torch.cat([compute_logits(model, first), compute_logits(model, second)], 1)
    torch.testing.assert_close(compute_logits(model, packed, position_ids=positions), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@ways
@torch.no_grad()
def test_cached_tokens_equal_one_pass(attached, family, way):
    model, tokens, logits, cache = attached(family, way), make_tokens(), [], None
    reasons = {method.kv_cache_unsupported_reason() for method in attached_methods(model).values()}
    if reasons != {None} or not is_causal(model):
        with pytest.raises(UserError, match="use_cache=False|non-causal"):
            model.generate(tokens, max_new_tokens=2)
        return
    for part in tokens.split([20, 3, *[1] * 17], 1):
        out = model(part, past_key_values=cache, use_cache=True)
        logits, cache = [*logits, out.logits], out.past_key_values
    torch.testing.assert_close(torch.cat(logits, 1), compute_logits(model), atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(unavailable_reason() is not None, reason="no compiler")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith(GROUPED) and way not in NON_MASKED])
@torch.no_grad()
def test_sparse_path_equals_masked_path(attached, family, way):
    model, mask = attached(family, way), torch.ones(2, 40, dtype=torch.long)
    mask[0, :13] = 0
    logits, paths = [], set()
    for backend in ("masked", "cpu"):
        set_routing(model, hard=True, backend=backend)
        logits.append(compute_logits(model, attention_mask=mask)[mask.bool()])
        paths |= {method.path for method in attached_methods(model).values()}
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    # with padding a sliding layer takes the masked path: of mistral all, of qwen2 the one that prunes here
    assert ("cpu" in paths) == (family != "mistral" and (family, way) != ("qwen2", "focus_dual budget"))


def train(model: PreTrainedModel, reentrant: bool | None) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return gradients and then buffers of the method, after two steps, and after a pair of forward passes."""
    model = copy.deepcopy(model).train()
    model.enable_input_require_grads()  # reentrant checkpointing needs an input with a gradient
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for seed in (0, 1):
        tokens = make_tokens(seed=seed)
        model(tokens, labels=tokens).loss.backward()
        update_balance(model)
    steps = [*copy_gradients(model), *copy_buffers(model)]
    model.zero_grad()
    pair = [model(tokens, labels=tokens).loss for tokens in (make_tokens(seed=2), make_tokens(2, 31))]
    (pair[0] + 2 * pair[1]).backward()  # as preferences are trained
    update_balance(model)
    return steps, [*copy_gradients(model), *copy_buffers(model)]


def copy_gradients(model: PreTrainedModel) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def copy_buffers(model: PreTrainedModel) -> list[Tensor]:
    methods = attached_methods(model).values()
    return [x.clone() for method in methods for name, x in method.named_buffers() if name in method.state_dict()]


@families
@pytest.mark.parametrize(("way", "reentrant"), [*((way, False) for way in WAYS), *((way, True) for way in MOVING)])
@pytest.mark.parametrize("part", ["router", "all"])
def test_gradient_checkpointing_keeps_gradients_and_buffers(attached, family, way, reentrant, part):
    model = attached(family, way)
    if not freeze(model, part) or (part == "router" and not way.startswith("focus ")):
        pytest.skip("nothing is trained through the model")
    count, buffers = len([*model.parameters()]), copy_buffers(model)
    for plain, checkpointed in zip(*(train(model, kind) for kind in (None, reentrant)), strict=True):
        named = zip(model.named_parameters(), plain[:count], strict=True)
        assert all(grad.isfinite().all() for (name, p), grad in named if p.requires_grad and ".focus." not in name)
        assert [x is None for x in checkpointed] == [x is None for x in plain]
        for ours, theirs in zip(checkpointed, plain, strict=True):
            if ours is not None:
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    if way in MOVING:
        assert not any(map(torch.equal, plain[count:], buffers))


@ways
def test_adapter_round_trip_keeps_logits(tiny_model, attached, tmp_path, way):
    model, hard = attached("llama", way), WAYS[way][2].get("hard", True)
    loaded = load_adapter(tiny_model("llama"), save_adapter(model, tmp_path), hard=hard)
    assert torch.equal(compute_logits(loaded), compute_logits(model))
    assert torch.equal(compute_logits(detach(loaded)), compute_logits(tiny_model("llama")))


@ways
def test_half_precision_keeps_routing_in_float32(attached, way):
    model = attached("llama", way)
    expected = compute_logits(model)
    with torch.autocast("cpu", torch.bfloat16):
        low = compute_logits(model).float()
    # hashes and choices of tokens change where numbers are rounded
    assert low.isfinite().all() and (low - expected).norm() < 0.35 * expected.norm()
    model.bfloat16()
    tensors = [x for method in attached_methods(model).values() for x in (*method.parameters(), *method.buffers())]
    assert all(x.dtype == torch.float32 for x in tensors if x.is_floating_point())
    assert compute_logits(model).dtype == torch.bfloat16
