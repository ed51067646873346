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
from focus_exp.attention.selection import Sequence, permitted_or_self, row_blocks

BLOCK = 256


def kept_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: Sequence,
    keeps: Callable[[slice], Tensor],
    *,
    scaling: float,
    softcap: float | None,
    dropout: float,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Output `[B, H, T, D]` of the pairs that `keeps` `[B, 1 or H, t, S]` leaves of a block of queries."""
    outputs = []
    for rows in row_blocks(q.shape[2], BLOCK):
        keep = keeps(rows) & permitted_or_self(sequence, rows, rows.stop)[:, None]
        keys, values = k[:, :, : rows.stop], v[:, :, : rows.stop]
        if keep.shape[1] > 1:  # a mask per head needs keys per head
            keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (keys, values))
        outputs.append(
            masked_attention(
                q[:, :, rows], keys, values, keep, None,
                scaling=scaling, softcap=softcap, gate_kind="log", dropout=dropout, sink_logits=sink_logits,
            )
        )  # fmt: skip
    return torch.cat(outputs, dim=2)


def refuse_sink_logits(method: str, sink_logits: Tensor | None) -> None:
    """ValueError where the base model has learned attention sinks, which the method's paper does not know."""
    if sink_logits is not None:
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
    softcap: float | None

    def scores(self, q: Tensor) -> Tensor:
        """s_ij `[B, G, H/G, t, S]` of scaled queries q, minus infinity where nothing is seen."""
        s = q @ self.k.transpose(-1, -2)
        s = s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)
        return s.masked_fill(~self.seen, float("-inf"))

    def weigh(self, scores: Tensor, dropout: float) -> Tensor:
        """softmax(scores) v `[B, G, H/G, t, D]`."""
        return F.dropout(scores.softmax(-1), dropout) @ self.v


def query_blocks(
    q: Tensor, k: Tensor, v: Tensor, sequence: Sequence, scaling: float, softcap: float | None
) -> Iterator[QueryBlock]:
    """Blocks of q `[B, H, T, D]` with what they see of k and v `[B, G, T, D]`."""
    precision = torch.promote_types(q.dtype, torch.float32)
    q, k, v = grouped(q, k.shape[1]).to(precision) * scaling, k.unsqueeze(2).to(precision), v.unsqueeze(2).to(precision)
    for rows in row_blocks(q.shape[3], BLOCK):
        seen = permitted_or_self(sequence, rows, rows.stop)[:, None, None]
        yield QueryBlock(rows, q[..., rows, :], k[..., : rows.stop, :], v[..., : rows.stop, :], seen, softcap)


def grouped(q: Tensor, groups: int) -> Tensor:
    """`[B, H, T, D]` -> `[B, G, H/G, T, D]`: neighbouring heads share a key head."""
    return q.unflatten(1, (groups, q.shape[1] // groups))
