"""Attention to a KV cache in place: a query reads the sinks, the window and the keys of its own groups, and no others.

Keys and values stay where the base model's cache has them; next to them are the groups of each key, as bits.

Shapes: T new queries, which are the last of S keys; Y heads with groups of their own, 1 or G; W integers of 32 groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.dense import masked_attention
from focus_exp.attention.kernels.decode import attend_cached, serves
from focus_exp.attention.selection import AttentionArgs, causal_mask, row_blocks

BLOCK = 256  # queries at a time
WORD = 32  # groups of an integer
BITS = 1 << torch.arange(WORD, dtype=torch.int32)


def pack_groups(groups: Tensor | None, batch: int, count: int, device: torch.device) -> Tensor:
    """Return memberships `(B, T, K)` or `(B, G, T, K)` bool as bits `(B, Y, T, W)` int32; zeros for None."""
    if groups is None:
        return torch.zeros(batch, 1, count, 1, dtype=torch.int32, device=device)
    groups = groups if groups.ndim == 4 else groups[:, None]
    size = groups.shape[-1]
    groups = groups[..., None, :] if size <= WORD else F.pad(groups, (0, -size % WORD)).unflatten(-1, (-1, WORD))
    bits = BITS if device.type == "cpu" else 1 << torch.arange(WORD, dtype=torch.int32, device=device)
    return (groups * bits[: groups.shape[-1]]).sum(-1, dtype=torch.int32)


@dataclass(frozen=True)
class CachedKeys:
    """Describe which keys of a cache the new queries read.

    Attributes:
        key_groups: `(B, Y, S, W)` int32, the groups of keys as bits.
        query_groups: `(B, Y, T, W)` int32, the groups that queries read.
        visible: `(B or 1, 1 or T, S)` bool, the keys that the base model lets queries see, besides causality; None for
            all.
        before: `(B or 1, T)` int32, tokens of a query's sequence before the first key that it sees; None for 0.
        window: a query reads this many keys before its own.
        sinks: and the first ones of its sequence.
    """

    key_groups: Tensor
    query_groups: Tensor
    visible: Tensor | None
    before: Tensor | None
    window: int
    sinks: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        """Return the output `(B, H, T, D)` of q `(B, H, T, D)` and all keys and values `(B, G, S, D)`."""
        if not serves(q, k, v):
            return self.attend_masked(q, k.to(q.dtype), v.to(q.dtype), args)
        logits = None if args.sink_logits is None else args.sink_logits.float().expand(len(q), -1)
        groups, seen = (self.key_groups, self.query_groups), (self.visible, self.before)
        numbers = (self.window, self.sinks, args.scaling, args.softcap or 0.0)
        return attend_cached(q, k, v, *groups, *seen, logits, *numbers).transpose(1, 2)

    def attend_masked(self, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        """Compute all pairs and mask those that are not read."""
        outputs = []
        for rows in row_blocks(q.shape[2], BLOCK):
            keep = self.keep_mask(rows)
            keep = keep | ~keep.any(-1, keepdim=True)  # of padding that sees nothing, whose softmax would be NaN
            outputs.append(masked_attention(q[:, :, rows], k, v, keep, args))
        return torch.cat(outputs, 2)

    def keep_mask(self, rows: slice) -> Tensor:
        """Return `(B, Y, t, S)` bool, the keys that a block of queries reads."""
        size, count = self.key_groups.shape[2], self.query_groups.shape[2]
        queries = slice(size - count + rows.start, size - count + rows.stop)
        seen = causal_mask(queries, size, self.key_groups.device)[None]
        if self.visible is not None:
            seen = seen & (self.visible[:, rows] if self.visible.shape[1] == count else self.visible)
        number = seen.cumsum(-1, dtype=torch.int32)  # from 1, of the keys that it sees
        local = number[..., -1:] - number <= self.window
        place = number if self.before is None else number + self.before[:, rows, None]
        meets = (self.key_groups[:, :, None] & self.query_groups[:, :, rows, None]).ne(0).any(-1)
        return seen[:, None] & ((local | (place <= self.sinks))[:, None] | meets)
