"""Regimes: the phases of a run, each trained to its last step or continued from its checkpoint."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from focus_exp.config import Config, PhaseConfig, phases_of
from focus_exp.data import Blocks, ResumableLoader
from focus_exp.models.attach import attached_methods
from focus_exp.training.callbacks import Checkpoint, GateAnnealing, Metrics, Progress
from focus_exp.training.module import LanguageModelTask
from focus_exp.training.precision import Precision

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Trained:
    """What the phases did in all, resumed parts included."""

    steps: int = 0
    tokens: int = 0


def train_phases(
    model: PreTrainedModel, blocks: Blocks, config: Config, precision: Precision, folder: Path, loggers: list[Logger]
) -> Trained:
    """Run every phase in order; a phase that has a checkpoint in `folder` goes on from there."""
    steps = 0
    for index, (name, phase) in enumerate(phases_of(config)):
        train_phase(model, blocks, config, phase, name, config.seed + index, precision, folder, loggers)
        steps += phase.steps
    return Trained(steps, steps * tokens_per_step(config))


def tokens_per_step(config: Config) -> int:
    return config.trainer.batch_size * config.trainer.accumulate * config.data.block_size


def train_phase(
    model: PreTrainedModel,
    blocks: Blocks,
    config: Config,
    phase: PhaseConfig,
    name: str,
    seed: int,
    precision: Precision,
    folder: Path,
    loggers: list[Logger],
) -> None:
    settings = config.trainer
    quiet_lightning()
    pl.seed_everything(seed, verbose=False)
    task = LanguageModelTask(model, phase, name)
    loader = ResumableLoader(
        blocks, settings.batch_size, seed, accumulate=settings.accumulate, workers=config.data.workers
    )
    checkpoint = folder / "checkpoints" / f"{name}.ckpt"
    if settings.gradient_checkpointing:
        # re-entrant checkpointing would drop gradients that reach only the router
        model.activation_checkpointing_enable({"use_reentrant": False})
    trainer = pl.Trainer(
        accelerator="gpu" if precision.device.type == "cuda" else "cpu",
        devices=1,
        precision=precision.lightning,
        max_steps=phase.steps,
        max_epochs=-1,
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.gradient_clip,
        logger=loggers or False,
        callbacks=[
            Metrics(folder / METRICS, name, settings.log_every, tokens_per_step(config)),
            Checkpoint(checkpoint, settings.checkpoint_every),
            GateAnnealing(config.attention),
            *([Progress(name)] if settings.progress else []),
        ],
        plugins=[LightningEnvironment()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    set_training_mode(model, phase)
    trainer.fit(task, loader, ckpt_path=checkpoint if checkpoint.exists() else None, weights_only=False)
    if settings.gradient_checkpointing:
        model.activation_checkpointing_disable()
    # Lightning leaves the model on the CPU
    torch.nn.Module.to(model, precision.device).eval()


def set_training_mode(model: PreTrainedModel, phase: PhaseConfig) -> None:
    """Routers balance every batch while they are trained; a frozen base keeps its dropout off."""
    model.train(phase.train == "all")
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # the layer's own flag, which decides whether it checkpoints; no dropout hangs on it
    for method in attached_methods(model).values():
        method.train()


def quiet_lightning() -> None:
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    warnings.filterwarnings("ignore", module="lightning_fabric")
