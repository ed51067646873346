"""Control: Focus with a router that ignores the text, every token in a random group, drawn anew in every layer."""

from __future__ import annotations

import torch
from torch import Tensor

from focus_exp.attention.method import AttentionMethod, LayerShape
from focus_exp.attention.selection import Selection, Sequence


class RandomGroups(AttentionMethod):
    """Groups follow from (seed, layer, position) alone, so that they are causal and do not depend on padding.

    `shares` `[K]` are the groups' expected sizes: those of a trained router make the control equally dense.
    A query reaches its own group and `top_k` - 1 further ones, the next in cyclic order (rule "query_topk").
    """

    def __init__(
        self,
        shape: LayerShape,
        *,
        groups: int = 4,
        window: int = 128,
        sinks: int = 4,
        top_k: int = 1,
        seed: int = 0,
        shares: list[float] | Tensor | None = None,
    ) -> None:
        super().__init__(shape, window, sinks)
        self.groups = groups
        self.top_k = top_k
        self.seed = seed
        self.shares: Tensor
        expected = torch.full((groups,), 1 / groups) if shares is None else torch.as_tensor(shares).float().clone()
        self.register_buffer("shares", expected)

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        position = torch.arange(h.shape[1], device=h.device) - sequence.start
        uniform = hashed_uniform(position, self.seed * 1_000 + self.shape.index)
        boundaries = self.shares.to(h.device).cumsum(0)[:-1].contiguous()
        first = torch.bucketize(uniform, boundaries, right=True)
        key_groups = torch.nn.functional.one_hot(first, self.groups).bool()
        query_groups = torch.stack([key_groups.roll(step, dims=-1) for step in range(self.top_k)]).any(0)
        return Selection(query_groups=query_groups, key_groups=key_groups)


def hashed_uniform(position: Tensor, stream: int) -> Tensor:
    """Uniform numbers in [0, 1) as a function of position and stream: the finaliser of MurmurHash3 (32 bits)."""
    mask = 0xFFFFFFFF
    x = (position + (stream * 0x9E3779B9 & mask)) & mask
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & mask
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & mask
    return (x ^ (x >> 16)).double() / 2**32
