"""The CPU kernel against the float64 reference: outputs, logsumexp, gradients, every instruction set."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_assignment, random_sequence
from test_dual import layers
from test_kernels import Problem, poisoned_memory  # noqa: F401  # a fixture
from torch.utils import cpp_extension

from focus_exp.attention import dense
from focus_exp.attention.base import LayerShape
from focus_exp.attention.focus_dual import UNSET, FocusDual
from focus_exp.attention.kernels import cpu_sparse
from focus_exp.attention.kernels.contract import BackendUnsupported
from focus_exp.attention.selection import AttentionArgs, Sequence, local_only_selection, select

KERNEL = cpu_sparse.CpuSparse()
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
pytestmark = pytest.mark.skipif(cpu_sparse.unavailable_reason() is not None, reason="no compiler")


@pytest.fixture(params=["", "avx512", "avx2", "emulated", "plain"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use one instruction set; "" is the best one, "emulated" that of AVX-512 with bf16 in portable vectors."""
    try:
        torch.ops.focus_exp.use_isa(request.param)
    except ValueError:
        pytest.skip("not on this processor")
    yield request.param
    torch.ops.focus_exp.use_isa("")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["f32", "bf16"])
@pytest.mark.parametrize("where", ["plain", "left", "right", "sliding"])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_each_instruction_set_equals_reference(isa, dtype, where, softcap):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 301, 64), *torch.randn(2, 2, 2, 301, 64)
    assignment = random_assignment("spread", 4, 301, 8).unflatten(0, (2, 2))
    args = AttentionArgs(0.125, softcap, sink_logits=torch.randn(6), window=37, sinks=3, ste_slope=2.5)
    problem = Problem([q, k, v], select(assignment, 3, "query_topk"), random_sequence(where, 2, 301), args)
    problem.check(KERNEL.attention, dtype, TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("start", "unread", "value"), [(31, slice(0, 31), torch.nan), (0, slice(150, 200), 9.0)], ids=["padding", "future"]
)
def test_attention_unread_tokens_change_no_output(start, unread, value):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 200, 16), *torch.randn(2, 1, 2, 200, 16)
    valid = torch.arange(200)[None] >= start if start else None
    sequence, args = Sequence(torch.full((1, 200), start), valid), AttentionArgs(0.25, window=9, sinks=2)
    selection = select(random_assignment("spread", 1, 200, 4), 2, "query_topk")
    before = KERNEL.attention(q, k, v, selection, sequence, args)
    for x in (q, k, v):
        x[:, :, unread] = value
    after = KERNEL.attention(q, k, v, selection, sequence, args)
    read = torch.ones(200, dtype=torch.bool)
    read[unread] = False
    assert torch.equal(before[:, :, read], after[:, :, read])
    assert not start or not after[:, :, unread].any()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["f32", "bf16"])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (1.5, True)])
def test_full_attention_equals_reference(isa, dtype, softcap, sinks):
    torch.manual_seed(0)
    tensors, sequence = [torch.randn(2, 6, 270, 64), *torch.randn(2, 2, 2, 270, 64)], Sequence.plain(2, 270)
    args = AttentionArgs(0.125, softcap, sink_logits=torch.randn(6) if sinks else None, window=270)
    problem = Problem(tensors, local_only_selection(sequence), sequence, args)
    problem.check(lambda q, k, v, *rest: cpu_sparse.attend_fully(q, k, v, rest[-1]), dtype, TOLERANCES[dtype])
    # a sliding layer's, which differs from the reference's window by one
    args = replace(args, window=99)
    problem = Problem(tensors, local_only_selection(sequence), sequence, args)
    problem.check(lambda q, k, v, *rest: cpu_sparse.attend_fully(q, k, v, rest[-1], 100), dtype, TOLERANCES[dtype])


@pytest.mark.parametrize(("length", "trained"), [(255, False), (256, False), (256, True)])
def test_dense_attention_takes_the_kernel_from_its_length(monkeypatch, length, trained):
    calls, kernel = [], cpu_sparse.attend_fully
    monkeypatch.setattr(cpu_sparse, "attend_fully", lambda *x: calls.append(1) or kernel(*x))
    q, k, v = torch.randn(1, 4, length, 16, requires_grad=trained), *torch.randn(2, 1, 2, length, 16)
    out = dense.full_attention(q, k, v, None, AttentionArgs(0.25))
    assert bool(calls) == (length == 256)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("padding", "served"), [(slice(19), 1), (slice(200, 256), 1), (slice(100, 101), 0)], ids=["left", "right", "inside"]
)
def test_dense_attention_takes_the_kernel_with_padding(monkeypatch, padding, served):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 256, 16), *torch.randn(2, 2, 2, 256, 16)
    valid = torch.ones(2, 256, dtype=torch.bool)
    valid[0, padding] = False
    calls, kernel = [], cpu_sparse.attend_fully
    monkeypatch.setattr(cpu_sparse, "attend_fully", lambda *x: calls.append(1) or kernel(*x))
    args = AttentionArgs(0.25, softcap=1.5, sink_logits=torch.randn(4))
    out = dense.full_attention(q, k, v, valid[:, None, None], args)
    assert len(calls) == served
    monkeypatch.setattr(cpu_sparse, "is_fastest_full_attention", lambda *_: False)
    masked = dense.full_attention(q, k, v, valid[:, None, None], args)
    torch.testing.assert_close(out.transpose(1, 2)[valid], masked.transpose(1, 2)[valid])


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_attention_several_threads_give_equal_numbers(set_threads):
    torch.manual_seed(0)
    tensors = [torch.randn(1, 6, 900, 16), *torch.randn(2, 1, 3, 900, 16)]
    assignment = random_assignment("spread", 3, 900, 8)[None]
    args = AttentionArgs(0.25, window=20, sinks=2, ste_slope=2.5)
    problem = Problem(tensors, select(assignment, 2, "query_topk"), Sequence.plain(1, 900), args)
    alone = problem.run(KERNEL.attention, torch.float32)
    set_threads(3)
    first, second = (problem.run(KERNEL.attention, torch.float32) for _ in range(2))
    assert all(map(torch.equal, first, second)) and torch.equal(alone[0], first[0])
    for x, y in zip(alone, first, strict=True):  # gradients of keys are summed over as many parts as there are threads
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5 * x.abs().max().item())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch's threads have another library")
def test_kernel_uses_the_threads_of_torch():
    built = next(path for path in torch.ops.loaded_libraries if "focus_exp_cpu_sparse" in path)
    is_gcc = cpp_extension.check_compiler_is_gcc(cpp_extension.get_cxx_compiler())
    assert not is_gcc or b"GOMP_parallel" in Path(built).read_bytes()


@given(layer=layers(200), dtype=st.sampled_from(list(TOLERANCES)))
@settings(max_examples=60)
def test_route_by_kernel_equals_route(layer, dtype):
    method, h, _, sequence = layer
    method, h = method.float(), h.to(dtype)
    with torch.no_grad():
        assert not method.is_routed or method.can_route_by_kernel(h)
        fast = method.route(h, sequence)
        method.observers.append(lambda *_: None)  # who wants the assignment
        slow = method.route(h, sequence)
        assert fast.max_groups == slow.max_groups and fast.is_dense == slow.is_dense
        if not method.is_routed:
            return
        queries, keys = method.logits(h, torch.arange(h.shape[1]) - sequence.start)
    assert fast.assignment is None
    assert (fast.key_groups.sum(-1) == 1).all()
    # they differ in the order of sums, and so in what is close to a tie
    close = 1e-5 * (1 + torch.cat([queries, keys]).abs().max())
    chosen = keys.gather(-1, fast.key_groups.long().argmax(-1, keepdim=True))
    assert (chosen > keys.amax(-1, keepdim=True) - close).all()
    for head, k in enumerate(method.groups_per_head):
        scores, of_head = queries[:, head], (fast.query_groups[:, head], slow.query_groups[:, head])
        limit = method.thresholds[head, max(k, 1) - 1 : max(k, 1)]
        if k in (0, method.groups) or method.counts == "head" or limit[0] == UNSET:
            limit = scores.sort(-1, descending=True).values[..., max(k, 1) - 1 : max(k, 1)]
        assert ((scores - limit).abs() < close)[of_head[0] != of_head[1]].all()


def test_route_by_kernel_ties_take_the_lowest_group():
    method = FocusDual.create(LayerShape(12, 6, 8, 0, 3), groups=5, top_k=2)
    for parameter in method.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        for length in (1, 20):
            selection = method.route(torch.randn(1, length, 12), Sequence.plain(1, length))
            assert selection.query_groups[..., :2].all() and selection.query_groups.sum() == 3 * length * 2
            assert selection.key_groups[..., 0].all() and selection.key_groups.sum() == 3 * length
        method.key_encoder.double()
        assert not method.can_route_by_kernel(torch.randn(1, 1, 12))


@pytest.mark.parametrize(("where", "error"), [("packed", BackendUnsupported), ("gap", RuntimeError)])
def test_attention_unsupported_sequence_raises(where, error):
    q = k = v = torch.randn(1, 1, 9, 8)
    sequence = random_sequence("packed", 1, 9)
    if where == "gap":
        sequence = Sequence(torch.zeros(1, 9, dtype=torch.long), torch.tensor([[True] * 4 + [False] + [True] * 4]))
    with pytest.raises(error):
        KERNEL.attention(q, k, v, local_only_selection(sequence), sequence, AttentionArgs(1.0, window=2))


def test_build_without_compiler_is_refused(tmp_path):
    code = (
        "from focus_exp.attention.kernels.cpu_sparse import unavailable_reason;"
        "reason = unavailable_reason(); assert reason and 'built' in reason, reason"
    )
    environment = os.environ | {
        "PATH": str(tmp_path),
        "CXX": str(tmp_path / "absent"),
        "FOCUS_EXP_CACHE": str(tmp_path),
    }
    assert subprocess.run([sys.executable, "-c", code], env=environment, cwd=os.getcwd()).returncode == 0


@pytest.mark.parametrize("dtype", cpu_sparse.DTYPES)
@pytest.mark.parametrize(("kernel", "torchs"), [(1.0, 2.0), (2.0, 1.0)], ids=["without AMX", "with AMX"])
def test_dense_attention_takes_the_faster_of_both(monkeypatch, tmp_path, dtype, kernel, torchs):
    monkeypatch.setattr(cpu_sparse, "kernel_folder", lambda: tmp_path)
    monkeypatch.setattr(cpu_sparse, "time_full_attention", lambda _: {"kernel": kernel, "torch": torchs})
    q, args = torch.randn(1, 2, 256, 16).to(dtype), AttentionArgs(0.25)
    cpu_sparse.is_faster_than_torch.cache_clear()
    try:
        assert cpu_sparse.is_fastest_full_attention(q, q, q, args) == (kernel < torchs)
        monkeypatch.setattr(cpu_sparse, "time_full_attention", None)
        cpu_sparse.is_faster_than_torch.cache_clear()  # as in another process, which reads what was measured
        assert cpu_sparse.is_fastest_full_attention(q, q, q, args) == (kernel < torchs)
    finally:
        cpu_sparse.is_faster_than_torch.cache_clear()
