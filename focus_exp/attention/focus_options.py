"""What Focus may be told; apart from `Focus` itself, because every configuration reads it and few wait for torch."""

from __future__ import annotations

from dataclasses import dataclass

from focus_exp.attention.options import GroupOptions, Options, option


@dataclass
class FocusOptions(GroupOptions):
    """Symbols are the paper's; the last four are what it tried against group dominance (T8)."""

    routing_dim: int = option(16, "d_g, numbers that a token is compared by", least=1)
    temperature: float = option(0.1, "tau, of the assignment's softmax", above=0)
    normalize: bool = option(True, "compare tokens and centroids by cosine")
    assignment: str = option(
        "balanced", "what makes groups even; sinkhorn reads the future", choices=("balanced", "sinkhorn", "softmax")
    )
    sinkhorn_iterations: int = option(10, "N, rounds of normalisation that balance a batch", least=1)
    balance_momentum: float = option(0.9, "share of its past in the running balance, per batch", least=0, most=1)
    gate: str = option("log", "what soft gates act on: scores, or weights (eq. 2)", choices=("log", "multiplicative"))
    gate_steepness: float = option(10.0, "lambda, of the soft gate", above=0)
    gate_threshold: float = option(0.5, "affinity at which the gate is half open", least=0, most=1)
    train_with: str = option(
        "soft", "soft gates on all pairs, or the hard groups' pairs alone", choices=("soft", "hard")
    )
    balance_loss: float = option(0.0, "weight of the loss that is least where groups have equal mass", least=0)
    entropy_loss: float = option(0.0, "weight of the mean entropy of a token's assignment", least=0)
    detach_inputs: bool = option(False, "no gradient from the router into the hidden states")
    centroid_update: str = option(
        "gradient",
        "what moves centroids: the gradient, an average of their tokens, or k-means now and then",
        choices=("gradient", "ema", "recluster"),
    )

    def refuse(self) -> str | None:
        if self.gate == "multiplicative" and self.gate_threshold != 0:
            return f"gate_threshold={self.gate_threshold} goes with gate=log alone; set it to 0, or use gate=log"
        return None


@dataclass
class RouterTraining(Options):
    """How a router is trained, in any regime that trains it; the method itself takes none of it."""

    gate_steepness_start: float | None = option(
        None, "gate_steepness at a phase's first step, from where it grows linearly", least=0
    )
    warm_start_blocks: int = option(0, "blocks of text whose full attention the routers are fitted to first", least=0)
    warm_start_steps: int = option(100, "steps of that fit", least=1)
    calibration_blocks: int = option(0, "blocks of text on which the balance is set at the end", least=0)
    centroid_decay: float = option(0.999, "of centroid_update=ema, per step", least=0, most=1)
    recluster_every: int = option(100, "steps between two k-means of centroid_update=recluster", least=1)
