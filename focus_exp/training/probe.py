"""The probe: the same held-out tokens through the routers every so many steps, to see one group swallow the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from transformers import PreTrainedModel

from focus_exp.attention.method import AttentionMethod
from focus_exp.attention.mitigations import entropy
from focus_exp.attention.selection import Selection, Sequence
from focus_exp.data import Blocks
from focus_exp.models.methods import find_routers, observe_selections
from focus_exp.results.metrics import read_metrics, write_metrics
from focus_exp.training.precision import Precision

PROBES = "probe.jsonl"
TOKENS = 1024  # of a probe, at most
TIMES = 20  # a phase, unless told otherwise
DEAD = 0.01  # share of the tokens below which a group is dead


def probe_tokens(blocks: Blocks) -> Tensor:
    """`[B, T]` token ids spread over `blocks`, at most TOKENS in all."""
    count = max(1, min(len(blocks), TOKENS // blocks.seq_len))
    chosen = np.linspace(0, len(blocks) - 1, count).round()
    return torch.stack([blocks[int(index)]["input_ids"][:TOKENS] for index in chosen])


class Probe(Callback):
    """One line of `path` (JSONL) before the first step of a phase, every `every` steps and after the last one.

    dominance: share of the tokens in the largest group, mean over layers; dominance_worst: the largest of a layer.
    dead_groups, dead_groups_worst: groups with under 1 % of the tokens, mean over layers and most in a layer.
    stability: share of the tokens whose group is the one it was at the probe before, null at a phase's first; the paper
    does not define its own. stability_renamed: the same, if groups may have changed their numbers in between.
    confidence, entropy: mean of a token's largest probability and of its entropy [nats].
    Loggers get the steps of the run, `before` of earlier phases included.
    """

    def __init__(
        self,
        path: Path,
        phase: str,
        before: int,
        every: int,
        model: PreTrainedModel,
        tokens: Tensor,
        precision: Precision,
    ) -> None:
        self.path, self.phase, self.before, self.every = path, phase, before, every
        self.model, self.tokens, self.precision = model, tokens, precision
        self.groups: Tensor | None = None  # [layers, N] at the last probe
        self.last_step = -1

    def state_dict(self) -> dict[str, Any]:
        return {"groups": self.groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.groups = state_dict["groups"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        resumed = self.groups is not None
        self.last_step = trainer.global_step if resumed else -1
        if trainer.is_global_zero:
            lines = read_metrics(self.path)
            kept = [m for m in lines if m["phase"] != self.phase or (resumed and m["step"] <= self.last_step)]
            write_metrics(self.path, kept)
        self.probe(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every == 0 or trainer.global_step == trainer.max_steps:
            self.probe(trainer)

    def probe(self, trainer: pl.Trainer) -> None:
        """Write the line of this step, if there is none yet; all processes look, one writes."""
        step = trainer.global_step
        if step == self.last_step:
            return
        self.last_step = step
        assignments = look(self.model, self.tokens, self.precision)
        groups = torch.stack([assignment.argmax(-1) for assignment in assignments])
        measured = describe(assignments, groups, self.groups)
        self.groups = groups
        if trainer.is_global_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"phase": self.phase, "step": step, **measured}) + "\n")
            for logger in trainer.loggers:
                found = {f"probe/{name}": value for name, value in measured.items() if value is not None}
                logger.log_metrics(found, self.before + step)


@torch.no_grad()
def look(model: PreTrainedModel, tokens: Tensor, precision: Precision) -> list[Tensor]:
    """The assignments `[N, K]` of the layers to `tokens` `[B, T]`, as evaluation makes them, on the CPU.

    Attention is gated as it is in training, softly or hard. Nothing of the model's state is changed.
    """
    found: dict[int, Tensor] = {}

    def observe(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        assert selection.assignment is not None
        found[layer] = selection.assignment.flatten(0, -2).cpu()

    with evaluating(model), observe_selections(model, observe), precision.context():
        model(input_ids=tokens.to(model.device), use_cache=False, logits_to_keep=1)
    return [found[layer] for layer in sorted(found)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block nothing is in training mode, and groups are as hard as training has them."""
    modes = {module: module.training for module in model.modules()}
    hard = {method: method.hard for method in find_routers(model).values()}
    model.eval()
    for method in hard:
        method.hard = method.train_with == "hard"
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for method, was in hard.items():
            method.hard = was


def describe(assignments: list[Tensor], groups: Tensor, before: Tensor | None) -> dict[str, float | None]:
    """The numbers of a line, from the layers' assignments `[N, K]`, their groups `[layers, N]` and those before."""
    count = assignments[0].shape[-1]
    shares = torch.stack([torch.bincount(g, minlength=count) / len(g) for g in groups])  # [layers, K]
    largest, dead = shares.amax(-1), (shares < DEAD).float().sum(-1)
    return {
        "dominance": largest.mean().item(),
        "dominance_worst": largest.max().item(),
        "dead_groups": dead.mean().item(),
        "dead_groups_worst": dead.max().item(),
        "stability": None if before is None else (groups == before).float().mean().item(),
        "stability_renamed": None if before is None else renamed_stability(groups, before, count),
        "confidence": float(np.mean([a.amax(-1).mean().item() for a in assignments])),
        "entropy": float(np.mean([entropy(a).mean().item() for a in assignments])),
    }


def renamed_stability(groups: Tensor, before: Tensor, count: int) -> float:
    """The most that `groups` `[layers, N]` can agree with those `before` if every layer may rename its groups."""
    kept = 0
    for now, then in zip(groups, before, strict=True):
        pairs = torch.bincount(count * then + now, minlength=count * count).view(count, count).numpy()
        kept += pairs[linear_sum_assignment(pairs, maximize=True)].sum()
    return float(kept / groups.numel())
