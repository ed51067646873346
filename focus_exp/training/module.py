"""Lightning module of one phase: trains the routers, LoRA or all parameters of a causal language model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel

from focus_exp.config import PhaseConfig
from focus_exp.errors import UserError
from focus_exp.models.head import Head
from focus_exp.models.load import gather_tensor
from focus_exp.models.methods import (
    attached_methods,
    disable_method,
    freeze,
    is_trainable,
    temporary_attributes,
    update_balance,
)
from focus_exp.training.distributed import all_gather_object, average_gradients, rank


class LanguageModelTask(pl.LightningModule):
    """Train the parameters that `phase.trainable` names on next-token prediction or distillation.

    A checkpoint holds the trained and attached parameters, optimizer, schedule and random states, of any number of
    processes. Optimization is manual, so that a batch of the loader is an optimizer step, and a checkpoint is never
    within one.

    Args:
        batch_size: sequences of a forward pass.
        first_step: optimizer steps of earlier phases.
    """

    model: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        phase: PhaseConfig,
        name: str,
        batch_size: int = 1,
        gradient_clip: float = 1.0,
        first_step: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        # not a submodule: Lightning would move a base that is sharded or quantized
        object.__setattr__(self, "model", model)
        self.phase, self.name, self.first_step = phase, name, first_step
        self.batch_size, self.gradient_clip = batch_size, gradient_clip
        self.trainable_names = freeze(model, phase.trainable)
        if not self.trainable_names:
            raise UserError(f"recipe.phases.{name}.trainable={phase.trainable}: the model has no such parameters.")
        self.restored: dict[str, Any] = {}

    def training_step(self, batch: dict[str, Tensor], index: int) -> dict[str, Any]:
        """Take an optimizer step on `batch["input_ids"]` `(B, T)`; returns its loss, gradient norm and rate."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        losses, parts = [], batch["input_ids"].split(self.batch_size)
        for tokens in parts:
            with auxiliary_losses(self.model) as auxiliary:
                loss = self.loss(tokens)
            losses.append(loss.detach())
            self.manual_backward(torch.stack([loss, *auxiliary]).sum() / len(parts))
        # the mean over processes, so that all of them stop at the same step
        means = all_gather_object(torch.stack(losses).mean().item())
        mean = sum(means) / len(means)
        self.check_finite("loss", mean)
        parameters = self.trainable_parameters()
        average_gradients(parameters)
        norm = torch.stack([gather_tensor(p.grad.norm()) for p in parameters if p.grad is not None]).norm()
        size = norm.item()
        self.check_finite("gradient norm", size)
        torch.nn.utils.clip_grads_with_norm_(parameters, self.gradient_clip, norm, foreach=False)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler: Any = self.lr_schedulers()
        scheduler.step()
        update_balance(self.model)
        return {"loss": torch.tensor(mean, dtype=torch.float64), "learning_rate": rate, "gradient_norm": size}

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of tokens `(B, T)` [nats/token]: cross-entropy, or KL from the base."""
        head, targets = self.head, tokens[:, 1:].flatten()
        predicted = head.inputs(input_ids=tokens)[:, :-1].flatten(0, 1)
        if self.phase.objective != "distill":
            return head.sum_cross_entropy(predicted, targets) / len(targets)
        with torch.no_grad(), disable_method(self.model):
            base = head.inputs(input_ids=tokens)[:, :-1].flatten(0, 1)

        def divergence(x: Tensor, rows: slice) -> Tensor:
            with torch.no_grad():
                target = head.logits(base[rows]).log_softmax(-1)
            return F.kl_div(head.logits(x).log_softmax(-1), target, log_target=True, reduction="sum")

        return head.sum_losses(divergence, predicted) / len(targets)

    @cached_property
    def head(self) -> Head:
        return Head(self.model)

    def check_finite(self, name: str, value: float) -> None:
        """Raise UserError if `value` is NaN or infinite."""
        if not math.isfinite(value):
            raise UserError(
                f"the {name} must be finite (got {value} at step {self.global_step + 1} of phase {self.name}). "
                "Lower recipe.phases.*.learning_rate or trainer.gradient_clip."
            )

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def configure_optimizers(self) -> Any:
        """Return AdamW with linear warm-up and a cosine to a tenth of the peak."""
        phase = self.phase
        matrices = [p for p in self.trainable_parameters() if p.ndim >= 2]
        vectors = [p for p in self.trainable_parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": phase.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=phase.learning_rate, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_scale(step, phase))
        return [optimizer], [scheduler]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        state = get_model_state_dict(self.model, options=options)
        parts = (self.phase.trainable, "router")  # methods move buffers whatever is trained
        checkpoint |= {
            "model": {name: x for name, x in state.items() if any(is_trainable(name, part) for part in parts)},
            "optimizer": get_optimizer_state_dict(self.model, self.optimizers(False), options=options),
            "optimizer_states": [],  # of Lightning, for the same number of processes alone
            "random_states": all_gather_object({name: x.get_rng_state() for name, x in random_generators().items()}),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if missing := sorted(set(self.trainable_names) - set(checkpoint.get("model", ()))):
            raise UserError(f"the checkpoint has no {missing[0]}, which is trained. Start again with overwrite=true.")
        self.restored = checkpoint
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(self.model, checkpoint["model"], options=options)

    def on_train_start(self) -> None:
        if not self.restored:
            return
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, self.optimizers(False), self.restored["optimizer"], options=options)
        states, self.restored = self.restored["random_states"], {}
        for name, generator in random_generators().items():
            if rank() < len(states) and name in states[rank()]:  # else it stays freshly seeded
                generator.set_rng_state(states[rank()][name])


def random_generators() -> dict[str, Any]:
    """Return the modules of torch that hold the random states of this process."""
    return {"cpu": torch, "cuda": torch.cuda} if torch.cuda.is_available() else {"cpu": torch}


@contextmanager
def auxiliary_losses(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yield the list that a forward pass fills with the weighted losses of the layers."""
    losses: list[Tensor] = []
    with temporary_attributes(attached_methods(model).values(), losses=losses):
        yield losses


def learning_rate_scale(step: int, phase: PhaseConfig) -> float:
    """Return the factor on the peak learning rate for optimizer step `step` + 1."""
    if step < phase.warmup_steps:
        return (step + 1) / (phase.warmup_steps + 1)
    progress = (step - phase.warmup_steps) / max(1, phase.steps - phase.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))
