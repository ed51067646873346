"""The Triton kernels in their interpreter: the reference's outputs and gradients, lists that wait for nothing."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gpu_checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_assignment, random_sequence
from test_kernels import Problem, poisoned_memory  # noqa: F401  # a fixture
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from focus_exp.attention.base import LayerShape
from focus_exp.attention.focus_dual import FocusDual
from focus_exp.attention.kernels import (
    KERNELS,
    BackendUnsupported,
    KernelRequirements,
    cpu_sparse,
    gpu_sparse,
)
from focus_exp.attention.kernels.gpu_sparse import KernelInputs, Layout, Triton
from focus_exp.attention.kv_cache import CachedKeys, pack_groups
from focus_exp.attention.selection import (
    AttentionArgs,
    Selection,
    Sequence,
    local_only_selection,
    select,
)

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is there on Linux alone")
pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="the kernels run on the GPU")


@pytest.mark.parametrize("size", [96, 256])
def test_triton_large_heads_half_precision_equals_reference(size):
    torch.manual_seed(size)
    tensors = (torch.randn(1, 2, 40, size), *torch.randn(2, 1, 1, 40, size))
    selection = select(random_assignment("spread", 1, 40, 3), 2, "query_topk")
    args = AttentionArgs(size**-0.5, window=4, sinks=2, ste_slope=5.0)
    problem = Problem([*tensors], selection, Sequence.plain(1, 40), args)
    problem.check(Triton().attention, torch.float16, 2e-3)  # the interpreter has no bf16


@given(st.integers(1, 2), st.integers(1, 150), st.data())
@settings(max_examples=10)
def test_layout_covers_each_distant_pair_once(batch, length, data):
    torch.manual_seed(data.draw(st.integers(0, 10_000)))
    groups, window, sinks = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([0, 3, 70])), 2
    asked, members = (torch.rand(batch, length, groups) < 0.4 for _ in range(2))
    sequence, args = Sequence.plain(batch, length), AttentionArgs(1.0, window=window, sinks=sinks)
    keys = torch.arange(length).float().expand(batch, length).reshape(-1, 1, 1)
    layout = Layout.of(
        KernelInputs.of(Selection(query_groups=asked, key_groups=members), sequence, args, 1), keys, keys
    )
    ahead_q, ahead_k = layout.ahead
    pairs = torch.zeros(batch, length, length, dtype=torch.long)
    for row in range(batch):
        for group in range(groups):
            listed = slice(*ahead_q[row, [0, -1], group].tolist())
            for entry, count in zip(layout.entries[row, listed], layout.visible[row, listed], strict=True):
                query, begin = int(entry) // groups, int(ahead_k[row, 0, group])
                assert int(entry) % groups == asked[row, query, :group].sum()
                seen = layout.keys[row, begin : begin + int(count)]
                if layout.is_shared:
                    bits = layout.key_bits[row, begin : begin + int(count)] & layout.query_bits[row, query]
                    seen = seen[bits % 2**group == 0]
                pairs[row, query, seen] += 1
        end = int(ahead_k[row, -1, -1])
        assert torch.equal(layout.sorted_k[row, 0, :end, 0], layout.keys[row, :end].float())
    share = (asked.float() @ members.float().transpose(1, 2)) > 0
    time = torch.arange(length)
    assert torch.equal(pairs, (share & (time[:, None] - time > window) & (time >= sinks)).long())


@pytest.mark.parametrize(("counts", "encoders", "budget"), [("pair", 2, None), ("head", 1, None), ("query", 2, [8, 3])])
def test_route_equals_the_encoders(counts, encoders, budget):
    torch.manual_seed(0)
    shape = LayerShape(40, 4, 16, 0, 2)
    method = FocusDual.create(shape, groups=8, window=16, sinks=2, top_k=2, counts=counts, encoders=encoders)
    for x in (method.mean, method.worth_bias, method.key_encoder.bias.data, method.q_encoder.bias.data):
        x.normal_()
    method.scale.uniform_(0.5, 2)
    method.worth.normal_(std=0.1)
    if encoders == 2:
        method.thresholds.copy_(torch.linspace(-2, -6, 7).expand(2, -1))
    if budget is not None:
        method.set_budget(budget)
    h, sequence = torch.randn(2, 90, 40), random_sequence("left", 2, 90)
    with torch.no_grad():
        position = torch.arange(90) - sequence.start
        queries, keys = method.logits(h, position)
        for kernel in (gpu_sparse, *([cpu_sparse] if cpu_sparse.unavailable_reason() is None else [])):
            ours = kernel.route(h, method.encoder_weights(), sequence.start, 18, counts == "pair")
            assert torch.equal(ours[0], method.select_query_groups(queries))
            assert torch.equal(ours[1].long().argmax(-1), keys.argmax(-1)) and (ours[1].sum(-1) == 1).all()
        weights = method.encoder_weights()
        assert method.encoder_weights() is weights
        method.worth += 1
        assert method.encoder_weights() is not weights


def test_halves_multiply_with_the_accuracy_of_float32():
    torch.manual_seed(0)
    h, weight = torch.randn(3, 9, 64).bfloat16(), torch.randn(64, 5)
    halves = gpu_sparse.pack_weights(weight)
    assert halves.dtype == torch.bfloat16
    product = (h.double().flatten(0, 1) @ halves.double()).unflatten(1, (2, -1)).sum(1)
    exact = h.double().flatten(0, 1) @ weight.double()
    assert (product - exact).abs().max() < 3e-5 * exact.abs().max()


@pytest.mark.parametrize("padding", ["plain", "left"])
def test_setup_never_waits_for_the_device(padding):
    sequence, g = random_sequence(padding, 2, 30), random_assignment("spread", 2, 30, 4)
    with FakeTensorMode() as mode:  # whatever depends on numbers raises
        valid = None if sequence.valid is None else mode.from_tensor(sequence.valid)
        fake = replace(sequence, start=mode.from_tensor(sequence.start), valid=valid)
        setup = KernelInputs.of(select(mode.from_tensor(g), 2, "share"), fake, AttentionArgs(1.0, window=5, sinks=2), 2)
    assert all(isinstance(x, FakeTensor) for x in setup.tensors if x is not None)


def test_spans_of_queries_equal_reference():
    case = gpu_checks.Case(2, "share", size=16, dtype=torch.float16, length=134, per_head=True, spans=True)
    assert case.errors("cpu") == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seen", [None, "rows", "shared"])
def test_attend_cached_split_over_keys_equals_the_masked_path(seen, dtype):
    from focus_exp.attention.kernels.decode_gpu import attend_cached

    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, n, length, size, dtype=dtype) for n, length, size in ((6, 3, 24), (2, 700, 24), (2, 700, 40))
    )
    groups = [pack_groups(torch.rand(2, 2, n, 40) < 0.03, 2, n, q.device) for n in (700, 3)]
    visible = torch.rand(2, 3 if seen == "rows" else 1, 700) < 0.9 if seen else None
    before = torch.randint(5, (2, 3)).int() if seen == "rows" else None
    keys = CachedKeys(*groups, visible, before, 50, 4)
    args = AttentionArgs(0.2, 3.0 if seen else None, sink_logits=torch.randn(6) if seen else None)
    exact = keys.attend_masked(q.float(), k.float(), v.float(), args)
    logits = None if args.sink_logits is None else args.sink_logits.expand(2, -1).contiguous()
    out = attend_cached(q, k, v, *groups, visible, before, logits, 50, 4, 0.2, args.softcap or 0.0)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out.transpose(1, 2).float(), exact, atol=tolerance, rtol=tolerance)


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """Return the names of the kernels that are launched, as they are."""
    names, run = list[str](), interpreter.GridExecutor.__call__
    monkeypatch.setattr(
        interpreter.GridExecutor,
        "__call__",
        lambda self, *args, **options: names.append(self.fn.__name__) or run(self, *args, **options),
    )
    return names


@torch.no_grad()
def test_layer_launches_five_kernels_and_a_decode_step_two(launches):
    from focus_exp.attention.kernels.decode_gpu import attend_cached

    (q,), (k, v), gates = torch.randn(1, 1, 4, 300, 16), torch.randn(2, 1, 2, 300, 16), torch.rand(1, 300, 8)
    selection, args = select(gates, 1, "query_topk"), AttentionArgs(0.25, window=4, sinks=1)
    Triton().attention(q, k, v, selection, Sequence.plain(1, 300), args)
    assert launches == ["count_members", "scan_counts", "place_tokens", "groups_forward", "window_forward"]
    launches.clear()
    groups = pack_groups(selection.key_groups, 1, 300, q.device)
    attend_cached(q[:, :, -1:], k, v, groups, groups[:, :, -1:], None, None, None, 4, 1, 0.25, 0.0)
    assert launches == ["decode_span", "decode_merge"]


def test_too_many_shared_groups_raise():
    several, args = select(torch.rand(1, 9, 70), 2, "share"), AttentionArgs(1.0, window=1)
    with pytest.raises(BackendUnsupported, match="attention.groups must be <= 63 .*70"):
        KernelInputs.of(several, Sequence.plain(1, 9), args, 1)
    KernelInputs.of(select(torch.rand(1, 9, 70), 2, "query_topk"), Sequence.plain(1, 9), args, 1)
    with pytest.raises(BackendUnsupported, match="got 3 for 2 heads"):
        KernelInputs.of(select(torch.rand(1, 3, 9, 4), 2, "query_topk"), Sequence.plain(1, 9), args, 2)


def test_triton_other_value_size_raises():
    q, k, v = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 4)
    with pytest.raises(BackendUnsupported, match="must have values of head size 8 .*4"):
        selection = local_only_selection(Sequence.plain(1, 9))
        Triton().attention(q, k, v, selection, Sequence.plain(1, 9), AttentionArgs(1.0, window=1))


def test_triton_unsupported_reasons(monkeypatch):
    bf16, float32 = (KernelRequirements("cuda", dtype, 256) for dtype in (torch.bfloat16, torch.float32))
    assert KERNELS["triton"].unsupported_reason(bf16) is None and KERNELS["triton"].unsupported_reason(float32) is None
    assert "head sizes up to 256" in KERNELS["triton"].unsupported_reason(replace(bf16, head_dim=288))
    assert gpu_sparse.import_error("absent") == "No module named 'absent'"
    caches = (gpu_sparse.capability_reason, gpu_sparse.unavailable_reason)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "T4")
    assert KERNELS["triton"].unsupported_reason(bf16) == "needs compute capability 8.0, T4 has 7.5"
    for cache in caches:
        cache.cache_clear()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton brings its compiler on Linux alone")
def test_triton_compiles_every_kernel():
    """The interpreter runs what it would refuse: a variable of a loop that changes its type, a sum of other shapes."""
    script = Path(__file__).parent / "compiled_kernels.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": sm_90, ") >= 13, done.stderr[-2000:]
