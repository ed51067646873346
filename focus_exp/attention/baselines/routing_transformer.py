"""Routing Transformer: online k-means over tokens (Roy, Saffar, Vaswani, Grangier 2021, arXiv 2003.05997)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.baselines.blocks import attend_masked
from focus_exp.attention.options import Count, Fraction, LocalOptions
from focus_exp.attention.router import move_to_means, sum_groups
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, group_mask, local_mask


@dataclass
class RoutingTransformerOptions(LocalOptions):
    groups: Count = 4
    tokens_per_group: Count | None = None
    centroid_decay: Fraction = 0.999


class RoutingTransformer(AttentionMethod, name="routing_transformer", options=RoutingTransformerOptions):
    """Keep a pair if i - j <= window, if j is a sink, or if both tokens are members of one centroid (algorithm 1).

    Every centroid takes the `tokens_per_group` tokens nearest to it (w; default n / k), so a token may have several
    centroids, or none. That choice compares a token with later ones: NOT causal, although no query sees a later key.
    After a training step every centroid moves to the mean of the tokens nearest to it, mu <- decay * mu + (1 - decay) *
    mean.
    Differences from the original:
    - There queries are layer-normed, and in a causal model keys are tied to them, k <- q. A pretrained model has
      separate keys, and its queries are rotated by position, so the layer-normed (no scale, no bias) hidden state that
      enters the layer is routed here, once for a token as query and as key, and for all heads.
    - There some heads are local and others routed. Here every head sees the union.
    - The centroids' update divides the sum over members by their number, and an empty centroid stays.
    - `sinks` is 0 there.
    """

    causal = False

    def __init__(self, shape: LayerShape, options: RoutingTransformerOptions) -> None:
        super().__init__(shape, options.window, options.sinks)
        self.groups = options.groups
        self.tokens_per_group = options.tokens_per_group
        self.centroid_decay = options.centroid_decay
        self.centroids: Tensor
        self.register_buffer("centroids", F.normalize(torch.randn(self.groups, shape.width), dim=-1))
        self.statistics = torch.zeros(self.groups, shape.width + 1)  # sums of the nearest tokens, and their number

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        with torch.autocast(h.device.type, enabled=False):
            precision = torch.promote_types(h.dtype, torch.float32)
            tokens = F.normalize(F.layer_norm(h.detach().to(precision), h.shape[-1:]), dim=-1)
            scores = tokens @ F.normalize(self.centroids.to(precision), dim=-1).T  # (B, T, K)
            if self.training and torch.is_grad_enabled():
                real = slice(None) if sequence.valid is None else sequence.valid
                nearest = scores[real].flatten(0, -2).argmax(-1)
                # gradient checkpointing adds each batch twice, which does not change the means
                self.statistics += sum_groups(tokens[real].flatten(0, -2), nearest, self.groups)
        members = nearest_tokens(scores, sequence, self.tokens_per_group)
        return Selection(query_groups=members, key_groups=members)

    @torch.no_grad()
    def update_statistics(self) -> None:
        before = self.centroids.to(self.statistics.dtype)
        self.centroids.copy_(move_to_means(before, self.statistics, self.centroid_decay))
        self.statistics.zero_()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        # the sparse path needs every token in a group
        self.path = "masked"

        def keep_mask(rows: slice) -> Tensor:
            local = local_mask(sequence, rows, rows.stop, self.window, self.sinks)
            return (local | group_mask(selection, rows, rows.stop))[:, None]

        return attend_masked(q, k, v, sequence, args, keep_mask)


def nearest_tokens(scores: Tensor, sequence: Sequence, count: int | None) -> Tensor:
    """Return `(B, T, K)` bool, the `count` tokens of each sequence with the largest scores, ties to the first.

    None counts the sequence's length over K, rounded up. Padding is never a member.
    """
    start, valid = sequence.start, sequence.valid_or_all()
    length = torch.zeros_like(start).scatter_add(1, start, valid.long()).gather(1, start)
    order = scores.masked_fill(~valid[..., None], float("-inf")).argsort(dim=1, descending=True, stable=True)
    starts = start[..., None].expand_as(order).gather(1, order)
    order = order.gather(1, starts.argsort(dim=1, stable=True))  # (B, T, K), sequence by sequence
    # tokens in the sequences before
    earlier = torch.searchsorted(start.sort(1).values, start.contiguous())
    index = torch.arange(order.shape[1], device=order.device)[:, None].expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, index) - earlier[..., None]
    limit = -(-length // scores.shape[-1]) if count is None else torch.full_like(length, count)
    return (rank < limit[..., None]) & valid[..., None]
