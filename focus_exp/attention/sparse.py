"""Hard Focus attention without the pairs it drops: parts by exact kernels, merged by their logsumexp.

Nothing is ever n x n, and nothing is subtracted in logsumexp space.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.kernels import Backend, Fused, Kernel, Whole
from focus_exp.attention.parts import Part, Rows, Stretches, Tokens, parts, rows_of, ungated_parts
from focus_exp.attention.selection import Selection, Sequence


@dataclass(frozen=True)
class Plan:
    """What does not depend on q, k and v: the layout of the tokens is made once and serves the backward too."""

    tokens: Tokens
    kernel: Kernel
    window: int
    scaling: float
    softcap: float | None
    surrogate: float | None

    def parts(self) -> Iterator[Part]:
        return parts(self.tokens, self.kernel, self.window, self.scaling, self.softcap)


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    sequence: Sequence,
    kernel: Backend,
    *,
    window: int,
    sinks: int,
    scaling: float,
    softcap: float | None = None,
    surrogate: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Hard Focus attention `[B, H, T, D]` of q `[B, H, T, D]` and k, v `[B, G, T, D]`; see `reference_attention`.

    `sequence.allowed` is not read: what the base model lets a query see must be causality and padding.
    `surrogate`: slope of the gate that stands in for the hard groups in the gradient of `selection.assignment`.
    `sink_logits` `[H]`: the score of one more key that all queries see and that has no value.
    """
    if isinstance(kernel, Fused):
        return kernel.attention(
            q, k, v, selection, sequence,
            window=window, sinks=sinks, scaling=scaling, softcap=softcap, surrogate=surrogate, sink_logits=sink_logits,
        )  # fmt: skip
    assert isinstance(kernel, Kernel)
    with torch.no_grad():
        plan = Plan(Tokens.of(selection, sequence, sinks), kernel, window, scaling, softcap, surrogate)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    assignment = selection.assignment.flatten(0, 1) if surrogate and selection.assignment is not None else None
    out: Tensor = SparseAttention.apply(*packed, assignment, sink_logits, plan)
    return out.unflatten(0, sequence.start.shape).transpose(1, 2)


class SparseAttention(torch.autograd.Function):
    """Parts merged into one output; every part's gradient from the merged output and logsumexp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, assignment: Tensor | None, sink_logits: Tensor | None, plan: Plan
    ) -> Tensor:
        rows, heads, _ = q.shape
        out = q.new_zeros(rows + 1, *q.shape[1:])  # the last row takes what nobody wants
        precision = torch.promote_types(q.dtype, torch.float32)
        lse = torch.full((rows + 1, heads), float("-inf"), dtype=precision, device=q.device)
        for part in plan.parts():
            o, part_lse = part.kernel.forward(*operands(part, q, k, v), part.meeting, plan.scaling, plan.softcap)
            targets = part.queries if part.targets is None else part.targets
            merge(out, lse, targets, o.flatten(0, 1)[..., : q.shape[-1]], part_lse.flatten(0, 1), part.fresh)
            del o, part_lse  # before the next part asks for as much
        if plan.tokens.valid is not None:  # padding has nothing to say, whatever a kernel made of it
            padding = F.pad(~plan.tokens.valid, (0, 1))[:, None]
            out.masked_fill_(padding[..., None], 0.0)
            lse.masked_fill_(padding, float("-inf"))
        if sink_logits is not None:
            out *= torch.sigmoid(lse - sink_logits)[..., None].to(out.dtype)
            lse = torch.logaddexp(lse, sink_logits.to(lse.dtype))
        ctx.save_for_backward(q, k, v, assignment, sink_logits, out, lse)
        ctx.plan = plan
        return out[:-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, assignment, sink_logits, out, lse = ctx.saved_tensors
        plan: Plan = ctx.plan
        # a query that nobody wants, or without any key, has probabilities exp(s - inf) = 0
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
        lse[-1] = float("inf")
        backward = Backward(plan, q, k, v, F.pad(grads[0], (0, 0, 0, 0, 0, 1)), out, lse)
        sums = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
        gates = GateGradient(plan, assignment) if assignment is not None and ctx.needs_input_grad[3] else None
        for part in plan.parts():
            marks = gates.marks(part) if gates and part.gated else part.marks
            gradients = backward.part(part, marks)
            for total, index, gradient in zip(sums, (part.queries, part.keys, part.keys), gradients, strict=True):
                add(total, index, gradient[..., : q.shape[-1]])
            if gates and part.gated:
                gates.add(part, gradients)
        if gates:
            for part in ungated_parts(plan.tokens, plan.kernel, plan.window):
                gates.add(part, backward.part(part, gates.marks(part)), sign=-1)
        dq, dk, dv = (total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True))
        dg = None if gates is None else gates.total.to(assignment.dtype)
        dsink = None
        if sink_logits is not None:  # p * (dP - sum_d dO O), where dP is 0: it has no value
            delta = (grads[0].to(lse.dtype) * out[:-1]).sum(-1)
            dsink = -(torch.exp(sink_logits - lse[:-1]) * delta).sum(0).to(sink_logits.dtype)
        return dq, dk, dv, dg, dsink, None


@dataclass(frozen=True)
class Backward:
    """The backward of one part after the other, from what the whole softmax left."""

    plan: Plan
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    out: Tensor
    lse: Tensor

    def part(self, part: Part, marks: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = operands(part, self.q, self.k, self.v, marks)
        extra = queries.shape[-1] - self.q.shape[-1]
        targets = part.queries if part.targets is None else part.targets
        grad, out, lse = (blocks_of(x, targets, len(queries)) for x in (self.grad, self.out, self.lse))
        whole = Whole(F.pad(grad, (0, extra)), F.pad(out, (0, extra)), lse)
        return part.kernel.backward(queries, keys, values, whole, part.meeting, self.plan.scaling, self.plan.softcap)


class GateGradient:
    """Straight-through gradient of the assignment g `[n, K]`: that of a gate slope * g_i . g_j added to the scores.

    With q' = [q, 0, g_i] and k' = [k, g_j, 0] the scores are those of q and k, and a kernel's gradients of the added
    coordinates are sum_j dS_ij g_j and sum_i dS_ij g_i. Pairs with a sink or in the window have no gate.
    """

    def __init__(self, plan: Plan, assignment: Tensor) -> None:
        assert plan.surrogate is not None
        self.slope = plan.surrogate / plan.scaling  # kernels multiply the coordinates' product by the scaling
        self.groups = assignment.shape[-1]
        none, keys = torch.zeros_like(assignment), assignment.masked_fill(plan.tokens.sink[:, None], 0.0)
        self.query_marks, self.key_marks = torch.cat([none, assignment], -1), torch.cat([keys, none], -1)
        self.sink = plan.tokens.sink[:, None]
        self.of_queries, self.of_keys = torch.zeros_like(assignment), torch.zeros_like(assignment)

    @property
    def total(self) -> Tensor:
        return (self.of_queries + self.of_keys.masked_fill(self.sink, 0.0)) * self.slope

    def marks(self, part: Part) -> tuple[Tensor, Tensor]:
        queries, keys = rows_of(self.query_marks, part.queries), rows_of(self.key_marks, part.keys)
        return queries.reshape(len(keys), -1, queries.shape[-1]), keys

    def add(self, part: Part, gradients: tuple[Tensor, Tensor, Tensor], sign: int = 1) -> None:
        dq, dk, _ = (x[..., -2 * self.groups :].sum(2, dtype=self.of_keys.dtype) for x in gradients)
        add(self.of_queries, part.queries, sign * dq[..., : self.groups])
        add(self.of_keys, part.keys, sign * dk[..., self.groups :])


def operands(
    part: Part, q: Tensor, k: Tensor, v: Tensor, marks: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of a part `[blocks, t or s, heads, D]`, with its marks as further coordinates."""
    keys, values = rows_of(k, part.keys), rows_of(v, part.keys)
    queries, marks = blocks_of(q, part.queries, len(keys)), marks or part.marks
    if marks is None:
        return queries, keys, values
    pairs = zip((queries, keys), marks, strict=True)
    queries, keys = (torch.cat([x, m.to(x.dtype)[:, :, None].expand(*x.shape[:3], -1)], -1) for x, m in pairs)
    return queries, keys, F.pad(values, (0, marks[1].shape[-1]))


def blocks_of(x: Tensor, rows: Tensor | slice, blocks: int) -> Tensor:
    """`[n, ...]` -> `[blocks, t, ...]`."""
    return rows_of(x, rows)[0].unflatten(0, (blocks, -1))


def add(x: Tensor, rows: Rows, values: Tensor) -> None:
    """Add `values` `[blocks, t, ...]` to the rows of `x` `[n, ...]`, a row as often as it is named."""
    values = values.flatten(0, 1).to(x.dtype)
    if isinstance(rows, slice):
        x[rows] += values
    else:
        x.index_add_(0, rows.index(x.device) if isinstance(rows, Stretches) else rows, values)


def merge(out: Tensor, lse: Tensor, rows: Tensor | slice, o: Tensor, part_lse: Tensor, fresh: bool) -> None:
    """Put a part's result into `rows`: weights exp(logsumexp), nothing from empty sets."""
    if fresh:
        put(out, rows, o)
        put(lse, rows, part_lse.to(lse.dtype))
        return
    old_out, old = rows_of(out, rows)[0], rows_of(lse, rows)[0]
    # the share of this part: 1 / (1 + e^(old - new)); two empty sets are empty
    weight = torch.sigmoid(part_lse.to(old.dtype) - old).nan_to_num_(0.0)[..., None]
    put(out, rows, mix(old_out, o, weight))
    put(lse, rows, torch.logaddexp(old, part_lse.to(old.dtype)))


def mix(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """a + weight * (b - a), rounded once."""
    return torch.lerp(a.to(weight.dtype), b.to(weight.dtype), weight).to(a.dtype)


def put(x: Tensor, rows: Tensor | slice, values: Tensor) -> None:
    if isinstance(rows, slice):
        x[rows] = values
    else:
        x.index_copy_(0, rows, values)
