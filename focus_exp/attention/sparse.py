"""Hard Focus attention without the pairs it drops: parts by exact kernels, merged by their logsumexp.

Nothing is ever n x n, and nothing is subtracted in logsumexp space.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from focus_exp.attention.kernels import Backend, Fused, Kernel, RowResult
from focus_exp.attention.parts import Part, Rows, Stretches, Tokens, near_parts, parts, rows_of
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, for_each_head
from focus_exp.attention.side_by_side import Stages, side_by_side


@dataclass(frozen=True)
class Plan:
    """What does not depend on q, k and v: the layout of the tokens is made once and serves the backward too."""

    tokens: Tokens
    kernel: Kernel
    args: AttentionArgs


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    sequence: Sequence,
    args: AttentionArgs,
    kernel: Backend,
) -> Tensor:
    """Compute hard Focus attention `(B, H, T, D)` without the pruned pairs; see `reference_attention`.

    `sequence.allowed` is not read: the base model's mask must be causality and padding alone.
    """
    if isinstance(kernel, Fused) and kernel.has_head_groups:
        return kernel.attention(q, k, v, selection, sequence, args)
    return grouped_attention(q, k, v, selection, sequence, args, kernel)


@for_each_head
def grouped_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs, kernel: Backend
) -> Tensor:
    """Compute `sparse_attention` where all heads share their groups."""
    if isinstance(kernel, Fused):
        return kernel.attention(q, k, v, selection, sequence, args)
    assert isinstance(kernel, Kernel)
    sink_logits = args.sink_logits
    with torch.no_grad():
        plan = Plan(Tokens.of(selection, sequence, args.sinks), kernel, replace(args, sink_logits=None))
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    gates: list[Tensor | None] = [None, None]
    if args.ste_slope and selection.assignment is not None:
        gates = [x.flatten(0, 1) for x in (selection.assignment, selection.effective_key_assignment)]
    if sink_logits is not None:
        precision = torch.promote_types(q.dtype, torch.float32)
        sink_logits = sink_logits.to(precision)[..., None, :].expand(*sequence.start.shape, -1).flatten(0, 1)
    out: Tensor = SparseAttention.apply(*packed, *gates, sink_logits, plan)
    return out.unflatten(0, sequence.start.shape).transpose(1, 2)


class SparseAttention(torch.autograd.Function):
    """Parts merged into one output; every part's gradient from the merged output and logsumexp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        asks: Tensor | None,
        answers: Tensor | None,
        sink_logits: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        rows, heads, size = q.shape
        precision = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty(rows, heads, size, dtype=precision, device=q.device)
        lse = torch.empty(rows, heads, dtype=precision, device=q.device)

        def put(stage: int, queries: Tensor | slice, o: Tensor, part_lse: Tensor) -> None:
            if stage:
                merge(out, lse, queries, o, part_lse)
            else:
                out[queries], lse[queries] = o, part_lse

        def attended(item: tuple[Stages, Part]) -> None:
            stages, part = item
            stages.give(part.stage, ((part.stage, *found) for found in of_part(plan, q, k, v, part)))

        items: list[tuple[Stages, Part]] = []
        for row in parts(plan.tokens, plan.args.window):
            stages = Stages(put, (part.stage for part in row))
            items += [(stages, part) for part in row]
        deque(side_by_side(attended, items, q.device), maxlen=0)
        if plan.tokens.valid is not None:  # padding has nothing to say, whatever a kernel made of it
            padding = ~plan.tokens.valid[:, None]
            out.masked_fill_(padding[..., None], 0.0)
            lse.masked_fill_(padding, float("-inf"))
        if sink_logits is not None:
            out *= torch.sigmoid(lse - sink_logits)[..., None]
            lse = torch.logaddexp(lse, sink_logits)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, asks, answers, sink_logits, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, asks, answers, sink_logits, out, lse = ctx.saved_tensors
        plan, size, (grad,) = ctx.plan, q.shape[-1], grads
        # a query without any key has probabilities exp(s - inf) = 0
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
        gated = asks is not None and any(ctx.needs_input_grad[3:5])
        own, added, every = slice(0, size), slice(size, None), slice(None)
        tensors, sink = (q, k, v, grad, out), plan.tokens.sink[:, None]
        if gated:
            tensors = widened(*tensors, asks, answers.masked_fill(sink, 0.0))
        sums = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in tensors[:3]]
        backward = Backward(plan, *tensors, lse, sums)
        every_part = chain.from_iterable(parts(plan.tokens, plan.args.window))
        backward.add(every_part, lambda part: (every, every) if part.gated else (own, own))
        dg: list[Tensor | None] = [None, None]
        if gated:
            # the gated parts hold pairs in the window, which have no gate
            near = (near_parts(plan.tokens, plan.args.window, row, met=True) for row in range(plan.tokens.batch))
            backward.add(chain.from_iterable(near), lambda part: (every, added), sign=-1)
            slope = plan.args.ste_slope / plan.args.scaling  # kernels multiply the coordinates' product by the scaling
            of_asks, of_answers = sums[0][..., added].chunk(2, -1)[0], sums[1][..., added].chunk(2, -1)[1]
            of_answers = of_answers.masked_fill(sink[..., None], 0.0)
            dg = [(x.sum(1) * slope).to(asks.dtype) for x in (of_asks, of_answers)]
        dsink = None
        if sink_logits is not None:  # p * (dP - sum_d dO O), where dP is 0: it has no value
            dsink = -torch.exp(sink_logits - lse) * (grad.to(lse.dtype) * out).sum(-1)
        dq, dk, dv = (total[..., own].to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True))
        return dq, dk, dv, *dg, dsink, None


def of_part(plan: Plan, q: Tensor, k: Tensor, v: Tensor, part: Part) -> Iterator[tuple[Tensor | slice, Tensor, Tensor]]:
    """Of every block of a part its queries, their output and logsumexp by the part's keys."""
    keys, values = rows_of(k, part.keys), rows_of(v, part.keys)
    for queries, calls in part.blocks:
        asking = blocks_of(q, queries, len(keys))
        first, *others = (
            of_call(plan, asking[:, some], keys[:, seen], values[:, seen], drop) for some, seen, drop in calls
        )
        for (some, _, _), found in zip(calls[1:], others, strict=True):
            merge(*first, some, *found)
        yield queries, *first


def of_call(plan: Plan, q: Tensor, k: Tensor, v: Tensor, drop: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output `[rows, H, D]` and logsumexp `[rows, H]` of one call, float32 at least."""
    o, lse = plan.kernel.forward(q, k, v, drop, plan.args)
    return o.flatten(0, 1).to(lse.dtype), lse.flatten(0, 1)


def widened(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, asks: Tensor, answers: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With 2K coordinates more, which carry the straight-through gradient of the assignments g, g' `[n, K]`.

    It is that of a gate slope * g_i . g'_j added to the scores, where g' of a sink is 0. With q' = [q, 0, g_i] and
    k' = [k, g'_j, 0] the scores are those of q and k, and a kernel's gradients of what is added are
    sum_j dS_ij g'_j and sum_i dS_ij g_i.
    """
    groups = asks.shape[-1]
    asking, asked = (
        F.pad(g.to(x.dtype), padding)[:, None].expand(-1, x.shape[1], -1)
        for g, x, padding in ((asks, q, (groups, 0)), (answers, k, (0, groups)))
    )
    v, grad, out = (F.pad(x, (0, 2 * groups)) for x in (v, grad, out))
    return torch.cat([q, asking], -1), torch.cat([k, asked], -1), v, grad, out


@dataclass(frozen=True)
class Backward:
    """The backward of one part after the other, from what the whole softmax left, into `sums`: of q, k and v."""

    plan: Plan
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    out: Tensor
    lse: Tensor
    sums: list[Tensor]

    def add(self, chosen: Iterable[Part], of: Callable[[Part], tuple[slice, slice]], sign: int = 1) -> None:
        """From the coordinates of all tensors that are given to the gradients of those wanted, both as `of` says."""

        def found(part: Part) -> list[tuple[Tensor, Rows, Tensor]]:
            given, wanted = of(part)
            return [(total[..., wanted], rows, x[..., wanted]) for total, rows, x in self.of_part(part, given)]

        for gradients in side_by_side(found, list(chosen), self.q.device):
            for gradient in gradients:
                add(*gradient, sign)

    def of_part(self, part: Part, given: slice) -> Iterator[tuple[Tensor, Rows, Tensor]]:
        """To which of `sums`, and which of its rows, a part adds what, from the coordinates `given`."""
        plan = self.plan
        keys, values = (rows_of(x[..., given], part.keys) for x in (self.k, self.v))
        of_keys, of_values = (torch.zeros_like(x, dtype=self.lse.dtype) for x in (keys, values))
        for rows, calls in part.blocks:
            queries, grad, out, lse = (
                blocks_of(x, rows, len(keys))
                for x in (self.q[..., given], self.grad[..., given], self.out[..., given], self.lse)
            )
            of_queries = torch.zeros_like(queries, dtype=self.lse.dtype)
            for few, seen, drop in calls:
                whole = RowResult(grad[:, few], out[:, few], lse[:, few])
                gradients = plan.kernel.backward(
                    queries[:, few], keys[:, seen], values[:, seen], whole, drop, plan.args
                )
                for total, index, gradient in zip(
                    (of_queries, of_keys, of_values), (few, seen, seen), gradients, strict=True
                ):
                    total[:, index] += gradient
            yield self.sums[0], rows, of_queries
        yield self.sums[1], part.keys, of_keys
        yield self.sums[2], part.keys, of_values


def blocks_of(x: Tensor, rows: Tensor | slice, blocks: int) -> Tensor:
    """`[n, ...]` -> `[blocks, t, ...]`."""
    return rows_of(x, rows)[0].unflatten(0, (blocks, -1))


def add(x: Tensor, rows: Rows, values: Tensor, sign: int) -> None:
    """Add `values` `[blocks, t, ...]` to the rows of `x` `[n, ...]`, a row as often as it is named."""
    values = values.flatten(0, 1).to(x.dtype)
    if isinstance(rows, slice):
        x[rows].add_(values, alpha=sign)
    else:
        x.index_add_(0, rows.index(x.device) if isinstance(rows, Stretches) else rows, values, alpha=sign)


def merge(out: Tensor, lse: Tensor, rows: Tensor | slice, o: Tensor, part_lse: Tensor) -> None:
    """Merge a part's result into `rows`: weights exp(logsumexp), nothing from empty sets."""
    old_out, old = (x[rows] if isinstance(rows, slice) else x.index_select(0, rows) for x in (out, lse))
    # the share of this part: 1 / (1 + e^(old - new)); two empty sets are empty
    old_out.lerp_(o, torch.sigmoid(part_lse - old).nan_to_num_(0.0)[..., None])
    torch.logaddexp(old, part_lse, out=old)
    if isinstance(rows, Tensor):  # a slice is a view
        out.index_copy_(0, rows, old_out)
        lse.index_copy_(0, rows, old)
