"""backend=flash against the reference, on whole models, and its calls on CUDA; what it refuses."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from builders import compute_logits, make_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Problem, random_assignment, random_sequence
from test_kernels import poisoned_memory  # noqa: F401  # a fixture
from torch import Tensor

from focus_exp import UserError, attach, set_routing
from focus_exp.attention.kernels import KERNELS, BackendUnsupported, KernelRequirements, flash, select_backends
from focus_exp.attention.selection import AttentionArgs, Sequence, select
from focus_exp.models.methods import attached_methods
from focus_exp.speed.layer import Case, Layer, time_cases
from focus_exp.speed.workload import Shape, balanced

ATTENTION = KERNELS["flash"].attention


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    torch.manual_seed(draw(st.integers(0, 10_000)))
    batch, length, groups = draw(st.integers(1, 2)), draw(st.integers(1, 300)), draw(st.sampled_from([1, 3, 8]))
    heads, repeats, size = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3])), draw(st.sampled_from([8, 20, 64]))
    kind = draw(st.sampled_from(["spread", "giant", "empty", "tied"]))
    lists = draw(st.sampled_from([None, 1, heads]))  # of groups: one, or one for each key/value head
    assignment = random_assignment(kind, batch * (lists or 1), length, groups)
    assignment = assignment if lists is None else assignment.unflatten(0, (batch, lists))
    q, (k, v) = torch.randn(batch, heads * repeats, length, size), torch.randn(2, batch, heads, length, size)
    rule, top_k = draw(st.sampled_from([("share", 1), ("query_topk", 1), ("query_topk", 2), ("query_topk", 3)]))
    window, sinks = draw(st.sampled_from([0, 5, 70, 400])), draw(st.sampled_from([0, 1, 4, 17]))
    return Problem(
        [q, k, v], select(assignment, min(top_k, groups), rule),
        random_sequence(draw(st.sampled_from(["plain", "left", "right"])), batch, length),
        AttentionArgs(size**-0.5, window=window, sinks=sinks),
    )  # fmt: skip


def check_problems(dtype: torch.dtype, tolerance: float, examples: int) -> None:
    @settings(max_examples=examples)
    @given(problem=problems())
    def check(problem: Problem) -> None:
        problem.check(ATTENTION, dtype, tolerance)

    check()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 4e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)], ids=str
)
def test_flash_any_problem_equals_reference(dtype, tolerance):
    check_problems(dtype, tolerance, examples=30)


class OnCuda(torch.Tensor):
    """A CPU tensor that takes the path of a GPU."""

    is_cuda = True


def attend_pieces(q: Tensor, k: Tensor, begins: Tensor, numbers: Any, options: dict[str, Any]) -> Iterator[Any]:
    """Yield each sequence, its queries and keys in float64, and the probabilities' logits."""
    longest_q, longest_k, dropout, is_causal, *_ = numbers
    left, right = (options[f"window_size_{side}"] for side in ("left", "right"))
    assert begins.dtype == torch.int32 and (begins.diff() >= 0).all() and begins[-1] == len(q) and not dropout
    assert begins.diff().max() <= longest_q == longest_k and is_causal == (left < 0) and right == 0
    assert q.shape[-1] == k.shape[-1] <= 256 and q.shape[-1] % 8 == 0 and all(x.stride(-1) == 1 for x in (q, k))
    for rows in (slice(int(a), int(b)) for a, b in pairwise(begins)):
        queries = q[rows].transpose(0, 1).double()
        keys = k[rows].transpose(0, 1).double().repeat_interleave(q.shape[1] // k.shape[1], 0)
        place = torch.arange(rows.stop - rows.start)
        distance = place[:, None] - place
        hidden = (distance < 0) | (distance > left if left >= 0 else torch.zeros_like(distance).bool())
        scores = options["scale"] * queries @ keys.transpose(1, 2)
        yield rows, queries, keys, scores.masked_fill(hidden, -torch.inf)


def varlen_forward(q, k, v, begins_q, begins_k, *numbers, **options):
    """Compute what torch documents of `aten::_flash_attention_forward`; the logsumexp is `(heads, rows)`."""
    assert torch.equal(begins_q, begins_k) and numbers[4:] == (False,)  # no debug mask
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for rows, _, _, scores in attend_pieces(q, k, begins_q, numbers, options):
        values = v[rows].transpose(0, 1).double().repeat_interleave(q.shape[1] // v.shape[1], 0)
        out[rows] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)
        lse[:, rows] = scores.logsumexp(-1).float()
    state = torch.zeros(2, dtype=torch.uint64)
    return out, lse, state, torch.empty(0), torch.empty(0)


def varlen_backward(dout, q, k, v, out, lse, begins_q, begins_k, *numbers, **options):
    """Compute what `aten::_flash_attention_backward` does, whatever the output and logsumexp given."""
    assert torch.equal(begins_q, begins_k) and lse.shape == (q.shape[1], len(q)) and lse.dtype == torch.float32
    grads = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
    delta = (dout.double() * out.double()).sum(-1).T
    for rows, queries, keys, scores in attend_pieces(q, k, begins_q, numbers, options):
        p = (scores - lse[:, rows, None].double()).exp()
        values = v[rows].transpose(0, 1).double().repeat_interleave(q.shape[1] // v.shape[1], 0)
        grad = dout[rows].transpose(0, 1).double()
        ds = options["scale"] * p * (grad @ values.transpose(1, 2) - delta[:, rows, None])
        parts = (ds @ keys, ds.transpose(1, 2) @ queries, p.transpose(1, 2) @ grad)
        for total, part in zip(grads, parts, strict=True):
            total[rows] += part.unflatten(0, (total.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(x.to(y.dtype) for x, y in zip(grads, (q, k, v), strict=True))


def test_flash_calls_on_cuda_equal_reference(monkeypatch):
    """The operators of CUDA, computed as documented, under the arguments and shapes that they would get."""
    calls = []
    for name, function in (
        ("_flash_attention_forward", varlen_forward),
        ("_flash_attention_backward", varlen_backward),
    ):
        schema = getattr(torch.ops.aten, name).default._schema

        def checked(*args, function=function, schema=schema, **options):
            names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
            assert len(args) == len(names) and options.keys() <= {argument.name for argument in schema.arguments}
            calls.append(schema.name)
            plain = [x.as_subclass(Tensor) if isinstance(x, Tensor) else x for x in args]
            return function(*plain, **options)

        monkeypatch.setattr(torch.ops.aten, name, checked)
    forward, backward = flash.Call.forward, flash.Call.backward
    monkeypatch.setattr(flash.Call, "forward", lambda call, q, *rest: forward(call, q.as_subclass(OnCuda), *rest))
    monkeypatch.setattr(flash.Call, "backward", lambda call, q, *rest: backward(call, q.as_subclass(OnCuda), *rest))
    check_problems(torch.float32, 1e-5, examples=10)
    assert set(calls) == {"aten::_flash_attention_forward", "aten::_flash_attention_backward"}


@pytest.mark.parametrize("family", ["gpt2", "llama", "olmo2"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("focus", {"top_k": 1, "detach_inputs": True}),
        ("focus", {"top_k": 2, "detach_inputs": True}),
        ("focus", {"pair_rule": "share", "assignment": "sinkhorn", "sinks": 0, "detach_inputs": True}),  # the paper's
        ("random_groups", {"heads": "kv"}),
    ],
    ids=["top-1", "top-2", "paper", "random"],
)
def test_attached_model_flash_equals_masked(tiny_model, family, side, method, options):
    torch.manual_seed(1)
    model, found = attach(tiny_model(family), method, **{"window": 3, "groups": 4} | options), []
    model.requires_grad_(False)
    mask = (torch.arange(40) >= torch.tensor([[0], [17]])).long()
    mask = {"none": None, "left": mask, "right": mask.flip(1)}[side]
    for backend in ("masked", "flash"):
        set_routing(model, hard=True, backend=backend)
        embedded = model.get_input_embeddings()(make_tokens()).requires_grad_()
        logits = model(inputs_embeds=embedded, attention_mask=mask, use_cache=False).logits
        logits = logits if mask is None else logits[mask.bool()]
        found.append((logits, *torch.autograd.grad(logits.square().mean(), embedded)))
        assert {method.path for method in attached_methods(model).values()} == {backend}
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_sliding_layers_under_flash_take_the_masked_path(tiny_model):
    model = attach(tiny_model("mistral", sliding_window=15), "focus", window=3)
    set_routing(model, hard=True, backend="flash")
    compute_logits(model, make_tokens())
    assert {method.path for method in attached_methods(model).values()} == {"masked"}


def test_backend_auto_never_takes_flash():
    assert "flash" not in [kernel.name for kernel in select_backends(KernelRequirements("cpu", torch.float32, 64))]


REFUSED = {
    "pair_rule=query_topk": ({}, {}, {"top_k": 2, "pair_rule": "share"}),
    "train_with=soft": ({"ste_slope": 5.0}, {}, {}),
    "softcap": ({"softcap": 30.0}, {}, {}),
    "sink logits": ({"sink_logits": torch.zeros(2)}, {}, {}),
    "sequence": ({}, {"allowed": torch.ones(1, 1, 9, 9).bool()}, {}),
    "method": ({}, {}, {"is_nested": False}),
}


@pytest.mark.parametrize("word", REFUSED)
def test_flash_refuses_with_the_option(word):
    args, sequence, options = REFUSED[word]
    selection = select(torch.rand(1, 9, 5), options.pop("top_k", 1), options.pop("pair_rule", "query_topk"))
    given_sequence = replace(Sequence.plain(1, 9), **sequence)
    given_args = AttentionArgs(1.0, **{"window": 2, "sinks": 1} | args)
    with pytest.raises(BackendUnsupported, match=word):
        ATTENTION(*torch.randn(3, 1, 2, 9, 8), replace(selection, **options), given_sequence, given_args)


def test_unsupported_reason_of_flash_names_size_dtype_and_groups():
    reason, cuda = KERNELS["flash"].unsupported_reason, KernelRequirements("cuda", torch.bfloat16, 128, 8)
    assert reason(cuda) is None and reason(KernelRequirements("cpu", torch.float32, 512)) is None
    assert "float64" in reason(KernelRequirements("cpu", torch.float64, 64))
    assert "float32" in reason(replace(cuda, dtype=torch.float32))
    assert "groups" in reason(replace(cuda, head_dim=256)) and "groups" in reason(replace(cuda, groups=128))


def test_attached_model_with_softcap_refuses_flash(tiny_model):
    model = set_routing(attach(tiny_model("gemma2"), "focus", window=3), hard=True, backend="flash")
    with pytest.raises(UserError, match="softcap"):
        compute_logits(model, make_tokens())


@pytest.mark.parametrize("clock", ["attention", "attention step"])
def test_time_cases_times_flash(clock):
    layer = Layer(Shape(8, 2, 1, 8), 5, 1, torch.float32, torch.device("cpu"), backend="flash", repeats=1)
    measured = list(time_cases(layer, 48, [Case.from_groups(layer, "focus", balanced(4, 48))], (clock,)))
    assert {m.settings["path"] for m in measured} == {"flash"}
    assert all(m.value > 0 for m in measured if m.metric == "speedup")
