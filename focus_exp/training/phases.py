"""Train the phases of a run, each to its last step or from its checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from focus_exp.attention.options import MAX_SEED
from focus_exp.config import Config, PhaseConfig
from focus_exp.data import SequenceDataset, make_loader
from focus_exp.models.methods import attached_methods, find_routers, temporary_attributes
from focus_exp.progress import ProgressBar
from focus_exp.results.metrics import METRICS
from focus_exp.training.callbacks import (
    PROBES,
    PROBES_PER_PHASE,
    CentroidUpdates,
    Checkpoint,
    GateAnnealing,
    Metrics,
    Probe,
    StepLog,
)
from focus_exp.training.checkpoints import CheckpointIO, checkpoint_path, minutes_between, read_checkpoint
from focus_exp.training.distributed import (
    active_strategy,
    broadcast_object,
    is_main,
    rank,
    world_size,
)
from focus_exp.training.module import LanguageModelTask
from focus_exp.training.precision import Precision

CHECKPOINTS = "checkpoints"


def train_phases(
    model: PreTrainedModel,
    blocks: SequenceDataset,
    config: Config,
    precision: Precision,
    folder: Path,
    loggers: Sequence[Logger],
    *,
    probed: Tensor | None = None,
    between: Callable[[str], None] = lambda _: None,
) -> int:
    """Train every phase in order, from its checkpoint in `folder` if there is one; returns all steps.

    Args:
        probed: tokens `(B, T)` on which router statistics are recorded.
        between: called with the name of every phase but the last, after it.
    """
    steps, phases = 0, config.phases
    for index, (name, phase) in enumerate(phases):
        seed = config.seed + index
        if phase.steps:
            train_phase(model, blocks, config, phase, name, seed, precision, folder, loggers, probed, steps)
        steps += phase.steps
        if index + 1 < len(phases):
            between(name)
    return steps


def tokens_per_step(config: Config) -> int:
    return config.trainer.batch_size * config.trainer.accumulate * config.data.seq_len


def train_phase(
    model: PreTrainedModel,
    blocks: SequenceDataset,
    config: Config,
    phase: PhaseConfig,
    name: str,
    seed: int,
    precision: Precision,
    folder: Path,
    loggers: Sequence[Logger],
    probed: Tensor | None = None,
    first_step: int = 0,
) -> None:
    """Train one phase; earlier phases took `first_step` steps."""
    settings = config.trainer
    quiet_lightning()
    pl.seed_everything((seed + 1_000_003 * rank()) % (MAX_SEED + 1), verbose=False)
    task = LanguageModelTask(model, phase, name, settings.gradient_clip)
    saved = checkpoint_path(folder / CHECKPOINTS, name)
    resume = broadcast_object(saved.exists())
    steps = range(read_checkpoint(saved, mmap=True)["global_step"] if resume else 0, phase.steps)
    loader = make_loader(
        blocks, settings.batch_size, seed, steps, accumulate=settings.accumulate, rank=rank(), world_size=world_size()
    )
    every = settings.probe_every
    if every is None:
        every = max(1, phase.steps // PROBES_PER_PHASE)
    callbacks: list[pl.Callback] = []
    bar = ProgressBar(
        total=phase.steps, initial=steps.start, desc=f"training {name}", unit="step", leave=True,
        disable=not (settings.progress and steps),
    )  # fmt: skip
    if is_main():
        metrics = StepLog(folder / METRICS, name, first_step)
        callbacks += [Metrics(metrics, settings.log_every, tokens_per_step(config), bar)]
    if config.has_router:
        callbacks += [CentroidUpdates(model, config.focus)]
    if probed is not None and every and find_routers(model):
        callbacks += [Probe(StepLog(folder / PROBES, name, first_step), every, model, probed, precision)]
    trained = sum(parameter.numel() for parameter in task.trainable_parameters())
    minutes = minutes_between(settings.checkpoint_minutes, trained)
    callbacks += [Checkpoint(saved, settings.checkpoint_every, minutes)]
    if config.has_router and config.focus.gate_steepness_start is not None:
        callbacks += [GateAnnealing(config.focus.gate_steepness_start, config.focus.gate_steepness)]
    # to Lightning each process is the only one, unless they have copies of the model
    is_cuda, is_ddp = precision.device.type == "cuda", active_strategy(settings) == "ddp"
    trainer = pl.Trainer(
        accelerator="gpu" if is_cuda else "cpu",
        strategy=DDPStrategy(broadcast_buffers=False) if is_ddp else "auto",
        devices=settings.devices if is_ddp else [torch.cuda.current_device()] if is_cuda else 1,
        num_nodes=settings.num_nodes if is_ddp else 1,
        precision=precision.lightning,
        max_steps=phase.steps,
        max_epochs=-1,
        accumulate_grad_batches=settings.accumulate // world_size(),
        logger=loggers or False,
        callbacks=callbacks,
        plugins=[LightningEnvironment(), CheckpointIO()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    set_training_mode(model, phase)
    # what callbacks set in routers
    state = {"projected": None, "gate_steepness": config.focus.gate_steepness} if config.has_router else {}
    with (
        bar,
        temporary_attributes(find_routers(model).values(), **state),
        checkpoint_layers(model, settings.gradient_checkpointing),
    ):
        trainer.fit(task, loader, ckpt_path=saved if resume else None, weights_only=True)
    model.eval()


def set_training_mode(model: PreTrainedModel, phase: PhaseConfig) -> None:
    """Put methods in training mode, and the base only if it is trained: no dropout in a frozen one."""
    model.train(phase.trainable == "all")
    for method in attached_methods(model).values():
        method.train()


@contextmanager
def checkpoint_layers(model: PreTrainedModel, is_enabled: bool) -> Iterator[None]:
    """Recompute the activations of each layer in the backward pass; transformers does so in training mode only.

    Re-entrant checkpointing would drop gradients that reach only the router. The second pass collects no tokens.
    """
    recomputation = partial(temporary_attributes, find_routers(model).values(), projected=None)
    layers: list[Any] = [m for m in model.modules() if is_enabled and isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, context_fn=lambda: (nullcontext(), recomputation())
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def quiet_lightning() -> None:
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", module=name)
