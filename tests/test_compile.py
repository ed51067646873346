"""Kernels as operators of torch.library, and attached models under torch.compile."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import make_tokens
from problems import random_sequence
from test_kernels import poisoned_memory  # noqa: F401  # a fixture
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp import attach, set_routing
from focus_exp.attention.kernels import cpu_sparse, gpu_sparse
from focus_exp.attention.selection import AttentionArgs, select, top_k_groups
from focus_exp.models.methods import attached_methods

needs_kernel = pytest.mark.skipif(cpu_sparse.unavailable_reason() is not None, reason="no compiler")
LOCAL = {"window": 6, "sinks": 2}
METHODS: dict[str, dict[str, Any]] = {
    "focus": {"groups": 4, "train_with": "hard"} | LOCAL,
    "focus_dual": {"groups": 8, "top_k": 2} | LOCAL,
    "key_gate": LOCAL,
}


def build(model: PreTrainedModel, method: str) -> PreTrainedModel:
    torch.manual_seed(0)
    set_routing(attach(model, method, **METHODS[method]), hard=True)
    for layer in attached_methods(model).values():
        layer.sparse_from = 2
    return model


def paths(model: PreTrainedModel) -> set[str | None]:
    return {method.path for method in attached_methods(model).values()}


@needs_kernel
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_cpu_attention_operators_fit_torch(trained, padded):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 40, 8), *torch.randn(2, 2, 2, 40, 8)
    query_gates, key_gates = torch.rand(2, 2, 2, 40, 3)
    logits = torch.randn(4)
    leaves = [x.requires_grad_(trained) for x in (q, k, v, logits, query_gates, key_gates)]
    groups = (query_gates > 0.5, key_gates > 0.5)
    valid = torch.arange(40).expand(2, -1) >= 5 if padded else None
    options = (6, 2, cpu_sparse.NO_REACH, 0.3, 0.0)
    operators = cpu_sparse.load_operators()
    torch.library.opcheck(operators.attend.default, (*leaves[:3], *groups, valid, *leaves[3:], *options, 5.0))
    out, lse = operators.attend(q, k, v, *groups, valid, logits, None, None, *options, 0.0)
    inputs = [x.detach() for x in (torch.rand_like(out), q, k, v, out, lse)]
    gates = (query_gates.detach(), key_gates.detach()) if trained else (None, None)
    torch.library.opcheck(operators.attend_backward.default, (*inputs, *groups, valid, *gates, *options))


@needs_kernel
def test_cpu_route_operator_fits_torch():
    weight, bias = torch.randn(2, 12, 16), torch.randn(2, 2, 7)
    limits, top_k = torch.zeros(2), torch.ones(2, dtype=torch.int32)
    arguments = (torch.randn(2, 9, 12), weight, bias, torch.randn(2), limits, top_k, None)
    torch.library.opcheck(cpu_sparse.load_operators().route.default, arguments)


@pytest.mark.skipif(gpu_sparse.import_error("triton") is not None, reason="no Triton")
@pytest.mark.parametrize(("trained", "shared"), [(True, False), (False, True)])
def test_gpu_attention_operators_fit_torch(trained, shared):
    torch.manual_seed(0)
    q, k, v = torch.randn(18, 2, 16), *torch.randn(2, 18, 1, 16)
    query_gates, key_gates = torch.rand(2, 2, 1, 9, 3)
    logits = torch.randn(2, 2)
    leaves = [x.requires_grad_(trained) for x in (q, k, v, logits, query_gates, key_gates)]
    several = 2 if shared else 1  # of every token, so that every place of a list is filled
    groups = [top_k_groups(x.detach(), several).to(torch.uint8) for x in (query_gates, key_gates)]
    begins = torch.zeros(2, dtype=torch.int32)
    valid = torch.ones(2, 9, dtype=torch.uint8) if trained else None
    numbers = (several, several, 2, 0, 0.3, 0.0)
    arguments = (*leaves[:3], *groups, begins, valid, *leaves[3:], *numbers, 5.0)
    torch.library.opcheck(torch.ops.focus_exp.gpu_attend.default, arguments)
    out, lse, *lists = (x.detach() for x in gpu_sparse.gpu_attend(*arguments))
    gates = (query_gates.detach(), key_gates.detach()) if trained else (None, None)
    torch.library.opcheck(
        torch.ops.focus_exp.gpu_attend_backward.default,
        (
            out,
            lse,
            torch.rand(2, 18),
            q.detach(),
            k.detach(),
            v.detach(),
            *groups,
            begins,
            valid,
            lists,
            *gates,
            *numbers,
        ),
    )


@pytest.mark.skipif(gpu_sparse.import_error("triton") is not None, reason="no Triton")
def test_gpu_attention_is_one_graph():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 9, 16), *torch.randn(2, 1, 1, 9, 16)
    sequence, args = random_sequence("left", 1, 9), AttentionArgs(0.3, window=2, sinks=1, sink_logits=torch.randn(2))

    def attend(q: Tensor, k: Tensor, v: Tensor, assignment: Tensor) -> Tensor:
        return gpu_sparse.Triton().attention(q, k, v, select(assignment, 1, "query_topk"), sequence, args)

    inputs = (q, k, v, torch.rand(1, 9, 3))
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    real = sequence.valid[:, None, :, None]
    torch.testing.assert_close(compiled(*inputs) * real, attend(*inputs) * real)


@needs_kernel
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_compiled_model_is_one_graph_that_takes_the_kernel(tiny_model, method, use_cache):
    model = build(tiny_model("llama", num_hidden_layers=1), method)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for length in (30, 41):
        ids, mask = make_tokens(2, length), torch.ones(2, length, dtype=torch.long)
        mask[0, :3] = mask[1, 9:12] = 0
        for shown in (None, mask):
            with torch.no_grad():
                expected = model(ids, attention_mask=shown, use_cache=use_cache)
                assert paths(model) == {"cpu"}
                found = compiled(ids, attention_mask=shown, use_cache=use_cache)
                assert paths(model) == {"cpu"}
                real = mask.bool() if shown is not None else ...
                torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=1e-4, atol=1e-5)
                if use_cache:
                    more = None if shown is None else F.pad(mask, (0, 1), value=1)
                    steps = [
                        model(ids[:, :1], attention_mask=more, past_key_values=out.past_key_values).logits
                        for out in (found, expected)
                    ]
                    assert paths(model) == {"cached"}
                    torch.testing.assert_close(*steps, rtol=1e-4, atol=1e-5)


def train(model: Any, parameters: list[Tensor], ids: Tensor) -> list[Tensor]:
    logits = model(ids).logits[:, :-1]  # and a cache, as transformers has by default
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]


@needs_kernel
@pytest.mark.parametrize("method", ["focus", "focus_dual"])
def test_compiled_training_step_equals_the_eager_one(tiny_model, method):
    model = build(tiny_model("llama", num_hidden_layers=1), method).train()
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (30, 41):
        ids = make_tokens(2, length)
        expected = train(model, list(model.parameters()), ids)
        found = train(compiled, list(twin.parameters()), ids)
        assert paths(twin) == paths(model) == {"cpu"}
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(list(twin.buffers()), list(model.buffers()), rtol=1e-4, atol=1e-6)


@needs_kernel
@pytest.mark.parametrize("method", ["focus", "focus_dual"])
@torch.no_grad()
def test_exported_model_of_any_length_takes_the_kernel(tiny_model, method):
    model = build(tiny_model("llama", num_hidden_layers=1), method)
    lengths = {"input_ids": {1: torch.export.Dim("length", min=4, max=512)}, "use_cache": None}
    inputs = {"input_ids": make_tokens(2, 30), "use_cache": False}
    program = torch.export.export(model, (), inputs, dynamic_shapes=lengths)
    assert torch.ops.focus_exp.attend.default in {node.target for node in program.graph.nodes}
    inputs["input_ids"] = make_tokens(2, 41)
    torch.testing.assert_close(program.module()(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)
