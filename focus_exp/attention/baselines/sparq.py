"""SparQ: tokens that matter, found by the query's largest components (Ribar et al. 2024, arXiv 2312.04985)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from focus_exp.attention.baselines.blocks import QueryBlock, query_blocks, refuse_sink_logits
from focus_exp.attention.method import AttentionMethod, LayerShape
from focus_exp.attention.options import Options, option
from focus_exp.attention.selection import PairCounts, Selection, Sequence, always_visible, real_pairs, row_blocks


@dataclass
class SparQOptions(Options):
    components: int | None = option(None, "r, numbers of a query that the estimate reads; None: half", least=1)
    tokens_kept: int = option(32, "k, tokens that a query attends to", least=1)
    recent_tokens: int = option(8, "l of them, the latest, the query's own among them", least=1, most="tokens_kept")
    reallocate: bool = option(False, "the mass of what is not kept, to the mean value")


class SparQ(AttentionMethod, name="sparq", options=SparQOptions):
    """Token selection at inference, in the three steps of the paper's algorithm 1; nothing is trained.

    1. Estimate: s^_i = softmax(q_[I] . K_[I]^T / sqrt(D * |q_[I]|_1 / |q|_1)), I the `components` (r; by default D / 2)
       largest |q|.
    2. Select: the `tokens_kept` (k) tokens of largest s^, and attend to them exactly.
    3. With `reallocate`: o = alpha * o + (1 - alpha) * mean of all values seen, alpha the sum of s^ over the selected.

    Heads that share keys choose components by their summed |q| and tokens by their summed s^, as in the original; the
    `recent_tokens` (l) latest tokens, the query's own among them, are always selected (k / 4 there).
    Differs from the original in this: it serves decoding, after a dense prefill, to save memory traffic. Here every
    query selects, prompt included, as perplexity wants it, and nothing is saved.
    """

    def __init__(self, shape: LayerShape, options: SparQOptions) -> None:
        super().__init__(shape, window=options.recent_tokens - 1, sinks=0)
        self.components = options.components or shape.head_dim // 2
        self.tokens_kept = options.tokens_kept
        self.reallocate = options.reallocate
        if self.components > shape.head_dim:
            raise ValueError(f"components={self.components} exceeds {shape.head_dim}, the size of a head")

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Selection,
        sequence: Sequence,
        *,
        scaling: float,
        softcap: float | None = None,
        dropout: float = 0.0,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        refuse_sink_logits("sparq", sink_logits)
        self.path = "masked"
        with torch.autocast(q.device.type, enabled=False):
            outputs = []
            for block in query_blocks(q, k, v, sequence):
                estimate = self.estimate(block, scaling, softcap)
                kept = self.select(block, estimate, sequence)
                exact = block.scores(block.q, scaling, softcap)
                out = block.weigh(exact.masked_fill(~kept, float("-inf")), dropout)
                if self.reallocate:
                    alpha = (estimate.exp() * kept).sum(-1, keepdim=True)
                    seen = block.seen.to(out.dtype)
                    out = alpha * out + (1 - alpha) * ((seen / seen.sum(-1, keepdim=True)) @ block.v)
                outputs.append(out)
            return torch.cat(outputs, dim=3).flatten(1, 2).to(v.dtype)

    def estimate(self, block: QueryBlock, scaling: float, softcap: float | None) -> Tensor:
        """log s^ `[B, G, H/G, t, S]`."""
        size = block.q.abs()
        largest = size.sum(2, keepdim=True).topk(self.components, dim=-1).indices
        chosen = torch.zeros_like(size[:, :, :1], dtype=torch.bool).scatter_(-1, largest, True)
        part = block.q * chosen
        tiny = torch.finfo(size.dtype).tiny
        coverage = part.abs().sum(-1, keepdim=True).clamp(min=tiny) / size.sum(-1, keepdim=True).clamp(min=tiny)
        return block.scores(part, scaling / coverage.sqrt(), softcap).log_softmax(-1)

    @torch.no_grad()
    def select(self, block: QueryBlock, estimate: Tensor, sequence: Sequence) -> Tensor:
        """`[B, G, 1, t, S]` bool: the recent tokens and those of the largest s^, `tokens_kept` in all."""
        length = block.rows.stop
        recent = always_visible(sequence, block.rows, length, self.window, 0)[:, None, None] & block.seen
        # in logarithms, where tokens that hardly matter still differ
        order = estimate.logsumexp(2, keepdim=True).masked_fill(recent, float("inf"))
        largest = order.topk(min(self.tokens_kept, length), dim=-1).indices
        return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, largest, True) & block.seen

    @torch.no_grad()
    def count_pairs(self, selection: Selection, sequence: Sequence) -> PairCounts:
        """Distant are all but the recent tokens. Pairs whose values are not read are removed, although an estimate has
        read `components` of the D numbers of their keys."""
        total = distant = kept = 0
        for rows in row_blocks(sequence.start.shape[1], 512):
            seen = real_pairs(sequence, rows)
            recent = (seen & always_visible(sequence, rows, rows.stop, self.window, 0)).sum(-1)
            total += int(seen.sum())
            distant += int((seen.sum(-1) - recent).sum())
            kept += int((seen.sum(-1).clamp(max=self.tokens_kept) - recent).sum())
        return PairCounts(total, distant, kept)
