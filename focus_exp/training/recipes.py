"""Regimes: the phases of a run, each trained to its last step or continued from its checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from focus_exp.attention.options import MAX_SEED
from focus_exp.config import Config, PhaseConfig, phases_of
from focus_exp.data import Blocks, ResumableLoader
from focus_exp.models.methods import attached_methods, find_routers
from focus_exp.results.metrics import METRICS, read_metrics, write_metrics
from focus_exp.training.callbacks import Checkpoint, GateAnnealing, Metrics, Progress
from focus_exp.training.checkpoints import Checkpoints, checkpoint_of
from focus_exp.training.exchange import agreed, is_main, rank, world_size
from focus_exp.training.mitigations import CentroidUpdates
from focus_exp.training.module import LanguageModelTask, learning_rate_scale
from focus_exp.training.precision import Precision
from focus_exp.training.probe import PROBES, TIMES, Probe
from focus_exp.training.strategies import batches_together, lightning_strategy, to_device

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Trained:
    """What the phases did in all, resumed parts included."""

    steps: int = 0
    tokens: int = 0


def train_phases(
    model: PreTrainedModel,
    blocks: Blocks,
    config: Config,
    precision: Precision,
    folder: Path,
    loggers: list[Logger],
    *,
    probed: Tensor | None = None,
    between: Callable[[str], None] = lambda _: None,
) -> Trained:
    """Run every phase in order; a phase that has a checkpoint in `folder` goes on from there.

    Routers are watched on the tokens `probed` `[B, T]`; `between` is called with the name of every phase but the last.
    In a phase of no steps nothing is trained: its router stays as it was fitted.
    """
    steps, phases = 0, phases_of(config)
    for index, (name, phase) in enumerate(phases):
        seed = config.seed + index
        if phase.steps:
            train_phase(model, blocks, config, phase, name, seed, precision, folder, loggers, probed, steps)
        steps += phase.steps
        if index + 1 < len(phases):
            between(name)
    if is_main():
        for path in (folder / METRICS, folder / PROBES):
            put_in_order(path, [name for name, _ in phases])
    return Trained(steps, steps * tokens_per_step(config))


def put_in_order(path: Path, phases: list[str]) -> None:
    """Sort the lines of a log by phase: one whose last checkpoint was damaged has been trained after a later one."""
    lines = read_metrics(path)
    ordered = sorted(lines, key=lambda line: phases.index(line["phase"]))
    if ordered != lines:
        write_metrics(path, ordered)


def unreached_rates(config: Config) -> Iterator[str]:
    """What is to be said of phases that are over before their warm-up is."""
    for name, phase in phases_of(config):
        if 0 < phase.steps <= phase.warmup_steps:
            highest = phase.learning_rate * learning_rate_scale(phase.steps - 1, phase)
            yield (
                f"recipe.phases.{name} has warmup_steps={phase.warmup_steps} and ends after {phase.steps}: the "
                f"learning rate comes to {highest:.3g}, not to {phase.learning_rate:g}"
            )


def tokens_per_step(config: Config) -> int:
    return config.trainer.batch_size * config.trainer.accumulate * config.data.seq_len


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
    probed: Tensor | None = None,
    before: int = 0,
) -> None:
    """Train one phase, which `before` steps of other phases precede."""
    settings = config.trainer
    quiet_lightning()
    pl.seed_everything((seed + 1_000_003 * rank()) % (MAX_SEED + 1), verbose=False)
    task = LanguageModelTask(model, phase, name)
    loader = ResumableLoader(
        blocks,
        settings.batch_size,
        seed,
        accumulate=settings.accumulate,
        workers=config.data.workers,
        rank=rank(),
        world_size=world_size(),
    )
    checkpoint = checkpoint_of(folder / CHECKPOINTS, name)
    if settings.gradient_checkpointing:
        # re-entrant checkpointing would drop gradients that reach only the router
        model.activation_checkpointing_enable({"use_reentrant": False})
    metrics = Metrics(folder / METRICS, name, before, settings.log_every, tokens_per_step(config))
    trainer = pl.Trainer(
        accelerator="gpu" if precision.device.type == "cuda" else "cpu",
        strategy=lightning_strategy(settings),
        devices=settings.devices if world_size() > 1 else 1,
        num_nodes=settings.num_nodes if world_size() > 1 else 1,
        precision=precision.lightning,
        max_steps=phase.steps,
        max_epochs=-1,
        accumulate_grad_batches=loader.share.accumulate,
        gradient_clip_val=settings.gradient_clip,
        logger=loggers or False,
        callbacks=[
            *([metrics] if is_main() else []),
            *([CentroidUpdates(model, config.focus)] if config.has_router else []),
            *probes(model, config, phase, name, before, precision, folder, probed),
            Checkpoint(checkpoint, settings.checkpoint_every),
            *([GateAnnealing(config.focus)] if config.has_router else []),
            *([Progress(name)] if settings.progress and is_main() else []),
        ],
        plugins=[LightningEnvironment(), Checkpoints()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    set_training_mode(model, phase)
    begun = agreed(checkpoint.exists())
    with batches_together(model, loader.share):
        trainer.fit(task, loader, ckpt_path=checkpoint if begun else None, weights_only=True)
    if settings.gradient_checkpointing:
        model.activation_checkpointing_disable()
    # Lightning leaves the model on the CPU
    to_device(model, precision.device)
    model.eval()


def probes(
    model: PreTrainedModel,
    config: Config,
    phase: PhaseConfig,
    name: str,
    before: int,
    precision: Precision,
    folder: Path,
    tokens: Tensor | None,
) -> list[Probe]:
    """What watches the routers of a phase, where there are any and it was not switched off."""
    every = config.trainer.probe_every
    if tokens is None or every == 0 or not find_routers(model):
        return []
    every = max(1, phase.steps // TIMES) if every is None else every
    return [Probe(folder / PROBES, name, before, every, model, tokens, precision)]


def set_training_mode(model: PreTrainedModel, phase: PhaseConfig) -> None:
    """Routers balance every batch while they are trained; a frozen base keeps its dropout off."""
    model.train(phase.trainable == "all")
    for module in model.modules():
        if (
            phase.trainable != "all"
            and isinstance(module, GradientCheckpointingLayer)
            and module.gradient_checkpointing
        ):
            checkpoint_frozen(module)
    for method in attached_methods(model).values():
        method.train()


def checkpoint_frozen(layer: Any) -> None:
    """Let a GradientCheckpointingLayer checkpoint that is not trained, until checkpointing is enabled again.

    Whether it does hangs on its own flag, on which in some families its dropout hangs too.
    """
    layer.training, checkpoint = True, layer._gradient_checkpointing_func

    def checkpointed(forward: Callable[..., Any], *inputs: Any) -> Any:
        def evaluated(*inputs: Any) -> Any:
            layer.training = False
            try:
                return forward(*inputs)
            finally:  # a recomputation ends early by an exception
                layer.training = True

        return checkpoint(evaluated, *inputs)

    layer._gradient_checkpointing_func = checkpointed


def quiet_lightning() -> None:
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    warnings.filterwarnings("ignore", module="lightning_fabric")
