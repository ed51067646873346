"""Blocks of queries for the published methods.

All pairs of a block are computed and the pruned ones masked, in memory O(block * T) per head. These methods are here
for their quality: their own kernels would save time, and none is saved here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.dense import masked_attention
from focus_exp.attention.selection import AttentionArgs, Sequence, base_mask_or_self, repeat_kv, row_blocks

BLOCK = 256


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, sequence: Sequence, args: AttentionArgs, keep_mask: Callable[[slice], Tensor]
) -> Tensor:
    """Return the output `(B, H, T, D)` over the pairs that `keep_mask` `(B, 1 or H, t, S)` keeps of each block."""
    outputs = []
    for rows in row_blocks(q.shape[2], BLOCK):
        keep = keep_mask(rows) & base_mask_or_self(sequence, rows, rows.stop)[:, None]
        keys, values = k[:, :, : rows.stop], v[:, :, : rows.stop]
        if keep.shape[1] > 1:  # a mask per head needs keys per head
            keys, values = repeat_kv(q, keys, values)
        outputs.append(masked_attention(q[:, :, rows], keys, values, keep, args))
    return torch.cat(outputs, dim=2)


def require_no_sink_logits(method: str, args: AttentionArgs) -> None:
    """Raise ValueError where the base model has learned attention sinks, which the method's paper does not define."""
    if args.sink_logits is not None:
        raise ValueError(f"{method} does not support the base model's learned attention sinks. Use another method.")


@dataclass(frozen=True)
class QueryBlock:
    """Hold a block of queries and the keys up to its end, heads grouped by their key head, in float32 at least.

    Attributes:
        q: `(B, G, H/G, t, D)`, scaled.
        k, v: `(B, G, 1, S, D)`.
        mask: `(B or 1, 1, 1, t, S)` bool, the base model's.
    """

    rows: slice
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    args: AttentionArgs

    def scores(self, q: Tensor) -> Tensor:
        """Score scaled queries q: `(B, G, H/G, t, S)`, -inf where masked."""
        s = q @ self.k.transpose(-1, -2)
        cap = self.args.softcap
        s = s if cap is None else cap * torch.tanh(s / cap)
        return s.masked_fill(~self.mask, float("-inf"))

    def weigh(self, scores: Tensor) -> Tensor:
        """Return softmax(scores) v `(B, G, H/G, t, D)`."""
        return F.dropout(scores.softmax(-1), self.args.dropout) @ self.v


def query_blocks(q: Tensor, k: Tensor, v: Tensor, sequence: Sequence, args: AttentionArgs) -> Iterator[QueryBlock]:
    """Yield blocks of q `(B, H, T, D)` with the keys and values `(B, G, T, D)` up to their end."""
    precision = torch.promote_types(q.dtype, torch.float32)
    q = group_heads(q, k.shape[1]).to(precision) * args.scaling
    k, v = k.unsqueeze(2).to(precision), v.unsqueeze(2).to(precision)
    for rows in row_blocks(q.shape[3], BLOCK):
        mask = base_mask_or_self(sequence, rows, rows.stop)[:, None, None]
        yield QueryBlock(rows, q[..., rows, :], k[..., : rows.stop, :], v[..., : rows.stop, :], mask, args)


def group_heads(q: Tensor, kv_heads: int) -> Tensor:
    """Group `(B, H, T, D)` by key head: `(B, G, H/G, T, D)`."""
    return q.unflatten(1, (kv_heads, -1))
