"""The Triton kernels in their interpreter: the reference's outputs and gradients, lists that wait for nothing."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_assignment, random_sequence
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from focus_exp.attention.dense import reference_attention, scores
from focus_exp.attention.kernels import KERNELS, BackendUnsupported, KernelRequirements, fused
from focus_exp.attention.kernels.cuda import FlashGroups
from focus_exp.attention.kernels.fused import Triton
from focus_exp.attention.kernels.layout import Plan, group_ids, lay_out, list_groups, query_ranges
from focus_exp.attention.selection import (
    AttentionArgs,
    Selection,
    Sequence,
    base_mask,
    group_mask,
    local_only_selection,
    select,
)
from focus_exp.attention.selection import local_mask as visible

pytest.importorskip("triton", reason="Triton is there on Linux alone")
pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="the kernels run on the GPU")


class GroupsOnTheCPU(FlashGroups):
    """What flash kernels do with the groups, in plain arithmetic."""

    name = "groups-on-the-cpu"

    def segments(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        index = torch.arange(len(q))
        segment = torch.searchsorted(offsets[1:], index, right=True)
        keep = (segment[:, None] == segment) & (index[:, None] >= index)
        q, k, v = (x.transpose(0, 1)[None].float() for x in (q, k, v))
        s = scores(q, k, args).masked_fill(~keep, float("-inf"))
        out = s.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return out[0].transpose(0, 1), s.logsumexp(-1)[0]


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory() -> Iterator[None]:
    """torch.empty holds NaN, so that a number nobody computed shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass
class Problem:
    tensors: tuple[Tensor, ...]  # q, k, v and, where there are some, the base's sinks
    selection: Selection
    sequence: Sequence
    args: AttentionArgs

    def run(self, attention, dtype: torch.dtype) -> list[Tensor]:
        """The output on real tokens and the gradients of all tensors and of the assignments."""
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in self.tensors]
        gates = torch.promote_types(dtype, torch.float32)
        gate = ("assignment",) if self.selection.key_assignment is None else ("assignment", "key_assignment")
        leaves += [getattr(self.selection, name).to(gates, copy=True).requires_grad_() for name in gate]
        args = replace(self.args, sink_logits=leaves[3]) if len(self.tensors) == 4 else self.args
        selection = replace(self.selection, **dict(zip(gate, leaves[len(self.tensors) :], strict=True)))
        out = attention(*leaves[:3], selection, self.sequence, args)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        if self.sequence.valid is not None:
            weights = weights * self.sequence.valid[:, None, :, None]
        gradients = torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)
        return [x.detach().double() for x in (out * (weights != 0), *gradients)]


@st.composite
def selections(draw: st.DrawFn, batch: int, length: int) -> Selection:
    """A router's, of any rule; or queries that ask other groups than they are in."""
    groups = draw(st.sampled_from([1, 3, 8]))
    kind, top_k = draw(st.sampled_from(["spread", "giant", "empty", "tied"])), draw(st.integers(1, min(3, groups)))
    g = random_assignment(kind, batch, length, groups)
    found = select(g, top_k, draw(st.sampled_from(["query_topk", "share"])))
    if draw(st.booleans()):  # some queries ask no group
        asks = found.query_groups & (torch.rand(batch, length, 1) < 0.7)
        found = replace(found, query_groups=asks, group=None)
    if not draw(st.booleans()):
        return found
    h = random_assignment("spread", batch, length, groups)
    keys = select(h, draw(st.integers(1, top_k)), "share").key_groups
    return Selection(g, found.query_groups, keys, key_assignment=h, max_groups=(top_k, top_k))


@st.composite
def problems(draw: st.DrawFn, one_group: bool = False) -> Problem:
    torch.manual_seed(draw(st.integers(0, 10_000)))
    batch, length = draw(st.integers(1, 2)), draw(st.integers(1, 80))
    heads, share, size = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from([8, 20]))
    q = torch.randn(batch, heads * share, length, size)
    k, v = torch.randn(2, batch, heads, length, size)
    logits = [torch.randn(heads * share)] if draw(st.booleans()) else []
    selection = select(random_assignment("spread", batch, length, 3), 1, "share")
    if not one_group:
        selection = draw(selections(batch, length))
    sequence = random_sequence(draw(st.sampled_from(["plain", "left", "right"])), batch, length)
    args = AttentionArgs(
        size**-0.5, draw(st.sampled_from([None, 1.5])), ste_slope=2.5,
        window=draw(st.sampled_from([0, 5, 30, 200])), sinks=draw(st.integers(0, 4)),
    )  # fmt: skip
    return Problem((q, k, v, *logits), selection, sequence, args)


def check(problem: Problem, kernel: Triton, dtype: torch.dtype = torch.float32, tolerance: float = 2e-6) -> None:
    problem.tensors = tuple(x.to(dtype).float() for x in problem.tensors)
    ours, truth = problem.run(kernel.attention, dtype), problem.run(reference_attention, torch.float64)
    scale = max(x.norm() for x in truth[1:])  # a gradient can be all cancellation
    for mine, exact, least in zip(ours, truth, [0.0, *[scale] * (len(truth) - 1)], strict=True):
        assert (mine - exact).norm() <= tolerance * max(exact.norm(), least)


@given(problem=problems())
@settings(max_examples=5)
def test_triton_any_input_equals_reference(problem):
    check(problem, Triton())


@given(problem=problems(one_group=True))
@settings(max_examples=2)
def test_flash_groups_any_input_equals_reference(problem):
    check(problem, GroupsOnTheCPU())


@pytest.mark.parametrize("size", [96, 256])
def test_triton_large_heads_half_precision_equals_reference(size):
    torch.manual_seed(size)
    tensors = (torch.randn(1, 2, 40, size), *torch.randn(2, 1, 1, 40, size))
    selection = select(random_assignment("spread", 1, 40, 3), 2, "query_topk")
    args = AttentionArgs(size**-0.5, window=4, sinks=2, ste_slope=5.0)
    problem = Problem(tensors, selection, Sequence.plain(1, 40), args)
    check(problem, Triton(), torch.float16, 2e-3)  # the interpreter has no bf16


def test_triton_groups_per_head_equal_reference(monkeypatch):
    """Heads folded into the batch, the base's sinks with them; and the sinks' gradients from several chunks."""
    monkeypatch.setattr(fused, "SINK_CHUNK", 32)
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 2, 50, 16), torch.randn(2, 2, 1, 50, 16)
    selection = select(random_assignment("spread", 2, 50, 4), 2, "query_topk")
    logits = torch.randn(2, 2)
    args = AttentionArgs(0.25, sink_logits=logits, window=9, sinks=3)
    ours = Triton().attention(q, k, v, selection, Sequence.plain(2, 50), args)
    for b in range(2):
        one = Selection(selection.assignment[b, None], selection.query_groups[b, None], selection.key_groups[b, None])
        row = slice(b, b + 1)
        of_row = replace(args, sink_logits=logits[b])
        truth = reference_attention(q[row], k[row], v[row], one, Sequence.plain(1, 50), of_row)
        torch.testing.assert_close(ours[row].double(), truth, atol=1e-5, rtol=1e-5)
    args = replace(args, sink_logits=None, ste_slope=2.5)
    check(Problem((q, k, v), selection, Sequence.plain(2, 50), args), Triton())


@given(problem=problems())
@settings(max_examples=2)
def test_triton_lse_equals_kept_pairs(problem):
    args = replace(problem.args, softcap=None)
    q, k, v, *_ = problem.tensors
    selection, sequence, rows = problem.selection, problem.sequence, slice(0, q.shape[2])
    keep = visible(sequence, rows, q.shape[2], args.window, args.sinks) | group_mask(selection, rows, q.shape[2])
    keep &= base_mask(sequence, rows, q.shape[2])
    s = scores(q.double(), k.double(), args).masked_fill(~keep[:, None], float("-inf"))
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    _, lse = Triton().forward(*packed, None, Plan.of(selection, sequence, args.window, args.sinks), args)
    truth = s.logsumexp(-1).transpose(0, 1).flatten(1)
    real = slice(None) if sequence.valid is None else sequence.valid.flatten()
    torch.testing.assert_close(lse[:, real].double(), truth[:, real], atol=1e-5, rtol=1e-5)


@given(st.integers(1, 3), st.integers(1, 40), st.data())
@settings(max_examples=20)
def test_list_groups_cover_each_distant_pair_once(batch, length, data):
    torch.manual_seed(data.draw(st.integers(0, 10_000)))
    groups, window = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([0, 3, 50]))
    asked, members = (torch.rand(batch, length, groups) < 0.4 for _ in range(2))
    found = list_groups(group_ids(asked, groups), group_ids(members, groups), groups, length, window)
    pairs = torch.zeros(batch * length, batch * length, dtype=torch.long)
    backwards = pairs.clone()
    low, high = query_ranges(found, groups, length, window)
    for r in range(groups):
        for place, query in enumerate(found.queries[r].tolist()):
            keys = found.keys[found.first[r, place] : found.stop[r, place]] // groups
            if found.lower is not None:
                keys = keys[(found.lower[r, place] & found.bits[keys]) == 0]
            pairs[query, keys] += 1
        for place, slot in enumerate(found.keys.tolist()):
            seeing = slice(low[r, place], high[r, place])
            queries, key = found.queries[r, seeing], slot // groups
            if found.lower is not None:
                queries = queries[(found.lower[r, seeing] & found.bits[key]) == 0]
            backwards[queries, key] += 1
    row, time = torch.arange(batch * length) // length, torch.arange(batch * length) % length
    share = (asked.flatten(0, 1).float() @ members.flatten(0, 1).float().T) > 0
    distant = (row[:, None] == row) & (time[:, None] - time > window)
    assert torch.equal(pairs, (share & distant).long()) and torch.equal(backwards, pairs)
    assert torch.equal(found.keys.long().sort().values, torch.arange(batch * length * groups))


@pytest.mark.parametrize(("top_k", "rule"), [(1, "query_topk"), (2, "query_topk"), (2, "share")])
@pytest.mark.parametrize("padding", ["plain", "left"])
def test_lay_out_never_syncs_and_compiles_fullgraph(top_k, rule, padding):
    g = random_assignment("spread", 2, 30, 4)
    sequence = random_sequence(padding, 2, 30)
    with FakeTensorMode() as mode:  # whatever depends on numbers raises
        valid = None if sequence.valid is None else mode.from_tensor(sequence.valid)
        fake = replace(sequence, start=mode.from_tensor(sequence.start), valid=valid)
        Plan.of(select(mode.from_tensor(g), top_k, rule), fake, window=5, sinks=2)
    compiled = torch.compile(lay_out, fullgraph=True, backend="eager", dynamic=True)
    one, other = (make(select(g, top_k, rule), sequence, 5, 2).lists for make in (compiled, lay_out))
    assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("queries", "first", "stop", "keys"))


def test_triton_local_only_equals_reference():
    sequence = random_sequence("left", 2, 40)
    q, k, v = torch.randn(3, 2, 2, 40, 8)
    args = AttentionArgs(0.3, window=5, sinks=2)
    ours = Triton().attention(q, k, v, local_only_selection(sequence), sequence, args)
    truth = reference_attention(q, k, v, local_only_selection(sequence), sequence, args)
    real = sequence.valid[:, None, :, None]
    torch.testing.assert_close((ours * real).double(), truth * real, atol=1e-5, rtol=1e-5)


def test_plan_too_many_shared_groups_raises():
    several = select(torch.rand(1, 9, 70), 2, "share")
    with pytest.raises(BackendUnsupported, match="attention.groups must be <= 63 .*70"):
        Plan.of(several, Sequence.plain(1, 9), 1, 0)
    Plan.of(select(torch.rand(1, 9, 70), 2, "query_topk"), Sequence.plain(1, 9), 1, 0)


def test_triton_other_value_size_raises():
    q, k, v = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 4)
    with pytest.raises(BackendUnsupported, match="must have values of head size 8 .*4"):
        selection = local_only_selection(Sequence.plain(1, 9))
        Triton().attention(q, k, v, selection, Sequence.plain(1, 9), AttentionArgs(1.0, window=1))


def test_gpu_kernels_unsupported_reasons(monkeypatch):
    bf16, float32 = (KernelRequirements("cuda", dtype, 256, softcap=True) for dtype in (torch.bfloat16, torch.float32))
    assert KERNELS["triton"].unsupported_reason(bf16) is None and KERNELS["triton"].unsupported_reason(float32) is None
    assert "head sizes up to 256" in KERNELS["triton"].unsupported_reason(replace(bf16, head_dim=288))
    assert KERNELS["torch-flash"].unsupported_reason(bf16) == "has no softcap"
    plain = replace(bf16, softcap=False)
    assert KERNELS["torch-flash"].unsupported_reason(plain) is None
    assert "one group" in KERNELS["torch-flash"].unsupported_reason(replace(plain, one_group=False))
    assert "needs FA3: No module named" in KERNELS["torch-fa3"].unsupported_reason(plain)
    assert "wheels are for torch 2.6 to 2.10" in KERNELS["flash-attn"].unsupported_reason(plain)
    assert "No module named 'flash_attn'" in KERNELS["flash-attn"].unsupported_reason(plain)
    fused.capability_reason.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "T4")
    assert KERNELS["triton"].unsupported_reason(bf16) == "needs compute capability 8.0, T4 has 7.5"
    fused.capability_reason.cache_clear()


def test_import_error_is_cached(monkeypatch):
    tried = []
    monkeypatch.setattr(fused.importlib, "import_module", lambda name: tried.append(name) or __import__("nowhere_"))
    fused.import_error.cache_clear()
    assert [fused.import_error("absent") for _ in range(3)] == ["No module named 'nowhere_'"] * 3
    assert tried == ["absent"]
    fused.import_error.cache_clear()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton brings its compiler on Linux alone")
def test_triton_compiles_every_kernel():
    """The interpreter runs what it would refuse: a variable of a loop that changes its type, a sum of other shapes."""
    script = Path(__file__).parent / "compiled_kernels.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.stdout.count(": sm_90, ") == 7, done.stderr[-2000:]
