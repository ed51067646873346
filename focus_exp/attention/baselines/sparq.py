"""SparQ: important tokens, estimated by the query's largest components (Ribar et al. 2024, arXiv 2312.04985)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from focus_exp.attention.base import LayerShape
from focus_exp.attention.baselines.blocks import QueryBlock
from focus_exp.attention.baselines.top_tokens import TopTokens, TopTokensOptions
from focus_exp.attention.options import Count, Fraction, Options
from focus_exp.attention.selection import Selection


@dataclass
class SparQOptions(Options):
    components: Count | None = None
    tokens_kept: Count | None = 32
    density: Fraction = 0.125
    recent_tokens: Count = 8
    reallocate: bool = False

    def invalid_reason(self) -> str | None:
        return self.order_reason("recent_tokens", "tokens_kept")


class SparQ(TopTokens, name="sparq", options=SparQOptions):
    """Select tokens at inference in the three steps of the paper's algorithm 1; nothing is trained.

    1. Estimate: s^_i = softmax(q_[I] . K_[I]^T / sqrt(D * |q_[I]|_1 / |q|_1)), I the `components` (r; by default D / 2)
       largest |q|.
    2. Select: the `tokens_kept` (k) tokens of largest s^, and attend to them exactly.
    3. With `reallocate`: o = alpha * o + (1 - alpha) * mean of all visible values, alpha the sum of s^ over the
       selected.

    Heads that share keys choose components by their summed |q| and tokens by their summed s^, as in the original; the
    `recent_tokens` (l) latest tokens, the query's own among them, are always selected (k / 4 there).
    Difference from the original: it serves decoding after a dense prefill, to save memory traffic. Here every query
    selects, prompt included, as perplexity requires, and nothing is saved. All but the recent tokens are distant;
    pairs whose values are not read count as pruned, although the estimate reads `components` of the D dimensions of
    their keys.
    """

    def __init__(self, shape: LayerShape, options: SparQOptions) -> None:
        distant = None if options.tokens_kept is None else options.tokens_kept - options.recent_tokens
        super().__init__(
            shape,
            TopTokensOptions(window=options.recent_tokens - 1, sinks=0, density=options.density, tokens_kept=distant),
        )
        self.components = options.components or shape.head_dim // 2
        self.reallocate = options.reallocate
        if self.components > shape.head_dim:
            raise ValueError(f"components must be <= {shape.head_dim}, the head size (got {self.components})")

    def importance(self, block: QueryBlock, scores: Tensor, selection: Selection) -> Tensor:
        # in logarithms, where unimportant tokens still differ
        return self.estimate(block).logsumexp(2, keepdim=True)

    def complete_output(self, out: Tensor, block: QueryBlock, kept: Tensor) -> Tensor:
        if not self.reallocate:
            return out
        alpha = (self.estimate(block).exp() * kept).sum(-1, keepdim=True)
        mask = block.mask.to(out.dtype)
        return alpha * out + (1 - alpha) * ((mask / mask.sum(-1, keepdim=True)) @ block.v)

    def estimate(self, block: QueryBlock) -> Tensor:
        """Return log s^ `(B, G, H/G, t, S)`."""
        size = block.q.abs()
        largest = size.sum(2, keepdim=True).topk(self.components, dim=-1).indices
        chosen = torch.zeros_like(size[:, :, :1], dtype=torch.bool).scatter_(-1, largest, True)
        part = block.q * chosen
        tiny = torch.finfo(size.dtype).tiny
        coverage = part.abs().sum(-1, keepdim=True).clamp(min=tiny) / size.sum(-1, keepdim=True).clamp(min=tiny)
        return block.scores(part / coverage.sqrt()).log_softmax(-1)
