"""Hard Focus attention without the pairs it drops: parts by exact kernels, merged by their logsumexp.

Nothing is ever n x n, and nothing is subtracted in logsumexp space.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.kernels import Kernel, Meeting
from focus_exp.attention.parts import Part, Tokens, parts
from focus_exp.attention.selection import Selection, Sequence


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    sequence: Sequence,
    kernel: Kernel,
    *,
    window: int,
    sinks: int,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """Hard Focus attention `[B, H, T, D]` of q `[B, H, T, D]` and k, v `[B, G, T, D]`; see `reference_attention`.

    `sequence.allowed` is not read: what the base model lets a query see must be causality and padding.
    """
    with torch.no_grad():
        tokens = Tokens.of(selection, sequence)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    out: Tensor = SparseAttention.apply(*packed, tokens, kernel, window, sinks, scaling, softcap)
    return out.unflatten(0, (tokens.batch, tokens.length)).transpose(1, 2)


class SparseAttention(torch.autograd.Function):
    """Parts merged into one output; every part's gradient from the merged output and logsumexp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor,
        tokens: Tokens, kernel: Kernel, window: int, sinks: int, scaling: float, softcap: float | None,
    ) -> Tensor:  # fmt: skip
        out = torch.zeros_like(q)
        precision = torch.promote_types(q.dtype, torch.float32)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=precision, device=q.device)
        for part in parts(tokens, kernel, window, sinks, scaling, softcap):
            o, part_lse = part.kernel.forward(*operands(part, q, k, v), meeting(part, q), scaling, softcap)
            merge(out, lse, part, o[..., : q.shape[-1]], part_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = (tokens, kernel, window, sinks, scaling, softcap)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad, width = grads[0].contiguous(), q.shape[-1]
        # a query without any key has probabilities exp(s - inf) = 0
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
        sums = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
        *_, scaling, softcap = ctx.plan
        for part in parts(*ctx.plan):
            rows = part.queries
            queries, keys, values = operands(part, q, k, v)
            extra = queries.shape[-1] - width
            gradients = part.kernel.backward(
                F.pad(take(grad, rows), (0, extra)), queries, keys, values, F.pad(take(out, rows), (0, extra)),
                take(lse, rows), meeting(part, q), scaling, softcap,
            )  # fmt: skip
            for total, index, gradient in zip(sums, (rows, part.keys, part.keys), gradients, strict=True):
                add(total, index, gradient[..., :width].to(total.dtype))
        dq, dk, dv = (total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True))
        return dq, dk, dv, None, None, None, None, None, None


def operands(part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gathered tokens of a part, with its marks."""
    queries, keys, values = take(q, part.queries), take(k, part.keys), take(v, part.keys)
    if part.marks is None:
        return queries, keys, values
    a, b = (mark.to(q.dtype)[:, None].expand(-1, x.shape[1], -1) for mark, x in zip(part.marks, (q, k), strict=True))
    return torch.cat([queries, a], -1), torch.cat([keys, b], -1), F.pad(values, (0, a.shape[-1]))


def meeting(part: Part, q: Tensor) -> Meeting:
    """The part's meeting with the pairs it keeps as a bias in the dtype of q."""
    keep = part.meeting.bias
    if keep is None:
        return part.meeting
    return Meeting(bias=torch.zeros(keep.shape, dtype=q.dtype, device=q.device).masked_fill_(~keep, float("-inf")))


def take(x: Tensor, rows: Tensor | slice) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def put(x: Tensor, rows: Tensor | slice, values: Tensor) -> None:
    if isinstance(rows, slice):
        x[rows] = values
    else:
        x.index_copy_(0, rows, values.to(x.dtype))


def add(x: Tensor, rows: Tensor | slice, values: Tensor) -> None:
    if isinstance(rows, slice):
        x[rows] += values
    else:
        x.index_add_(0, rows, values)


def merge(out: Tensor, lse: Tensor, part: Part, o: Tensor, part_lse: Tensor) -> None:
    """Put a part's result into the rows of its queries: weights exp(logsumexp), nothing from empty sets."""
    if part.fresh:
        put(out, part.queries, o)
        put(lse, part.queries, part_lse)
        return
    old = take(lse, part.queries)
    new = torch.logaddexp(old, part_lse.to(old.dtype))
    shift = new.masked_fill(new == float("-inf"), 0.0)
    before, added = ((x - shift).exp()[..., None] for x in (old, part_lse))
    put(out, part.queries, torch.addcmul(take(out, part.queries) * before, o.to(before.dtype), added))
    put(lse, part.queries, new)
