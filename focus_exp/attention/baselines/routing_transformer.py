"""Routing Transformer: online k-means over tokens (Roy, Saffar, Vaswani, Grangier 2021, arXiv 2003.05997)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.baselines.blocks import kept_attention
from focus_exp.attention.method import AttentionMethod, LayerShape
from focus_exp.attention.mitigations import group_means, move_to_means
from focus_exp.attention.options import NearOptions, option
from focus_exp.attention.recompute import Forwards
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, always_visible, same_group


@dataclass
class RoutingTransformerOptions(NearOptions):
    groups: int = option(4, least=1)
    tokens_per_group: int | None = option(None, least=1)
    centroid_decay: float = option(0.999, least=0, most=1)


class RoutingTransformer(AttentionMethod, name="routing_transformer", options=RoutingTransformerOptions):
    """A pair is kept if i - j <= window, if j is a sink, or if both tokens are members of one centroid (algorithm 1).

    Every centroid takes the `tokens_per_group` tokens nearest to it (w; default n / k), so a token may have several
    centroids, or none. That choice compares a token with later ones: NOT causal, although no query sees a later key.
    While training every centroid moves to the mean of the tokens nearest to it, mu <- decay * mu + (1 - decay) * mean.
    Differs from the original in this:
    - There queries are layer-normed, and in a causal model keys are tied to them, k <- q. A pretrained model has keys
      of its own and its queries are rotated by position, so what is routed here is the layer-normed (no scale, no
      bias) hidden state that enters the layer, once for a token as query and as key, and for all heads.
    - There some heads are local and others routed. Here every head sees the union.
    - The sum over members in the centroids' update is divided by their number, and a centroid without any stays.
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
        self.forwards = Forwards()

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        with torch.autocast(h.device.type, enabled=False):
            precision = torch.promote_types(h.dtype, torch.float32)
            tokens = F.normalize(F.layer_norm(h.detach().to(precision), h.shape[-1:]), dim=-1)
            centroids = self.centroids.to(precision)
            if self.training:
                valid = sequence.valid
                centroids = self.forwards.value(tokens, valid, lambda: self.follow(tokens, valid), self.move)
            scores = tokens @ F.normalize(centroids, dim=-1).T  # [B, T, K]
        members = nearest_tokens(scores, sequence, self.tokens_per_group)
        return Selection(query_groups=members, key_groups=members)

    def follow(self, tokens: Tensor, valid: Tensor | None) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the centroids `(K, E)`, and for each batch of the step the means of the tokens nearest to them."""
        batches, own = self.batches(tokens, valid)
        before, means, centroids = [], [], self.centroids
        for batch, mask in batches:
            rows = batch.flatten(0, -2) if mask is None else batch[mask]
            before.append(centroids.to(rows.dtype, copy=True))
            nearest = (rows @ F.normalize(before[-1], dim=-1).T).argmax(-1)
            means.append(group_means(rows, nearest, self.groups))
            centroids = move_to_means(before[-1], *means[-1], self.centroid_decay).to(self.centroids.dtype)
        return before[own], means

    def move(self, means: list[tuple[Tensor, Tensor]]) -> None:
        """Move every centroid towards the mean of the tokens that were nearest to it, batch by batch."""
        for mean, sizes in means:
            self.centroids.copy_(move_to_means(self.centroids.to(mean.dtype), mean, sizes, self.centroid_decay))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        # the sparse path wants every token in a group
        self.path = "masked"

        def keeps(rows: slice) -> Tensor:
            near = always_visible(sequence, rows, rows.stop, self.window, self.sinks)
            return (near | same_group(selection, rows, rows.stop))[:, None]

        return kept_attention(q, k, v, sequence, args, keeps)


def nearest_tokens(scores: Tensor, sequence: Sequence, count: int | None) -> Tensor:
    """Membership `[B, T, K]` bool: the `count` tokens of each sequence with the largest scores, ties to the first.

    Without `count` its share: the length of the sequence over K, rounded up. Padding is never a member.
    """
    start = sequence.start
    valid = torch.ones_like(start, dtype=torch.bool) if sequence.valid is None else sequence.valid
    length = torch.zeros_like(start).scatter_add(1, start, valid.long()).gather(1, start)
    order = scores.masked_fill(~valid[..., None], float("-inf")).argsort(dim=1, descending=True, stable=True)
    own = start[..., None].expand_as(order).gather(1, order)
    order = order.gather(1, own.argsort(dim=1, stable=True))  # [B, T, K], sequence by sequence
    # how many tokens stand in the sequences before
    earlier = torch.searchsorted(start.sort(1).values, start.contiguous())
    place = torch.arange(order.shape[1], device=order.device)[:, None].expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, place) - earlier[..., None]
    most = -(-length // scores.shape[-1]) if count is None else torch.full_like(length, count)
    return (rank < most[..., None]) & valid[..., None]
