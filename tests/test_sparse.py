"""Attached models and methods by a kernel of hard routing against the masked path, and that against the reference."""

import pytest
import torch
from conftest import FAMILIES
from hypothesis import given, settings
from problems import random_assignment, random_sequence
from test_cpu_kernel import evaluate, problems

from focus_exp import attach, set_routing
from focus_exp.assets import cache_root
from focus_exp.attention.base import SPARSE_FROM, LayerShape
from focus_exp.attention.baselines.longformer import Longformer
from focus_exp.attention.baselines.window import WindowOnly
from focus_exp.attention.dense import blocked_attention, reference_attention
from focus_exp.attention.kernels import KERNELS, KernelRequirements, select_backends
from focus_exp.attention.kernels.cpu_sparse import unavailable_reason
from focus_exp.attention.selection import AttentionArgs, Sequence, select
from focus_exp.config import ModelConfig
from focus_exp.data.books import read_books
from focus_exp.evaluation.perplexity import token_losses
from focus_exp.models.load import load_model
from focus_exp.models.methods import attached_methods

needs_kernel = pytest.mark.skipif(unavailable_reason() is not None, reason="no compiler")


@given(problem=problems())
@settings(max_examples=20)
def test_masked_path_random_problem_equals_reference(problem):
    tensors, options = problem
    tensors = [x.double() if isinstance(x, torch.Tensor) else x for x in tensors]
    ours, exact = (evaluate(f, torch.float64, *tensors, **options) for f in (blocked_attention, reference_attention))
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)


@needs_kernel
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
    for backend in ("masked", "cpu"):
        set_routing(model, hard=True, backend=backend)
        with torch.no_grad():
            logits[backend] = model(tokens, attention_mask=mask).logits[mask.bool()]
        paths[backend] = {method.path for method in attached_methods(model).values()}
    masked, fast = logits.values()
    torch.testing.assert_close(fast, masked, atol=1e-4, rtol=1e-4)
    (_, slow), (name, taken) = paths.items()
    assert slow == {"masked"} and taken - {"masked"} == {name}


@needs_kernel
def test_backend_auto_switches_at_sparse_from(tiny_model):
    model = set_routing(attach(tiny_model("llama"), "focus", window=5), hard=True)
    for length, path in ((SPARSE_FROM["cpu"] - 1, "masked"), (SPARSE_FROM["cpu"], "cpu"), (100, "cpu")):
        if length == 100:
            set_routing(model, hard=True, sparse_from=100)
        with torch.no_grad():
            model(torch.randint(256, (1, length)), logits_to_keep=1)
        assert {method.path for method in attached_methods(model).values()} == {path}


@needs_kernel
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
    for method.backend in ("masked", "cpu"):
        leaves = [x.clone().requires_grad_() for x in tensors]
        selection = method.route(torch.randn(2, 90, 16), sequence)
        out = method.attend(*leaves, selection, sequence, AttentionArgs(0.35)).transpose(1, 2)[real]
        assert method.path == method.backend
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*found)


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
    assert "256" in KERNELS["triton"].unsupported_reason(KernelRequirements("cuda", torch.bfloat16, 512))


@needs_kernel
@pytest.mark.real
@pytest.mark.slow
def test_real_model_sparse_path_equals_masked():
    config, cache = ModelConfig(name="smollm2", hub_id="owner/absent"), cache_root(None)
    loaded = load_model(config, assets="embedded", cache=cache, seed=0, dtype=torch.float32, from_scratch=False)
    model = attach(loaded.model, "focus", groups=8, window=64)
    text = " ".join(text for _, text in read_books(cache, "test"))[:4000]
    tokens = torch.tensor([loaded.tokenizer(text)["input_ids"][:700]])
    losses = []
    for backend in ("masked", "cpu"):
        set_routing(model, hard=True, top_k=1, backend=backend)
        with torch.no_grad():
            losses.append(token_losses(model, tokens)[:, 1:])
        assert {method.path for method in attached_methods(model).values()} == {backend}
    assert (losses[0] - losses[1]).abs().max() < 1e-3
    assert not torch.equal(*losses)
