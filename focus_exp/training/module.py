"""Lightning module of one phase: trains the routers, LoRA or all parameters of a causal language model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Self

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from focus_exp.config import PhaseConfig
from focus_exp.errors import UserError
from focus_exp.models.head import Head
from focus_exp.models.methods import (
    disable_method,
    find_routers,
    freeze,
    is_trainable,
    temporary_attributes,
    update_balance,
)
from focus_exp.training.distributed import (
    all_gather_object,
    all_reduce_mean,
    average_gradients,
    gather_state,
    global_norm,
    is_sharded,
    rank,
    shard_like,
)


class LanguageModelTask(pl.LightningModule):
    """Train the parameters that `phase.trainable` names on next-token prediction or distillation.

    A checkpoint holds the trained and attached parameters, optimizer, schedule and random states. Losses are averaged
    over processes, so that all of them stop at the same non-finite step.
    """

    def __init__(self, model: PreTrainedModel, phase: PhaseConfig, name: str, gradient_clip: float = 1.0) -> None:
        super().__init__()
        self.model, self.phase, self.name, self.gradient_clip = model, phase, name, gradient_clip
        self.trainable_names = freeze(model, phase.trainable)
        if not self.trainable_names:
            raise UserError(f"recipe.phases.{name}.trainable={phase.trainable}: the model has no such parameters.")
        self.strict_loading = False  # on_load_checkpoint checks that the trained part is complete
        self._random_state: dict[str, Tensor] | None = None

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """Return the loss of `batch["input_ids"]` `(B, T)`, auxiliary router losses included."""
        with auxiliary_losses(self.model) as auxiliary:
            loss = self.loss(batch["input_ids"])
        mean = all_reduce_mean(loss.detach())
        self.check_finite("loss", mean)
        # what Lightning hands to callbacks is divided by the accumulated batches
        self.last_loss = mean
        return loss + torch.stack(auxiliary).sum() if auxiliary else loss

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

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for p in self.trainable_parameters() if p.grad is not None]
        if is_sharded(self.model):
            average_gradients(parameters)
        self.gradient_norm = global_norm(parameters)
        self.check_finite("gradient norm", self.gradient_norm)
        # here, because Lightning computes a norm of its own, not of sharded and whole gradients together
        torch.nn.utils.clip_grads_with_norm_(parameters, self.gradient_clip, self.gradient_norm, foreach=False)
        # read here: by the time the step is logged the scheduler has advanced
        self.learning_rate = optimizer.param_groups[0]["lr"]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        update_balance(self.model)

    def check_finite(self, name: str, value: Tensor) -> None:
        """Raise UserError if `value` is NaN or infinite."""
        if not torch.isfinite(value):
            raise UserError(
                f"the {name} must be finite (got {value.item()} at step {self.global_step + 1} of phase {self.name}). "
                "Lower recipe.phases.*.learning_rate or trainer.gradient_clip."
            )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Do nothing: the model stays where `place_base` has put it."""
        return self

    def cpu(self) -> Self:
        return self

    def changes(self, name: str) -> bool:
        """Return whether a step may change `name`; methods move buffers whatever is trained."""
        return is_trainable(name, self.phase.trainable) or is_trainable(name, "router")

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def configure_optimizers(self) -> Any:
        """Return AdamW with linear warm-up and a cosine to a tenth of the peak."""
        phase = self.phase
        matrices = [p for p in self.trainable_parameters() if p.ndim >= 2]
        vectors = [p for p in self.trainable_parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": phase.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=phase.learning_rate, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_scale(step, phase))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state = {name: state[name] for name in state if self.changes(name.removeprefix("model."))}
        optimizer_states = gather_state(checkpoint["optimizer_states"])
        checkpoint.update(state_dict=gather_state(state), optimizer_states=optimizer_states)
        random_state = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random_state["cuda"] = torch.cuda.get_rng_state()
        checkpoint["random_states"] = all_gather_object(random_state)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        required = {f"model.{name}" for name in self.trainable_names}
        if missing := sorted(required - set(checkpoint["state_dict"])):
            raise UserError(f"the checkpoint has no {missing[0]}, which is trained. Start again with overwrite=true.")
        current = self.state_dict()
        for name, tensor in checkpoint["state_dict"].items():
            checkpoint["state_dict"][name] = shard_like(current[name], tensor)
        parameters = sorted(self.trainable_parameters(), key=lambda p: p.ndim < 2)  # as in configure_optimizers
        for index, values in checkpoint["optimizer_states"][0]["state"].items():
            for name, tensor in values.items():
                if tensor.shape == parameters[index].shape:
                    values[name] = shard_like(parameters[index], tensor)
        states = checkpoint["random_states"]
        # an additional process keeps its freshly seeded state
        self._random_state = states[rank()] if rank() < len(states) else None
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):  # the loader has the batches that are left
            counts.update(ready=0, started=0, processed=0, completed=0)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self._random_state is not None:
            torch.set_rng_state(self._random_state["cpu"])
            if "cuda" in self._random_state and torch.cuda.is_available():
                torch.cuda.set_rng_state(self._random_state["cuda"])
            self._random_state = None


@contextmanager
def auxiliary_losses(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yield the list that a forward pass fills with the weighted losses of the layers."""
    losses: list[Tensor] = []
    with temporary_attributes(find_routers(model).values(), losses=losses):
        yield losses


def learning_rate_scale(step: int, phase: PhaseConfig) -> float:
    """Return the factor on the peak learning rate for optimizer step `step` + 1."""
    if step < phase.warmup_steps:
        return (step + 1) / (phase.warmup_steps + 1)
    progress = (step - phase.warmup_steps) / max(1, phase.steps - phase.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))
