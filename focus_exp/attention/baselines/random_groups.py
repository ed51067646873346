"""Control: Focus with random groups, drawn independently in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.options import GroupOptions, Seed, choices
from focus_exp.attention.selection import Selection, Sequence, select


@dataclass
class RandomGroupsOptions(GroupOptions):
    seed: Seed = 0
    shares: list[float] | None = None
    heads: Annotated[str, choices("layer", "kv")] = "layer"


class RandomGroups(AttentionMethod, name="random_groups", options=RandomGroupsOptions):
    """Draw groups from (seed, layer, head, position) alone: causal, and independent of padding.

    `shares` `(K,)` are the groups' expected sizes; those of a trained router make the control size-matched. Its density
    is a little lower, since a router's groups are less equal within a sequence than over all. A token's `top_k` groups
    are drawn without replacement, the first of them by these shares.
    """

    def __init__(self, shape: LayerShape, options: RandomGroupsOptions) -> None:
        super().__init__(shape, options.window, options.sinks)
        self.groups = options.groups
        self.top_k = options.top_k
        self.pair_rule = options.pair_rule
        self.seed = options.seed
        self.heads = shape.kv_heads or shape.heads if options.heads == "kv" else None
        self.shares: Tensor
        shares = [1 / self.groups] * self.groups if options.shares is None else options.shares
        self.register_buffer("shares", torch.as_tensor(shares).float().clone())

    def kv_cache_unsupported_reason(self) -> None:
        return None

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        position = torch.arange(h.shape[1], device=h.device) - sequence.start
        stream, count = (self.seed * 1_000 + self.shape.index) * 1_000, self.groups * (self.heads or 1)
        uniform = torch.stack([hash_to_uniform(position, stream + number) for number in range(count)], dim=-1)
        if self.heads is not None:
            uniform = uniform.unflatten(-1, (self.heads, self.groups)).transpose(1, 2)
        # the largest of these keys is group g with probability shares[g] (Efraimidis and Spirakis, 2006)
        return select(uniform.log() / self.shares.to(h.device), self.top_k, self.pair_rule)


def hash_to_uniform(position: Tensor, stream: int) -> Tensor:
    """Hash position and stream to uniform numbers in (0, 1): the finalizer of MurmurHash3 (32 bits)."""
    mask = 0xFFFFFFFF
    x = (position + (stream * 0x9E3779B9 & mask)) & mask
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & mask
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & mask
    return ((x ^ (x >> 16)).double() + 0.5) / 2**32
