"""Masks, sequences and caches of attached models, and the check that attach makes."""

import copy
from types import SimpleNamespace

import pytest
import torch
from builders import attach_focus, compute_logits, make_tokens
from tiny_architectures import tiny_model as tiny_architecture
from transformers import AttentionMaskInterface, DynamicCache, StaticCache

from focus_exp import UserError, attach, detach, disable_method, set_routing
from focus_exp.attention.kernels.cpu_sparse import unavailable_reason
from focus_exp.models.hf_cache import GrowingLayer
from focus_exp.models.hooks import IMPLEMENTATION, routed_attention
from focus_exp.models.methods import attached_methods, observe_selections

LENGTH = 40


@pytest.mark.parametrize("padding", [None, 0, 7])
def test_make_layer_mask_padding_builds_no_square_mask(tiny_model, padding):
    model, seen = attach_focus(tiny_model("llama")), []
    mask = None if padding is None else (torch.arange(LENGTH) >= padding).long().expand(2, -1)
    with observe_selections(model, lambda layer, method, selection, sequence: seen.append(sequence)):
        compute_logits(model, make_tokens(), attention_mask=mask)
    assert all(sequence.allowed is None and (sequence.valid is None) == (not padding) for sequence in seen)
    assert all((sequence.start[:, padding or 0 :] == (padding or 0)).all() for sequence in seen) and len(seen) == 2


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("masked", [False, True], ids=["positions", "positions and mask"])
def test_packed_positions_masked_path_equals_sparse_path(tiny_model, family, masked):
    """With a mask the base model does not separate packed documents, so neither path may."""
    model = attach_focus(tiny_model(family))
    positions = torch.cat([torch.arange(17), torch.arange(23)]).expand(2, -1)
    given = {"position_ids": positions} | ({"attention_mask": torch.ones(2, LENGTH).long()} if masked else {})
    found = []
    for backend in ("masked", "cpu"):
        set_routing(model, hard=True, backend=backend)
        found.append(compute_logits(model, make_tokens(), **given))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    for method in attached_methods(model).values():
        method.window = LENGTH
    base = detach(copy.deepcopy(model))
    expected = compute_logits(base, make_tokens(), **given)
    torch.testing.assert_close(compute_logits(model, make_tokens(), **given), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.skipif(unavailable_reason() is not None, reason="no compiler")
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_sliding_layers_take_the_kernel_as_the_masked_path_computes(tiny_model, family):
    model, found = attach_focus(tiny_model(family, sliding_window=15)), []
    for backend in ("masked", "cpu"):
        set_routing(model, hard=True, backend=backend)
        found.append(compute_logits(model, make_tokens()))
        assert {method.path for method in attached_methods(model).values()} == {backend}
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(unavailable_reason() is not None, reason="no compiler")
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # masks of one kind, and of two
def test_generate_static_cache_prefills_by_the_kernel(tiny_model, family):
    """A mask as wide as the cache would leave its first pass to the masked path."""
    model = attach_focus(tiny_model(family))
    for method in attached_methods(model).values():
        method.sparse_from = 1
    options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    found = []
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)):
        found.append(model.generate(make_tokens(), past_key_values=cache, **options))
        assert {method.path for method in attached_methods(model).values()} == {"cpu"}
    assert found[0].equal(found[1])


@torch.no_grad()
def test_compiled_model_compiles_nothing_for_later_tokens_of_a_cache(tiny_model):
    model, tokens = attach_focus(tiny_model("llama", num_hidden_layers=1)), make_tokens()
    out = model(tokens[:, :14], use_cache=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, logits, graphs = torch.compile(model, backend="eager"), [out.logits], []
    for part in tokens[:, 14:].split(1, 1):
        out = compiled(part, past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.testing.assert_close(torch.cat(logits, 1), compute_logits(model), atol=1e-5, rtol=1e-4)
    assert graphs[2] > 0 and len(set(graphs[2:])) == 1


def test_make_layer_mask_marks_a_band_alone(tiny_model):
    model, seen = attach_focus(tiny_model("mistral", sliding_window=15)), []
    padded = (torch.arange(LENGTH) >= 3).long().expand(2, -1)
    with observe_selections(model, lambda layer, method, selection, sequence: seen.append(sequence.reach)):
        for mask in (None, padded):
            compute_logits(model, make_tokens(), attention_mask=mask)
        compute_logits(model, make_tokens()[:, :14])
    assert seen == [15, 15, None, None, None, None]


@pytest.mark.parametrize("length", [20, 300])
@pytest.mark.parametrize("padded", [False, True])
def test_layers_without_a_method_may_see_later_tokens(length, padded):
    """As those of an encoder do."""
    q, k, v = torch.randn(3, 1, 2, length, 16)
    mask = (torch.arange(length) < length - 5)[None, None, None] if padded else None
    module = SimpleNamespace(is_causal=False)
    out, _ = routed_attention(module, q, k, v, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_forward_non_causal_mask_raises(tiny_model):
    model = attach_focus(tiny_model("llama"))
    mask = torch.ones(LENGTH, LENGTH).tril().bool()
    mask[:5, :5] = True
    with pytest.raises(UserError, match="lets tokens see later ones"):
        compute_logits(model, make_tokens(), attention_mask=mask.expand(2, 1, -1, -1))
    with pytest.raises(UserError, match=r"attention_mask .*\(2, 1, 1, 40\)"):
        compute_logits(model, make_tokens(), attention_mask=mask[-1:].expand(2, 1, -1, -1))


def test_cache_is_read_by_the_base_and_no_longer_by_the_method(tiny_model):
    model, tokens = attach_focus(tiny_model("llama"), layers=[1]), make_tokens()
    with torch.no_grad():
        cache, other = (model(tokens, use_cache=True).past_key_values for _ in range(2))
    more = {"past_key_values": cache, "use_cache": True}
    plain = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        plain.update(layer.keys, layer.values, index)
    with disable_method(model):
        found, expected = (
            compute_logits(model, tokens[:, :1], past_key_values=x, use_cache=True) for x in (cache, plain)
        )
    torch.testing.assert_close(found, expected)
    with pytest.raises(UserError, match="filled without"):
        compute_logits(model, tokens[:, :1], **more)
    other.layers[1].keys, other.layers[1].values = (x[:, :, 1:] for x in (other.layers[1].keys, other.layers[1].values))
    with pytest.raises(UserError, match="has 40 keys in layer 1, and the groups of 41"):
        compute_logits(model, tokens[:, :1], past_key_values=other, use_cache=True)


def test_cache_with_other_groups_raises(tiny_model):
    model, tokens = attach_focus(tiny_model("llama")), make_tokens()
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    more, twin = {"past_key_values": cache, "use_cache": True}, copy.deepcopy(cache)
    set_routing(model, hard=True, pair_rule="share")
    with pytest.raises(UserError, match="filled without"):
        compute_logits(model, tokens[:, :1], **more)
    set_routing(model, hard=True, pair_rule="query_topk")
    expected = compute_logits(model, torch.cat([tokens, tokens[:, :1]], 1))[:, -1:]
    found = compute_logits(model, tokens[:, :1], **more | {"past_key_values": twin})
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    attach_focus(detach(model))
    with pytest.raises(UserError, match="filled without"):
        compute_logits(model, tokens[:, :1], **more)


def test_attach_lost_mask_raises(tiny_model, monkeypatch, verified):
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, IMPLEMENTATION, lambda *args, **kwargs: None)
    with pytest.raises(UserError, match="MistralForCausalLM cannot run an attached method by masks: .* differ"):
        attach(tiny_model("mistral"))


def test_attach_forgetting_cache_raises(tiny_model, monkeypatch, verified):
    monkeypatch.setattr(GrowingLayer, "update", lambda self, *new: new)
    with pytest.raises(UserError, match="cannot run an attached method through the cache"):
        attach(tiny_model("llama"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("inkling_text", "InklingAttention.*position_bias"),
        ("doge", "changes its attention mask"),
        ("bloom", "has no layer that computes attention by transformers' attention interface"),
    ],
)
def test_attach_unsupported_architecture_raises_and_leaves_no_trace(name, reason):
    model = tiny_architecture(name)
    before, tokens = list(model.state_dict()), make_tokens()
    expected = compute_logits(model, tokens)
    with pytest.raises(UserError, match=reason):
        attach(model)
    assert list(model.state_dict()) == before and torch.equal(compute_logits(model, tokens), expected)
    assert not any(module._forward_pre_hooks for module in model.modules())
