"""Longformer: sliding window and global tokens (Beltagy, Peters, Cohan 2020, arXiv 2004.05150, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.baselines.blocks import attend_masked
from focus_exp.attention.options import Count, Options, Size
from focus_exp.attention.selection import (
    AttentionArgs,
    PairCounts,
    Selection,
    Sequence,
    local_mask,
    row_blocks,
    unpadded_mask,
)


@dataclass
class LongformerOptions(Options):
    window: Size = 128
    global_tokens: Size = 64
    dilation: Count = 1
    dilated_heads: Size = 2


class Longformer(AttentionMethod, name="longformer", options=LongformerOptions):
    """Attend over {j : i - j <= window} and {j among the first `global_tokens` tokens of i's sequence}.

    The last `dilated_heads` heads see the tokens i - m * dilation, m = 0 .. window, in place of the window ("dilated
    sliding window"). Differences from the original:
    - Global attention is symmetric there. In a causal model a global token attends to earlier tokens only, which are
      global themselves; so it is one-sided, and global queries need no projections of their own (Q_g, K_g, V_g).
    - The window covers `window` tokens before i, not w / 2 on either side, and is equal in all layers; section 4.1
      widens it with depth and dilates upper layers only.
    - No parameters are added: the base model is trained.
    """

    def __init__(self, shape: LayerShape, options: LongformerOptions) -> None:
        super().__init__(shape, options.window, sinks=options.global_tokens)
        self.dilation = options.dilation
        self.dilated_heads = options.dilated_heads

    @property
    def is_dilated(self) -> bool:
        return self.dilation > 1 and self.dilated_heads > 0

    def keep_mask(self, sequence: Sequence, rows: slice) -> Tensor:
        """Return `(B, H, t, S)` bool of dilated and other heads."""
        local = local_mask(sequence, rows, rows.stop, self.window, self.sinks)[:, None]
        device, start = local.device, sequence.start[:, rows, None]
        j = torch.arange(rows.stop, device=device)
        distance = torch.arange(rows.start, rows.stop, device=device)[:, None] - j
        dilated = (distance % self.dilation == 0) & (distance <= self.window * self.dilation)
        dilated = dilated | ((j >= start) & (j < start + self.sinks))
        is_dilated = torch.arange(self.shape.heads, device=device) >= self.shape.heads - self.dilated_heads
        return torch.where(is_dilated[:, None, None], dilated[:, None], local)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        if not self.is_dilated:
            return super().attend(q, k, v, selection, sequence, args)
        self.path = "masked"
        return attend_masked(q, k, v, sequence, args, partial(self.keep_mask, sequence))

    @torch.no_grad()
    def count_pairs(self, selection: Selection, sequence: Sequence) -> PairCounts:
        """Sum over heads where heads differ; pairs that not every head keeps are distant."""
        if not self.is_dilated:
            return super().count_pairs(selection, sequence)
        total = distant = kept = 0
        for rows in row_blocks(sequence.start.shape[1], 512):
            mask, keep = unpadded_mask(sequence, rows)[:, None], self.keep_mask(sequence, rows)
            far = mask & ~keep.all(1, keepdim=True)
            total += int(mask.sum()) * keep.shape[1]
            distant += int(far.sum()) * keep.shape[1]
            kept += int((far & keep).sum())
        return PairCounts(total, distant, kept)
