"""FocusDual: routing against its definition, groups per head, budgets, adapters, training."""

import math
from typing import Any

import pytest
import torch
from builders import compute_logits
from conftest import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_sequence
from torch import Tensor

from focus_exp import UserError, attach, freeze, load_adapter, save_adapter, set_routing
from focus_exp.attention.base import LayerShape
from focus_exp.attention.focus_dual import UNSET, FocusDual
from focus_exp.attention.selection import AttentionArgs, Sequence, base_mask, local_mask
from focus_exp.fitting.encoders import score_thresholds as thresholds
from focus_exp.models.methods import attached_methods, observe_selections, set_budget

WIDTH, SIZE = 12, 8
NEAR = {"window": 5, "sinks": 2}


@st.composite
def layers(draw: st.DrawFn, most: int = 40) -> tuple[FocusDual, Tensor, list[Tensor], Sequence]:
    """A layer in float64 with hidden states, q, k and v, and where the tokens lie."""
    torch.manual_seed(draw(st.integers(0, 10_000)))
    kv_heads, share, groups = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 2)), draw(st.integers(2, 6))
    options: dict[str, Any] = {"groups": groups, "heads": draw(st.sampled_from(["kv", "layer"]))}
    options |= {"top_k": draw(st.integers(1, groups))}
    options |= {"counts": draw(st.sampled_from(["query", "pair", "head"])), "encoders": draw(st.sampled_from([1, 2]))}
    if draw(st.booleans()):
        heads = kv_heads if options["heads"] == "kv" else 1
        reach = st.integers(0, groups)
        options["groups_per_layer"] = [draw(st.one_of(reach, st.lists(reach, min_size=heads, max_size=heads)))]
    shape = LayerShape(WIDTH, kv_heads * share, SIZE, 0, kv_heads)
    near = {"window": draw(st.integers(0, 9)), "sinks": draw(st.integers(0, 3))}
    method = FocusDual.create(shape, **options, **near).double()
    if hasattr(method, "mean"):
        method.mean.normal_()
        method.scale.uniform_(0.5, 2)
        torch.nn.init.normal_(method.key_encoder.bias)
        if draw(st.booleans()):
            set_counts(method)
    batch, length = draw(st.integers(1, 2)), draw(st.integers(1, most))
    heads = (kv_heads * share, kv_heads, kv_heads)
    tensors = [torch.randn(batch, n, length, SIZE, dtype=torch.float64) for n in heads]
    sequence = random_sequence(draw(st.sampled_from(["plain", "left", "right"])), batch, length)
    return method, torch.randn(batch, length, WIDTH, dtype=torch.float64), tensors, sequence


def set_counts(method: FocusDual) -> None:
    """As a fit does: what queries are worth differs, and with it how many groups they read."""
    method.worth.normal_()
    method.worth_bias.normal_()
    tokens = torch.randn(1, 200, len(method.mean), dtype=method.mean.dtype)
    with torch.no_grad():
        promises, _ = method.logits(tokens, torch.arange(200)[None])
        method.thresholds.copy_(thresholds(promises[0]))


def logits_by_hand(encoder: Any, token: Tensor, head: int) -> list[float]:
    return (encoder.weight[head] @ token + encoder.bias[head]).tolist()


def kept_by_hand(method: FocusDual, h: Tensor, sequence: Sequence, head: int) -> Tensor:
    """`[B, T, T]` bool: whether j is in a group that i reads."""
    kept = torch.zeros(*h.shape[:2], h.shape[1], dtype=torch.bool)
    reach = method.groups_per_head[head]
    if reach == 0 or method.is_dense():
        return ~kept if reach else kept
    for row, tokens in enumerate((h - method.mean) / method.scale):
        asked, of_key = [], []
        for place, token in enumerate(tokens):
            logits = logits_by_hand(method.q_encoder, token, head)
            least = method.thresholds[head][reach - 1] if 0 < reach < method.groups else UNSET
            if method.counts != "head" and least != UNSET:
                norm = torch.tensor(logits).logsumexp(0) - method.worth[head] @ token - method.worth_bias[head]
                distant = range(int(sequence.start[row, place]) + method.sinks, place - method.window)
                norm += math.log(1 + len(distant)) if method.counts == "pair" else 0
                asked.append([g for g, logit in enumerate(logits) if logit - norm > least])
            else:
                asked.append(sorted(range(len(logits)), key=lambda g, logits=logits: -logits[g])[:reach])
            keys = logits_by_hand(method.key_encoder, token, head)
            of_key.append(keys.index(max(keys)))
        kept[row] = torch.tensor([[group in some for group in of_key] for some in asked])
    return kept


@given(layer=layers(20))
@settings(max_examples=20)
def test_focus_dual_selection_equals_definition(layer):
    method, h, (q, k, v), sequence = layer
    length, share = h.shape[1], q.shape[1] // method.heads
    every = slice(0, length)
    seen = base_mask(sequence, every, length) | torch.eye(length, dtype=torch.bool)
    near = local_mask(sequence, every, length, method.window, method.sinks)
    with torch.no_grad():
        selection = method.route(h, sequence)
        out = method.attend(q, k, v, selection, sequence, AttentionArgs(0.3))
    kept = [kept_by_hand(method, h, sequence, head) for head in range(method.heads)]
    for head in range(q.shape[1]):
        mask = seen & (near | kept[head // share])
        of_key = head * k.shape[1] // q.shape[1]
        scores = (q[:, head] @ k[:, of_key].transpose(-1, -2) * 0.3).masked_fill(~mask, float("-inf"))
        truth = scores.softmax(-1) @ v[:, of_key]
        real = slice(None) if sequence.valid is None else sequence.valid
        torch.testing.assert_close(out[:, head][real], truth[real])
    real = torch.ones_like(near) if sequence.valid is None else sequence.valid[:, :, None] & sequence.valid[:, None]
    seen, far = seen & real & torch.ones_like(near), seen & ~near & real
    counts = method.count_pairs(selection, sequence)
    assert (counts.total, counts.distant) == (method.heads * int(seen.sum()), method.heads * int(far.sum()))
    assert counts.distant_kept == sum(int((far & mask).sum()) for mask in kept)


def test_focus_dual_state_has_fitted_names_and_shapes():
    shape = LayerShape(WIDTH, 6, SIZE, 0, 3)
    for heads, n in (("kv", 3), ("layer", 1)):
        linear = FocusDual.create(shape, groups=5, heads=heads).state_dict()
        assert {name: tuple(x.shape) for name, x in linear.items()} == {
            "key_encoder.weight": (n, 5, WIDTH), "key_encoder.bias": (n, 5),
            "query_encoder.weight": (n, 5, WIDTH), "query_encoder.bias": (n, 5),
            "mean": (WIDTH,), "scale": (WIDTH,), "worth": (n, WIDTH), "worth_bias": (n,), "thresholds": (n, 4),
        }  # fmt: skip
    assert not [name for name in FocusDual.create(shape, encoders=1).state_dict() if name.startswith("query_encoder")]


def attached(model, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return attach(model, "focus_dual", **{"groups": 6, "top_k": 2} | NEAR | options)


def test_thresholds_give_k_groups_on_average():
    method = FocusDual.create(LayerShape(WIDTH, 6, SIZE, 0, 3), groups=5)
    torch.manual_seed(0)
    method.worth.normal_()
    tokens = torch.randn(1, 400, WIDTH)
    method.thresholds.copy_(thresholds(method.group_scores(tokens)[0].detach()))
    for k in (1, 2, 4):
        method.top_k = k
        reads = method.route(tokens, Sequence.plain(1, 400)).query_groups.sum(-1).float()
        torch.testing.assert_close(reads.mean(-1), torch.full((1, 3), float(k)))
        assert reads.std(-1).min() > 0.3
    method.top_k, method.counts = 2, "head"
    assert method.route(tokens, Sequence.plain(1, 400)).query_groups.sum(-1).eq(2).all()


def test_set_routing_top_k_with_budget_raises(tiny_model):
    model = set_budget(attached(tiny_model("llama")), [1, 2])
    given = attached_methods(model)[0].top_k
    set_routing(model, hard=True, top_k=given)
    with pytest.raises(UserError, match=rf"top_k must be unset .*got {given + 1}"):
        set_routing(model, hard=True, top_k=given + 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_set_budget_full_and_window_drop_encoders(tiny_model, family):
    base, window = tiny_model(family), attach(tiny_model(family), "window", **NEAR)
    model = attached(tiny_model(family))
    routed = compute_logits(model)
    for every, truth in (("full", base), ("window", window), (6, base), (0, window)):
        same = attached(tiny_model(family), groups_per_layer=[every] * 2)
        torch.testing.assert_close(compute_logits(same), compute_logits(truth), atol=2e-5, rtol=1e-5)
        assert freeze(same) == []
    model = set_budget(model, [[2] * attached_methods(model)[0].heads, 2])
    assert torch.equal(compute_logits(model), routed)
    half = set_budget(model, ["full", 1])
    counted = {}
    with observe_selections(half, lambda layer, method, *seen: counted.update({layer: method.count_pairs(*seen)})):
        compute_logits(half)
    assert counted[0].distant_kept == counted[0].distant and 0 < counted[1].distant_kept < counted[1].distant
    if family in ("gpt2", "llama"):  # of the others some layers slide
        assert counted[0].total == counted[1].total
    assert all(".layers.1." in name or ".h.1." in name for name in freeze(half)) and freeze(half)


def test_set_budget_is_saved_in_adapter(tiny_model, tmp_path):
    model = set_budget(attached(tiny_model("llama")), [1, "window"])
    loaded = load_adapter(tiny_model("llama"), save_adapter(model, tmp_path / "adapter"))
    assert torch.equal(compute_logits(loaded), compute_logits(model))
    assert loaded.focus_attachment.options["groups_per_layer"] == [1, "window"]
    assert sum(p.numel() for p in attached_methods(loaded)[1].parameters()) == 0


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (["full"], "budget must have an entry for each of 2 layers .got 1"),
        (["full"] * 3, "budget must have an entry for each of 2 layers .got 3"),
        (["full", 7], "groups_per_layer of layer 1 must be .* to groups=6.*7"),
        (["full", "some"], "groups_per_layer of layer 1 must be .*'some'"),
        ([True, 1], "groups_per_layer of layer 0 must be .*True"),
        ([[1, 2, 3], 1], r"groups_per_layer of layer 0 must be a list of 2 numbers"),
        ([[1, -1], 1], r"groups_per_layer of layer 0 must be .*\[1, -1\]"),
        ("full", "groups_per_layer must be a list"),
    ],
)
def test_groups_per_layer_invalid_raises(tiny_model, budget, said):
    with pytest.raises(UserError, match=said):
        attached(tiny_model("llama"), groups_per_layer=budget)
    model = attached(tiny_model("llama"))
    with pytest.raises(UserError, match=said.replace(", none for layer 1", " for 2 layers")):
        set_budget(model, budget)


def test_set_budget_wrong_method_or_dropped_encoders_raises(tiny_model):
    with pytest.raises(ValueError, match="must have an entry for layer 1"):
        FocusDual.create(LayerShape(WIDTH, 2, SIZE, 1), groups_per_layer=[2])
    with pytest.raises(UserError, match="window"):
        set_budget(attach(tiny_model("llama"), "window"), ["full", "full"])
    model = set_budget(attached(tiny_model("llama")), ["window", 2])
    with pytest.raises(UserError, match="groups_per_layer of layer 0 without encoders"):
        set_budget(model, [2, 2])
