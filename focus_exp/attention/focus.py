"""Focus: a router per layer, soft gates while it is trained, hard groups when it is used."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from focus_exp.attention.focus_options import FocusOptions, RouterTraining
from focus_exp.attention.method import AttentionMethod, LayerShape, ste_slope
from focus_exp.attention.mitigations import balance_loss, entropy_loss
from focus_exp.attention.recompute import Forwards, in_backward
from focus_exp.attention.routing import Router, RouterOutput, balance_potential, sinkhorn
from focus_exp.attention.selection import AttentionArgs, PairCounts, Selection, Sequence, count_pairs, keeps_all, select


class Focus(AttentionMethod, name="focus", options=FocusOptions):
    """Learned grouping (paper section 2). Assignments:

    balanced: g = softmax(S / tau + b); in training mode b balances each batch exactly, and where gradients are
        enabled its running average is updated; in evaluation mode the average is used, so a token's groups depend on
        the token alone.
    sinkhorn: the paper's, over the whole sequence: not causal.
    softmax: g = softmax(S / tau), nothing balances it.

    `train_with` "soft" gates all pairs while training; "hard" computes the hard groups' pairs alone, with a
    straight-through gradient to the router (see `GateGradient`), and costs in training what it costs in use.

    The last four options are those that the paper tried against dominance. Whoever trains with them gathers `losses`
    in the forward pass (`auxiliary_losses` does), and moves the centroids between steps (`CentroidUpdates` does).
    """

    fitting = RouterTraining

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
        self.forwards = Forwards()
        self.balance_loss = options.balance_loss
        self.entropy_loss = options.entropy_loss
        self.detach_inputs = options.detach_inputs
        self.losses: list[Tensor] | None = None  # of the forward passes, while somebody gathers them
        self.projected: list[Tensor] | None = None  # tokens `[N, R]`, likewise

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return self.assignment != "sinkhorn"

    def assign(self, h: Tensor, sequence: Sequence) -> Tensor:
        """Distribution over groups `[B, T, K]`, float32 at least."""
        routed: RouterOutput = self.router(h.detach() if self.detach_inputs else h)
        assignment = self.distribute(routed.scores / self.temperature, routed.potential, sequence)
        if self.training:
            self.gather(routed.tokens, assignment, sequence)
        return assignment

    def distribute(self, logits: Tensor, average: Tensor, sequence: Sequence) -> Tensor:
        """Assign tokens with the scores `logits` `(B, T, K)`; `average` `(K,)` is the running balance potential."""
        if self.assignment == "sinkhorn":
            return sinkhorn(logits, self.sinkhorn_iterations, sequence.valid)
        if self.assignment == "softmax":
            return logits.softmax(-1)
        if not self.training:
            return (logits + average).softmax(-1)
        valid = sequence.valid
        potential = self.forwards.value(
            logits, valid, lambda: self.balance(logits.detach(), average, valid), partial(self.move, average)
        )
        return (logits + potential).softmax(-1)

    def gather(self, tokens: Tensor, assignment: Tensor, sequence: Sequence) -> None:
        """Keep what the options against dominance want of a training pass, where somebody asked for it."""
        real = slice(None) if sequence.valid is None else sequence.valid
        if self.balance_loss or self.entropy_loss:
            # when gradient checkpointing repeats the pass, too: it wants the same operations again
            g = assignment[real].flatten(0, -2)
            loss = self.balance_loss * balance_loss(g) + self.entropy_loss * entropy_loss(g)
            if self.losses is not None:
                self.losses.append(loss)
        if self.projected is not None and not in_backward():
            self.projected.append(tokens.detach()[real].flatten(0, -2))

    def balance(self, logits: Tensor, average: Tensor, valid: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Return the potential `(K,)` that balances this batch, and those of all batches of the step."""
        batches, own = self.batches(logits, valid)
        average, potentials = average.clone(), []
        for batch, mask in batches:
            potentials.append(balance_potential(batch, average, self.sinkhorn_iterations, mask))
            self.move(average, potentials[-1:])
        return potentials[own], potentials

    def move(self, average: Tensor, potentials: list[Tensor]) -> None:
        """Move the running average in place towards each batch's potential."""
        for potential in potentials:
            average.lerp_(potential, 1 - self.balance_momentum)

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        assignment = self.assign(h, sequence)
        hard = self.train_with == "hard" if self.training else self.hard
        return select(assignment, self.top_k, self.pair_rule) if hard else Selection(assignment)

    def complete_args(self, args: AttentionArgs, selection: Selection) -> AttentionArgs:
        return replace(
            super().complete_args(args, selection), gate=self.gate, gate_steepness=self.gate_steepness,
            gate_threshold=self.gate_threshold, ste_slope=ste_slope(selection, self.gate_steepness),
        )  # fmt: skip

    def keeps_all(self) -> bool:
        return self.hard and not self.training and keeps_all(self.groups, self.top_k, self.pair_rule)

    def groups_of_keys(self) -> tuple[object, ...]:
        # a key is in its first group, or under "share" in as many as a query
        return (self.serial, self.pair_rule, self.top_k if self.pair_rule == "share" else 1)

    def refuses_cache(self) -> str | None:
        if not self.causal:
            return "Focus with assignment sinkhorn: a token's groups depend on later tokens; use assignment balanced"
        if self.training:
            does = "assign groups by the whole batch" if self.train_with == "hard" else "put gates on every token"
            return f"routers in training mode, which {does}; call model.eval()"
        if not self.hard:
            return "soft gates: every token would be read; choose hard groups with set_routing(model, hard=True)"
        return None

    @torch.no_grad()
    def count_pairs(self, selection: Selection, sequence: Sequence) -> PairCounts:
        """Soft gates remove no pair: eq. 2 weighs them all."""
        return count_pairs(selection if selection.query_groups is not None else None, sequence, self.window, self.sinks)
