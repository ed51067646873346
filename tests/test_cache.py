"""KV caches of attached models: decoding equals one pass over the sequence, and reads only the kept pairs."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from builders import attach_focus, compute_logits, make_tokens
from conftest import build
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_sequence
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from focus_exp import attach, detach, disable_method, set_routing, update_balance
from focus_exp.assets import cache_root
from focus_exp.attention.dense import reference_attention
from focus_exp.attention.kernels.cpu_sparse import unavailable_reason
from focus_exp.attention.kv_cache import CachedKeys, pack_groups
from focus_exp.attention.selection import AttentionArgs, causal_mask, group_mask, local_mask, select
from focus_exp.config import ModelConfig
from focus_exp.errors import UserError
from focus_exp.models.cache_size import count_keys_and_bytes
from focus_exp.models.hf_cache import GroupedLayer, GrowingLayer, is_grouped
from focus_exp.models.load import load_model
from focus_exp.models.methods import attached_methods, observe_selections

FAMILIES = ["gpt2", "llama"]
RULES = [(1, "query_topk"), (2, "query_topk"), (2, "share"), (3, "share")]


@torch.no_grad()
def run_in_chunks(model, ids, sizes, mask=None, cache=None):
    """Return the logits of `ids` in chunks of `sizes` [tokens], and the cache."""
    found, done = [], 0 if cache is None else cache.get_seq_length()
    begin = 0
    for size in sizes:
        past = None if mask is None else mask[:, : done + size]
        positions = None if mask is None else (past.cumsum(1) - 1).clamp(min=0)[:, done:]
        out = model(
            input_ids=ids[:, begin : begin + size], attention_mask=past, position_ids=positions,
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        found.append(out.logits)
        cache, begin, done = out.past_key_values, begin + size, done + size
    return torch.cat(found, dim=1), cache


@torch.no_grad()
def run_at_once(model, ids, mask=None):
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize(("top_k", "rule"), RULES)
@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma3"])
def test_forward_chunks_with_cache_equal_one_pass(tiny_model, family, top_k, rule):
    model, ids = attach_focus(tiny_model(family), top_k, rule), make_tokens()
    found, cache = run_in_chunks(model, ids, [7, 7] + [1] * 26)
    assert is_grouped(cache) == ((top_k, rule) != (3, "share"))  # that keeps all pairs
    torch.testing.assert_close(found, run_at_once(model, ids), rtol=1e-4, atol=1e-5)


@given(data=st.data(), length=st.integers(1, 60))
@settings(max_examples=40)
def test_cached_keys_any_selection_equals_reference(data, length):
    torch.manual_seed(data.draw(st.integers(0, 10_000)))
    batch, heads, groups = (data.draw(st.integers(1, most)) for most in (3, 2, 70))
    share, size = data.draw(st.sampled_from([1, 2, 3, 30])), data.draw(st.sampled_from([8, 16, 20, 64, 256]))
    per_head, count = data.draw(st.booleans()), data.draw(st.integers(1, length))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    q = torch.randn(batch, heads * share, length, size, dtype=dtype)
    k, v = torch.randn(2, batch, heads, length, size, dtype=dtype)
    shape = (batch, heads, length, groups) if per_head else (batch, length, groups)
    top_k, rule = data.draw(st.integers(1, min(2, groups))), data.draw(st.sampled_from(["query_topk", "share"]))
    selection = select(torch.rand(shape), top_k, rule)
    sequence = random_sequence(data.draw(st.sampled_from(["plain", "left"])), batch, length)
    window, sinks = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 3))
    sink_logits = torch.randn(heads * share) if data.draw(st.booleans()) else None
    softcap = data.draw(st.sampled_from([None, 2.0]))
    args = AttentionArgs(size**-0.5, softcap, sink_logits=sink_logits, window=window, sinks=sinks)
    visible = None if sequence.valid is None else sequence.valid[:, None]
    if visible is not None and data.draw(st.booleans()):  # row by row, as of a preallocated cache
        visible = visible & torch.ones(length, length).tril().bool()[length - count :]
    key_groups, query_groups = (
        pack_groups(x, batch, length, q.device) for x in (selection.key_groups, selection.query_groups)
    )
    keys = CachedKeys(key_groups, query_groups[:, :, length - count :], visible, None, window, sinks)
    exact = reference_attention(q, k, v, selection, sequence, args)[:, :, length - count :]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for attend in (keys.attend, keys.attend_masked):
        found = attend(q[:, :, length - count :], k, v, args)
        if sequence.valid is not None:
            found, exact = (x * sequence.valid[:, None, length - count :, None] for x in (found, exact))
        torch.testing.assert_close(found.double(), exact.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(unavailable_reason() is not None, reason="no compiler")
@pytest.mark.parametrize("isa", ["", "avx512", "avx2", "emulated", "plain"])
@pytest.mark.parametrize(("key", "value"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_attend_cached_each_instruction_set_equals_the_masked_path(isa, key, value):
    """Long enough for several stretches and all threads; with tokens before the first key, as of a sliding layer."""
    torch.manual_seed(0)
    try:
        torch.ops.focus_exp.use_isa(isa)
    except ValueError:
        pytest.skip("not on this processor")
    q = torch.randn(2, 6, 3, 24).to(getattr(torch, value))
    k, v = (torch.randn(2, 2, 4500, n).to(getattr(torch, d)) for n, d in ((24, key), (40, value)))
    groups = [pack_groups(torch.rand(2, 2, n, 40) < 0.03, 2, n, q.device) for n in (4500, 3)]
    before = torch.tensor([[1, 2, 9], [0, 0, 1]], dtype=torch.int32)
    keys = CachedKeys(*groups, torch.rand(2, 3, 4500) < 0.9, before, 50, 4)
    args = AttentionArgs(0.2, 3.0, sink_logits=torch.randn(6))
    found, exact = keys.attend(q, k, v, args), keys.attend_masked(q.float(), k.float(), v.float(), args)
    torch.ops.focus_exp.use_isa("")
    tolerance = 1e-5 if value == "float32" else 1e-2
    torch.testing.assert_close(found.float(), exact, atol=tolerance, rtol=tolerance)


def test_cache_reordered_rows_keep_their_starts(tiny_model):
    """Without a mask the cache knows where documents start."""
    model, ids, mask = attach_focus(tiny_model("llama"), 2), make_tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    _, cache = run_in_chunks(model, ids, [12], mask)
    new = make_tokens(2, 3, seed=3)
    first, _ = run_in_chunks(model, new, [3], cache=cache)
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped, _ = run_in_chunks(model, new.flip(0), [3], cache=cache)
    torch.testing.assert_close(swapped.flip(0), first, rtol=1e-4, atol=1e-5)


def grouped_layers(cache):
    return [layer for layer in cache.layers if isinstance(layer, GroupedLayer)]


@pytest.mark.parametrize("family", ["llama", "mistral"])  # the layers of the latter slide
def test_cache_layers_hold_the_keys_of_the_base(tiny_model, family):
    model, base, ids = attach_focus(tiny_model(family), layers=[1]), tiny_model(family), make_tokens()
    found, cache = run_in_chunks(model, ids, [9, 5] + [1] * 26)
    torch.testing.assert_close(found, run_at_once(model, ids), rtol=1e-4, atol=1e-5)
    plain = run_in_chunks(base, ids, [9, 5] + [1] * 26)[1]
    assert [layer.keys.shape for layer in cache.layers] == [layer.keys.shape for layer in plain.layers]
    assert len(grouped_layers(cache)) == 1


def test_generate_non_causal_raises(tiny_model):
    model = attach_focus(tiny_model("llama"), assignment="sinkhorn")
    for options in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(make_tokens(1))}):
        with pytest.raises(UserError, match="non-causal.*balanced"):
            model.generate(make_tokens(1), max_new_tokens=2, **options)
    detach(model)
    model.generate(make_tokens(1), max_new_tokens=2, pad_token_id=0)


def test_generate_without_cache_support_raises_and_works_uncached(tiny_model):
    model = attach_focus(tiny_model("llama"), hard=False)
    with pytest.raises(UserError, match="soft.*use_cache=False"):
        model.generate(make_tokens(1), max_new_tokens=2)
    assert model(input_ids=make_tokens(1)).past_key_values is None
    assert model.generate(make_tokens(1), max_new_tokens=2, use_cache=False, pad_token_id=0).shape[1] == 42
    detach(model)
    attach(model, "sparq")
    with pytest.raises(UserError, match="SparQ.*use_cache=False"):
        model.generate(make_tokens(1), max_new_tokens=2)


def test_forward_filled_foreign_cache_raises(tiny_model):
    model = tiny_model("llama")
    ids = make_tokens(1)
    filled = model(input_ids=ids, use_cache=True).past_key_values
    attach_focus(model)
    with pytest.raises(UserError, match="filled without"):
        model(input_ids=ids[:, :1], past_key_values=filled)
    for empty in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)):
        assert is_grouped(model(input_ids=ids, past_key_values=empty).past_key_values)
    static = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(UserError, match=r"attention_mask must have 0 \+ 1 columns.*got 40"):
        model(input_ids=ids[:, :1], past_key_values=static, attention_mask=torch.ones(1, 40, dtype=torch.long))
    with pytest.raises(UserError, match=r"attention_mask must have 40 \+ 1 columns.*got 3"):
        cache = run_in_chunks(model, ids, [40])[1]
        model(input_ids=ids[:, :1], past_key_values=cache, attention_mask=torch.ones(1, 3, dtype=torch.long))


def test_forward_cache_of_fewer_layers_raises(tiny_model):
    model, ids = attach_focus(tiny_model("llama"), layers=[1]), make_tokens(1)
    _, cache = run_in_chunks(model, ids, [20])
    attach_focus(detach(model))
    with pytest.raises(UserError, match="filled without"):
        model(input_ids=ids[:, :1], past_key_values=cache)


class CustomCache(DynamicCache):
    pass


def test_forward_soft_routing_with_hard_cache_raises(tiny_model):
    model = attach_focus(tiny_model("llama"))
    cache = model(input_ids=make_tokens(1), use_cache=True).past_key_values
    set_routing(model, hard=False)
    with pytest.raises(UserError, match="no KV cache for soft routing"):
        model(input_ids=make_tokens(1)[:, :1], past_key_values=cache)


def test_forward_additive_mask_raises(tiny_model):
    model, mask = attach_focus(tiny_model("llama")), torch.zeros(1, 1, 40, 40)
    mask[..., 3] = -1.0
    with pytest.raises(UserError, match="attention_mask must only hide keys"):
        model(input_ids=make_tokens(1), attention_mask=mask, use_cache=False)


def test_generate_disabled_uses_base_cache(tiny_model):
    model = tiny_model("gpt2")
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    expected = model.generate(make_tokens(1), **options)
    attach_focus(model)
    with disable_method(model):
        found = model.generate(make_tokens(1), **options)
    assert found.sequences.equal(expected.sequences) and not is_grouped(found.past_key_values)
    assert is_grouped(model.generate(make_tokens(1), **options).past_key_values)
    detach(model)
    assert not is_grouped(model.generate(make_tokens(1), **options).past_key_values)


@pytest.mark.parametrize(("top_k", "rule"), RULES[:3])
def test_decode_reads_exactly_the_kept_pairs(tiny_model, top_k, rule):
    model = attach_focus(tiny_model("llama"), top_k, rule)
    ids = make_tokens(1, 60)
    kept: dict[int, torch.Tensor] = {}

    def observe(layer, method, selection, sequence):
        near = local_mask(sequence, slice(0, 60), 60, method.window, method.sinks)
        kept[layer] = (
            (near | group_mask(selection, slice(0, 60), 60)) & causal_mask(slice(0, 60), 60, ids.device)
        ).sum(-1)

    with observe_selections(model, observe):
        run_at_once(model, ids)
    _, cache = run_in_chunks(model, ids, [37])
    for place in range(37, 60):
        _, cache = run_in_chunks(model, ids[:, place : place + 1], [1], cache=cache)
        for layer, grouped in enumerate(grouped_layers(cache)):
            assert count_keys_and_bytes(grouped)[0] == kept[layer][0, place]


@torch.no_grad()
def test_growing_layer_copies_rarely_and_never_overwrites():
    x, layer, rooms = torch.randn(1, 2, 1003, 4), GrowingLayer(), set()
    for begin, end in ((0, 300), *((place, place + 1) for place in range(300, 1003))):
        keys, values = layer.update(x[:, :, begin:end], -x[:, :, begin:end])
        rooms.add(keys.untyped_storage().data_ptr())
        assert keys.untyped_storage().nbytes() <= keys.nbytes * (1 + 1 / 32) + 17 * 2 * 4 * 4
    assert keys.equal(x) and values.equal(-x) and len(rooms) < 30
    twin, deep = copy.copy(layer), copy.deepcopy(layer)
    layer.crop(-3)
    before = [layer, twin, deep], [layer.keys.clone(), twin.keys.clone(), deep.keys.clone()]
    for number, one in enumerate(before[0]):
        one.update(torch.full((1, 2, 1, 4), float(number)), torch.zeros(1, 2, 1, 4))
    for number, (one, kept) in enumerate(zip(*before, strict=True)):
        assert one.keys[:, :, :-1].equal(kept) and (one.keys[:, :, -1] == number).all()


@pytest.mark.parametrize("kind", [DynamicCache, partial(StaticCache, max_cache_len=600)])
@torch.no_grad()
def test_cache_memory_is_that_of_a_plain_one(tiny_model, kind):
    base, ids = tiny_model("llama", head_dim=64), make_tokens(2, 512)
    model = attach_focus(tiny_model("llama", head_dim=64))
    sizes = []
    for one in (base, model):
        cache = kind(config=base.config)
        for part in ids.split([400, *[1] * 112], 1):
            one(input_ids=part, past_key_values=cache)
        sizes.append(sum(count_keys_and_bytes(layer)[1] for layer in cache.layers))
    assert sizes[1] < 1.1 * sizes[0]


STATIC = {"cache_implementation": "static", "disable_compile": True, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("family", "setting"),
    [("llama", {"top_k": 3, "pair_rule": "share"}), ("gemma2", {"top_k": 4}), ("mistral", {"groups": 1})],
    ids=str,
)
def test_static_cache_all_pairs_kept_gives_base_text(tiny_model, family, setting):
    base, model = tiny_model(family), attach_focus(tiny_model(family), **setting)
    ids, mask = make_tokens(2, 21), torch.ones(2, 21, dtype=torch.long)
    mask[0, :6] = 0
    for shown in (torch.ones_like(mask), mask):
        options = {**STATIC, "max_new_tokens": 8, "attention_mask": shown}
        assert model.generate(ids, **options).equal(base.generate(ids, **options))


def test_quantized_cache_all_pairs_kept_gives_base_text(tiny_model):
    base, model = tiny_model("llama"), attach_focus(tiny_model("llama"), window=40)
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}, "return_dict_in_generate": True}
    options |= {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected, found = (one.generate(make_tokens(2, 21), **options) for one in (base, model))
    assert found.sequences.equal(expected.sequences) and is_grouped(found.past_key_values)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_generate_static_cache_compiles_a_step_as_one_graph(tiny_model, fullgraph):
    model, base, prompt = attach_focus(tiny_model("llama"), 1), tiny_model("llama"), make_tokens(2, 12)
    compiled = CompileConfig(fullgraph=fullgraph, backend="eager", mode=None)
    compiled._compile_all_devices = True
    plain = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    expected = model.generate(prompt, **plain, disable_compile=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert model.generate(prompt, **plain, compile_config=compiled).equal(expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.utils.counters.clear()
    set_routing(model, hard=True, top_k=4)
    expected = base.generate(prompt, **plain, disable_compile=True)
    assert model.generate(prompt, **plain, compile_config=compiled).equal(expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("method", ["focus", "focus_dual"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@torch.no_grad()
def test_compiled_step_of_a_static_cache_is_one_graph(tiny_model, family, method):
    model, ids = attach(tiny_model(family), method, groups=4, window=6, sinks=2), make_tokens(2, 30)
    set_routing(model.eval(), hard=True)
    found = {}
    for name in ("eager", "compiled"):
        cache = StaticCache(config=model.config, max_cache_len=64)
        model(ids[:, :20], past_key_values=cache)
        torch._dynamo.reset()
        step = torch.compile(model, backend="eager", fullgraph=True) if name == "compiled" else model
        found[name] = torch.cat([step(ids[:, i : i + 1], past_key_values=cache).logits for i in range(20, 30)], 1)
    torch.testing.assert_close(found["compiled"], found["eager"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["eager"], run_at_once(model, ids)[:, 20:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [DynamicCache, partial(StaticCache, max_cache_len=64), CustomCache])
def test_given_cache_keeps_class_identity_and_keys(tiny_model, kind):
    base, model = tiny_model("llama"), attach_focus(tiny_model("llama"), 1)
    cache, plain, ids = kind(config=model.config), DynamicCache(config=model.config), make_tokens(2, 30)
    before = type(cache)
    with torch.no_grad():
        for part in ids.split([20, 9, 1], 1):
            out = model(input_ids=part, past_key_values=cache)
        base(input_ids=ids, past_key_values=plain)
    assert out.past_key_values is cache and type(cache) is before
    assert cache.get_seq_length() == 30 and len(cache) == len(plain) and cache.is_initialized
    width = 64 if isinstance(cache, StaticCache) else 30
    for layer, expected in zip(cache.layers, plain.layers, strict=True):
        assert isinstance(layer, StaticLayer if isinstance(cache, StaticCache) else DynamicLayer)
        assert layer.keys.shape == layer.values.shape == (*expected.keys.shape[:2], width, expected.keys.shape[3])
    torch.testing.assert_close(cache.layers[0].keys[:, :, :30], plain.layers[0].keys)  # routing changes later layers
    torch.testing.assert_close(cache.layers[0].values[:, :, :30], plain.layers[0].values)


def test_lazy_cache_without_config_is_filled_in_place(tiny_model):
    model, cache, ids = attach_focus(tiny_model("mistral"), 1), DynamicCache(), make_tokens(2, 20)
    with torch.no_grad():
        parts = [model(input_ids=part, past_key_values=cache).logits for part in ids.split([9, 1, 10], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), run_at_once(model, ids), rtol=1e-4, atol=1e-5)


def test_prefix_tuning_raises(tiny_model):
    peft = pytest.importorskip("peft")
    model = attach_focus(tiny_model("llama"), 1)
    prefixed = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    for hard in (True, False):
        set_routing(model, hard=hard)
        with pytest.raises(UserError, match="prefix tuning"):
            prefixed(input_ids=make_tokens(1, 8))


@pytest.mark.parametrize(("train_with", "reason"), [("hard", "whole batch"), ("soft", "gate every token")])
def test_generate_training_mode_raises_its_reason(tiny_model, train_with, reason):
    model = attach(tiny_model("llama"), "focus", train_with=train_with)
    with pytest.raises(UserError, match=reason):
        model.train().generate(make_tokens(1), max_new_tokens=2)


def run_rows_alone(model, ids, mask):
    """Return logits `[B, T, V]` of each row computed without its padding."""
    found = torch.zeros(*ids.shape, model.config.vocab_size)
    for row, real in enumerate(mask.bool()):
        if real.any():
            found[row, real] = run_at_once(model, ids[row, real][None])[0]
    return found


masks = st.lists(st.lists(st.booleans(), min_size=30, max_size=30), min_size=1, max_size=3)


@given(
    rows=masks, rule=st.sampled_from(RULES), window=st.sampled_from([0, 5, 30]), family=st.sampled_from(FAMILIES),
    hard=st.booleans(), backend=st.sampled_from(["masked", "auto"]),
)  # fmt: skip
@settings(max_examples=25)
def test_forward_inner_padding_equals_rows(rows, rule, window, family, hard, backend):
    mask, ids = torch.tensor(rows).long(), make_tokens(len(rows), 30)
    model = attach_focus(build(f"tiny_{family}"), *rule, window=window, sinks=2, hard=hard)
    set_routing(model, hard=hard, backend=backend)
    for method in attached_methods(model).values():
        method.sparse_from = 1
    real, expected = mask.bool(), run_rows_alone(model, ids, mask)
    torch.testing.assert_close(run_at_once(model, ids, mask)[real], expected[real], rtol=1e-4, atol=1e-5)
    seen, positions = torch.ones(30, 30).tril().bool() & real[:, None], (mask.cumsum(1) - 1).clamp(min=0)
    found = model(input_ids=ids, attention_mask=seen[:, None], position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("backend", ["masked", "auto"])
def test_backward_inner_padding_equals_rows(tiny_model, hard, backend):
    model = attach_focus(tiny_model("llama"), 2, train_with="hard" if hard else "soft", hard=hard)
    set_routing(model, hard=hard, backend=backend).train()
    ids, mask = make_tokens(1, 30), torch.ones(1, 30, dtype=torch.long)
    mask[0, 5:14] = mask[0, 20:22] = mask[0, 27:] = 0
    real, found, before = mask[0].bool(), [], copy.deepcopy(model.state_dict())
    for given_ids, given_mask in ((ids, mask), (ids[:, real], None)):
        model.zero_grad()
        model.load_state_dict(before)
        positions = None if given_mask is None else (given_mask.cumsum(1) - 1).clamp(min=0)
        out = model(input_ids=given_ids, attention_mask=given_mask, position_ids=positions, use_cache=False).logits
        (out[:, real] if given_mask is not None else out).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        update_balance(model)
        found.append(torch.cat([method.router.potential for method in attached_methods(model).values()]))
    torch.testing.assert_close(found[0], found[2], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[1], found[3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_second_turn_of_a_batch_with_a_cache_equals_rows(tiny_model, family):
    """Prompts padded on the right, answers whose ends are masked, and the next prompts."""
    changes = {"sliding_window": 200} if family == "mistral" else {}
    model, ids = attach_focus(tiny_model(family, **changes)), make_tokens(2, 50)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[0, 12:18] = mask[1, 17:18] = 0
    cache = None
    for begin, end in ((0, 18), (18, 19), (19, 26), (26, 40), (40, 41), (41, 50)):
        if begin == 26:
            mask[0, 21:26] = 0
        found, cache = run_in_chunks(model, ids[:, begin:end], [end - begin], mask[:, :end], cache)
        expected = run_rows_alone(model, ids[:, :end], mask[:, :end])[:, begin:]
        real = mask[:, begin:end].bool()
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)
    without_mask = model(input_ids=ids[:, :1], past_key_values=cache, position_ids=mask.sum(1, keepdim=True)).logits
    expected = run_rows_alone(model, torch.cat([ids, ids[:, :1]], 1), torch.cat([mask, mask[:, -1:]], 1))
    torch.testing.assert_close(without_mask[1], expected[1, -1:], rtol=1e-4, atol=1e-5)  # it hides nothing of row 0


def test_compile_inner_padding_is_one_graph(tiny_model):
    model, ids, mask = attach_focus(tiny_model("llama"), 1), make_tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[0, :3] = mask[0, 9:20] = mask[1, 25:] = 0
    expected, real = run_rows_alone(model, ids, mask), mask.bool()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(run_at_once(compiled, ids, mask)[real], expected[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"head_dim": 288}], ids=["gradients", "large heads"])
def test_cache_steps_that_the_kernel_refuses_equal_one_pass(tiny_model, changes):
    model, ids, cache, found = attach_focus(tiny_model("llama", **changes), 2), make_tokens(2, 12), None, []
    for part in ids.split([9, 1, 2], 1):
        with torch.set_grad_enabled(not changes):
            out = model(input_ids=part, past_key_values=cache, use_cache=True)
        found, cache = [*found, out.logits], out.past_key_values
    torch.testing.assert_close(torch.cat(found, 1), run_at_once(model, ids), rtol=1e-4, atol=1e-5)


def test_emptied_cache_is_filled_again(tiny_model):
    model, ids = attach_focus(tiny_model("llama"), 1), make_tokens(2, 12)
    _, cache = run_in_chunks(model, ids, [5])
    with pytest.raises(ValueError, match="positive value"):
        cache.layers[0].crop(1)
    cache.reset()
    cache.crop(0)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.layers[0].keys is None and cache.get_seq_length() == 0
    found, _ = run_in_chunks(model, ids, [9, 3], cache=cache)
    torch.testing.assert_close(found, run_at_once(model, ids), rtol=1e-4, atol=1e-5)


def test_deepcopied_cache_continues(tiny_model):
    model, ids = attach_focus(tiny_model("llama"), 1), make_tokens(2, 30)
    _, cache = run_in_chunks(model, ids[:, :20], [20])
    expected = run_at_once(model, ids)[:, 20:]
    for one in (copy.deepcopy(cache), copy.deepcopy(cache), cache):
        torch.testing.assert_close(
            run_in_chunks(model, ids[:, 20:], [4, 6], cache=one)[0], expected, rtol=1e-4, atol=1e-5
        )


@given(data=st.data(), rule=st.sampled_from(RULES[:3]), window=st.integers(0, 9), sinks=st.integers(0, 3))
@settings(max_examples=30)
def test_cache_any_history_equals_rows(data, rule, window, sinks):
    """Chunks with padding anywhere, tokens hidden by a later mask, crops, beams, resets."""
    family = data.draw(st.sampled_from(["gpt2", "llama", "mistral"]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = build(f"tiny_{family}", **({"sliding_window": 200} if family == "mistral" else {}))
    model = attach_focus(base, *rule, window=window, sinks=sinks)
    batch, cache = data.draw(st.integers(1, 3)), None
    ids, mask = torch.zeros(batch, 0, dtype=torch.long), torch.zeros(batch, 0, dtype=torch.long)
    seed = data.draw(st.integers(0, 1000))
    for step in range(data.draw(st.integers(2, 7))):
        action = data.draw(st.sampled_from(["chunk", "token", "chunk", "token", "crop", "reorder", "reset", "hide"]))
        if action == "crop" and cache is not None:
            count = data.draw(st.integers(0, ids.shape[1]))
            cache.crop(-count)
            ids, mask = ids[:, : ids.shape[1] - count], mask[:, : ids.shape[1] - count]
        elif action == "reorder" and ids.shape[1]:
            chosen = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch)))
            cache.reorder_cache(chosen)
            ids, mask = ids[chosen], mask[chosen]
        elif action == "reset" and cache is not None:
            cache.reset()
            ids, mask = ids[:, :0], mask[:, :0]
        size = 1 if action == "token" else data.draw(st.integers(2, 14))
        kind = data.draw(st.sampled_from(["none", "random", "left", "right"]))
        new = torch.ones(batch, size, dtype=torch.long)
        for row in range(batch):
            if kind == "random":
                new[row] = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)))
            elif kind in ("left", "right"):
                count = data.draw(st.integers(0, size))
                new[row, slice(0, count) if kind == "left" else slice(size - count, size)] = 0
        past = ids.shape[1]
        if action == "hide":  # the end of an answer, which the next turn masks
            mask = mask.clone()
            for row in range(batch):
                mask[row, past - data.draw(st.integers(0, past)) :] = 0
        ids, mask = torch.cat([ids, make_tokens(batch, size, seed + step)], 1), torch.cat([mask, new], 1)
        with torch.no_grad():
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
            seen = mask
            if data.draw(st.booleans()) and action != "hide":
                seen = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()[past:] & mask.bool()[:, None]
                seen = seen[:, None]
            out = model(
                input_ids=ids[:, past:], attention_mask=seen, position_ids=positions, past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
        cache, real = out.past_key_values, new.bool()
        expected = run_rows_alone(model, ids, mask)[:, past:]
        torch.testing.assert_close(out.logits[real], expected[real], rtol=1e-4, atol=1e-5)
        assert cache.layers[0].keys.shape[2] == ids.shape[1]
    assert torch.isfinite(out.logits).all()


TOOLS = {  # what a tool does to the cache, and to the rows of tokens
    "none": (lambda cache: cache, lambda ids: ids),
    "copy": (copy.deepcopy, lambda ids: ids),
    "pickle": (lambda cache: pickle.loads(pickle.dumps(cache)), lambda ids: ids),
    "set": (lambda cache: [setattr(x, "keys", x.keys.clone()) for x in cache.layers] and cache, lambda ids: ids),
    "reset": (lambda cache: cache.reset() or cache, lambda ids: ids[:, :0]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])) or cache, lambda ids: ids[[1, 1]]),
    "beams": (
        lambda cache: cache.batch_repeat_interleave(2) or cache.batch_select_indices(torch.tensor([3, 0])) or cache,
        lambda ids: ids[[1, 0]],
    ),
    "crop": (lambda cache: cache.crop(-3) or cache, lambda ids: ids[:, :-3]),
}


@pytest.mark.parametrize("family", ["llama", "mistral"])  # full attention, and windows that are soon full
@pytest.mark.parametrize("kind", [DynamicCache, partial(StaticCache, max_cache_len=64)], ids=["dynamic", "static"])
@given(data=st.data())
@settings(max_examples=10)
def test_cache_of_any_kind_after_any_tools_equals_one_pass(family, kind, data):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = build(f"tiny_{family}", **({"sliding_window": 9} if family == "mistral" else {}))
    model = attach_focus(base, *data.draw(st.sampled_from(RULES[:3])), window=3)
    cache, ids = kind(config=model.config), make_tokens(2, 0)
    if kind is DynamicCache and family == "mistral":
        cache.activate_past_recording()
    # transformers' static layers have no other tools, and keep inference tensors
    names = [*TOOLS] if kind is DynamicCache else ["none", "copy", "pickle", "set", "reset", "reorder"]
    for step in range(4):
        change, follow = TOOLS[data.draw(st.sampled_from(names))]
        if ids.shape[1] > 3:
            cache, ids = change(cache), follow(ids)
        past, size = ids.shape[1], data.draw(st.sampled_from([1, 2, 7, 12]))
        ids = torch.cat([ids, make_tokens(2, size, seed=step)], 1)
        mode = data.draw(st.sampled_from([torch.no_grad, torch.inference_mode]))
        with mode() if kind is DynamicCache else torch.no_grad():
            found = model(ids[:, past:], past_key_values=cache).logits
        torch.testing.assert_close(found, run_at_once(model, ids)[:, past:], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(unavailable_reason() is not None, reason="no compiler")
@torch.no_grad()
def test_generate_real_model_equals_recomputing_by_every_path():
    loaded = load_model(
        ModelConfig(name="smollm2", hub_id="owner/absent"), assets="embedded", cache=cache_root(), seed=0,
        dtype=torch.float32, from_scratch=False,
    )  # fmt: skip
    model = attach_focus(loaded.model, window=16, sinks=4)
    prompt = loaded.tokenizer("It is a truth universally acknowledged, that", return_tensors="pt")["input_ids"]
    text = model.generate(prompt, max_new_tokens=200, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert text.shape[1] == prompt.shape[1] + 200
    logits = [compute_logits(set_routing(model, hard=True, backend=backend), text) for backend in ("masked", "cpu")]
    assert {method.path for method in attached_methods(model).values()} == {"cpu"}
    for x in logits:
        assert text[:, prompt.shape[1] :].equal(x.argmax(-1)[:, prompt.shape[1] - 1 : -1])
    masked, sparse = (F.cross_entropy(x[0, :-1], text[0, 1:], reduction="none") for x in logits)
    assert 0 < (masked - sparse).abs().max() < 1e-3


@pytest.mark.parametrize("method", ["focus", "focus_dual"])
@pytest.mark.parametrize("action", ["chunk", "token after a short prompt", "crop"])
def test_cache_of_inference_mode_is_continued_in_no_grad(tiny_model, method, action):
    model, ids = attach(tiny_model("llama"), method, window=6, sinks=2).eval(), make_tokens(1, 40)
    set_routing(model, hard=True)
    first, count = (4, 1) if "short" in action else (30, 3)
    with torch.inference_mode():
        cache = model(ids[:, :first], use_cache=True).past_key_values
    with torch.no_grad():
        if action == "crop":
            cache.crop(-5)
            first -= 5
        found = model(ids[:, first : first + count], past_key_values=cache).logits
    expected = run_at_once(model, ids[:, : first + count])[:, first:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_two_encoders_are_attached_in_inference_mode(tiny_model):
    model = attach(tiny_model("llama"), "focus_dual", window=6, sinks=2)
    assert compute_logits(model).isfinite().all()


CACHE_TOOLS = {
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "set": lambda cache: setattr(cache.layers[0], "keys", cache.layers[0].keys.clone()),
    "offload": lambda cache: [layer.offload() or layer.prefetch() for layer in cache.layers],
    "pickle": lambda cache: setattr(cache, "layers", pickle.loads(pickle.dumps(cache.layers))),
}


@pytest.mark.parametrize("tool", CACHE_TOOLS)
@torch.no_grad()
def test_cache_tools_of_transformers_work(tiny_model, tool):
    model, ids = attach_focus(tiny_model("llama")), make_tokens(1, 41)
    cache = model(ids[:, :40], use_cache=True).past_key_values
    CACHE_TOOLS[tool](cache)
    rows = 2 if tool == "repeat" else 1
    found = model(ids[:, 40:].expand(rows, 1), past_key_values=cache).logits
    torch.testing.assert_close(found, run_at_once(model, ids)[:, 40:].expand_as(found), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_cache_of_other_layers_is_served_or_refused_by_its_reason(tiny_model):
    """Early exit fills the first layers alone; with a method on later layers the cache is not one of prefix tuning."""
    model, ids = attach_focus(tiny_model("llama", num_hidden_layers=4), layers=[2, 3]), make_tokens(1, 41)
    whole = model(ids[:, :40], use_cache=True).past_key_values
    early = DynamicCache(config=model.config)
    for index in (0, 1):
        early.update(whole.layers[index].keys, whole.layers[index].values, index)
    try:
        found = model(ids[:, 40:], past_key_values=early).logits
        assert found.isfinite().all()
    except UserError as error:
        assert "prefix tuning" not in str(error)
