"""Controls that keep single distant tokens: the most important ones, and those that an indexer scores highest."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.baselines.blocks import QueryBlock, query_blocks, require_no_sink_logits
from focus_exp.attention.options import Count, Fraction, LocalOptions, Size
from focus_exp.attention.router import cast_chunks, disable_autocast
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
class TopTokensOptions(LocalOptions):
    density: Fraction = 0.125
    tokens_kept: Size | None = None


class TopTokens(AttentionMethod):
    """Keep i - j <= window, the first `sinks` tokens, and the distant ones of largest `importance`."""

    options = TopTokensOptions

    def __init__(self, shape: LayerShape, options: TopTokensOptions) -> None:
        super().__init__(shape, options.window, options.sinks)
        self.density = options.density
        self.distant_kept = options.tokens_kept

    def choose(self, block: QueryBlock, scores: Tensor, selection: Selection, distant: Tensor, count: Tensor) -> Tensor:
        """Return `(B, G, H/G, t, S)` bool, or 1 in place of G and H/G: the `count` distant pairs that queries keep."""
        return keep_largest(self.importance(block, scores, selection), distant, count)

    @abstractmethod
    def importance(self, block: QueryBlock, scores: Tensor, selection: Selection) -> Tensor:
        """Return `(B, 1 or G, 1, t, S)`, importance of the pairs of a block with these scores `(B, G, H/G, t, S)`."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        require_no_sink_logits(self.name, args)
        self.path = "masked"
        outputs = []
        with torch.autocast(q.device.type, enabled=False):
            for block in query_blocks(q, k, v, sequence, args):
                scores = block.scores(block.q)
                with torch.no_grad():
                    local = local_mask(sequence, block.rows, block.rows.stop, self.window, self.sinks)
                    distant = block.mask & ~local[:, None, None]
                    count = self.num_kept(distant.sum(-1, keepdim=True))
                    kept = (block.mask & ~distant) | self.choose(block, scores, selection, distant, count)
                out = block.weigh(scores.masked_fill(~kept, float("-inf")))
                outputs.append(self.complete_output(out, block, kept))
        return torch.cat(outputs, dim=3).flatten(1, 2).to(v.dtype)

    def complete_output(self, out: Tensor, block: QueryBlock, kept: Tensor) -> Tensor:
        """Add an approximation of the pruned pairs to the output `(B, G, H/G, t, D)` over the `kept` ones."""
        return out

    def num_kept(self, distant: Tensor) -> Tensor:
        """Return how many distant tokens a query keeps out of `distant`."""
        return (distant * self.density).long() if self.distant_kept is None else distant.clamp(max=self.distant_kept)

    @torch.no_grad()
    def count_pairs(self, selection: Selection, sequence: Sequence) -> PairCounts:
        counts = torch.zeros(3, dtype=torch.long, device=sequence.start.device)
        for rows in row_blocks(sequence.start.shape[1], 512):
            mask = unpadded_mask(sequence, rows)
            distant = (mask & ~local_mask(sequence, rows, rows.stop, self.window, self.sinks)).sum(-1)
            counts += torch.stack([mask.sum(), distant.sum(), self.num_kept(distant).sum()])
        return PairCounts(*counts.tolist())


def keep_largest(importance: Tensor, distant: Tensor, count: Tensor) -> Tensor:
    """Return `(..., t, S)` bool, the `count` `(..., t, 1)` most important distant pairs of each query."""
    order = importance.masked_fill(~distant, float("-inf")).topk(int(count.max()), dim=-1).indices
    chosen = torch.arange(order.shape[-1], device=order.device) < count
    return torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, order, chosen.expand_as(order))


class BestTokens(TopTokens, name="best_tokens", options=TopTokensOptions):
    """Upper bound of token selection: it reads every key, so it is not a method.

    Importance is P_ij |v_j - o_i|, summed over the heads that share the key, with P and o of full attention: pruning j
    alone changes the output o_i by P_ij (v_j - o_i) / (1 - P_ij).
    """

    def importance(self, block: QueryBlock, scores: Tensor, selection: Selection) -> Tensor:
        p = scores.softmax(-1)
        return (p * torch.cdist(p @ block.v, block.v.expand(*p.shape[:3], -1, -1))).sum(2, keepdim=True)


@dataclass
class TokenIndexerOptions(TopTokensOptions):
    size: Count = 16


@dataclass(frozen=True)
class Indexed(Selection):
    """Hold the indexer's projections of tokens as queries and as keys, each `(B, T, R)`."""

    queries: Tensor | None = None
    keys: Tensor | None = None


class TokenIndexer(TopTokens, name="token_indexer", options=TokenIndexerOptions):
    """Score tokens by one indexer per layer: the dot product of `size` features of query and key.

    The features are linear in the layer's standardized hidden state, like the encoders of `focus_dual`. This is the
    lightning indexer of DeepSeek-V3.2 (arXiv 2512.02556) with one head, hence without gate, and without rotation.
    """

    is_fitted = True

    def __init__(self, shape: LayerShape, options: TokenIndexerOptions) -> None:
        super().__init__(shape, options)
        self.query_projection = nn.Parameter(torch.randn(shape.width, options.size) * shape.width**-0.5)
        self.key_projection = nn.Parameter(torch.randn(shape.width, options.size) * shape.width**-0.5)
        self.mean: Tensor
        self.scale: Tensor
        self.register_buffer("mean", torch.zeros(shape.width))
        self.register_buffer("scale", torch.ones(shape.width))

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        both = torch.cat([self.query_projection, self.key_projection], 1)
        with disable_autocast(h):
            chunks = [(chunk - self.mean) / self.scale @ both for chunk in cast_chunks(h, self.mean.dtype)]
        queries, keys = torch.cat(chunks, 1).chunk(2, -1)
        return Indexed(queries=queries, keys=keys)

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Score standardized hidden states `(t, E)` against `(S, E)`: `(t, S)`."""
        return (queries @ self.query_projection) @ (keys @ self.key_projection).T

    def importance(self, block: QueryBlock, scores: Tensor, selection: Selection) -> Tensor:
        assert isinstance(selection, Indexed) and selection.queries is not None and selection.keys is not None
        queries, keys = selection.queries[:, block.rows], selection.keys[:, : block.rows.stop]
        return (queries @ keys.transpose(-1, -2))[:, None, None]
