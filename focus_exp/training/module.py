"""The one Lightning module: a causal language model of which a phase trains the router, LoRA or everything."""

from __future__ import annotations

import math
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.config import PhaseConfig
from focus_exp.errors import UserError
from focus_exp.models.methods import disable_method, freeze, is_trainable
from focus_exp.training.exchange import gathered, mean_of, rank
from focus_exp.training.mitigations import auxiliary_losses
from focus_exp.training.strategies import average_gradients, global_norm, is_sharded


class LanguageModelTask(pl.LightningModule):
    """Next-token prediction with the parameters that `phase.trainable` names; the others are frozen.

    Checkpoints hold the trainable part and what is attached, the optimiser and the random states. Losses are means over
    all processes, so that a loss or gradient that is not finite stops all of them at the same step.
    """

    def __init__(self, model: PreTrainedModel, phase: PhaseConfig, name: str) -> None:
        super().__init__()
        self.model = model
        self.phase = phase
        self.name = name
        self.trainable_names = freeze(model, phase.trainable)
        if not self.trainable_names:
            raise UserError(f"recipe phase {name} trains the {phase.trainable}, but the model has no such parameters")
        self._random_state: dict[str, Tensor] | None = None
        # a checkpoint holds the trained part alone; on_load_checkpoint checks that it holds all of that
        self.strict_loading = False
        self.last_good: dict[str, Tensor] = {}

    def on_train_start(self) -> None:
        self.remember()

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """The loss of `batch["input_ids"]` `[B, T]` and the routers' own losses."""
        with auxiliary_losses(self.model) as auxiliary:
            loss = self.loss(batch["input_ids"])
        mean = mean_of(loss.detach())
        if not torch.isfinite(mean):
            self.model.load_state_dict(self.last_good, strict=False)
            raise NonFiniteError(f"the loss is {mean.item()} at step {self.global_step + 1} of phase {self.name}")
        # what Lightning hands to callbacks is divided by the accumulated batches
        self.last_loss = mean
        return loss + torch.stack(auxiliary).sum() if auxiliary else loss

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the objective for `tokens` (B, T): next-token loss or divergence from the base [nats per token]."""
        logits = self.model(input_ids=tokens, use_cache=False).logits
        predicted = logits[:, :-1].flatten(0, 1).float()
        if self.phase.objective != "distill":
            return F.cross_entropy(predicted, tokens[:, 1:].flatten())
        loss = F.kl_div(predicted.log_softmax(-1), self.base_predictions(tokens), log_target=True, reduction="none")
        return loss.sum(-1).mean()

    @torch.no_grad()
    def base_predictions(self, tokens: Tensor) -> Tensor:
        """Log-probabilities `[B * (T - 1), V]` that the model without what is attached gives the tokens after these."""
        with disable_method(self.model):
            logits = self.model(input_ids=tokens, use_cache=False).logits
        return logits[:, :-1].flatten(0, 1).float().log_softmax(-1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an update that would spoil the weights, which are then still those of the last good step."""
        if is_sharded(self.model):
            average_gradients(self.trainable_parameters())
        norm = global_norm(self.gradients())
        if not torch.isfinite(norm):
            raise NonFiniteError(f"the gradient is not finite at step {self.global_step + 1} of phase {self.name}")
        self.gradient_norm = norm.item()
        # by the time the step is logged the schedule has gone on
        self.learning_rate = optimizer.param_groups[0]["lr"]
        self.remember()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if not is_sharded(self.model):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val is not None:
            for gradient in self.gradients():
                gradient.mul_(min(1.0, gradient_clip_val / (self.gradient_norm + 1e-6)))

    def configure_model(self) -> None:
        """Asked for by ModelParallelStrategy; a sharded base has been so since it was loaded."""

    def cpu(self) -> LanguageModelTask:
        """Lightning asks for it after training; quantised weights stay where they were quantised."""
        return self if getattr(self.model, "is_quantized", False) else super().cpu()

    def remember(self) -> None:
        """Copy a small trained part while its loss is known to be finite, for whoever reads it after a failing step.

        A trained base is too large to copy at every step: its last good state is the last checkpoint.
        """
        if self.phase.trainable != "all":
            state = self.model.state_dict()
            self.last_good = {name: state[name].clone() for name in state if self.changes(name)}

    def changes(self, name: str) -> bool:
        """Whether a step may change what is called `name`; methods move buffers of their own, whatever is trained."""
        return is_trainable(name, self.phase.trainable) or is_trainable(name, "router")

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.trainable_parameters() if p.grad is not None]

    def configure_optimizers(self) -> Any:
        """AdamW; linear warm-up, then a cosine to a tenth of the peak."""
        phase = self.phase
        matrices = [p for p in self.trainable_parameters() if p.ndim >= 2]
        others = [p for p in self.trainable_parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": phase.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=phase.learning_rate, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_scale(step, phase))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        prefix = "model."
        checkpoint["state_dict"] = {
            name: tensor for name, tensor in checkpoint["state_dict"].items() if self.changes(name.removeprefix(prefix))
        }
        state = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        checkpoint["random_states"] = gathered(state)
        checkpoint["accumulated"] = self.trainer.accumulate_grad_batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        wanted = {f"model.{name}" for name in self.trainable_names}
        if missing := sorted(wanted - set(checkpoint["state_dict"])):
            raise UserError(f"the checkpoint lacks trainable parameters, first {missing[0]}; start with overwrite=true")
        states = checkpoint["random_states"]
        # a process that was not there goes on with the stream it begins with
        self._random_state = states[rank()] if rank() < len(states) else None
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            # checkpoints are written between steps, which other processes do in other numbers of batches, and before
            # Lightning has counted the last of them as completed, by which it knows where it is
            batches = counts["processed"] // checkpoint["accumulated"] * self.trainer.accumulate_grad_batches
            behind = counts["processed"] - counts["completed"]
            counts.update(ready=batches, started=batches, processed=batches, completed=batches - behind)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self._random_state is not None:
            torch.set_rng_state(self._random_state["cpu"])
            if "cuda" in self._random_state and torch.cuda.is_available():
                torch.cuda.set_rng_state(self._random_state["cuda"])
            self._random_state = None


class NonFiniteError(UserError):
    """The loss or a gradient is NaN or infinite; a small trained part is that of the last step with a finite loss."""


def learning_rate_scale(step: int, phase: PhaseConfig) -> float:
    """Factor on the peak learning rate before optimiser step `step` + 1."""
    if step < phase.warmup_steps:
        return (step + 1) / (phase.warmup_steps + 1)
    progress = (step - phase.warmup_steps) / max(1, phase.steps - phase.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))
