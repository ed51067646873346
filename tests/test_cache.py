"""Generation with groups: token by token what the whole sequence gives at once, and only its own pairs are read."""

import copy
import gc
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
import tiny_architectures
import torch
from conftest import FAMILIES, build
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_sequence
from transformers import CompileConfig, DynamicCache, StaticCache, StoppingCriteria
from transformers.cache_utils import DynamicLayer

from focus_exp import attach, detach, disable_method, set_routing
from focus_exp.assets import cache_root
from focus_exp.attention import one_token
from focus_exp.attention.dense import reference_attention
from focus_exp.attention.kv_cache import SPARE, GroupedCache, GroupedKVPool
from focus_exp.attention.selection import AttentionArgs, Sequence, causal_mask, group_mask, local_mask, select
from focus_exp.config import ModelConfig
from focus_exp.errors import UserError
from focus_exp.models.hf_cache import grouped_caches, is_grouped, prepare_cache
from focus_exp.models.load import load_model
from focus_exp.models.methods import attached_methods, observe_selections
from focus_exp.speed.timing import read_proc_status

RULES = [(1, "query_topk"), (2, "query_topk"), (2, "share"), (3, "share")]
VOCABULARY = 100


def attached(model, top_k=1, pair_rule="query_topk", **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        attach(model, "focus", **{"groups": 4, "window": 6, "sinks": 2, **options})
    return set_routing(model, hard=True, top_k=top_k, pair_rule=pair_rule)


def tokens(batch=1, length=40, seed=0):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def stepped(model, ids, sizes, mask=None, cache=None):
    """Logits of `ids` given to the model in chunks of `sizes` [tokens], and the cache in the end."""
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
def whole(model, ids, mask=None):
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize(("top_k", "rule"), RULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_give_the_logits_of_the_whole(tiny_model, family, top_k, rule):
    model = attached(tiny_model(family), top_k, rule)
    ids = tokens(2)
    expected = whole(model, ids)
    for sizes in ([1] * 40, [7] * 5 + [5], [4] + [1] * 36, [30] + [1] * 10, [128]):
        found, cache = stepped(model, ids, sizes)
        assert is_grouped(cache) == ((top_k, rule) != (3, "share"))  # that keeps all pairs
        assert cache.get_seq_length() == 40
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_long_chunks_after_a_long_past(tiny_model, family):
    model = attached(tiny_model(family), 2, window=20)
    ids = tokens(1, 300)
    found, _ = stepped(model, ids, [128, 128, 44])
    torch.testing.assert_close(found, whole(model, ids), rtol=1e-4, atol=1e-5)


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    padding=st.lists(st.integers(0, 8), min_size=1, max_size=3),
    rule=st.sampled_from(RULES),
    window=st.integers(0, 12),
    sinks=st.integers(0, 3),
    family=st.sampled_from(["gpt2", "llama", "gemma2"]),
)
@settings(max_examples=40)
def test_any_split_of_a_padded_batch_gives_the_same_logits(sizes, padding, rule, window, sinks, family):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = attached(build(f"tiny_{family}"), *rule, window=window, sinks=sinks)
    length = sum(sizes)
    mask = torch.ones(len(padding), length, dtype=torch.long)
    for row, pads in enumerate(padding):
        mask[row, : min(pads, length - 1)] = 0
    ids = tokens(len(padding), length)
    expected = whole(model, ids, mask)
    found, _ = stepped(model, ids, sizes, mask)
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)
    assert torch.isfinite(found).all()


@given(data=st.data(), sizes=st.lists(st.integers(1, 9), min_size=2, max_size=9))
@settings(max_examples=60)
def test_steps_of_any_groups_are_the_oracle(data, sizes):
    """Groups of each key/value head's own and of keys' own too, rows of different lengths, rows chosen anew."""
    torch.manual_seed(data.draw(st.integers(0, 10_000)))
    batch, heads, share, groups = (data.draw(st.integers(1, most)) for most in (3, 2, 2, 5))
    length, own = sum(sizes), data.draw(st.sampled_from([None, heads]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    q = torch.randn(batch, heads * share, length, 8, dtype=dtype)
    k, v = torch.randn(2, batch, heads, length, 8, dtype=dtype)
    shape = (batch, length, groups) if own is None else (batch, own, length, groups)
    top_k = data.draw(st.integers(1, min(2, groups)))
    rule = data.draw(st.sampled_from(["query_topk", "share"]))
    selection = select(torch.rand(shape), top_k, rule)
    if data.draw(st.booleans()):
        selection = replace(selection, key_groups=select(torch.rand(shape), 1, rule).key_groups, group=None)
    sequence = random_sequence(data.draw(st.sampled_from(["plain", "left"])), batch, length)
    window, sinks = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 3))
    sink_logits = torch.randn(heads * share) if data.draw(st.booleans()) else None
    softcap = data.draw(st.sampled_from([None, 2.0]))
    args = AttentionArgs(0.4, softcap, sink_logits=sink_logits, window=window, sinks=sinks)
    chosen = torch.randint(batch, (batch,)) if data.draw(st.booleans()) else torch.arange(batch)
    copied = data.draw(st.sampled_from([0, 3, one_token.COPIED]))
    cache, begin, found = GroupedCache(window, sinks), 0, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_token, "COPIED", copied)
        for size in sizes:
            new = slice(begin, begin + size)
            valid = None if sequence.valid is None else sequence.valid[:, new]
            some = Sequence(sequence.start[:, new] - begin, valid)
            selected = replace(
                selection, **{name: x.narrow(-1 if name == "group" else -2, begin, size)
                              for name, x in vars(selection).items() if isinstance(x, torch.Tensor)},
            )  # fmt: skip
            if begin:
                found.append(cache.attend(q[:, :, new], k[:, :, new], v[:, :, new], selected, some, args))
            cache.append(k[:, :, new], v[:, :, new], selected, some)
            begin += size
            if begin == sizes[0]:
                cache.reorder_rows(chosen)  # as beams do; what follows goes on from the chosen rows
                q, k, v, selection, sequence = rows_chosen(chosen, sizes[0], q, k, v, selection, sequence)
    exact = reference_attention(q, k, v, selection, sequence, args)[:, :, sizes[0] :]
    found = torch.cat(found, 2)
    if sequence.valid is not None:
        found, exact = (x * sequence.valid[:, None, sizes[0] :, None] for x in (found, exact))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), exact.double(), atol=tolerance, rtol=tolerance)


def rows_chosen(rows, length, q, k, v, selection, sequence):
    """The same, where the tokens before `length` are those of the chosen rows; the padding of all tokens too."""

    def chosen(x, dimension):
        return torch.cat(
            [x[rows].narrow(dimension, 0, length), x.narrow(dimension, length, x.shape[dimension] - length)], dimension
        )

    tensors = {
        name: chosen(x, x.ndim - 1 if name == "group" else x.ndim - 2)
        for name, x in vars(selection).items() if isinstance(x, torch.Tensor)
    }  # fmt: skip
    valid = None if sequence.valid is None else sequence.valid[rows]
    return *(chosen(x, 2) for x in (q, k, v)), replace(selection, **tensors), Sequence(sequence.start[rows], valid)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_recomputing(tiny_model, family):
    model = attached(tiny_model(family), 2)
    for prompt in (tokens(2, 3), tokens(2, 30)):
        options = {"max_new_tokens": 25, "do_sample": False, "pad_token_id": 0}
        cached = model.generate(prompt, **options)
        assert cached.equal(model.generate(prompt, use_cache=False, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True},
        {"do_sample": True, "num_return_sequences": 3},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_every_way_of_generating_gives_the_text_of_recomputing(tiny_model, options):
    model = attached(tiny_model("llama"), 1)
    prompt = tokens(1, 20)
    plain = {"cache_implementation": None, "prompt_lookup_num_tokens": None}
    texts = []
    for chosen in (options, {**options, "use_cache": False, **{k: v for k, v in plain.items() if k in options}}):
        torch.manual_seed(3)
        settled = {key: value for key, value in chosen.items() if value is not None}
        texts.append(model.generate(prompt, max_new_tokens=20, pad_token_id=0, **settled))
    assert texts[0].equal(texts[1])


def test_a_left_padded_batch_generates_what_each_row_does_alone(tiny_model):
    model = attached(tiny_model("llama"), 1)
    rows = [tokens(1, length, seed) for seed, length in enumerate((5, 17, 30))]
    ids = torch.zeros(3, 30, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, alone in enumerate(rows):
        ids[row, 30 - alone.shape[1] :], mask[row, 30 - alone.shape[1] :] = alone, 1
    options = {"max_new_tokens": 15, "do_sample": False, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, **options)
    for row, alone in enumerate(rows):
        assert together[row, 30:].equal(model.generate(alone, **options)[0, alone.shape[1] :])


def test_a_conversation_goes_on_from_its_cache(tiny_model):
    model = attached(tiny_model("gpt2"), 1)
    first, second = tokens(1, 18), tokens(1, 9, seed=1)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    answer = model.generate(first, **options)
    everything = torch.cat([answer.sequences, second], dim=1)
    went_on = model.generate(everything, past_key_values=answer.past_key_values, **options)
    assert went_on.sequences.equal(model.generate(everything, **options).sequences)


def test_crop_reset_and_choice_of_rows_are_as_if_the_rest_had_never_been(tiny_model):
    model = attached(tiny_model("llama"), 2)
    ids, other = tokens(3, 40), tokens(3, 12, seed=5)
    for kept in (1, 5, 20, 39):
        _, cache = stepped(model, ids, [10] + [1] * 10 + [20])
        cache.crop(kept - 40)
        assert cache.get_seq_length() == kept
        found, _ = stepped(model, other, [5] + [1] * 7, cache=cache)
        expected = whole(model, torch.cat([ids[:, :kept], other], 1))[:, kept:]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    _, cache = stepped(model, ids, [40])
    cache.crop(-50)  # more than there are
    assert cache.get_seq_length() == 0
    found, _ = stepped(model, other, [12], cache=cache)
    torch.testing.assert_close(found, whole(model, other), rtol=1e-4, atol=1e-5)
    rows = torch.tensor([2, 0, 0, 1])
    _, cache = stepped(model, ids, [40])
    cache.reorder_cache(rows)
    continued = tokens(4, 6, seed=7)
    found, _ = stepped(model, continued, [1] * 6, cache=cache)
    expected = whole(model, torch.cat([ids[rows], continued], 1))[:, 40:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    cache.reset()
    assert cache.get_seq_length() == 0
    found, _ = stepped(model, ids, [13] * 3 + [1], cache=cache)
    torch.testing.assert_close(found, whole(model, ids), rtol=1e-4, atol=1e-5)


def test_the_same_place_after_other_rows_were_chosen_begins_where_those_do(tiny_model):
    """Layers share what is said of their tokens; without a mask it is the cache that knows where texts begin."""
    model, ids, mask = attached(tiny_model("llama"), 2), tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    _, cache = stepped(model, ids, [12], mask)
    new = tokens(2, 3, seed=3)
    first, _ = stepped(model, new, [3], cache=cache)
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped, _ = stepped(model, new.flip(0), [3], cache=cache)
    torch.testing.assert_close(swapped.flip(0), first, rtol=1e-4, atol=1e-5)


def test_repeated_and_selected_rows(tiny_model):
    model = attached(tiny_model("gpt2"), 1)
    ids, more = tokens(2, 20), tokens(4, 5, seed=2)
    _, cache = stepped(model, ids, [20])
    cache.batch_repeat_interleave(2)
    found, cache = stepped(model, more, [2, 1, 2], cache=cache)
    expected = whole(model, torch.cat([ids.repeat_interleave(2, 0), more], 1))[:, 20:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    cache.batch_select_indices(torch.tensor([False, True, True, False]))
    last = tokens(2, 1, seed=3)
    found, _ = stepped(model, last, [1], cache=cache)
    before = torch.cat([ids.repeat_interleave(2, 0), more], 1)[1:3]
    torch.testing.assert_close(found, whole(model, torch.cat([before, last], 1))[:, 25:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["window", "random_groups"])
def test_controls_generate_too(tiny_model, name):
    model = tiny_model("llama")
    attach(model, name, window=6, sinks=2)
    ids = tokens(2)
    found, _ = stepped(model, ids, [9] + [1] * 31)
    torch.testing.assert_close(found, whole(model, ids), rtol=1e-4, atol=1e-5)


def test_layers_without_a_method_keep_all_their_tokens(tiny_model):
    model = tiny_model("llama")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        attach(model, "focus", layers=[1], groups=4, window=6, sinks=2)
    set_routing(model, hard=True)
    ids = tokens(2)
    found, cache = stepped(model, ids, [9, 5] + [1] * 26)
    torch.testing.assert_close(found, whole(model, ids), rtol=1e-4, atol=1e-5)
    assert len(grouped_caches(cache)) == 1 and cache.layers[0].keys.shape[2] == 40


def test_what_reads_the_future_does_not_generate(tiny_model):
    model = tiny_model("llama")
    attach(model, "focus", assignment="sinkhorn")
    set_routing(model, hard=True)
    for options in ({}, {"use_cache": False}):
        with pytest.raises(UserError, match="reads the future.*balanced"):
            model.generate(tokens(), max_new_tokens=2, **options)
    detach(model)
    model.generate(tokens(), max_new_tokens=2, pad_token_id=0)


def test_what_has_no_cache_says_why_and_generates_without(tiny_model):
    model = tiny_model("llama")
    attach(model, "focus")
    set_routing(model, hard=False)
    with pytest.raises(UserError, match="soft routing.*hard=True.*use_cache=False"):
        model.generate(tokens(), max_new_tokens=2)
    assert model(input_ids=tokens()).past_key_values is None
    assert model.generate(tokens(), max_new_tokens=2, use_cache=False, pad_token_id=0).shape[1] == 42
    with pytest.raises(UserError, match="no key/value cache for routers in training mode, which gate every"):
        model.train().generate(tokens(), max_new_tokens=2)
    detach(model)
    attach(model, "sparq")
    with pytest.raises(UserError, match="SparQ.*use_cache=False"):
        model.generate(tokens(), max_new_tokens=2)


def test_a_cache_that_others_filled_is_refused_and_an_empty_one_replaced(tiny_model):
    model = tiny_model("llama")
    ids = tokens()
    filled = model(input_ids=ids, use_cache=True).past_key_values
    attached(model)
    with pytest.raises(UserError, match="filled without"):
        model(input_ids=ids[:, :1], past_key_values=filled)
    for empty in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)):
        assert is_grouped(model(input_ids=ids, past_key_values=empty).past_key_values)
    static = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(UserError, match="attention_mask has 40 columns for 0 tokens in the cache and 1 new"):
        model(input_ids=ids[:, :1], past_key_values=static, attention_mask=torch.ones(1, 40, dtype=torch.long))
    with pytest.raises(UserError, match="attention_mask has 3 columns for 40 tokens in the cache and 1 new"):
        cache = stepped(model, ids, [40])[1]
        model(input_ids=ids[:, :1], past_key_values=cache, attention_mask=torch.ones(1, 3, dtype=torch.long))


class OwnCache(DynamicCache):
    pass


@pytest.mark.parametrize("kind", [DynamicCache, partial(StaticCache, max_cache_len=64), OwnCache])
def test_a_loop_may_go_on_with_the_empty_cache_that_it_gave(tiny_model, kind):
    model = attached(tiny_model("llama"))
    ids, cache = tokens(), kind(config=model.config)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        parts = [model(input_ids=part, past_key_values=cache).logits for part in ids.split(1, dim=1)]
    assert cache.get_seq_length() == ids.shape[1] and is_grouped(cache)
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_a_cache_of_hard_groups_does_not_serve_soft_gates(tiny_model):
    model = attached(tiny_model("llama"))
    cache = model(input_ids=tokens(), use_cache=True).past_key_values
    set_routing(model, hard=False)
    with pytest.raises(UserError, match="filled by hard groups, and there is none for soft routing"):
        model(input_ids=tokens()[:, :1], past_key_values=cache)


def test_a_mask_that_adds_to_scores_is_refused(tiny_model):
    model, mask = attached(tiny_model("llama")), torch.zeros(1, 1, 40, 40)
    mask[..., 3] = -1.0
    with pytest.raises(UserError, match="attention_mask adds to scores"):
        model(input_ids=tokens(), attention_mask=mask, use_cache=False)


def test_the_base_generates_with_its_own_cache(tiny_model):
    model = tiny_model("gpt2")
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    expected = model.generate(tokens(), **options)
    attached(model)
    with disable_method(model):
        found = model.generate(tokens(), **options)
    assert found.sequences.equal(expected.sequences) and not is_grouped(found.past_key_values)
    assert is_grouped(model.generate(tokens(), **options).past_key_values)
    detach(model)
    assert not is_grouped(model.generate(tokens(), **options).past_key_values)


def test_a_copied_model_generates_by_itself(tiny_model):
    model = attached(tiny_model("llama"))
    twin = copy.deepcopy(model)
    for method in attached_methods(twin).values():
        torch.nn.init.normal_(method.router.centroids)
    expected = whole(twin, tokens())
    found, _ = stepped(twin, tokens(), [5] + [1] * 35)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("top_k", "rule"), RULES[:3])
def test_a_step_reads_the_pairs_that_it_keeps_and_no_others(tiny_model, top_k, rule):
    model = attached(tiny_model("llama"), top_k, rule)
    ids = tokens(1, 60)
    kept: dict[int, torch.Tensor] = {}

    def observe(layer, method, selection, sequence):
        near = local_mask(sequence, slice(0, 60), 60, method.window, method.sinks)
        kept[layer] = (
            (near | group_mask(selection, slice(0, 60), 60)) & causal_mask(slice(0, 60), 60, ids.device)
        ).sum(-1)

    with observe_selections(model, observe):
        whole(model, ids)
    _, cache = stepped(model, ids, [37])
    for place in range(37, 60):
        _, cache = stepped(model, ids[:, place : place + 1], [1], cache=cache)
        for layer, grouped in enumerate(grouped_caches(cache)):
            assert grouped.pairs_read == kept[layer][0, place]


def test_all_tokens_are_kept_once_beside_the_window(tiny_model):
    model = attached(tiny_model("llama"), 2, "share")
    _, cache = stepped(model, tokens(2, 60), [25] + [1] * 35)
    for grouped in grouped_caches(cache):
        near, members = grouped.local.tensors[2:]
        for row, buckets in enumerate(grouped.pool.buckets):
            pooled = {kind: grouped.pool.tensors[2][b.begin : b.end].tolist() for kind, b in buckets.items()}
            assert sorted([*near[row, :2].tolist(), *chain(*pooled.values())]) == list(range(60))
            assert all(places == sorted(places) for places in pooled.values())
            assert sorted(near[row, 2:].tolist()) == list(range(53, 60))
            for place, groups in zip(near[row, 2:].tolist(), members[row, 2:], strict=True):
                assert place in pooled[tuple(groups.nonzero()[:, 0].tolist())]


def test_a_pool_grows_by_copying_now_and_then():
    keys = torch.randn(1, 1003, 2, 4)
    pool, rooms = GroupedKVPool(keys), set()
    for begin, stop in ((0, 3), *((place, place + 1) for place in range(3, 1003))):
        for kind, some in (((0,), slice(begin, stop, 3)), ((1, 2), slice(begin + 1, stop, 3))):
            index = torch.arange(1003)[some]
            if len(index):
                pool.append({(0, kind): [keys[0, some], -keys[0, some], index]}, window=5)
        rooms.add(len(pool.tensors[0]))
    assert len(rooms) < 25
    held = sum(bucket.count for bucket in pool.buckets[0].values())
    assert len(pool.tensors[0]) <= held * 1.25 + 2 * SPARE
    for bucket in pool.buckets[0].values():
        found, negative, index = (x[bucket.begin : bucket.end] for x in pool.tensors)
        assert found.equal(keys[0, index]) and negative.equal(-found) and len(index) == len(set(index.tolist()))
        assert bucket.slice_before(900) == slice(bucket.begin, bucket.begin + int((index < 900).sum()))


def test_what_is_held_grows_with_the_tokens_alone(tiny_model):
    model = attached(tiny_model("llama"), 1)
    _, cache = stepped(model, tokens(1, 100), [100])
    grouped = grouped_caches(cache)
    (_, heads, size), layers = grouped[0].pool.tensors[0].shape, len(grouped)
    token = 2 * heads * size * 4 + 8  # keys and values, place
    for length in (200, 400, 800):
        steps = length - cache.get_seq_length()
        _, cache = stepped(model, tokens(1, steps), [1] * steps, cache=cache)
        room = length / 4 + 4 * SPARE + 2 * 6 + SPARE  # of the buckets, and of the window
        assert (
            layers * token * length <= sum(x.bytes for x in grouped_caches(cache)) <= layers * token * (length + room)
        )


def sampled(model, length, seed, **options):
    torch.manual_seed(seed)
    return model.generate(
        tokens(1, 5), max_length=length, do_sample=True, eos_token_id=None, pad_token_id=0, **options
    )  # fmt: skip


def test_samples_repeat_by_seed(tiny_model):
    model = attached(tiny_model("llama"), 1)
    assert sampled(model, 300, 11).equal(sampled(model, 300, 11))
    assert not sampled(model, 300, 11).equal(sampled(model, 300, 12))


@pytest.mark.slow
def test_ten_thousand_tokens_hold_what_the_cache_holds(tiny_model):
    model = attached(tiny_model("llama", max_position_embeddings=16_384), 1)
    cache = prepare_cache(model.config, attached_methods(model), None)
    held: dict[int, tuple[int, int, int]] = {}

    class Watch(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            if ids.shape[1] in (2_000, 6_000, 10_000):
                gc.collect()
                held[ids.shape[1]] = (
                    read_proc_status("VmRSS"),
                    sum(x.bytes for x in grouped_caches(cache)),
                    len(gc.get_objects()),
                )
            return torch.zeros(1, dtype=torch.bool)

    text = sampled(model, 10_000, 11, past_key_values=cache, stopping_criteria=[Watch()])
    assert text.shape[1] == 10_000 and cache.get_seq_length() == 9_999
    first, middle, last = held.values()
    assert last[1] - middle[1] == pytest.approx(middle[1] - first[1], rel=0.3)
    assert last[0] - first[0] <= 2 * (last[1] - first[1]) + 2**23
    assert abs(last[2] - first[2]) < 200


STATIC = {"cache_implementation": "static", "disable_compile": True, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("setting", [{"top_k": 4}, {"top_k": 3, "pair_rule": "share"}, {"groups": 1}], ids=str)
def test_static_cache_keeping_every_pair_gives_the_base_text(tiny_model, family, setting):
    base, model = tiny_model(family), attached(tiny_model(family), **setting)
    ids, mask = tokens(2, 21), torch.ones(2, 21, dtype=torch.long)
    mask[0, :6] = 0
    for shown in (torch.ones_like(mask), mask):
        options = {**STATIC, "max_new_tokens": 8, "attention_mask": shown}
        assert model.generate(ids, **options).equal(base.generate(ids, **options))


@pytest.mark.parametrize("length", [3, 20])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
@torch.no_grad()
def test_static_cache_keeping_every_pair_gives_the_base_logits(tiny_model, family, length):
    base, model = tiny_model(family), attached(tiny_model(family), top_k=4)
    found = []
    for one in (base, model):
        cache, ids = StaticCache(config=one.config, max_cache_len=40), tokens(2, length + 6)
        with observe_selections(model, lambda *_: None):
            parts = [one(input_ids=part, past_key_values=cache).logits for part in ids.split([length, 3, 1, 1, 1], 1)]
        found.append(torch.cat(parts, 1))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["model", "decoder", "torch.compile"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_compiled_model_generates_the_eager_text(tiny_model, way, cache):
    model, prompt = attached(tiny_model("llama"), 1), tokens(2, 12)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    expected = model.generate(prompt, **options)
    torch._dynamo.reset()
    if way == "model":
        model.compile(backend="eager")
    elif way == "decoder":
        model.model.compile(backend="eager")
    else:
        model.model = torch.compile(model.model, backend="eager")
    assert model.generate(prompt, **options).equal(expected)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_automatic_compile_is_off_for_a_grouped_cache_and_on_for_the_base(tiny_model, fullgraph):
    model, base, prompt = attached(tiny_model("llama"), 1), tiny_model("llama"), tokens(2, 12)
    compiled = CompileConfig(fullgraph=fullgraph, backend="eager", mode=None)
    compiled._compile_all_devices = True
    plain = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    expected = model.generate(prompt, **plain, disable_compile=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert model.generate(prompt, **plain, compile_config=compiled).equal(expected)
    assert not torch._dynamo.utils.counters["stats"]
    set_routing(model, hard=True, top_k=4)
    expected = base.generate(prompt, **plain, disable_compile=True)
    assert model.generate(prompt, **plain, compile_config=compiled).equal(expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    detach(model)
    assert "get_compiled_call" not in vars(model) and "create_masks_for_generate" not in vars(model)


@pytest.mark.parametrize("kind", [DynamicCache, partial(StaticCache, max_cache_len=64), OwnCache])
def test_cache_keeps_its_class_its_identity_and_readable_keys(tiny_model, kind):
    base, model = tiny_model("llama"), attached(tiny_model("llama"), 1)
    cache, plain, ids = kind(config=model.config), DynamicCache(config=model.config), tokens(2, 30)
    before = type(cache)
    with torch.no_grad():
        for part in ids.split([20, 9, 1], 1):
            out = model(input_ids=part, past_key_values=cache)
        base(input_ids=ids, past_key_values=plain)
    assert out.past_key_values is cache and type(cache) is before
    assert cache.get_seq_length() == 30 and len(cache) == len(plain) and cache.is_initialized
    width = 64 if isinstance(cache, StaticCache) else 30
    for layer, expected in zip(cache.layers, plain.layers, strict=True):
        assert isinstance(layer, DynamicLayer)
        assert layer.keys.shape == layer.values.shape == (*expected.keys.shape[:2], width, expected.keys.shape[3])
    torch.testing.assert_close(cache.layers[0].keys[:, :, :30], plain.layers[0].keys)  # routing changes later layers
    torch.testing.assert_close(cache.layers[0].values[:, :, :30], plain.layers[0].values)


def test_cache_made_by_the_model_is_a_dynamic_cache_that_iterates(tiny_model):
    model = attached(tiny_model("gpt2"), 1)
    cache = model(input_ids=tokens(2, 10), use_cache=True).past_key_values
    assert type(cache) is DynamicCache
    for keys, values, _ in cache:
        assert keys.shape == values.shape == (2, model.config.n_head, 10, model.config.n_embd // model.config.n_head)
    assert DynamicCache(tuple(cache)).get_seq_length() == 10
    cache.reset()
    assert cache.layers[0].keys is None and cache.get_seq_length() == 0


def test_lazy_cache_without_configuration_is_served_in_place(tiny_model):
    model, cache, ids = attached(tiny_model("mistral"), 1), DynamicCache(), tokens(2, 20)
    with torch.no_grad():
        parts = [model(input_ids=part, past_key_values=cache).logits for part in ids.split([9, 1, 10], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole(model, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
def test_static_cache_with_left_padding_generates_the_dynamic_text(tiny_model, family):
    model, ids, mask = attached(tiny_model(family), 1), tokens(2, 14), torch.ones(2, 14, dtype=torch.long)
    mask[0, :5] = 0
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    assert model.generate(ids, **{**STATIC, **options}).equal(model.generate(ids, **options))


@pytest.mark.parametrize("kind", ["prompt lookup", "assistant"])
def test_convolution_hybrid_rolls_its_cache_back(kind):
    model = attached(tiny_architectures.tiny_model("lfm2"), 1)
    prompt = tokens(1, 12).repeat(1, 2)
    options = {"max_new_tokens": 15, "do_sample": False, "pad_token_id": 0}
    helped = {"prompt_lookup_num_tokens": 4}
    if kind == "assistant":
        helped = {"assistant_model": attached(tiny_architectures.tiny_model("lfm2", seed=1), 1)}
    assert model.generate(prompt, **options, **helped).equal(model.generate(prompt, **options))


def test_prefix_tuning_is_refused_by_name(tiny_model):
    peft = pytest.importorskip("peft")
    model = attached(tiny_model("llama"), 1)
    prefixed = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    for hard in (True, False):
        set_routing(model, hard=hard)
        with pytest.raises(UserError, match="prefix tuning"):
            prefixed(input_ids=tokens(1, 8))


@pytest.mark.parametrize(("train_with", "said"), [("hard", "whole batch"), ("soft", "gate every token")])
def test_training_mode_is_refused_a_cache_with_its_own_reason(tiny_model, train_with, said):
    model = attach(tiny_model("llama"), "focus", train_with=train_with)
    with pytest.raises(UserError, match=said):
        model.train().generate(tokens(), max_new_tokens=2)


def test_output_attentions_is_as_with_sdpa(tiny_model):
    base, model = tiny_model("llama"), attached(tiny_model("llama"), 1)
    options = {"max_new_tokens": 3, "pad_token_id": 0, "return_dict_in_generate": True, "output_attentions": True}
    for top_k in (1, 4):
        set_routing(model, hard=True, top_k=top_k)
        found = [one(input_ids=tokens(), output_attentions=True).attentions for one in (base, model)]
        assert found[0] == found[1] == ()
        assert [one.generate(tokens(), **options).attentions for one in (base, model)] == [((), (), ())] * 2


def alone(model, ids, mask):
    """Logits `[B, T, V]` of each row's tokens without its padding, computed by themselves."""
    found = torch.zeros(*ids.shape, model.config.vocab_size)
    for row, real in enumerate(mask.bool()):
        if real.any():
            found[row, real] = whole(model, ids[row, real][None])[0]
    return found


masks = st.lists(st.lists(st.booleans(), min_size=30, max_size=30), min_size=1, max_size=3)


@given(
    rows=masks,
    rule=st.sampled_from(RULES),
    hard=st.booleans(),
    backend=st.sampled_from(["masked", "math", "cpu-flash"]),
    window=st.integers(0, 9),
    sinks=st.integers(0, 3),
    family=st.sampled_from(["gpt2", "llama"]),
    method=st.sampled_from(["focus", "window", "random_groups", "focus_dual"]),
)
@settings(max_examples=40)
def test_masked_places_inside_rows_give_each_row_its_own_logits(
    rows, rule, hard, backend, window, sinks, family, method
):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = build(f"tiny_{family}")
        if method == "focus":
            set_routing(
                attach(model, method, groups=4, window=window, sinks=sinks),
                hard=hard, top_k=rule[0], pair_rule=rule[1], backend=backend,
            )  # fmt: skip
        else:
            set_routing(attach(model, method, window=window, sinks=sinks), hard=True, backend=backend)
        set_routing(model, hard=hard, sparse_from=1)
    mask, ids = torch.tensor(rows).long(), tokens(len(rows), 30)
    real, expected = mask.bool(), alone(model, ids, mask)
    torch.testing.assert_close(whole(model, ids, mask)[real], expected[real], rtol=1e-4, atol=1e-5)
    seen, positions = torch.ones(30, 30).tril().bool() & real[:, None], (mask.cumsum(1) - 1).clamp(min=0)
    found = model(input_ids=ids, attention_mask=seen[:, None], position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("backend", ["masked", "cpu-flash"])
def test_masked_places_inside_rows_give_each_row_its_own_gradients(tiny_model, hard, backend):
    model = attached(tiny_model("llama"), 2, train_with="hard" if hard else "soft", assignment="softmax")
    set_routing(model, hard=hard, backend=backend).train()
    ids, mask = tokens(1, 30), torch.ones(1, 30, dtype=torch.long)
    mask[0, 5:14] = mask[0, 20:22] = mask[0, 27:] = 0
    real, found = mask[0].bool(), []
    for given_ids, given_mask in ((ids, mask), (ids[:, real], None)):
        model.zero_grad()
        positions = None if given_mask is None else (given_mask.cumsum(1) - 1).clamp(min=0)
        out = model(input_ids=given_ids, attention_mask=given_mask, position_ids=positions, use_cache=False).logits
        (out[:, real] if given_mask is not None else out).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_compiled_layers_count_windows_by_tokens_in_one_graph(tiny_model):
    model, ids, mask = attached(tiny_model("llama"), 1), tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[0, :3] = mask[0, 9:20] = mask[1, 25:] = 0
    positions, real = (mask.cumsum(1) - 1).clamp(min=0), mask.bool()
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        found = compiled(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found[real], alone(model, ids, mask)[real], rtol=1e-4, atol=1e-5)


def test_copied_cache_continues_by_itself(tiny_model):
    model, ids = attached(tiny_model("llama"), 1), tokens(2, 30)
    _, cache = stepped(model, ids[:, :20], [20])
    expected = whole(model, ids)[:, 20:]
    for one in (copy.deepcopy(cache), copy.deepcopy(cache), cache):
        torch.testing.assert_close(stepped(model, ids[:, 20:], [4, 6], cache=one)[0], expected, rtol=1e-4, atol=1e-5)


@given(data=st.data(), rule=st.sampled_from(RULES[:3]), window=st.integers(0, 9), sinks=st.integers(0, 3))
@settings(max_examples=60)
def test_any_history_of_a_cache_gives_each_row_its_own_logits(data, rule, window, sinks):
    """Chunks with padding anywhere, tokens that a later mask hides, crops, beams, resets: against rows alone."""
    family = data.draw(st.sampled_from(["gpt2", "llama", "mistral"]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        changes = {"sliding_window": 200} if family == "mistral" else {}
        model = attached(build(f"tiny_{family}", **changes), *rule, window=window, sinks=sinks)
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
        ids, mask = torch.cat([ids, tokens(batch, size, seed + step)], 1), torch.cat([mask, new], 1)
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
        expected = alone(model, ids, mask)[:, past:]
        torch.testing.assert_close(out.logits[real], expected[real], rtol=1e-4, atol=1e-5)
        assert cache.layers[0].keys.shape[2] == ids.shape[1]
    assert torch.isfinite(out.logits).all()


@pytest.mark.slow
@pytest.mark.real
def test_the_real_model_generates_the_text_of_recomputing():
    loaded = load_model(
        ModelConfig(name="smollm2", hub_id="owner/absent"), assets="embedded", cache=cache_root(), seed=0,
        dtype=torch.float32, from_scratch=False,
    )  # fmt: skip
    model = attached(loaded.model, window=16, sinks=4)
    prompt = loaded.tokenizer("It is a truth universally acknowledged, that", return_tensors="pt")["input_ids"]
    text = model.generate(prompt, max_new_tokens=200, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert text.shape[1] == prompt.shape[1] + 200
    with torch.no_grad():
        best = model(text, use_cache=False).logits.argmax(-1)  # after every token, from all before it at once
    assert text[:, prompt.shape[1] :].equal(best[:, prompt.shape[1] - 1 : -1])
