"""Sparse path against the reference: outputs, gradients, partitions, attached models."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import pytest
import torch
from conftest import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_assignment, random_sequence
from torch import Tensor

from focus_exp import attach, set_routing
from focus_exp.assets import cache_root
from focus_exp.attention.base import SPARSE_FROM, LayerShape
from focus_exp.attention.baselines.longformer import Longformer
from focus_exp.attention.baselines.window import WindowOnly
from focus_exp.attention.dense import blocked_attention, reference_attention
from focus_exp.attention.kernels import KERNELS, Kernel, KernelRequirements, select_backend, unsupported_reasons
from focus_exp.attention.kernels.cpu_sparse import unavailable_reason
from focus_exp.attention.kernels.plain import Math
from focus_exp.attention.parts import Tokens, pairs_computed, parts, rows_of
from focus_exp.attention.selection import (
    AttentionArgs,
    Selection,
    Sequence,
    count_pairs,
    fold_heads,
    local_only_selection,
    select,
)
from focus_exp.attention.sparse import sparse_attention
from focus_exp.config import ModelConfig
from focus_exp.data.books import read_books
from focus_exp.evaluation.perplexity import token_losses
from focus_exp.models.load import load_model
from focus_exp.models.methods import attached_methods


def name_of(kernel: Kernel) -> str:
    return kernel.name


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory() -> Iterator[None]:
    """torch.empty holds NaN, so that a number nobody computed shows; blocks are small, so that there are several."""
    torch.use_deterministic_algorithms(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("focus_exp.attention.parts.SEEN_BLOCK", 24)
        patch.setattr("focus_exp.attention.parts.DIAGONAL_BLOCK", 10)
        yield
    torch.use_deterministic_algorithms(False)


@dataclass
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    selection: Selection
    sequence: Sequence
    args: AttentionArgs
    sink_logits: Tensor | None = None

    def run(self, attention, dtype: torch.dtype, *kernel) -> list[Tensor]:
        """The output on real tokens and the gradients of q, k, v, and of the base's sinks where it has some."""
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (self.q, self.k, self.v)]
        selection = self.selection
        args = self.args
        if self.sink_logits is not None:
            leaves.append(self.sink_logits.to(dtype, copy=True).requires_grad_())
            args = replace(args, sink_logits=leaves[-1])
        if args.ste_slope:
            for name in ("assignment", "key_assignment"):
                if (x := getattr(selection, name)) is not None:
                    leaves.append(x.to(torch.promote_types(dtype, torch.float32), copy=True).requires_grad_())
                    selection = replace(selection, **{name: leaves[-1]})
        out = attention(*leaves[:3], selection, self.sequence, args, *kernel)
        assert torch.isfinite(out).all()
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        if self.sequence.valid is not None:
            weights = weights * self.sequence.valid[:, None, :, None]
        (out * weights.to(out.dtype)).sum().backward()
        return [x.detach().double() for x in (out * (weights != 0), *(leaf.grad for leaf in leaves))]


@st.composite
def problems(draw: st.DrawFn, nothing: bool = False) -> Problem:
    torch.manual_seed(draw(st.integers(0, 10_000)))
    batch, length, groups = draw(st.integers(1, 2)), draw(st.integers(1, 150)), draw(st.sampled_from([1, 3, 8]))
    heads, share, size = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([8, 20, 64, 256]))
    q = torch.randn(batch, heads * share, length, size, dtype=torch.float64)
    k, v = torch.randn(2, batch, heads, length, size, dtype=torch.float64)

    def assigned() -> Tensor:
        """`[B, T, K]`, or `[B, 1 or G, T, K]`."""
        own = draw(st.sampled_from([None, 1, heads]))
        kind = draw(st.sampled_from(["spread", "giant", "empty", "tied"]))
        g = random_assignment(kind, batch * (own or 1), length, groups)
        return g if own is None else g.unflatten(0, (batch, own))

    rule = draw(st.sampled_from(["query_topk", "share"]))
    selection = select(assigned(), draw(st.integers(1, min(3, groups))), rule)
    if draw(st.booleans()):  # groups of their own for keys
        keys = assigned()
        members = select(keys, draw(st.integers(1, min(2, groups))), rule).key_groups
        selection = replace(selection, key_groups=members, group=None, key_assignment=keys)
    if draw(st.booleans()):  # and some queries that ask none
        asks = selection.query_groups & (torch.rand(selection.query_groups.shape[:-1]) < 0.7)[..., None]
        selection = replace(selection, query_groups=asks, group=None)
    sequence = random_sequence(draw(st.sampled_from(["plain", "left", "right"])), batch, length)
    if nothing:
        selection = local_only_selection(sequence)
    args = AttentionArgs(size**-0.5, window=draw(st.sampled_from([0, 5, 70, 200])), sinks=draw(st.integers(0, 4)))
    sink_logits = torch.randn(heads * share, dtype=torch.float64) if draw(st.booleans()) else None
    return Problem(q, k, v, selection, sequence, args, sink_logits)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["f32", "bf16"])
@pytest.mark.parametrize("kernel", [KERNELS["cpu-flash"], KERNELS["math"]], ids=name_of)
@given(problem=st.one_of(problems(), problems(nothing=True)))
@settings(max_examples=15)
def test_sparse_attention_any_input_equals_reference(kernel, dtype, tolerance, problem):
    problem.q, problem.k, problem.v = (x.to(dtype).double() for x in (problem.q, problem.k, problem.v))
    ours = problem.run(sparse_attention, dtype, kernel)
    truth = problem.run(reference_attention, torch.float64)
    scale = max(x.norm() for x in truth[1:])  # a gradient can be all cancellation
    for mine, exact, least in zip(ours, truth, [0.0, *[scale] * (len(truth) - 1)], strict=True):
        assert (mine - exact).norm() <= tolerance * max(exact.norm(), least)


@pytest.mark.parametrize("kernel", [KERNELS["cpu-flash"], KERNELS["math"]], ids=name_of)
@given(problem=problems())
@settings(max_examples=6)
def test_sparse_attention_threads_are_deterministic(kernel, problem):
    problem.args = replace(problem.args, ste_slope=1.0)
    alone = problem.run(sparse_attention, torch.float32, kernel)
    torch.set_num_threads(3)
    try:
        together, again = (problem.run(sparse_attention, torch.float32, kernel) for _ in range(2))
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, together, again))
    for mine, other in zip(together, alone, strict=True):  # a product of several threads is rounded otherwise
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * max(x.abs().max().item() for x in alone))


@pytest.mark.parametrize(
    "attention", [(sparse_attention, KERNELS["cpu-flash"]), (blocked_attention,)], ids=["cpu-flash", "masked"]
)
@given(problem=problems())
@settings(max_examples=15)
def test_ste_gradient_equals_reference(attention, problem):
    problem.args = replace(problem.args, ste_slope=2.5)
    function, *kernel = attention
    ours = problem.run(function, torch.float64, *kernel)
    truth = problem.run(reference_attention, torch.float64)
    assert len(ours) == 5 + (problem.sink_logits is not None) + (problem.selection.key_assignment is not None)
    for mine, exact in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-9, rtol=1e-9)


@given(problem=problems())
@settings(max_examples=15)
def test_sparse_attention_softcap_equals_reference(problem):
    problem.args = replace(problem.args, softcap=1.5, ste_slope=2.5)
    ours = problem.run(sparse_attention, torch.float64, Math())
    for mine, exact in zip(ours, problem.run(reference_attention, torch.float64), strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-9, rtol=1e-9)


@given(problem=problems())
@settings(max_examples=15)
def test_parts_cover_each_kept_pair_once(problem):
    window, sinks = problem.args.window, problem.args.sinks
    selection, sequence, _ = fold_heads(problem.selection, problem.sequence)
    tokens = Tokens.of(selection, sequence, sinks)
    rows = sequence.start.numel()
    seen, index = torch.zeros(rows, rows), torch.arange(rows)
    for part in chain.from_iterable(parts(tokens, window)):
        keys = rows_of(index, part.keys)
        for queries, calls in part.blocks:
            asking = rows_of(index, queries).reshape(len(keys), -1)
            for few, some, drop in calls:
                for number, (i, j) in enumerate(zip(asking[:, few], keys[:, some], strict=True)):
                    pairs = torch.ones(len(i), len(j)) if drop is None else (~drop[number]).float()
                    seen.index_put_((i[:, None], j[None]), pairs, accumulate=True)
    assert seen.max() <= 1
    if sequence.valid is not None:
        seen *= sequence.valid.flatten()[:, None]
    counts = count_pairs(problem.selection, problem.sequence, window, sinks)
    assert seen.sum() == counts.total - counts.distant + counts.distant_kept


@given(problem=problems())
@settings(max_examples=10)
def test_pairs_computed_equals_kernel_calls(problem):
    window, sinks = problem.args.window, problem.args.sinks
    calls = []

    class Counted(Math):
        def forward(self, q, k, v, drop, args):
            calls.append(q.shape[0] * q.shape[1] * k.shape[1])
            return super().forward(q, k, v, drop, args)

    sparse_attention(problem.q, problem.k, problem.v, problem.selection, problem.sequence, problem.args, Counted())
    _, sequence, _ = fold_heads(problem.selection, problem.sequence)
    batch, length = sequence.start.shape
    share = pairs_computed(problem.selection, problem.sequence, window, sinks)
    assert share == pytest.approx(sum(calls) / (batch * length * (length + 1) / 2))
    if problem.sequence.valid is None:
        counts = count_pairs(problem.selection, problem.sequence, window, sinks)
        assert share >= counts.density


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("top_k", "rule"), [(1, "query_topk"), (2, "query_topk"), (2, "share")])
def test_attached_model_sparse_path_equals_masked(tiny_model, family, top_k, rule):
    torch.manual_seed(0)
    changes = {"sliding_window": None} if family == "mistral" else {}  # where all layers slide, all take the mask
    model = attach(tiny_model(family, **changes), "focus", window=5, sinks=2)
    set_routing(model, hard=True, top_k=top_k, pair_rule=rule)
    tokens, mask = torch.randint(256, (2, 90)), torch.ones(2, 90, dtype=torch.long)
    mask[0, :30] = 0
    logits, paths = {}, {}
    for backend in ("masked", "cpu-flash"):
        if family == "gemma2" and backend == "cpu-flash":
            backend = "math"  # softcap
        set_routing(model, hard=True, backend=backend)
        with torch.no_grad():
            logits[backend] = model(tokens, attention_mask=mask).logits[mask.bool()]
        paths[backend] = {method.path for method in attached_methods(model).values()}
    masked, fast = logits.values()
    torch.testing.assert_close(fast, masked, atol=1e-4, rtol=1e-4)
    (_, slow), (name, taken) = paths.items()
    assert slow == {"masked"} and taken - {"masked"} == {name}


FASTEST = "cpu-flash" if unavailable_reason() else "cpu"


def test_backend_auto_switches_at_sparse_from(tiny_model):
    model = set_routing(attach(tiny_model("llama", max_position_embeddings=4096), "focus", window=5), hard=True)
    for length, path in ((SPARSE_FROM - 1, "masked"), (SPARSE_FROM, FASTEST)):
        with torch.no_grad():
            model(torch.randint(256, (1, length)), logits_to_keep=1)
        assert {method.path for method in attached_methods(model).values()} == {path}


@pytest.mark.parametrize(
    "method",
    [
        WindowOnly.create(LayerShape(16, 4, 8, 0), window=9, sinks=2),
        Longformer.create(LayerShape(16, 4, 8, 0), window=7, global_tokens=5),
    ],
    ids=["window", "longformer"],
)
@pytest.mark.parametrize("where", ["plain", "left"])
def test_local_method_sparse_path_equals_masked(method, where):
    sequence = random_sequence(where, 2, 90)
    tensors = [torch.randn(2, heads, 90, 8) for heads in (4, 2, 2)]
    real = torch.ones(2, 90, dtype=torch.bool) if sequence.valid is None else sequence.valid
    found = []
    for method.backend in ("masked", "cpu-flash"):
        leaves = [x.clone().requires_grad_() for x in tensors]
        selection = method.route(torch.randn(2, 90, 16), sequence)
        out = method.attend(*leaves, selection, sequence, AttentionArgs(0.35)).transpose(1, 2)[real]
        assert method.path == method.backend
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kernel", [KERNELS["cpu-flash"], KERNELS["math"]], ids=name_of)
def test_sparse_attention_double_backward_raises(kernel):
    """The backward pass is exact, and no function of its own that autograd could follow."""
    q, k, v = torch.randn(3, 1, 2, 40, 8).requires_grad_()
    selection = select(random_assignment("spread", 1, 40, 3), 1, "query_topk")
    out = sparse_attention(q, k, v, selection, Sequence.plain(1, 40), AttentionArgs(0.3, window=4, sinks=1), kernel)
    (gradient,) = torch.autograd.grad(out.square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_unsupported_reasons_name_device_dtype_and_size():
    reasons = unsupported_reasons(KernelRequirements("cpu", torch.float32, 64))
    assert reasons["cpu-flash"] is None and reasons["math"] is None
    assert all("CUDA" in reasons[name] for name in ("triton", "torch-flash", "flash-attn"))
    assert select_backend(KernelRequirements("cpu", torch.bfloat16, 64)).name == FASTEST
    serving = select_backend(KernelRequirements("cpu", torch.float32, 64, softcap=True))
    assert (serving is None) == (unavailable_reason() is not None)
    assert "bfloat16" in unsupported_reasons(KernelRequirements("cuda", torch.float32, 64))["torch-flash"]
    assert "256" in unsupported_reasons(KernelRequirements("cuda", torch.bfloat16, 512))["torch-flash"]


@pytest.mark.real
@pytest.mark.slow
def test_real_model_sparse_path_equals_masked():
    config, cache = ModelConfig(name="smollm2", hub_id="owner/absent"), cache_root(None)
    loaded = load_model(config, assets="embedded", cache=cache, seed=0, dtype=torch.float32, from_scratch=False)
    model = attach(loaded.model, "focus", groups=8, window=64)
    text = " ".join(text for _, text in read_books(cache, "test"))[:4000]
    tokens = torch.tensor([loaded.tokenizer(text)["input_ids"][:700]])
    losses = []
    for backend in ("masked", "cpu-flash"):
        set_routing(model, hard=True, top_k=1, backend=backend)
        with torch.no_grad():
            losses.append(token_losses(model, tokens))
        assert {method.path for method in attached_methods(model).values()} == {backend}
    assert (losses[0] - losses[1]).abs().max() < 1e-3
    assert not torch.equal(*losses)
