"""Hard routing by two standard FlashAttention calls, merged by their logsumexp (the paper's appendix D).

A: pairs of one group, and pairs with a sink, at every distance. Tokens are sorted by group, with the sinks ahead of
   every group, for one causal variable-length call.
B: the other pairs within the window, by one windowed call in the order of the text. In further dimensions of the heads
   a query has -HIDDEN for each of its groups and a key 1 for its own, so that no pair of A has weight in B.

Each kept pair is in exactly one call. Gradients are each kernel's own, given the merged output and logsumexp, and add
up. On CUDA the kernels are those of `torch.nn.attention.varlen.varlen_attn`, whose own backward takes no merged
logsumexp; `activate_flash_attention_impl` of torch.nn.attention changes them to FlashAttention 3 or 4. On a CPU torch's
CPU kernel is called for some queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from focus_exp.attention.kernels.contract import MAX_HEAD_DIM, Backend, BackendUnsupported, KernelRequirements
from focus_exp.attention.kernels.gpu_sparse import capability_reason
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence

HIDDEN = 2.0**15  # subtracted from the product of query and key; float16 holds it
BLOCK = 256  # queries at a time on a CPU


class Flash(Backend):
    """Serve routing with each key in one group, which is also among its groups as a query; chosen by name alone."""

    name = "flash"
    device = "cuda"
    place = "CUDA and on CPUs"
    dtypes = (torch.float16, torch.bfloat16)
    is_automatic = trains_router = False

    def unsupported_reason(self, requirements: KernelRequirements) -> str | None:
        if torch.compiler.is_compiling():
            return "is not traced by torch.compile"
        if requirements.device == "cpu":
            return "does not take float64" if requirements.dtype == torch.float64 else None
        if reason := super().unsupported_reason(requirements) or capability_reason((8, 0)):
            return reason
        width = requirements.head_dim + requirements.groups
        return f"takes head size plus groups below {MAX_HEAD_DIM}, not {width}" if width >= MAX_HEAD_DIM else None

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        if reason := refused_reason(v, k, selection, sequence, args):
            raise BackendUnsupported(f"backend={self.name} {reason}. Use backend=auto.")
        layout = Layout.build(selection, sequence, args)
        split = (len(q), layout.lists, -1)
        rows = [x.unflatten(1, split[1:]).transpose(2, 3).flatten(0, 2) for x in (q, k, v)]  # (n, heads / N, D)
        out: Tensor = Attention.apply(*rows, layout)
        return out.unflatten(0, split).transpose(2, 3).flatten(1, 2)


def refused_reason(v: Tensor, k: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs) -> str | None:
    """Return what must be different, as words after the backend's name."""
    most = selection.max_groups or (0, 0)
    reasons = {
        "attention.method focus or random_groups": not selection.is_nested or not most[1],
        f"attention.pair_rule=query_topk where top_k > 1 (got share, {most[0]})": most[1] > 1,
        "attention.train_with=soft (got hard)": args.ste_slope is not None,
        "a base model without softcap": args.softcap is not None,
        "a base model without sink logits": args.sink_logits is not None,
        "one causal sequence in each row": sequence.allowed is not None,
        "values of the head size of keys": v.shape[-1] != k.shape[-1],
    }
    return next((f"must have {words}" for words, is_missing in reasons.items() if is_missing), None)


@dataclass(frozen=True)
class Layout:
    """Hold N, the order of call A, and both calls.

    There are N lists of groups, 1 or one for each key/value head, and n = B * N * T tokens. The m rows of call A are
    each token once for each of its k groups, and each sink once for each of the K groups. Behind the groups come
    padding and rows that nothing reads.

    Attributes:
        tokens: `(m,)`, the token of each row.
        slots: `(n, k)`, the rows of each token, that of its first group first.
    """

    lists: int
    tokens: Tensor
    slots: Tensor
    a: Call
    b: Call

    @staticmethod
    def build(selection: Selection, sequence: Sequence, args: AttentionArgs) -> Layout:
        assert selection.query_groups is not None and selection.key_groups is not None and selection.max_groups
        members = [x if x.ndim == 4 else x[:, None] for x in (selection.query_groups, selection.key_groups)]
        lists, top_k = max(x.shape[1] for x in members), selection.max_groups[0]
        queries, keys = (x.expand(-1, lists, -1, -1).flatten(0, 1) for x in members)
        (rows, length, groups), device = queries.shape, queries.device
        valid, start = (x.repeat_interleave(lists, 0) for x in (sequence.valid_or_all(), sequence.start))
        begin = start.masked_fill(~valid, length).amin(1, keepdim=True)
        row, place, number = (torch.arange(count, device=device) for count in (rows, length, groups))
        sinks = min(args.sinks, length)
        is_sink = valid & (place >= begin) & (place < begin + sinks)
        is_apart = (is_sink | ~valid)[..., None]
        sink_places = (begin + place[:sinks]).clamp(max=length - 1)
        of_sinks = number.expand(rows, sinks, -1).masked_fill(~is_sink.gather(1, sink_places)[..., None], groups)
        ranked = torch.argsort(queries.byte() + keys.byte(), dim=-1, descending=True, stable=True)  # the first has 2
        of_tokens = ranked[..., :top_k].masked_fill(is_apart, groups)
        group, order = torch.cat([of_sinks.flatten(1), of_tokens.flatten(1)], 1).short().sort(dim=1, stable=True)
        copies, longest = sinks * groups, order.shape[1]
        is_copy, index = order < copies, order - copies
        tokens = torch.where(is_copy, begin + order // groups, index // top_k).clamp(max=length - 1)
        slots = torch.empty_like(order).scatter_(1, order, torch.arange(longest, device=device).expand_as(order))
        of_copies, slots = slots[:, :copies:groups], slots[:, copies:].unflatten(1, (length, top_k))
        if sinks:  # a sink sees sinks alone, as each of its copies does
            copy = of_copies.gather(1, (place - begin).clamp(0, sinks - 1))
            slots[..., 0] = torch.where(is_sink, copy, slots[..., 0])
        more_a = None
        if top_k > 1:  # a key is seen in its first group, and a sink in the query's first
            hidden, is_once = -HIDDEN * (~is_copy & (index % top_k > 0)), is_copy | (group == groups)
            more_a = torch.stack([is_copy | True, hidden], -1), torch.stack([hidden, is_once], -1)
        more_b = -HIDDEN * F.pad(queries, (0, 1), value=True), torch.cat([keys, is_apart], -1)
        borders = torch.searchsorted(group, F.pad(number, (0, 1), value=groups).short().repeat(rows, 1))
        borders = F.pad((borders + longest * row[:, None]).flatten(), (0, 1), value=rows * longest)
        tokens, slots = (tokens + length * row[:, None]).flatten(), (slots + longest * row[:, None, None]).flatten(0, 1)
        a = Call(borders.int(), longest, -1, args.scaling, more_a)
        b = Call(F.pad(row + 1, (1, 0)).int() * length, length, args.window, args.scaling, more_b)
        return Layout(lists, tokens, slots, a, b)


class Attention(torch.autograd.Function):
    """Run both calls forward and backward for q, k, v `(n, heads / N, D)`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        out_a, lse_a = layout.a.forward(*(x[layout.tokens] for x in (q, k, v)))
        out_b, lse_b = layout.b.forward(q, k, v)
        parts = torch.stack([lse_b, *lse_a[:, layout.slots].unbind(-1)], -1)
        lse = parts.logsumexp(-1)  # (heads / N, n)
        first, *others = (parts - lse[..., None]).exp().transpose(0, 1)[..., None].unbind(-2)
        out = out_b * first
        for slot, weight in zip(layout.slots.unbind(1), others, strict=True):
            out += out_a[slot] * weight
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout = layout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        layout, rows, dout = ctx.layout, ctx.layout.tokens, grads[0].to(out.dtype)
        totals = layout.b.backward(q, k, v, out, lse, dout)
        is_read = torch.zeros_like(rows, dtype=torch.bool).index_fill_(0, layout.slots.flatten(), True)
        lse_a = lse[:, rows].masked_fill(~is_read, float("inf"))  # no pair of the others has weight
        sorted_rows = (*(x[rows] for x in (q, k, v, out)), lse_a, dout[rows] * is_read[:, None, None])
        for total, part in zip(totals, layout.a.backward(*sorted_rows), strict=True):
            total.index_add_(0, rows, part)
        return *(total.to(q.dtype) for total in totals), None


@dataclass(frozen=True)
class Call:
    """Call the device's FlashAttention for q, k, v `(rows, heads, D)` of sequences one after the other.

    Attributes:
        borders: int32, where sequences begin, and the end of the last.
        longest: no sequence is longer; to know how long they are, Python would have to wait for the device.
        window: a query sees the keys of its sequence with 0 <= i - j <= window, or, at -1, all with 0 <= i - j.
        more: appended to the heads of queries and keys, `(..., E)`.
    """

    borders: Tensor
    longest: int
    window: int
    scaling: float
    more: tuple[Tensor, Tensor] | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return output `(rows, heads, D)` and natural logsumexp `(heads, rows)`."""
        size, (q, k, v) = q.shape[-1], self.widen(q, k, v)
        if q.is_cuda:
            numbers, options = self.cuda_arguments()
            out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *numbers, False, **options)
            return out[..., :size], lse
        out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
        for rows, keys, mask in self.cpu_pieces(q):
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                cut(q, rows, q), cut(k, keys, q), cut(v, keys, q), 0.0, False, attn_mask=mask, scale=self.scaling
            )
            out[rows], lse[:, rows] = part[0].transpose(0, 1), part_lse[0]
        return out[..., :size], lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> list[Tensor]:
        """Return the float32 gradients of q, k and v, given output and logsumexp of all that a query sees."""
        size, (q, k, v) = q.shape[-1], self.widen(q, k, v)
        dout, out = (F.pad(x, (0, q.shape[-1] - size)) for x in (dout, out))
        if q.is_cuda:
            numbers, options = self.cuda_arguments()
            numbers += torch.zeros(2, dtype=torch.uint64, device=q.device), lse.new_empty(0)  # of dropout: none
            grads = torch.ops.aten._flash_attention_backward(dout, q, k, v, out, lse.contiguous(), *numbers, **options)
            return [x[..., :size].float() for x in grads]
        totals = [torch.zeros(x.shape) for x in (q, k, v)]
        for rows, keys, mask in self.cpu_pieces(q):
            pieces = (cut(dout, rows, q), cut(q, rows, q), cut(k, keys, q), cut(v, keys, q), cut(out, rows, q))
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *pieces, lse[None, :, rows].contiguous(), 0.0, False, attn_mask=mask, scale=self.scaling
            )
            for total, part, where in zip(totals, grads, (rows, keys, keys), strict=True):
                total[where] += part[0].float().unflatten(0, (total.shape[1], -1)).sum(1).transpose(0, 1)
        return [x[..., :size] for x in totals]

    def widen(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Append `more` to the heads of q and k, and zeros up to a multiple of eight, which CUDA needs, to all."""
        added = 0 if self.more is None else self.more[0].shape[-1]
        zeros = added + -(q.shape[-1] + added) % 8
        wide = [F.pad(x, (0, zeros)) if zeros else x for x in (q, k, v)]
        for x, tail in zip(wide, self.more or (), strict=False):
            x[..., q.shape[-1] : q.shape[-1] + added] = tail.flatten(0, -2)[:, None]
        return wide

    def cuda_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        longest = max(self.longest, 2)  # single queries go to another kernel, which takes no empty sequences
        options = {"scale": self.scaling, "window_size_left": self.window, "window_size_right": 0}
        return (self.borders, self.borders, longest, longest, 0.0, self.window < 0), options

    def cpu_pieces(self, q: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield some queries, the keys up to the last of them that they may see, and which they do not."""
        reach = self.longest if self.window < 0 else self.window
        for begin, end in pairwise(self.borders.tolist()):
            for first in range(begin, end, BLOCK):
                rows = slice(first, min(first + BLOCK, end))
                keys = slice(max(begin, first - reach), rows.stop)
                distance = torch.arange(rows.start, rows.stop)[:, None] - torch.arange(keys.start, keys.stop)
                mask = torch.zeros(distance.shape, dtype=q.dtype)
                yield rows, keys, mask.masked_fill_((distance < 0) | (distance > reach), float("-inf"))


def cut(x: Tensor, rows: slice, q: Tensor) -> Tensor:
    """Return rows of `(n, heads, D)` as `(1, heads, rows, D)`, with heads repeated for those of q."""
    return x[rows].transpose(0, 1)[None].repeat_interleave(q.shape[1] // x.shape[1], 1)
