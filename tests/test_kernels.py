"""Every backend against the float64 reference, which of them is chosen, and which kernel computes full attention."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from builders import compute_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Problem, random_assignment, random_sequence
from torch import Tensor

from focus_exp import attach, set_routing
from focus_exp.attention.base import SPARSE_FROM
from focus_exp.attention.dense import blocked_attention, masked_attention
from focus_exp.attention.kernels import KERNELS, KernelRequirements, gpu_sparse, select_backends
from focus_exp.attention.kernels.cpu_sparse import unavailable_reason
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, local_only_selection, select
from focus_exp.models.methods import attached_methods
from focus_exp.speed import workload
from focus_exp.speed.workload import Shape, Tensors, full_work, rank_full_attention

CPU = torch.device("cpu")
SHAPE = Shape(width=8, heads=2, kv_heads=1, head_dim=8)
needs_kernel = pytest.mark.skipif(unavailable_reason() is not None, reason="no compiler")


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory() -> Iterator[None]:
    """torch.empty holds NaN, so that a number nobody computed shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@st.composite
def problems(
    draw: st.DrawFn,
    most: int = 200,
    groups: tuple[int, ...] = (1, 3, 8, 64),
    shares: tuple[int, ...] = (1, 2, 3, 7, 25),
    sizes: tuple[int, ...] = (8, 16, 20, 64, 256),
    kinds: tuple[str, ...] = ("plain", "left", "right"),
    masked: bool = False,
) -> Problem:
    """Draw a problem with a sequence of one of these kinds; with `masked` also soft routing, which kernels refuse."""
    torch.manual_seed(draw(st.integers(0, 10_000)))
    batch, length, count = draw(st.integers(1, 2)), draw(st.integers(1, most)), draw(st.sampled_from(groups))
    heads, share, size = draw(st.integers(1, 2)), draw(st.sampled_from(shares)), draw(st.sampled_from(sizes))
    q = torch.randn(batch, heads * share, length, size)
    k, v = torch.randn(2, batch, heads, length, size)

    def assigned() -> Tensor:
        """`(B, T, K)`, or `(B, 1 or G, T, K)`."""
        of_heads = draw(st.sampled_from([None, 1, heads]))
        kind = draw(st.sampled_from(["spread", "giant", "empty", "tied"]))
        g = random_assignment(kind, batch * (of_heads or 1), length, count)
        return g if of_heads is None else g.unflatten(0, (batch, of_heads))

    rule = draw(st.sampled_from(["query_topk", "share"]))
    selection = select(assigned(), draw(st.integers(1, min(3, count))), rule)
    if draw(st.booleans()):  # groups of their own for keys
        keys = assigned()
        members = select(keys, draw(st.integers(1, min(2, count))), rule).key_groups
        selection = replace(selection, key_groups=members, max_groups=None, key_assignment=keys)
    for name in ("query_groups", "key_groups"):
        if draw(st.booleans()):  # some are in no group
            members = getattr(selection, name)
            members = members & (torch.rand(members.shape[:-1]) < 0.7)[..., None]
            selection = replace(selection, **{name: members}, max_groups=None)
    sequence = random_sequence(draw(st.sampled_from(kinds)), batch, length)
    if draw(st.integers(0, 5)) == 0:
        selection = Selection() if masked and draw(st.booleans()) else local_only_selection(sequence)
    elif masked and draw(st.booleans()):
        selection = Selection(selection.assignment, key_assignment=selection.key_assignment)
    return Problem([q, k, v], selection, sequence, AttentionArgs(
        scaling=size**-0.5,
        softcap=draw(st.sampled_from([None, 1.5])),
        window=draw(st.sampled_from([0, 5, 16, 70, 300])),
        sinks=draw(st.sampled_from([0, 1, 4, 17])),
        sink_logits=torch.randn(heads * share) if draw(st.booleans()) else None,
        ste_slope=2.5 if draw(st.booleans()) and selection.query_groups is not None and selection.assignment is not None
        else None,
        gate=draw(st.sampled_from(["log", "multiplicative"])) if selection.is_soft else "log",
        gate_steepness=draw(st.sampled_from([1.0, 10.0])),
        gate_threshold=draw(st.sampled_from([0.0, 0.5])),
    ))  # fmt: skip


SMALL = {"groups": (1, 3, 8), "shares": (1, 2)}
KINDS = ("plain", "left", "right", "packed", "sliding")


@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance", "of_gradients", "examples"),
    [
        ("masked", torch.float64, 1e-12, 1e-12, 25),
        ("masked", torch.float32, 1e-5, 1e-5, 25),
        ("masked", torch.bfloat16, 1e-2, 4e-2, 25),
        ("cpu", torch.float32, 1e-5, 1e-5, 40),
        ("cpu", torch.bfloat16, 1e-2, 1e-2, 40),
        ("triton", torch.float32, 2e-6, 2e-6, 6),
    ],
    ids=str,
)
def test_backend_any_problem_equals_reference(monkeypatch, backend, dtype, tolerance, of_gradients, examples):
    if backend == "cpu" and unavailable_reason() is not None:
        pytest.skip("no compiler")
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton is there on Linux alone")
        monkeypatch.setattr(gpu_sparse, "SINK_CHUNK", 32)
    limits = {
        "masked": SMALL | {"most": 40, "kinds": KINDS, "masked": True},
        "cpu": {"kinds": ("plain", "left", "right", "sliding", "sliding")},
        "triton": SMALL | {"most": 80, "sizes": (8, 20)},
    }[backend]

    @settings(max_examples=examples)
    @given(problem=problems(**limits), block=st.sampled_from([1, 4, 7, 64]))
    def check(problem: Problem, block: int) -> None:
        attention = partial(blocked_attention, block=block) if backend == "masked" else KERNELS[backend].attention
        problem.check(attention, dtype, tolerance, of_gradients)

    check()


@needs_kernel
def test_backend_auto_switches_at_sparse_from(tiny_model):
    model = set_routing(attach(tiny_model("llama"), "focus", window=5), hard=True)
    for length, path in ((SPARSE_FROM["cpu"] - 1, "masked"), (SPARSE_FROM["cpu"], "cpu"), (100, "cpu")):
        if length == 100:
            for method in attached_methods(model).values():
                method.sparse_from = 100
        with torch.no_grad():
            model(torch.randint(256, (1, length)), logits_to_keep=1)
        assert {method.path for method in attached_methods(model).values()} == {path}


@needs_kernel
def test_kernel_double_backward_raises():
    """The backward pass is exact, and no function of its own that autograd could follow."""
    q, k, v = torch.randn(3, 1, 2, 40, 8).requires_grad_()
    selection = select(random_assignment("spread", 1, 40, 3), 1, "query_topk")
    args = AttentionArgs(0.3, window=4, sinks=1)
    out = KERNELS["cpu"].attention(q, k, v, selection, Sequence.plain(1, 40), args)
    (gradient,) = torch.autograd.grad(out.square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_unsupported_reason_names_device_dtype_and_size():
    on_cpu = KernelRequirements("cpu", torch.float32, 64)
    assert KERNELS["cpu"].unsupported_reason(on_cpu) == unavailable_reason()
    assert "CUDA" in KERNELS["triton"].unsupported_reason(on_cpu)
    assert bool(select_backends(on_cpu)) == (unavailable_reason() is None)
    for name, device, dtype, size, word in (
        *(("triton", "cuda", torch.bfloat16, 512, "256"), ("cpu", "cuda", torch.float32, 64, "cuda")),
        *(("cpu", "cpu", torch.float64, 64, "float64"), ("cpu", "cpu", torch.float32, 512, "256")),
    ):
        assert word in KERNELS[name].unsupported_reason(KernelRequirements(device, dtype, size))
    assert "groups" in KERNELS["cpu"].unsupported_reason(replace(on_cpu, groups=10**6))


@needs_kernel
@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_padding_between_tokens_takes_the_kernel_and_equals_the_masked_path(tiny_model, backend):
    model = attach(tiny_model("llama"), "focus", window=5)
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, 5:9] = 0
    ids = torch.randint(256, (1, 20), generator=torch.Generator().manual_seed(0))
    logits = []
    for name in ("masked", backend):
        set_routing(model, hard=True, backend=name)
        for method in attached_methods(model).values():
            method.sparse_from = 1
        logits.append(compute_logits(model, ids, attention_mask=mask)[mask.bool()])
    assert {method.path for method in attached_methods(model).values()} == {"cpu"}
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def refused() -> None:
    raise RuntimeError("No available kernel")


def test_full_attention_leaves_out_kernels_that_refuse(monkeypatch):
    tensors = Tensors.random(SHAPE, 8, torch.float32, CPU)
    works = {"sdpa-flash": refused, "sdpa-cudnn": refused, "sdpa-efficient": lambda: tensors.k}
    monkeypatch.setattr(workload, "full_attention_kernels", lambda _: works)
    assert rank_full_attention(tensors, CPU) == ["sdpa-efficient"]
    works["sdpa-efficient"] = refused
    with pytest.raises(RuntimeError, match="no full attention for torch.float32 on cpu"):
        rank_full_attention(tensors, CPU)


def test_full_attention_training_needs_backward(monkeypatch):
    tensors = Tensors.random(SHAPE, 8, torch.float32, CPU).with_grad()

    def exact() -> torch.Tensor:
        return F.scaled_dot_product_attention(tensors.q, tensors.k, tensors.v, is_causal=True, enable_gqa=True)

    works = {"forward alone": lambda: exact().detach(), "both": exact, "neither": refused}
    monkeypatch.setattr(workload, "full_attention_kernels", lambda _: works)
    assert rank_full_attention(tensors, CPU) == ["both"]
    full_work("both", tensors)()


def test_masked_attention_cuda_gqa_repeats_keys(monkeypatch):
    class OnCuda(torch.Tensor):
        is_cuda = True

    q, (k, v) = torch.randn(1, 4, 6, 8), torch.randn(2, 1, 2, 6, 8)
    keep = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    expected = masked_attention(q, k, v, keep, AttentionArgs(0.3))
    kernel, asked = F.scaled_dot_product_attention, []

    def watched(q, k, v, **options):
        asked.append((k.shape[1], options["enable_gqa"]))
        return kernel(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    found = masked_attention(q.as_subclass(OnCuda), k, v, keep, AttentionArgs(0.3))
    assert asked == [(4, False)]
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)
