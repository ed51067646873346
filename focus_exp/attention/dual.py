"""Focus with two encoders: one says which group a token is in as a key, the other which groups it reads as a query."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from focus_exp.attention.dual_options import FULL, WINDOW, EncoderTraining, FocusDualOptions
from focus_exp.attention.method import AttentionMethod, LayerShape, ste_slope
from focus_exp.attention.routing import cast, own_precision
from focus_exp.attention.selection import AttentionArgs, PairCounts, Selection, Sequence, top_k_groups

UNSET = torch.finfo(torch.float32).max  # a threshold before any fit: as many groups as were asked for are read


class Encoder(nn.Module):
    """A classifier of tokens into groups for each head; with a rank its heads see a shared projection of the token.

    Holds n*K*(E + 1) trained numbers, or E*R + n*K*(R + 1).
    """

    def __init__(self, width: int, groups: int, heads: int, rank: int) -> None:
        super().__init__()
        size = rank or width
        self.projection = nn.Parameter(torch.randn(width, rank) * width**-0.5) if rank else None
        self.weight = nn.Parameter(torch.randn(heads, groups, size) * size**-0.5)
        self.bias = nn.Parameter(torch.zeros(heads, groups))

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[B, n, T, K]` of tokens `[B, T, E]`."""
        x = x if self.projection is None else x @ self.projection
        logits = x @ self.weight.flatten(0, 1).T + self.bias.flatten()
        return logits.unflatten(-1, self.bias.shape).transpose(1, 2)


class FocusDual(AttentionMethod, name="focus_dual", options=FocusDualOptions):
    """A pair is kept if i - j <= window, if j is a sink, or if j's group is among those that i reads.

    A key is in the group of its largest logit, a query reads those of its `top_k` largest; both depend on the token's
    hidden state alone, so that it is causal. Whoever fits the encoders balances the groups by the keys' bias. Groups
    are hard in training too, with the straight-through gradient of a gate on sum_g P(i reads g) P(j in g).

    Once a fit has set the `thresholds`, and unless `counts` is head, a query reads the groups whose promise passes the
    one at which `top_k` are read on average: some need many groups and most hardly any. The promise is log P(i reads g)
    plus the log of what the distant keys of i are worth together, which is linear in the token; where `counts` is pair,
    less the log of their number, as groups are the larger the more text there is before i.

    `budget` `[n]` is the layer's own number of groups that a query of each head reads, in place of `top_k`. Where it is
    none or all for all heads there is nothing to train: the layer has its window alone, or the base's own attention.
    """

    fitting = EncoderTraining

    def __init__(self, shape: LayerShape, options: FocusDualOptions) -> None:
        super().__init__(shape, options.window, options.sinks)
        self.groups = options.groups
        self.top_k = options.top_k
        self.gate_steepness = options.gate_steepness
        self.heads = shape.kv_heads or shape.heads if options.heads == "kv" else 1
        self.budget: list[int] | None = None
        self.counts = options.counts
        self.mean: Tensor
        self.scale: Tensor
        self.worth: Tensor
        self.worth_bias: Tensor
        self.thresholds: Tensor
        sizes = (shape.width, options.groups, self.heads, options.rank)
        self.key_encoder = Encoder(*sizes)
        if options.encoders > 1:
            self.query_encoder = Encoder(*sizes)
        self.register_buffer("mean", torch.zeros(shape.width))
        self.register_buffer("scale", torch.ones(shape.width))
        # of a query's distant keys together: log of what they are worth, to each head
        self.register_buffer("worth", torch.zeros(self.heads, shape.width))
        self.register_buffer("worth_bias", torch.zeros(self.heads))
        # what a group has to promise for queries to read k = 1 to K - 1 on average
        self.register_buffer("thresholds", torch.full((self.heads, options.groups - 1), UNSET))
        if options.groups_per_layer is not None:
            self.allot(self.part_of(options.groups_per_layer))

    def part_of(self, budget: list[Any]) -> list[int]:
        """How many groups a query of each head reads `[n]`, as `budget` says of this layer.

        ValueError where it does not, and where groups are to be told by encoders that were dropped.
        """
        layer = self.shape.index
        if layer >= len(budget):
            raise ValueError(f"budget has {len(budget)} entries, none for layer {layer}; give one for each layer")
        entry = {FULL: self.groups, WINDOW: 0}.get(str(budget[layer]), budget[layer])
        part = entry if isinstance(entry, list) else [entry] * self.heads
        if len(part) != self.heads:
            raise ValueError(f"budget holds {entry} for layer {layer}, which has {self.heads} heads with groups")
        if chooses(part, self.groups) and not hasattr(self, "mean"):
            raise ValueError(f"layer {layer} has no encoders any more, so that it can only be full or window")
        return part

    def allot(self, part: list[int]) -> None:
        """Let a query of each head read so many groups from here on; encoders without a use are dropped for good."""
        self.budget = part
        if not self.routes:
            for name in {*dict(self.named_children()), *dict(self.named_buffers(recurse=False))}:
                delattr(self, name)

    @property
    def asking(self) -> nn.Module:
        """The encoder of queries."""
        return self.query_encoder if hasattr(self, "query_encoder") else self.key_encoder

    @property
    def reach(self) -> list[int]:
        """How many groups a query reads, by head `[n]`."""
        return self.budget or [self.top_k] * self.heads

    @property
    def routes(self) -> bool:
        """Whether the pairs depend on the tokens."""
        return chooses(self.reach, self.groups)

    def promises(self, x: Tensor) -> Tensor:
        """How much queries expect of each group `[B, n, T, K]`, from standardised tokens `[B, T, E]`."""
        worth = x @ self.worth.T + self.worth_bias
        return self.asking(x).log_softmax(-1) + worth.transpose(1, 2)[..., None]

    def weighed(self, counts: str, promises: Tensor, position: Tensor) -> Tensor:
        """Promises `[B, n, T, K]` to queries at `position` `[B, T]` as `counts` compares them with thresholds."""
        if counts != "pair":
            return promises
        distant = (position - self.window - self.sinks).clamp(min=0)
        return promises - distant.to(promises.dtype).log1p()[:, None, :, None]

    def logits(self, h: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Promises to queries and logits of keys `[B, n, T, K]`, from hidden states `[B, T, E]` and the tokens' places
        `[B, T]` in their texts, in the encoders' precision."""
        with own_precision(h):
            found = []
            for part in cast(h, self.mean.dtype):
                x = (part - self.mean) / self.scale
                found.append((self.promises(x), self.key_encoder(x)))
            queries, keys = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
            return self.weighed(self.counts, queries, position), keys

    def read_by(self, promises: Tensor) -> Tensor:
        """Which groups queries read `[B, n, T, K]` bool, by their promises."""
        found = []
        for of_head, thresholds, k in zip(promises.unbind(1), self.thresholds, self.reach, strict=True):
            read = top_k_groups(of_head, k)
            if self.counts != "head" and 0 < k < self.groups:
                least = thresholds[k - 1]
                read = torch.where(least == UNSET, read, of_head > least)
            found.append(read)
        return torch.stack(found, 1)

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        reach = self.reach
        if not self.routes:
            return Selection(keeps_all=reach[0] > 0)
        position = torch.arange(h.shape[1], device=h.device) - sequence.start
        queries, keys = self.logits(h, position)
        return Selection(
            assignment=queries.softmax(-1),
            key_assignment=keys.softmax(-1),
            query_groups=self.read_by(queries),
            key_groups=top_k_groups(keys, 1),
            most=(max(reach) if self.counts == "head" else self.groups, 1),
        )

    def keeps_all(self) -> bool:
        return set(self.reach) == {self.groups}

    @torch.no_grad()
    def count_pairs(self, selection: Selection, sequence: Sequence) -> PairCounts:
        """For each head with groups of its own, also where none has any: so layers of every kind weigh the same."""
        counts = super().count_pairs(selection, sequence)
        times = self.heads if selection.query_groups is None else 1
        return PairCounts(*(times * count for count in (counts.total, counts.distant, counts.distant_kept)))

    def groups_of_keys(self) -> tuple[object, ...]:
        return (self.serial, self.routes)

    def refuses_cache(self) -> None:
        return None

    def complete_args(self, args: AttentionArgs, selection: Selection) -> AttentionArgs:
        return replace(super().complete_args(args, selection), ste_slope=ste_slope(selection, self.gate_steepness))


def chooses(reach: list[int], groups: int) -> bool:
    """Whether the pairs of a layer depend on its tokens: not where every head reads none of the groups, or all."""
    return set(reach) not in ({0}, {groups})
