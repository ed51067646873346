"""Focus: a router per layer, soft routing while it is trained, hard routing when it is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from focus_exp.attention.base import AttentionMethod, LayerShape, ste_slope
from focus_exp.attention.options import FocusOptions
from focus_exp.attention.router import (
    Router,
    RouterOutput,
    balance_loss,
    balance_potential,
    entropy_loss,
    sinkhorn,
)
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, is_dense_rule, select


class Focus(AttentionMethod, name="focus", options=FocusOptions):
    """Learned grouping of tokens (arXiv 2604.03260, section 2).

    Assignments of tokens to groups, from scores S:
        balanced: g = softmax(S / tau + b). While the router is trained b balances each batch exactly; else b is their
            running average, moved once a step by `update_statistics`, so a token's groups depend on the token alone.
        sinkhorn: the paper's, over the whole sequence; not causal.
        softmax: g = softmax(S / tau), without balance.

    `train_with` "soft" gates all pairs in training; "hard" computes the pairs of hard routing alone, with a
    straight-through gradient to the router, at the cost of inference. A router is trained in training mode, if its
    parameters require gradients: a frozen one routes as in eval mode.

    The last four options are the paper's remedies against router collapse. A training loop collects `losses` in the
    forward pass (`auxiliary_losses`) and moves the centroids between steps (`CentroidUpdates`).
    """

    causal_counterpart: ClassVar[dict[str, Any]] = {"assignment": "balanced"}

    def __init__(self, shape: LayerShape, options: FocusOptions) -> None:
        super().__init__(shape, options.window, options.sinks)
        trained_centroids = options.centroid_update != "ema"
        self.router = Router(
            shape.width, options.groups, options.routing_dim, options.normalize, trained_centroids=trained_centroids
        )
        self.groups = options.groups
        self.temperature = options.temperature
        self.assignment = options.assignment
        self.sinkhorn_iterations = options.sinkhorn_iterations
        self.balance_momentum = options.balance_momentum
        self.gate = options.gate
        self.gate_steepness = options.gate_steepness
        self.gate_threshold = options.gate_threshold
        self.train_with = options.train_with
        self.hard = False
        self.top_k = options.top_k
        self.pair_rule = options.pair_rule
        self.balance_loss = options.balance_loss
        self.entropy_loss = options.entropy_loss
        self.detach_inputs = options.detach_inputs
        self.statistics = torch.zeros(2, options.groups)  # sum of the potentials of batches, and their number

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return self.assignment != "sinkhorn"

    @property
    def is_trained(self) -> bool:
        """Return whether a step may change the router: training mode, and parameters that require gradients."""
        return self.training and any(parameter.requires_grad for parameter in self.router.parameters())

    def assign(self, h: Tensor, sequence: Sequence) -> Tensor:
        """Return the distribution over groups `(B, T, K)`, float32 at least."""
        output: RouterOutput = self.router(h.detach() if self.detach_inputs else h)
        assignment = self.distribute(output.scores / self.temperature, output.potential, sequence)
        if self.is_trained:
            self.collect(output.tokens, assignment, sequence)
        return assignment

    def distribute(self, logits: Tensor, average: Tensor, sequence: Sequence) -> Tensor:
        """Assign tokens with the scores `logits` `(B, T, K)`; `average` `(K,)` is the running balance potential."""
        if self.assignment == "sinkhorn":
            return sinkhorn(logits, self.sinkhorn_iterations, sequence.valid)
        if self.assignment == "softmax":
            return logits.softmax(-1)
        if not self.is_trained:
            return (logits + average).softmax(-1)
        potential = balance_potential(logits.detach(), average, self.sinkhorn_iterations, sequence.valid)
        if torch.is_grad_enabled():
            # gradient checkpointing adds each batch twice, which does not change their mean
            self.statistics += torch.stack([potential, torch.ones_like(potential)])
        return (logits + potential).softmax(-1)

    @torch.no_grad()
    def update_statistics(self) -> None:
        total, count = self.statistics
        momentum = torch.where(count > 0, self.balance_momentum, 1.0)
        self.router.potential.lerp_(total / count.clamp(min=1), 1 - momentum)
        self.statistics.zero_()

    def collect(self, tokens: Tensor, assignment: Tensor, sequence: Sequence) -> None:
        """Append the auxiliary loss and the projected tokens of a training pass, if a training loop collects them."""
        real = slice(None) if sequence.valid is None else sequence.valid
        if self.balance_loss or self.entropy_loss:
            # also when gradient checkpointing repeats the pass, which expects the same operations
            g = assignment[real].flatten(0, -2)
            loss = self.balance_loss * balance_loss(g) + self.entropy_loss * entropy_loss(g)
            if self.losses is not None:
                self.losses.append(loss)
        if self.projected is not None:
            self.projected.append(tokens.detach()[real].flatten(0, -2))

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        assignment = self.assign(h, sequence)
        hard = self.train_with == "hard" if self.is_trained else self.hard
        return select(assignment, self.top_k, self.pair_rule) if hard else Selection(assignment)

    def complete_args(self, args: AttentionArgs, selection: Selection) -> AttentionArgs:
        args, slope = super().complete_args(args, selection), ste_slope(selection, self.gate_steepness)
        gate: dict[str, Any] = {"gate": self.gate, "gate_steepness": self.gate_steepness}
        return replace(args, ste_slope=slope, gate_threshold=self.gate_threshold, **gate)

    def is_dense(self) -> bool:
        return self.hard and not self.is_trained and is_dense_rule(self.groups, self.top_k, self.pair_rule)

    def kv_cache_key(self) -> tuple[object, ...]:
        # a key is in its first group, or under "share" in as many as a query
        return (self.serial, self.pair_rule, self.top_k if self.pair_rule == "share" else 1)

    def kv_cache_unsupported_reason(self) -> str | None:
        if not self.causal:
            return "Focus with assignment=sinkhorn, whose groups depend on later tokens; use assignment=balanced"
        if self.is_trained:
            cause = "assign groups by the whole batch" if self.train_with == "hard" else "gate every token"
            return f"routers in training mode, which {cause}; call model.eval()"
        if not self.hard:
            return "soft routing, which reads every token; use hard routing: set_routing(model, hard=True)"
        return None
