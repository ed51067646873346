"""Focus with two encoders: one groups tokens as keys, the other selects the groups that a token reads as a query."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from focus_exp.attention.base import AttentionMethod, LayerShape, ste_slope
from focus_exp.attention.kernels import cpu_sparse, gpu_sparse
from focus_exp.attention.kernels.contract import EncoderWeights
from focus_exp.attention.options import FULL, WINDOW, FocusDualOptions
from focus_exp.attention.router import cast_chunks, disable_autocast
from focus_exp.attention.selection import AttentionArgs, PairCounts, Selection, Sequence, distant_keys, top_k_groups

KERNELS = {"cpu": cpu_sparse, "cuda": gpu_sparse}
UNSET = torch.finfo(torch.float32).max  # a threshold before any fit: a query reads its top_k groups


class Encoder(nn.Module):
    """Classify tokens into groups for each of n heads, with n*K*(E + 1) trainable parameters."""

    def __init__(self, width: int, groups: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(heads, groups, width) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(heads, groups))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(B, n, T, K)` of tokens `(B, T, E)`."""
        logits = x @ self.weight.flatten(0, 1).T + self.bias.flatten()
        return logits.unflatten(-1, self.bias.shape).transpose(1, 2)


class FocusDual(AttentionMethod, name="focus_dual", options=FocusDualOptions):
    """Keep a pair if i - j <= window, if j is a sink, or if j's group is among those that i reads.

    A key is in the group of its largest logit; a query reads the groups of its `top_k` largest. Both depend on the
    token's hidden state alone, so the method is causal. The keys' bias balances the groups. Routing is hard in training
    too, with the straight-through gradient of a gate on sum_g P(i reads g) P(j in g).

    Once fitted, and unless `counts` is "head", a query reads the groups whose score passes the threshold at which
    `top_k` are read on average: some queries need many groups and most hardly any. The score of a group is
    log P(i reads g) plus the log importance of the distant keys of i, which is linear in the token. With `counts`
    "pair" it is divided by the number of distant keys, since groups grow with the context.

    `budget` `(n,)` replaces `top_k` by the layer's own number of groups for each head. Where it is 0 or K for all heads
    nothing is trained: the layer has its window alone, or the base model's attention.
    """

    is_fitted = True

    def __init__(self, shape: LayerShape, options: FocusDualOptions) -> None:
        super().__init__(shape, options.window, options.sinks)
        self.groups = options.groups
        self.top_k = options.top_k
        self.gate_steepness = options.gate_steepness
        self.heads = shape.kv_heads or shape.heads if options.heads == "kv" else 1
        self.budget: list[int] | None = None
        self.counts = options.counts
        self.folded: tuple[Any, EncoderWeights] | None = None
        self.mean: Tensor
        self.scale: Tensor
        self.worth: Tensor
        self.worth_bias: Tensor
        self.thresholds: Tensor
        sizes = (shape.width, options.groups, self.heads)
        self.key_encoder = Encoder(*sizes)
        if options.encoders > 1:
            self.query_encoder = Encoder(*sizes)
        self.register_buffer("mean", torch.zeros(shape.width))
        self.register_buffer("scale", torch.ones(shape.width))
        # log importance of a query's distant keys to each head; the names are those of saved adapters
        self.register_buffer("worth", torch.zeros(self.heads, shape.width))
        self.register_buffer("worth_bias", torch.zeros(self.heads))
        # scores that a group has to pass so that queries read k = 1 to K - 1 groups on average
        self.register_buffer("thresholds", torch.full((self.heads, options.groups - 1), UNSET))
        if options.groups_per_layer is not None:
            self.set_budget(self.layer_budget(options.groups_per_layer))

    def layer_budget(self, budget: list[Any]) -> list[int]:
        """Return this layer's entry of `budget` as the number of groups per head `(n,)`.

        Raises:
            ValueError: there is no entry, or it needs encoders that were dropped.
        """
        layer = self.shape.index
        if layer >= len(budget):
            raise ValueError(f"groups_per_layer must have an entry for layer {layer} (got {len(budget)} entries)")
        entry = {FULL: self.groups, WINDOW: 0}.get(str(budget[layer]), budget[layer])
        per_head = entry if isinstance(entry, list) else [entry] * self.heads
        if len(per_head) != self.heads:
            raise ValueError(f"groups_per_layer of layer {layer} must be a list of {self.heads} numbers (got {entry})")
        if depends_on_tokens(per_head, self.groups) and not hasattr(self, "mean"):
            raise ValueError(f"groups_per_layer of layer {layer} without encoders must be full or window (got {entry})")
        return per_head

    def set_budget(self, per_head: list[int]) -> None:
        """Set the number of groups that a query of each head reads; unused encoders are dropped for good."""
        self.budget = per_head
        if not self.is_routed:
            self.is_fitted = False
            for name in {*dict(self.named_children()), *dict(self.named_buffers(recurse=False))}:
                delattr(self, name)

    @property
    def q_encoder(self) -> nn.Module:
        """Encoder of queries, which with `encoders` 1 is the keys'."""
        return self.query_encoder if hasattr(self, "query_encoder") else self.key_encoder

    @property
    def groups_per_head(self) -> list[int]:
        """Number of groups that a query reads, by head `(n,)`."""
        return self.budget or [self.top_k] * self.heads

    @property
    def is_routed(self) -> bool:
        """False where the kept pairs do not depend on the tokens."""
        return depends_on_tokens(self.groups_per_head, self.groups)

    def group_scores(self, x: Tensor) -> Tensor:
        """Score each group for queries `(B, n, T, K)`, from standardized tokens `(B, T, E)`."""
        log_importance = x @ self.worth.T + self.worth_bias
        return self.q_encoder(x).log_softmax(-1) + log_importance.transpose(1, 2)[..., None]

    def normalize_lengths(self, counts: str, scores: Tensor, position: Tensor) -> Tensor:
        """Normalize scores `(B, n, T, K)` of queries at `position` `(B, T)` as `counts` compares them."""
        if counts != "pair":
            return scores
        count = distant_keys(position, self.window + self.sinks).to(self.mean.dtype)
        return scores - count.log1p()[:, None, :, None]

    def logits(self, h: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return group scores of queries and logits of keys `(B, n, T, K)`, in the encoders' precision.

        Args:
            h: `(B, T, E)`, hidden states.
            position: `(B, T)`, of the tokens in their sequences.
        """
        with disable_autocast(h):
            chunks = []
            for chunk in cast_chunks(h, self.mean.dtype):
                x = (chunk - self.mean) / self.scale
                chunks.append((self.group_scores(x), self.key_encoder(x)))
            queries, keys = (torch.cat(parts, 2) for parts in zip(*chunks, strict=True))
            return self.normalize_lengths(self.counts, queries, position), keys

    def select_query_groups(self, scores: Tensor) -> Tensor:
        """Return `(B, n, T, K)` bool, the groups that queries with these scores read."""
        selected = []
        for head_scores, thresholds, k in zip(scores.unbind(1), self.thresholds, self.groups_per_head, strict=True):
            groups = top_k_groups(head_scores, k)
            if self.counts != "head" and 0 < k < self.groups:
                threshold = thresholds[k - 1]
                groups = torch.where(threshold == UNSET, groups, head_scores > threshold)
            selected.append(groups)
        return torch.stack(selected, 1)

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        if not self.is_routed:
            return Selection(is_dense=self.groups_per_head[0] > 0)
        if self.can_route_by_kernel(h):
            return self.route_by_kernel(h, sequence)
        position = torch.arange(h.shape[1], device=h.device) - sequence.start
        queries, keys = self.logits(h, position)
        return Selection(
            assignment=queries.softmax(-1),
            key_assignment=keys.softmax(-1),
            query_groups=self.select_query_groups(queries),
            key_groups=top_k_groups(keys, 1),
            max_groups=self.max_groups,
        )

    @property
    def max_groups(self) -> tuple[int, int]:
        """Upper bounds on a token's groups as query and as key."""
        return max(self.groups_per_head) if self.counts == "head" else self.groups, 1

    def can_route_by_kernel(self, h: Tensor) -> bool:
        """Tell whether a kernel serves: hard routing without gradients or soft assignments."""
        encoders, kernel = (self.key_encoder, self.q_encoder), KERNELS.get(h.device.type)
        if kernel is None or h.dtype not in kernel.DTYPES or self.groups > cpu_sparse.MAX_GROUPS or self.observers:
            return False
        if torch.is_grad_enabled() or not all(type(x) is Encoder for x in encoders):
            return False
        tensors: list[Any] = [x for encoder in encoders for x in (encoder.weight, encoder.bias)]
        if any(type(x) is not nn.Parameter or x.dtype != torch.float32 or x.device != h.device for x in tensors):
            return False
        return kernel.unavailable_reason() is None

    def route_by_kernel(self, h: Tensor, sequence: Sequence) -> Selection:
        """Return hard routing as `route` does, in one kernel call."""
        local = self.window + self.sinks
        kernel = KERNELS[h.device.type]
        groups = kernel.route(h, self.encoder_weights(), sequence.start, local, self.counts == "pair")
        return Selection(query_groups=groups[0], key_groups=groups[1], max_groups=self.max_groups)

    def encoder_weights(self) -> EncoderWeights:
        """Return the encoders with the standardization of tokens folded in, computed again when a tensor changes.

        Under torch.compile they are part of the graph.
        """
        if torch.compiler.is_compiling():
            return self.fold_encoders()
        parts = (self, self.key_encoder, self.q_encoder)  # which is quicker than self.parameters(), once a token
        tensors = [x for part in parts for x in (*part._parameters.values(), *part._buffers.values()) if x is not None]
        versions = [(x.data_ptr(), None if x.is_inference() else x._version) for x in tensors]
        state = (versions, self.groups_per_head, self.counts)
        if self.folded is None or self.folded[0] != state or any(x.is_inference() for x in tensors):
            self.folded = (state, self.fold_encoders())
        return self.folded[1]

    def fold_encoders(self) -> EncoderWeights:
        pair: list[Any] = [self.q_encoder, self.key_encoder]
        encoders = torch.stack([x.weight for x in pair], 1) / self.scale  # (n, 2, K, E)
        worth = self.worth / self.scale
        k = torch.tensor(self.groups_per_head, device=worth.device)
        is_limited = (k > 0) & (k < self.groups) & (self.counts != "head")
        limits = self.thresholds.gather(1, (k - 1).clamp(0, self.groups - 2)[:, None])[:, 0]
        weight = torch.cat([encoders.flatten(0, 2), worth]).T.contiguous()
        return EncoderWeights(
            weight=weight,
            packed=KERNELS[weight.device.type].pack_weights(weight),
            bias=torch.stack([x.bias for x in pair], 1) - encoders @ self.mean,
            worth_bias=self.worth_bias - worth @ self.mean,
            limits=torch.where(is_limited, limits, UNSET),
            top_k=k.int(),
        )

    def complete_args(self, args: AttentionArgs, selection: Selection) -> AttentionArgs:
        return replace(super().complete_args(args, selection), ste_slope=ste_slope(selection, self.gate_steepness))

    def is_dense(self) -> bool:
        return set(self.groups_per_head) == {self.groups}

    @torch.no_grad()
    def count_pairs(self, selection: Selection, sequence: Sequence) -> PairCounts:
        """Count pairs once per head with its own groups, also where none has any, so that all layers weigh the same."""
        counts = super().count_pairs(selection, sequence)
        n = self.heads if selection.query_groups is None else 1
        return PairCounts(n * counts.total, n * counts.distant, n * counts.distant_kept)

    def kv_cache_key(self) -> tuple[object, ...]:
        return (self.serial, self.is_routed)

    def kv_cache_unsupported_reason(self) -> None:
        return None


def depends_on_tokens(groups_per_head: list[int], groups: int) -> bool:
    """Tell whether the kept pairs depend on the tokens: not where every head reads no group, or every head all."""
    return set(groups_per_head) not in ({0}, {groups})
