"""Train the phases of a run, each to its last step or from its checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from focus_exp.attention.options import MAX_SEED
from focus_exp.config import Config
from focus_exp.data import SequenceDataset, make_loader
from focus_exp.models.methods import attached_methods, find_routers, temporary_attributes
from focus_exp.results.metrics import METRICS
from focus_exp.training.callbacks import (
    PROBES,
    PROBES_PER_PHASE,
    CentroidUpdates,
    Checkpoint,
    GateAnnealing,
    Metrics,
    PhaseBar,
    Probe,
)
from focus_exp.training.checkpoints import CheckpointIO, checkpoint_path, minutes_between, read_checkpoint
from focus_exp.training.distributed import broadcast_object, is_main, rank, world_size
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
    for library in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(library).setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", module=library)
    settings, done, is_cuda = config.trainer, 0, precision.device.type == "cuda"
    for index, (name, phase) in enumerate(config.phases):
        if index:
            between(config.phases[index - 1][0])
        if not phase.steps:
            continue
        seed, path = config.seed + index, checkpoint_path(folder / CHECKPOINTS, name)
        pl.seed_everything((seed + 1_000_003 * rank()) % (MAX_SEED + 1), verbose=False)
        task = LanguageModelTask(model, phase, name, settings.batch_size, settings.gradient_clip, done)
        is_resumed = broadcast_object(path.exists())
        steps = range(read_checkpoint(path, mmap=True)["global_step"] if is_resumed else 0, phase.steps)
        processes = {"accumulate": settings.accumulate, "rank": rank(), "world_size": world_size()}
        loader = make_loader(blocks, settings.batch_size, seed, steps, **processes)
        trainer = pl.Trainer(
            accelerator="gpu" if is_cuda else "cpu",
            devices=[torch.cuda.current_device()] if is_cuda else 1,  # to Lightning each process is the only one
            precision=precision.lightning,
            max_steps=phase.steps,
            max_epochs=-1,
            logger=loggers or False,
            callbacks=make_callbacks(task, config, precision, folder, probed),
            plugins=[LightningEnvironment(), CheckpointIO()],
            enable_progress_bar=settings.progress,
            enable_checkpointing=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        # methods in training mode, and the base only if it is trained: no dropout in a frozen one
        model.train(phase.trainable == "all")
        for method in attached_methods(model).values():
            method.train()
        with checkpoint_layers(model) if settings.gradient_checkpointing else nullcontext():
            trainer.fit(task, loader, ckpt_path=path if is_resumed else None, weights_only=True)
        model.eval()
        done += phase.steps
    return done


def tokens_per_step(config: Config) -> int:
    return config.trainer.batch_size * config.trainer.accumulate * config.data.seq_len


def make_callbacks(
    task: LanguageModelTask, config: Config, precision: Precision, folder: Path, probed: Tensor | None
) -> list[pl.Callback]:
    """Return the callbacks of a phase in the order in which they see a step."""
    settings, model, steps = config.trainer, task.model, task.phase.steps
    every = max(1, steps // PROBES_PER_PHASE) if settings.probe_every is None else settings.probe_every
    callbacks: list[pl.Callback] = [PhaseBar()] if settings.progress else []
    if is_main():
        callbacks += [Metrics(folder / METRICS, settings.log_every, tokens_per_step(config))]
    attention, router = config.attention, config.recipe.router
    if router and (update := getattr(attention, "centroid_update", "gradient")) != "gradient":
        callbacks += [CentroidUpdates(model, update, router)]
    if router and router.gate_steepness_start is not None and hasattr(attention, "gate_steepness"):
        callbacks += [GateAnnealing(model, router.gate_steepness_start, attention.gate_steepness)]
    if probed is not None and every and find_routers(model):
        callbacks += [Probe(folder / PROBES, every, model, probed, precision)]
    path = checkpoint_path(folder / CHECKPOINTS, task.name)
    minutes = minutes_between(settings.checkpoint_minutes, sum(p.numel() for p in task.trainable_parameters()))
    return [*callbacks, Checkpoint(path, settings.checkpoint_every, minutes)]


@contextmanager
def checkpoint_layers(model: PreTrainedModel) -> Iterator[None]:
    """Recompute the activations of each layer in the backward pass; transformers does so in training mode only.

    Re-entrant checkpointing would drop gradients that reach only the router. The second pass collects no tokens.
    """
    routers = list(find_routers(model).values())

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), temporary_attributes(routers, projected=None)

    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
