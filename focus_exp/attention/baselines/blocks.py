"""What the published methods share: blocks of queries against the keys up to their end, and pairs to count.

All pairs of a block are computed and those a method drops are masked: memory is O(block * T) per head, and no time is
saved. These methods are here for their quality; what their own kernels would save is not to be seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.blocked import masked_attention
from focus_exp.attention.selection import AttentionArgs, Sequence, permitted_or_self, row_blocks

BLOCK = 256


def kept_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: Sequence,
    args: AttentionArgs,
    keeps: Callable[[slice], Tensor],
) -> Tensor:
    """Output `[B, H, T, D]` of the pairs that `keeps` `[B, 1 or H, t, S]` leaves of a block of queries."""
    outputs = []
    for rows in row_blocks(q.shape[2], BLOCK):
        keep = keeps(rows) & permitted_or_self(sequence, rows, rows.stop)[:, None]
        keys, values = k[:, :, : rows.stop], v[:, :, : rows.stop]
        if keep.shape[1] > 1:  # a mask per head needs keys per head
            keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (keys, values))
        outputs.append(masked_attention(q[:, :, rows], keys, values, keep, args))
    return torch.cat(outputs, dim=2)


def refuse_sink_logits(method: str, args: AttentionArgs) -> None:
    """ValueError where the base model has learned attention sinks, which the method's paper does not know."""
    if args.sink_logits is not None:
        raise ValueError(f"{method} has no place for the base model's learned attention sinks; use another method")


@dataclass(frozen=True)
class QueryBlock:
    """A block of queries and the keys up to its end, heads by the key head they share, in float32 at least.

    q `[B, G, H/G, t, D]`, times the scaling of scores; k, v `[B, G, 1, S, D]`; seen `[B or 1, 1, 1, t, S]` bool.
    """

    rows: slice
    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor
    args: AttentionArgs

    def scores(self, q: Tensor) -> Tensor:
        """s_ij `[B, G, H/G, t, S]` of scaled queries q, minus infinity where nothing is seen."""
        s = q @ self.k.transpose(-1, -2)
        cap = self.args.softcap
        s = s if cap is None else cap * torch.tanh(s / cap)
        return s.masked_fill(~self.seen, float("-inf"))

    def weigh(self, scores: Tensor) -> Tensor:
        """softmax(scores) v `[B, G, H/G, t, D]`."""
        return F.dropout(scores.softmax(-1), self.args.dropout) @ self.v


def query_blocks(q: Tensor, k: Tensor, v: Tensor, sequence: Sequence, args: AttentionArgs) -> Iterator[QueryBlock]:
    """Blocks of q `[B, H, T, D]` with what they see of k and v `[B, G, T, D]`."""
    precision = torch.promote_types(q.dtype, torch.float32)
    q = grouped(q, k.shape[1]).to(precision) * args.scaling
    k, v = k.unsqueeze(2).to(precision), v.unsqueeze(2).to(precision)
    for rows in row_blocks(q.shape[3], BLOCK):
        seen = permitted_or_self(sequence, rows, rows.stop)[:, None, None]
        yield QueryBlock(rows, q[..., rows, :], k[..., : rows.stop, :], v[..., : rows.stop, :], seen, args)


def grouped(q: Tensor, groups: int) -> Tensor:
    """`[B, H, T, D]` -> `[B, G, H/G, T, D]`: neighbouring heads share a key head."""
    return q.unflatten(1, (groups, q.shape[1] // groups))
