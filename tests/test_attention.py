"""Attention on tensors: blocked against reference, gates, pair rules, balance, random groups."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import KINDS, SMALL, problems
from torch import Tensor
from torch.nn.functional import logsigmoid

from focus_exp.attention.base import LayerShape
from focus_exp.attention.baselines.random_groups import RandomGroups
from focus_exp.attention.dense import blocked_attention
from focus_exp.attention.focus import Focus
from focus_exp.attention.focus_dual import FocusDual
from focus_exp.attention.router import Router, balance_potential, sinkhorn
from focus_exp.attention.selection import (
    AttentionArgs,
    PairCounts,
    Selection,
    Sequence,
    base_mask,
    count_pairs,
    fold_heads,
    is_dense_rule,
    select,
    top_k_groups,
)

SEEDS = st.integers(0, 10_000)
SHAPE = LayerShape(width=8, heads=2, head_dim=4, index=0)


def distances_to_hard(gate_kind: str, threshold: float, one_hot: Tensor) -> list[float]:
    """How far soft attention is from the hard mask as the gate gets steeper."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 33, 8, dtype=torch.float64).unbind()
    sequence = Sequence.plain(1, 33)
    args = AttentionArgs(1.0, window=3, sinks=1, gate=gate_kind, gate_threshold=threshold)
    hard = blocked_attention(q, k, v, select(one_hot, 1, "share"), sequence, args)
    soft = [
        blocked_attention(q, k, v, Selection(one_hot), sequence, replace(args, gate_steepness=steepness))
        for steepness in (1.0, 10.0, 100.0, 1000.0)
    ]
    return [float((out - hard).abs().max()) for out in soft]


@given(seed=SEEDS, groups=st.integers(2, 6))
@settings(max_examples=20)
def test_log_gate_steep_approaches_hard_mask(seed, groups):
    """Trap 2: a multiplied score of 0 still weighs e^0, and at threshold 0 the score is only halved."""
    torch.manual_seed(seed)
    one_hot = torch.nn.functional.one_hot(torch.randint(groups, (1, 33)), groups).double()
    distances = distances_to_hard("log", 0.5, one_hot)
    assert all(nearer <= farther for farther, nearer in pairwise(distances))
    assert distances[0] > 0.1 and distances[-1] < 1e-9
    assert distances_to_hard("multiplicative", 0.0, one_hot)[-1] > 0.1
    assert distances_to_hard("multiplicative", 0.5, one_hot)[-1] > 0.1


@given(seed=SEEDS, groups=st.integers(2, 8), data=st.data())
@settings(max_examples=15)
def test_query_topk_balanced_keys_keep_k_of_K(seed, groups, data):
    top_k = data.draw(st.integers(1, groups))
    torch.manual_seed(seed)
    queries, keys = 9, 5 * groups
    assignment = torch.rand(1, keys + queries, groups)
    assignment[0, :keys] += 2 * torch.eye(groups).repeat(5, 1)[torch.randperm(keys)]
    allowed = torch.zeros(1, 1, keys + queries, keys + queries, dtype=torch.bool)
    allowed[..., keys:, :keys] = True
    sequence = Sequence(torch.zeros(1, keys + queries, dtype=torch.long), allowed=allowed)
    counts = count_pairs(select(assignment, top_k, "query_topk"), sequence, window=0, sinks=0)
    assert counts == PairCounts(queries * keys, queries * keys, queries * keys * top_k // groups)


@given(seed=SEEDS, groups=st.integers(2, 8), data=st.data())
@settings(max_examples=15)
def test_share_rule_2k_above_K_is_dense(seed, groups, data):
    """Trap 3: k = 3 of 4 is full attention under another name; so is k = K under either rule."""
    torch.manual_seed(seed)
    assignment = torch.rand(2, 40, groups)
    top_k = data.draw(st.integers(groups // 2 + 1, groups))
    for selection in (select(assignment, top_k, "share"), select(assignment, groups, "query_topk")):
        counts = count_pairs(selection, Sequence.plain(2, 40), window=4, sinks=2)
        assert counts.distant_kept == counts.distant > 0
    sparse = count_pairs(select(assignment, 1, "share"), Sequence.plain(2, 40), window=4, sinks=2)
    assert sparse.distant_kept < sparse.distant


@given(problem=problems(most=40, **SMALL, kinds=KINDS, masked=True), block=st.sampled_from([1, 5, 512]))
@settings(max_examples=30)
def test_count_pairs_any_input_equals_loop(problem, block):
    sequence, args, selection = problem.sequence, problem.args, problem.selection
    length = sequence.start.shape[1]
    memberships = None if selection.is_soft else selection
    groups, rows, _ = fold_heads(memberships or Selection(), sequence)
    batch = len(rows.start)
    seen = base_mask(rows, slice(0, length), length).expand(batch, length, length)
    total = distant = kept = 0
    for b in range(batch):
        for i in range(length):
            for j in range(i + 1):
                if not seen[b, i, j] or (rows.valid is not None and not rows.valid[b, i]):
                    continue
                total += 1
                if i - j <= args.window or rows.start[b, i] <= j < rows.start[b, i] + args.sinks:
                    continue
                distant += 1
                if memberships is None:
                    kept += 1
                elif groups.query_groups is not None:
                    kept += bool((groups.query_groups[b, i] & groups.key_groups[b, j]).any())
    assert count_pairs(memberships, sequence, args.window, args.sinks, block) == PairCounts(total, distant, kept)


def test_top_k_groups_tie_takes_lowest_index():
    tied = torch.tensor([[[0.25, 0.25, 0.25, 0.25], [0.1, 0.4, 0.1, 0.4]]])
    assert top_k_groups(tied, 1).int().tolist() == [[[1, 0, 0, 0], [0, 1, 0, 0]]]
    assert top_k_groups(tied, 3).int().tolist() == [[[1, 1, 1, 0], [1, 1, 0, 1]]]


def test_router_changed_centroids_change_scores():
    router, h = Router(8, groups=3, routing_dim=4, normalize=True).eval(), torch.randn(1, 5, 8)
    with torch.no_grad():
        before = router(h).scores
        router.centroids.data.neg_()  # as averages of weights are written, which torch counts as no change
        torch.testing.assert_close(router(h).scores, -before)


@pytest.mark.parametrize("kind", [Focus, FocusDual])
def test_ste_slope_equals_half_open_gate(kind):
    method, affinity = kind.create(SHAPE, gate_steepness=6.0), torch.zeros(1, requires_grad=True)
    logsigmoid(method.gate_steepness * affinity).backward()
    assignment = torch.full((1, 3, 2), 0.5)
    hard = select(assignment.clone().requires_grad_(), 1, "share")
    assert method.complete_args(AttentionArgs(1.0), hard).ste_slope == affinity.grad.item()
    assert method.complete_args(AttentionArgs(1.0), select(assignment, 1, "share")).ste_slope is None


@pytest.mark.parametrize("pair_rule", ["share", "query_topk"])
def test_is_dense_rule_equals_enumeration(pair_rule):
    for groups in range(1, 7):
        for k in range(1, groups + 1):
            chosen = [set(some) for some in combinations(range(groups), k)]
            firsts = chosen if pair_rule == "share" else [{group} for group in range(groups)]
            assert is_dense_rule(groups, k, pair_rule) == all(asked & kept for asked in chosen for kept in firsts)


@given(seed=SEEDS, groups=st.integers(2, 8), normalize=st.booleans())
@settings(max_examples=20)
def test_router_has_ER_plus_KR_parameters_and_float32_scores(seed, groups, normalize):
    router = Router(48, groups, 16, normalize)
    assert sum(p.numel() for p in router.parameters()) == 48 * 16 + groups * 16
    h = 1000 * torch.randn(2, 5, 48, dtype=torch.bfloat16)
    scores = router(h).scores
    assert scores.shape == (2, 5, groups) and scores.dtype == torch.float32
    assert (scores.abs().max() <= 1 + 1e-5) == normalize
    with torch.no_grad():
        router.centroids.mul_(3)
    assert torch.allclose(router(h).scores, scores, atol=1e-5) == normalize


@given(seed=SEEDS, groups=st.integers(2, 8), spread=st.floats(0.1, 2))
@settings(max_examples=12)
def test_balance_potential_equals_sinkhorn_limit(seed, groups, spread):
    torch.manual_seed(seed)
    logits = spread * torch.randn(1, 200, groups, dtype=torch.float64) + 2 * torch.randn(groups, dtype=torch.float64)
    valid = torch.arange(200)[None] < 150
    inside = logits[:, :150]
    assignment = sinkhorn(logits, 200, valid)
    torch.testing.assert_close(assignment[:, :150], sinkhorn(inside, 200))
    torch.testing.assert_close(assignment[:, :150].sum(-1), torch.ones(1, 150, dtype=torch.float64))
    torch.testing.assert_close(
        assignment[:, :150].mean(1), torch.full((1, groups), 1 / groups).double(), atol=1e-6, rtol=0
    )

    potential = balance_potential(logits, torch.zeros(groups).double(), 200, valid)
    torch.testing.assert_close(potential, balance_potential(inside, torch.zeros(groups).double(), 200))
    torch.testing.assert_close((inside + potential).softmax(-1), assignment[:, :150], atol=1e-6, rtol=0)


@pytest.mark.parametrize("assignment", ["balanced", "sinkhorn"])
def test_focus_all_padding_keeps_finite_gradients(assignment):
    method, h = Focus.create(SHAPE, assignment=assignment).train(), torch.randn(2, 12, 8)
    nothing = torch.zeros(2, 12, dtype=torch.bool)
    for valid in (nothing, nothing.index_fill(0, torch.tensor(1), True)):
        method.assign(h, replace(Sequence.plain(2, 12), valid=valid)).square().sum().backward()
        method.update_statistics()
    for x in (method.router.potential, method.router.projection.grad, method.router.centroids.grad):
        assert torch.isfinite(x).all()


@given(seed=SEEDS, groups=st.integers(2, 8))
@settings(max_examples=20)
def test_balance_potential_sharpened_balances_counts(seed, groups):
    torch.manual_seed(seed)
    logits = torch.randn(1, 800, groups) + 2 * torch.randn(groups)
    potential = balance_potential(logits, torch.zeros(groups), 200, sharpness=20)
    shares = (logits + potential).argmax(-1).flatten().bincount(minlength=groups) / 800
    assert (shares - 1 / groups).abs().max() < 0.15 / groups


@given(seed=SEEDS, shift=st.integers(1, 30))
@settings(max_examples=10)
def test_balanced_assignment_eval_is_causal(seed, shift):
    torch.manual_seed(seed)
    method, h = Focus.create(SHAPE, sinkhorn_iterations=100), torch.randn(2, 60, 8)
    sequence, changed = Sequence.plain(2, 60), torch.cat([h[:, :shift], torch.randn(2, 60 - shift, 8)], 1)
    balanced = method.assign(h, sequence).mean((0, 1))
    torch.testing.assert_close(balanced, torch.full((4,), 0.25), atol=1e-2, rtol=0)
    method.update_statistics()
    assert method.router.potential.abs().max() > 0
    with torch.no_grad():
        method.eval()
        past = method.assign(h, sequence)[:, :shift]
        assert torch.equal(method.assign(changed, sequence)[:, :shift], past)
        method.assignment = "sinkhorn"
        assert not torch.equal(method.assign(changed, sequence)[:, :shift], method.assign(h, sequence)[:, :shift])


@given(
    seed=SEEDS, raw=st.lists(st.floats(0.1, 1), min_size=2, max_size=6), layer=st.integers(0, 40),
    top_k=st.integers(1, 2),
)  # fmt: skip
@settings(max_examples=12)
def test_random_groups_sizes_equal_shares(seed, raw, layer, top_k):
    shares = torch.tensor(raw) / sum(raw)
    options = {"groups": len(raw), "seed": seed, "shares": shares.tolist(), "top_k": top_k}
    method = RandomGroups.create(LayerShape(8, 2, 4, layer), **options)
    groups = method.route(torch.zeros(1, 4000, 8), Sequence.plain(1, 4000)).key_groups
    assert groups.sum(-1).eq(1).all()
    torch.testing.assert_close(groups[0].float().mean(0), shares, atol=0.04, rtol=0)


def first_groups(h: Tensor, start: int = 0, layer: int = 0, seed: int = 0) -> Tensor:
    sequence = Sequence(torch.full(h.shape[:2], start))
    return RandomGroups.create(LayerShape(8, 2, 4, layer), seed=seed).route(h, sequence).key_groups[0]


def test_random_groups_depend_on_position_layer_and_seed():
    h = torch.randn(1, 300, 8)
    groups = first_groups(h)
    assert torch.equal(first_groups(torch.randn(1, 300, 8)), groups)
    assert torch.equal(first_groups(h[:, :71]), groups[:71])
    assert torch.equal(first_groups(h, start=9)[9:], groups[:-9])
    for other in (first_groups(h, layer=1), first_groups(h, seed=1), first_groups(h, seed=123_456_789)):
        assert 0.15 < (other & groups).sum() / 300 < 0.35


def test_random_groups_top_k_includes_first():
    method = RandomGroups.create(SHAPE, groups=5, top_k=3)
    selection = method.route(torch.zeros(1, 200, 8), Sequence.plain(1, 200))
    assert selection.query_groups.sum(-1).eq(3).all() and (selection.query_groups | ~selection.key_groups).all()
    method.pair_rule = "share"
    shared = method.route(torch.zeros(1, 200, 8), Sequence.plain(1, 200))
    assert torch.equal(shared.key_groups, shared.query_groups)
    assert torch.equal(shared.query_groups, selection.query_groups)
