"""Distilled block gate: block scores learned from attention (SeerAttention, Gao et al. 2024, arXiv 2410.13276)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from focus_exp.attention.base import LayerShape
from focus_exp.attention.baselines.block_means import BlockMeans, BlockOptions, KeyBlocks

POOLS = ("mean", "amax", "amin")  # of a block's keys, as in the original


class BlockGate(BlockMeans, name="block_gate", options=BlockOptions):
    """Score a block by the query and a linear map of the block's mean, largest and smallest key components.

    The map, one for each key/value head, is fitted to the base model's attention mass by block. It starts as block
    means: the identity on the mean key. It has 3 D^2 parameters per key/value head.
    Differences from the original:
    - Every query chooses for itself, as in SeerAttention-R (arXiv 2506.08889); tiles of queries are not causal.
    - One map of keys replaces the two of queries and keys, whose product it is, and sees them after RoPE. Fitted to
      hidden states before RoPE, 48 sequences of 1,024 tokens were too few: it chose worse than block means.
    - The target is each query head's mass without the window.
    """

    is_fitted = True

    def __init__(self, shape: LayerShape, options: BlockOptions) -> None:
        super().__init__(shape, options)
        identity = torch.eye(len(POOLS) * shape.head_dim, shape.head_dim)
        self.weight = nn.Parameter(identity.repeat(shape.kv_heads or shape.heads, 1, 1))

    def block_keys(self, k: Tensor, blocks: KeyBlocks) -> Tensor:
        return self.map_pooled(torch.cat([blocks.pool(k, pool) for pool in POOLS], -1))

    def map_pooled(self, pooled: Tensor) -> Tensor:
        """Map pooled keys `(..., G, N, 3 D)` to keys `(..., G, N, D)`."""
        return pooled @ self.weight.to(pooled.dtype)
