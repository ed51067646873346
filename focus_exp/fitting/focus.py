"""Warm start of the routers from the frozen model's attention, and calibration of their balance.

Warm start fits each layer's router, without passes through the model, to put pairs with distant attention into one
group. Groups have equal mass by construction, which makes this a balanced cut of the attention graph. It takes one
forward pass per sequence and seconds of small matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.dense import scores, weights
from focus_exp.attention.focus import Focus
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, base_mask, local_mask, row_blocks
from focus_exp.fitting.encoders import balancing_bias
from focus_exp.models.methods import (
    attached_methods,
    observe_selections,
    set_routing,
    swap_methods,
    use_causal_counterparts,
)
from focus_exp.progress import ProgressBar
from focus_exp.training.precision import Precision

BATCH = 2
LEARNING_RATE = 0.02
SHARPNESS = (1.0, 2.0, 4.0, 8.0)


class AttentionProbe(AttentionMethod):
    """Full attention that records hidden states `(T, E)` and distant attention `(T, T)`, averaged over heads."""

    def __init__(self, shape: LayerShape, window: int, sinks: int) -> None:
        super().__init__(shape, window, sinks)
        self.hidden: list[Tensor] = []
        self.mass: list[Tensor] = []

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        self.hidden.extend(h.detach().to(torch.bfloat16))
        return Selection()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        batch, length = q.shape[0], q.shape[2]
        mass = torch.zeros(batch, length, length, dtype=torch.bfloat16, device=q.device)
        outputs = []
        for rows in row_blocks(length, 256):
            visible = base_mask(sequence, rows, rows.stop)
            s = scores(q[:, :, rows], k[:, :, : rows.stop], args)
            p = weights(s.masked_fill(~visible[:, None], float("-inf")), args.sink_logits)
            distant = ~local_mask(sequence, rows, rows.stop, self.window, self.sinks)
            mass[:, rows, : rows.stop] = (p.float().mean(1) * distant).to(mass.dtype)
            values = v[:, :, : rows.stop].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
            outputs.append(p.to(v.dtype) @ values)
        self.mass.extend(mass)
        return torch.cat(outputs, dim=2)


def focus_methods(model: PreTrainedModel) -> dict[int, Focus]:
    """Return the attached Focus methods by layer."""
    return {layer: method for layer, method in attached_methods(model).items() if isinstance(method, Focus)}


def warm_start(model: PreTrainedModel, sequences: list[Tensor], steps: int, precision: Precision, seed: int) -> None:
    """Fit every attached router to the model's attention on `sequences`, each `(T,)` token ids."""
    methods = focus_methods(model)
    probes = {i: AttentionProbe(m.shape, m.window, m.sinks) for i, m in methods.items()}
    with torch.no_grad(), swap_methods(model, dict(probes)):
        run_forward(model, sequences, precision, "warm start: recording attention")
    generator = torch.Generator().manual_seed(seed)
    for index, method in ProgressBar(methods.items(), desc="warm start: fitting routers", unit="layer"):
        fit_router(method, probes.pop(index), steps, generator)


def run_forward(model: PreTrainedModel, sequences: list[Tensor], precision: Precision, description: str) -> None:
    with precision.context():
        for tokens in ProgressBar(sequences, desc=description, unit="sequence"):
            model(input_ids=tokens[None].to(model.device), use_cache=False, logits_to_keep=1)


def fit_router(method: Focus, probe: AttentionProbe, steps: int, generator: torch.Generator) -> None:
    """Maximize the fraction of distant attention inside groups, sum_ij mass_ij g_i . g_j / sum_ij mass_ij."""
    parameters = list(method.router.parameters())
    optimizer = torch.optim.Adam([p.requires_grad_(True) for p in parameters], lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    method.train()
    for _ in range(steps):
        indices = torch.randint(len(probe.hidden), (BATCH,), generator=generator).tolist()
        h = torch.stack([probe.hidden[i] for i in indices])
        mass = torch.stack([probe.mass[i] for i in indices]).float()
        g = method.assign(h, Sequence.plain(h.shape[0], h.shape[1], h.device))
        loss = -((mass @ g) * g).sum() / mass.sum().clamp(min=1e-6)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        method.update_statistics()
    method.eval()
    optimizer.zero_grad()


@torch.no_grad()
def calibrate(model: PreTrainedModel, sequences: list[Tensor], precision: Precision) -> None:
    """Set the frozen balancing biases so that groups of hard routing have equal sizes on `sequences` `(T,)`.

    The running average lags behind a moving router, and balances mass where hard routing needs counts. A non-causal
    router gets biases too, for its causal counterpart.
    """
    methods = {i: m for i, m in focus_methods(model).items() if m.assignment != "softmax"}
    if not methods or not sequences:
        return
    log_assignments: dict[int, list[Tensor]] = {index: [] for index in methods}

    def observe(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        if layer in methods and selection.assignment is not None:
            log_assignments[layer].append(selection.assignment.clamp(min=1e-30).log().flatten(0, 1))

    model.eval()
    set_routing(model, hard=True)
    with use_causal_counterparts(model), observe_selections(model, observe):
        run_forward(model, sequences, precision, "calibrating balance")
    for index, method in methods.items():
        logits = torch.cat(log_assignments[index])
        method.router.potential += balancing_bias(logits[None], 20, SHARPNESS)[0]


@contextmanager
def temporary_calibration(model: PreTrainedModel, sequences: list[Tensor], precision: Precision) -> Iterator[None]:
    """Calibrate for the block, and restore the biases that training follows."""
    potentials = {method: method.router.potential.clone() for method in focus_methods(model).values()}
    calibrate(model, sequences, precision)
    try:
        yield
    finally:
        for method, potential in potentials.items():
            method.router.potential.copy_(potential)
