"""What Focus may be told; apart from `Focus` itself, because every configuration reads it and few wait for torch."""

from __future__ import annotations

from dataclasses import dataclass

from focus_exp.attention.options import GroupOptions, Options, option


@dataclass
class FocusOptions(GroupOptions):
    """Symbols are the paper's; the last four are what it tried against group dominance (T8)."""

    routing_dim: int = option(16, least=1)
    temperature: float = option(0.1, above=0)
    normalize: bool = option(True)
    assignment: str = option("balanced", choices=("balanced", "sinkhorn", "softmax"))
    sinkhorn_iterations: int = option(10, least=1)
    balance_momentum: float = option(0.9, least=0, most=1)
    gate: str = option("log", choices=("log", "multiplicative"))
    gate_steepness: float = option(10.0, above=0)
    gate_threshold: float = option(0.5, least=0, most=1)
    train_with: str = option("soft", choices=("soft", "hard"))
    balance_loss: float = option(0.0, least=0)
    entropy_loss: float = option(0.0, least=0)
    detach_inputs: bool = option(False)
    centroid_update: str = option("gradient", choices=("gradient", "ema", "recluster"))

    def refuse(self) -> str | None:
        if self.gate == "multiplicative" and self.gate_threshold != 0:
            return f"gate_threshold={self.gate_threshold} goes with gate=log alone; set it to 0, or use gate=log"
        return None


@dataclass
class RouterTraining(Options):
    """How a router is trained, in any recipe that trains it; the method itself takes none of it."""

    gate_steepness_start: float | None = option(None, least=0)
    warm_start_sequences: int = option(0, least=0)
    warm_start_steps: int = option(100, least=1)
    balance_sequences: int = option(0, least=0)
    centroid_decay: float = option(0.999, least=0, most=1)
    recluster_every: int = option(100, least=1)
