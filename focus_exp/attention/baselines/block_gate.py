"""Distilled block gate: block scores learned from attention (SeerAttention, Gao et al. 2024, arXiv 2410.13276)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from focus_exp.attention.base import LayerShape
from focus_exp.attention.baselines.block_means import BlockOptions, KeyBlocks, TopBlocks
from focus_exp.attention.baselines.blocks import QueryBlock
from focus_exp.attention.options import FitOptions, option
from focus_exp.attention.router import cast_chunks, disable_autocast
from focus_exp.attention.selection import Selection, Sequence

POOLS = ("mean", "amax", "amin")  # of a block's key features, as in the original


@dataclass
class BlockGateOptions(BlockOptions):
    size: int = option(16, least=1)


class BlockGate(TopBlocks, name="block_gate", options=BlockGateOptions):
    """Score blocks of keys by a gate per key/value head, fitted to the base model's attention mass by block.

    A token has `size` (R) features as key and 3 R as query, linear in the layer's standardized hidden state. A block's
    mean, largest and smallest key features are compared with the query's by dot product. That is before RoPE, as in
    the original: pre-RoPE queries and keys are linear in the hidden state too. The gate has 4 R E parameters per
    key/value head.
    Differences from the original:
    - Every query chooses for itself, as in SeerAttention-R (arXiv 2506.08889); tiles of queries are not causal.
    - Features are not rotated by the positions of blocks, so that the gate serves lengths beyond its calibration.
    - The target is the mass summed over the query heads that share a key, not its maximum, and without the window.
    """

    fit_options = FitOptions

    def __init__(self, shape: LayerShape, options: BlockGateOptions) -> None:
        super().__init__(shape, options)
        self.heads, self.size = shape.kv_heads or shape.heads, options.size
        width = self.heads * (len(POOLS) + 1) * self.size
        self.projection = nn.Parameter(torch.randn(shape.width, width) * shape.width**-0.5)
        self.mean: Tensor
        self.scale: Tensor
        self.register_buffer("mean", torch.zeros(shape.width))
        self.register_buffer("scale", torch.ones(shape.width))

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        blocks = KeyBlocks.of(sequence, self.keys_per_block, self.sinks)
        with disable_autocast(h):
            chunks = [(chunk - self.mean) / self.scale @ self.projection for chunk in cast_chunks(h, self.mean.dtype)]
            return self.add_features(torch.cat(chunks, 1), blocks)

    def add_features(self, x: Tensor, blocks: KeyBlocks) -> KeyBlocks:
        """Add the features of queries and blocks from projected tokens `(B, T, G * 4 * R)`."""
        x = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        keys, queries = x.split([self.size, len(POOLS) * self.size], -1)
        return replace(blocks, queries=queries, keys=torch.cat([blocks.pool(keys, pool) for pool in POOLS], -1))

    def block_scores(self, block: QueryBlock, selection: KeyBlocks) -> Tensor:
        assert selection.queries is not None and selection.keys is not None
        return (selection.queries[:, :, block.rows] @ selection.keys.transpose(-1, -2))[:, :, None]
