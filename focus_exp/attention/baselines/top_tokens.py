"""Controls that keep single distant tokens: those that an indexer finds, and those that would matter most."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from focus_exp.attention.baselines.blocks import QueryBlock, query_blocks, refuse_sink_logits
from focus_exp.attention.method import AttentionMethod, LayerShape
from focus_exp.attention.options import FitOptions, NearOptions, option
from focus_exp.attention.routing import cast, own_precision
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
class TopTokensOptions(NearOptions):
    density: float = option(0.125, least=0, most=1)
    tokens_kept: int | None = option(None, least=0)


class TopTokens(AttentionMethod):
    """Keeps i - j <= window, the first `sinks` tokens, and the distant ones of largest `importance`."""

    options = TopTokensOptions

    def __init__(self, shape: LayerShape, options: TopTokensOptions) -> None:
        super().__init__(shape, options.window, options.sinks)
        self.density = options.density
        self.distant_kept = options.tokens_kept

    @abstractmethod
    def importance(self, block: QueryBlock, scores: Tensor, selection: Selection) -> Tensor:
        """`[B, 1 or G, 1, t, S]` float of the pairs of a block, whose scores `[B, G, H/G, t, S]` are given."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        refuse_sink_logits(self.name, args)
        self.path = "masked"
        outputs = []
        with torch.autocast(q.device.type, enabled=False):
            for block in query_blocks(q, k, v, sequence, args):
                scores = block.scores(block.q)
                with torch.no_grad():
                    visible = always_visible(sequence, block.rows, block.rows.stop, self.window, self.sinks)
                    distant = block.seen & ~visible[:, None, None]
                    wanted = self.number(distant.sum(-1, keepdim=True))
                    kept = (block.seen & ~distant) | best(self.importance(block, scores, selection), distant, wanted)
                out = block.weigh(scores.masked_fill(~kept, float("-inf")))
                outputs.append(self.completed(out, block, kept))
        return torch.cat(outputs, dim=3).flatten(1, 2).to(v.dtype)

    def completed(self, out: Tensor, block: QueryBlock, kept: Tensor) -> Tensor:
        """The attention `out` `[B, G, H/G, t, D]` to the `kept` pairs, with what stands for the others."""
        return out

    def number(self, distant: Tensor) -> Tensor:
        """How many tokens a query keeps that has so many `distant` ones before it."""
        return (distant * self.density).long() if self.distant_kept is None else distant.clamp(max=self.distant_kept)

    @torch.no_grad()
    def count_pairs(self, selection: Selection, sequence: Sequence) -> PairCounts:
        counts = torch.zeros(3, dtype=torch.long, device=sequence.start.device)
        for rows in row_blocks(sequence.start.shape[1], 512):
            seen = real_pairs(sequence, rows)
            far = (seen & ~always_visible(sequence, rows, rows.stop, self.window, self.sinks)).sum(-1)
            counts += torch.stack([seen.sum(), far.sum(), self.number(far).sum()])
        return PairCounts(*counts.tolist())


def best(importance: Tensor, distant: Tensor, wanted: Tensor) -> Tensor:
    """Which of the distant pairs `[..., t, S]` are kept, where each query wants so many, `[..., t, 1]`; bool."""
    order = importance.masked_fill(~distant, float("-inf")).topk(int(wanted.max()), dim=-1).indices
    chosen = torch.arange(order.shape[-1], device=order.device) < wanted
    return torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, order, chosen.expand_as(order))


class BestTokens(TopTokens, name="best_tokens", options=TopTokensOptions):
    """The limit of selection by tokens, which reads all of what it leaves out: no method, but what one could reach.

    A pair is worth P_ij |v_j - o_i|, summed over the heads that share its key: P and o those of full attention, from
    whose output o_i the removal of j alone takes P_ij (v_j - o_i) / (1 - P_ij).
    """

    def importance(self, block: QueryBlock, scores: Tensor, selection: Selection) -> Tensor:
        p = scores.softmax(-1)
        return (p * torch.cdist(p @ block.v, block.v.expand(*p.shape[:3], -1, -1))).sum(2, keepdim=True)


@dataclass
class TokenIndexerOptions(TopTokensOptions):
    size: int = option(16, least=1)


@dataclass(frozen=True)
class Indexed(Selection):
    """What the indexer tells of the tokens, as queries and as keys, each `[B, T, R]`."""

    queries: Tensor | None = None
    keys: Tensor | None = None


class TokenIndexer(TopTokens, name="token_indexer", options=TokenIndexerOptions):
    """One indexer a layer: importance is the product of `size` numbers of the query's token and of the key's.

    They are linear in the layer's standardised hidden state, as the encoders of `focus_dual` are. As the lightning
    indexer of DeepSeek-V3.2 (arXiv 2512.02556) with one head, which has no gate then, and without its rotation.
    """

    fitting = FitOptions

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
        with own_precision(h):
            found = torch.cat([(part - self.mean) / self.scale @ both for part in cast(h, self.mean.dtype)], 1)
        queries, keys = found.chunk(2, -1)
        return Indexed(queries=queries, keys=keys)

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """`[t, S]`, by which tokens are found, of standardised hidden states `[t, E]` and `[S, E]`."""
        return (queries @ self.query_projection) @ (keys @ self.key_projection).T

    def importance(self, block: QueryBlock, scores: Tensor, selection: Selection) -> Tensor:
        assert isinstance(selection, Indexed) and selection.queries is not None and selection.keys is not None
        queries, keys = selection.queries[:, block.rows], selection.keys[:, : block.rows.stop]
        return (queries @ keys.transpose(-1, -2))[:, None, None]
