"""Training-free block selection: the blocks whose mean keys score highest (MoBA, Lu et al. 2025, arXiv 2502.13189)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from focus_exp.attention.base import LayerShape
from focus_exp.attention.baselines.blocks import QueryBlock, require_no_sink_logits
from focus_exp.attention.baselines.top_tokens import TopTokens, TopTokensOptions
from focus_exp.attention.options import Count, Fraction, LocalOptions
from focus_exp.attention.router import disable_autocast
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence


@dataclass
class BlockOptions(LocalOptions):
    density: Fraction = 0.125
    keys_per_block: Count = 64


@dataclass(frozen=True)
class KeyBlocks(Selection):
    """Number the blocks of keys, counted from the start of each sequence, and hold what scores them.

    Attributes:
        index: `(B, T)` int, block of each token.
        pooled: `(B, T)` bool, tokens that stand for their block: neither padding nor sinks.
        keys: `(B, G, N, D)`, one for each of N blocks.
    """

    index: Tensor | None = None
    pooled: Tensor | None = None
    keys: Tensor | None = None

    @classmethod
    def of(cls, sequence: Sequence, size: int, sinks: int) -> KeyBlocks:
        place = torch.arange(sequence.start.shape[1], device=sequence.start.device) - sequence.start
        begun = (place % size == 0).cumsum(1)
        return cls(index=begun - begun[:, :1], pooled=sequence.valid_or_all() & (place >= sinks))

    def pool(self, x: Tensor, reduce: str) -> Tensor:
        """Reduce x `(B, G, T, C)` over the pooled tokens of each block, `(B, G, N, C)`; 0 where there are none."""
        assert self.index is not None and self.pooled is not None
        count = int(self.index.max()) + 1
        index = self.index.where(self.pooled, count)[:, None, :, None].expand_as(x)
        blocks = x.new_zeros(*x.shape[:2], count + 1, x.shape[3])
        return blocks.scatter_reduce(2, index, x, reduce, include_self=False)[:, :, :-1]


class TopBlocks(TopTokens):
    """Keep i - j <= window, the first `sinks` tokens, and the distant tokens of the best blocks of keys.

    Every query chooses for itself and keeps `density` of its distant tokens: its own block first, then the blocks
    before it by descending score, and the latest tokens of the last one. Pairs of other blocks count as pruned,
    although their pooled keys are read.
    """

    def __init__(self, shape: LayerShape, options: BlockOptions) -> None:
        super().__init__(shape, TopTokensOptions(options.window, options.sinks, options.density))
        self.keys_per_block = options.keys_per_block

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        return KeyBlocks.of(sequence, self.keys_per_block, self.sinks)

    @abstractmethod
    def block_scores(self, block: QueryBlock, selection: KeyBlocks) -> Tensor:
        """Return the scores `(B, G, 1 or H/G, t, N)` of all blocks of keys for a block of queries."""

    def choose(self, block: QueryBlock, scores: Tensor, selection: Selection, distant: Tensor, count: Tensor) -> Tensor:
        assert isinstance(selection, KeyBlocks) and selection.index is not None
        index = selection.index[:, None, None, None, : block.rows.stop].expand_as(distant)
        ranked = self.block_scores(block, selection)
        number = torch.arange(ranked.shape[-1], device=index.device)
        # the query's own block may hold its future: it comes first, unscored
        ranked = ranked.masked_fill(number >= selection.index[:, None, None, block.rows, None], float("inf"))
        best = ranked.sort(dim=-1, descending=True, stable=True).indices
        sizes = distant.new_zeros(*distant.shape[:-1], len(number), dtype=torch.int32)
        sizes = sizes.scatter_add(-1, index, distant.int())  # distant tokens of each block
        ranked_sizes = sizes.expand(best.shape).gather(-1, best)
        left = (count - ranked_sizes.cumsum(-1)).int() + ranked_sizes  # of the count, before each block
        quota = torch.zeros_like(left).scatter(-1, best, left)
        later = sizes.cumsum(-1).gather(-1, index) - distant.cumsum(-1)  # distant tokens of the block after each
        return distant & (later < quota.gather(-1, index.expand(*quota.shape[:-1], -1)))


class BlockMeans(TopBlocks, name="block_means", options=BlockOptions):
    """Score a block of keys by the dot product of the query and the block's mean key; nothing is trained.

    Differences from the original: the base model is not trained with it; a query keeps a density, not a number of
    blocks; and sinks, which are always visible, stay out of the mean. FlexPrefill (arXiv 2502.20766) and XAttention
    (arXiv 2503.16428) choose once for each tile of queries, by pooled queries or sampled scores: coarser, and not
    causal within the tile.
    """

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        require_no_sink_logits(self.name, args)
        assert isinstance(selection, KeyBlocks)
        with disable_autocast(k):
            keys = self.block_keys(k.detach().to(torch.promote_types(k.dtype, torch.float32)), selection)
        return super().attend(q, k, v, replace(selection, keys=keys), sequence, args)

    def block_keys(self, k: Tensor, blocks: KeyBlocks) -> Tensor:
        """Return the keys `(B, G, N, D)` of blocks of k `(B, G, T, D)`."""
        return blocks.pool(k, "mean")

    def block_scores(self, block: QueryBlock, selection: KeyBlocks) -> Tensor:
        assert selection.keys is not None
        return block.q @ selection.keys[:, :, None].transpose(-1, -2)
