"""Longformer: sliding window and global tokens (Beltagy, Peters, Cohan 2020, arXiv 2004.05150, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from focus_exp.attention.baselines.blocks import kept_attention
from focus_exp.attention.method import AttentionMethod, LayerShape
from focus_exp.attention.options import Options, option
from focus_exp.attention.selection import (
    AttentionArgs,
    PairCounts,
    Selection,
    Sequence,
    always_visible,
    real_pairs,
    row_blocks,
)


@dataclass
class LongformerOptions(Options):
    window: int = option(128, least=0)
    global_tokens: int = option(64, least=0)
    dilation: int = option(1, least=1)
    dilated_heads: int = option(2, least=0)


class Longformer(AttentionMethod, name="longformer", options=LongformerOptions):
    """softmax(q k^T) over {j : i - j <= window} and {j among the first `global_tokens` tokens of i's sequence}.

    The last `dilated_heads` heads see the tokens i - m * dilation, m = 0 .. window, in place of the window ("dilated
    sliding window"). Differs from the original in this:
    - Global attention is symmetric there: a global token also attends to all tokens. In a causal model it can attend
      to earlier ones alone, which are global themselves; so it is one-sided, and the second set of projections
      (Q_g, K_g, V_g) that global queries have there has nothing to do.
    - The window looks back `window` tokens, not w / 2 to either side, and is as wide in all layers; section 4.1 widens
      it from layer to layer and dilates upper layers alone.
    - No parameters are added: what is trained is the base.
    """

    def __init__(self, shape: LayerShape, options: LongformerOptions) -> None:
        super().__init__(shape, options.window, sinks=options.global_tokens)
        self.dilation = options.dilation
        self.dilated_heads = options.dilated_heads

    @property
    def dilates(self) -> bool:
        return self.dilation > 1 and self.dilated_heads > 0

    def keeps(self, sequence: Sequence, rows: slice) -> Tensor:
        """`[B, H, t, S]` bool, where some heads are dilated."""
        near = always_visible(sequence, rows, rows.stop, self.window, self.sinks)[:, None]
        device, start = near.device, sequence.start[:, rows, None]
        j = torch.arange(rows.stop, device=device)
        distance = torch.arange(rows.start, rows.stop, device=device)[:, None] - j
        dilated = (distance % self.dilation == 0) & (distance <= self.window * self.dilation)
        far = dilated | ((j >= start) & (j < start + self.sinks))
        is_dilated = torch.arange(self.shape.heads, device=device) >= self.shape.heads - self.dilated_heads
        return torch.where(is_dilated[:, None, None], far[:, None], near)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        if not self.dilates:
            return super().attend(q, k, v, selection, sequence, args)
        self.path = "masked"
        return kept_attention(q, k, v, sequence, args, partial(self.keeps, sequence))

    @torch.no_grad()
    def count_pairs(self, selection: Selection, sequence: Sequence) -> PairCounts:
        """Summed over heads where heads differ; distant are the pairs that not every head keeps."""
        if not self.dilates:
            return super().count_pairs(selection, sequence)
        total = distant = kept = 0
        for rows in row_blocks(sequence.start.shape[1], 512):
            seen, keep = real_pairs(sequence, rows)[:, None], self.keeps(sequence, rows)
            far = seen & ~keep.all(1, keepdim=True)
            total += int(seen.sum()) * keep.shape[1]
            distant += int(far.sum()) * keep.shape[1]
            kept += int((far & keep).sum())
        return PairCounts(total, distant, kept)
