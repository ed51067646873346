"""Callbacks of a phase: progress, metrics, checkpoints and signals, gate annealing, centroid updates, probes."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.router import follow_means, kmeans
from focus_exp.attention.selection import Selection, Sequence
from focus_exp.config import PhaseConfig, RouterConfig
from focus_exp.data import SequenceDataset
from focus_exp.errors import STOP_SIGNALS, Interrupted
from focus_exp.models.methods import find_routers, observe_selections, temporary_attributes
from focus_exp.progress import ProgressBar
from focus_exp.results.measurement import Measurement
from focus_exp.results.metrics import METRICS, read_metrics, write_metrics
from focus_exp.training.distributed import all_gather_object, broadcast_object, is_main
from focus_exp.training.precision import Precision

PROBES = "probe.jsonl"
MAX_TOKENS = 1024
PROBES_PER_PHASE = 20  # unless trainer.probe_every is set
DEAD_FRACTION = 0.01  # of the tokens, below which a group is dead

log = logging.getLogger(__name__)


class PhaseBar(callbacks.ProgressBar):
    """Show the steps of a phase and their loss, in a log a line for every tenth."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        done, name = trainer.global_step, f"training {module.name}"
        self.bar = ProgressBar(total=trainer.max_steps, initial=done, desc=name, unit="step", leave=True)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.bar.set_postfix(loss=f"{outputs['loss']:.3f}", refresh=False)
        self.bar.update()

    def on_train_end(self, *_: Any) -> None:
        self.bar.close()


def truncate_lines(path: Path, trainer: pl.Trainer, step: int) -> None:
    """Drop the phase's lines of a JSONL file after `step`, which a resumed phase writes again."""
    phase = trainer.lightning_module.name
    write_metrics(path, [line for line in read_metrics(path) if line["phase"] != phase or line["step"] <= step])


def write_line(path: Path, trainer: pl.Trainer, values: dict[str, Any], **of_run: Any) -> None:
    """Append a line by phase and step to a JSONL file; loggers get steps of the run, and `of_run` in place of values.

    Lightning's `log` would keep the values of the last of `log_every` steps, and no step of a phase.
    """
    step, task = trainer.global_step, cast(Any, trainer.lightning_module)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"phase": task.name, "step": step, **values}) + "\n")
    prefix = "train" if path.name == METRICS else "probe"
    shown = {f"{prefix}/{name}": value for name, value in (values | of_run).items() if value is not None}
    for logger in trainer.loggers:
        logger.log_metrics(shown, task.first_step + step)


class Metrics(Callback):
    """Write loss, learning rate and speed every `log_every` optimizer steps.

    Everything but `seconds` and `tokens_per_second` is a function of config and seed.
    """

    def __init__(self, path: Path, log_every: int, tokens_per_step: int) -> None:
        self.path, self.log_every, self.tokens_per_step = path, log_every, tokens_per_step
        self.losses: list[float] = []  # since the last line, which may be older than the checkpoint

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = state_dict["losses"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        truncate_lines(self.path, trainer, trainer.global_step)
        self.began = self.last = time.perf_counter()
        self.last_step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())
        step, now = trainer.global_step, time.perf_counter()
        if step % self.log_every:
            return
        values = outputs | {
            "loss": sum(self.losses) / len(self.losses),
            "tokens": step * self.tokens_per_step,
            "tokens_per_second": (step - self.last_step) * self.tokens_per_step / (now - self.last),
            "seconds": now - self.began,
        }
        run_tokens = (module.first_step + step) * self.tokens_per_step
        write_line(self.path, trainer, values, phase=module.name, tokens=run_tokens)
        self.losses, self.last, self.last_step = [], now, step


class Checkpoint(Callback):
    """Save `path` every `every` optimizer steps, at the end, and before a signal ends the run.

    Lightning's ModelCheckpoint saves neither at the end nor at a signal, and not by time if optimization is manual.

    Args:
        minutes: at least, between the checkpoints that `every` asks for.
    """

    def __init__(self, path: Path, every: int, minutes: float = 0.0) -> None:
        self.path, self.every, self.minutes = path, every, minutes
        self.last = time.monotonic()  # checkpoint, or start
        self.received = 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if is_main() and trainer.global_step:
            log.info("%s: resuming from step %d of %d", self.path.stem, trainer.global_step, trainer.max_steps)
        for signum in STOP_SIGNALS:  # after Lightning has installed its own handlers; it restores those before
            signal.signal(signum, self.receive)

    def receive(self, signum: int, frame: Any) -> None:
        if signum == self.received != signal.SIGUSR2:  # the second time: at once
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        self.received = signum
        log.warning("stopping after this step; send the signal again to stop at once")

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        step, is_late = trainer.global_step, time.monotonic() - self.last >= 60 * self.minutes
        # the clock of process 0 decides, and the signal of any process
        states = all_gather_object((self.received, is_late))
        received = max(signum for signum, _ in states)
        if received or step == trainer.max_steps or (step % self.every == 0 and states[0][1]):
            trainer.save_checkpoint(self.path)
            broadcast_object(None)  # once process 0 has written it
            self.last = time.monotonic()
        if received:
            self.received = received
            raise Interrupted(received, f"at step {step} of {trainer.max_steps}")

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if received := max(all_gather_object(self.received)):
            raise Interrupted(received, f"after the last of {trainer.max_steps} steps")

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        # SLURM also signals the processes of loggers and data workers, which end at once
        if self.received and isinstance(exception, (ConnectionError, RuntimeError)):
            raise Interrupted(self.received, f"after step {trainer.global_step} of {trainer.max_steps}") from exception


class GateAnnealing(Callback):
    """Anneal the gate steepness linearly from gate_steepness_start to gate_steepness.

    A shallow gate passes gradients of pairs that it would prune; a steep one approaches hard routing.
    """

    def __init__(self, model: nn.Module, start: float, final: float) -> None:
        self.routers, self.start, self.final = find_routers(model).values(), start, final

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        progress = trainer.global_step / max(1, trainer.max_steps - 1)
        for router in self.routers:
            router.gate_steepness = self.start + (self.final - self.start) * progress

    def on_train_end(self, *_: Any) -> None:
        for router in self.routers:
            router.gate_steepness = self.final


class CentroidUpdates(Callback):
    """Move centroids without a gradient, by the tokens of whole steps of all processes.

    ema: after every step towards the means of their tokens. recluster: every recluster_every steps to k-means centres,
    at the average norm that they had.
    """

    def __init__(self, model: nn.Module, update: str, recipe: RouterConfig) -> None:
        self.routers = find_routers(model)
        self.update, self.decay = update, recipe.centroid_decay
        self.every = 1 if update == "ema" else recipe.recluster_every

    def on_train_batch_start(self, *_: Any) -> None:
        for method in self.routers.values():
            method.projected = []

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        # k-means not at the last step, after which nothing is trained on the new groups
        if step % self.every or (self.update == "recluster" and step == trainer.max_steps):
            return
        for layer, method in self.routers.items():
            assert method.projected is not None
            before = method.router.centroids
            # (batches, processes, N, R), the order of a single process: k-means starts from some of the tokens
            tokens = torch.stack(all_gather_object(torch.stack(method.projected).cpu()), 1)
            tokens = tokens.flatten(0, -2).to(before.device)
            if self.update == "ema":
                after = follow_means(before, tokens, method.router.compare(tokens).argmax(-1), self.decay)
            else:
                # scores are dot products: a longer centroid would attract tokens that are nearer to another
                after = kmeans(tokens, len(before), step + 1_000_003 * layer)
                after = nn.functional.normalize(after, dim=-1) * before.norm(dim=-1).mean()
            before.copy_(after)

    def on_train_end(self, *_: Any) -> None:
        for method in self.routers.values():
            method.projected = None


class Probe(Callback):
    """Write router statistics before, every `every` steps during, and after a phase.

    dominance: fraction of tokens in the largest group, mean over layers.
    dead_groups: groups with less than DEAD_FRACTION of the tokens, mean over layers.
    assignment_overlap: fraction of tokens in the same group as at the previous probe (the paper's stability).
    confidence: mean maximum of the tokens' assignments.
    """

    def __init__(self, path: Path, every: int, model: PreTrainedModel, tokens: Tensor, precision: Precision) -> None:
        self.path, self.every = path, every
        self.model, self.tokens, self.precision = model, tokens, precision
        self.groups: Tensor | None = None  # (layers, N) at the last probe

    def state_dict(self) -> dict[str, Any]:
        return {"groups": self.groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.groups = state_dict["groups"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if is_main():
            truncate_lines(self.path, trainer, trainer.global_step if self.groups is not None else -1)
        if self.groups is None:
            self.probe(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step % self.every == 0 or trainer.global_step == trainer.max_steps:
            self.probe(trainer)

    def probe(self, trainer: pl.Trainer) -> None:
        """Write this step's statistics; all processes compute them, process 0 writes."""
        assignments = route_tokens(self.model, self.tokens, self.precision)
        groups = torch.stack([assignment.argmax(-1) for assignment in assignments])
        statistics = router_statistics(assignments, groups, self.groups)
        self.groups = groups
        if is_main():
            write_line(self.path, trainer, statistics)


def probe_tokens(blocks: SequenceDataset) -> Tensor:
    """Return token ids `(B, T)` spread evenly over `blocks`, at most MAX_TOKENS in all."""
    count = max(1, min(len(blocks), MAX_TOKENS // blocks.seq_len))
    indices = np.linspace(0, len(blocks) - 1, count).round()
    return torch.stack([blocks[int(index)]["input_ids"][:MAX_TOKENS] for index in indices])


@torch.no_grad()
def route_tokens(model: PreTrainedModel, tokens: Tensor, precision: Precision) -> list[Tensor]:
    """Return the assignments `(B * T, K)` of each layer to tokens `(B, T)` in eval mode, on the CPU.

    Gates are soft or hard as in training. The model's state does not change.
    """
    assignments: dict[int, Tensor] = {}
    routers = list(find_routers(model).values())
    is_hard = any(router.train_with == "hard" for router in routers)

    def observe(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        assert selection.assignment is not None
        assignments[layer] = selection.assignment.flatten(0, -2).cpu()

    with (
        temporary_attributes(model.modules(), training=False),
        temporary_attributes(routers, hard=is_hard),
        observe_selections(model, observe),
        precision.context(),
    ):
        model(input_ids=tokens.to(model.device), use_cache=False, logits_to_keep=1)
    return [assignments[layer] for layer in sorted(assignments)]


def router_statistics(assignments: list[Tensor], groups: Tensor, previous: Tensor | None) -> dict[str, float | None]:
    """Summarize the assignments of the layers; see `Probe` for the keys.

    Args:
        assignments: per layer `(N, K)`.
        groups: `(layers, N)`, argmax of the assignments.
        previous: groups at the previous probe; without them the overlap is None.
    """
    count = assignments[0].shape[-1]
    loads = torch.stack([torch.bincount(g, minlength=count) / len(g) for g in groups])  # (layers, K)
    return {
        "dominance": loads.amax(-1).mean().item(),
        "dead_groups": (loads < DEAD_FRACTION).float().sum(-1).mean().item(),
        "assignment_overlap": None if previous is None else (groups == previous).float().mean().item(),
        "confidence": float(np.mean([a.amax(-1).mean().item() for a in assignments])),
    }


def read_probes(path: Path, phases: Mapping[str, PhaseConfig]) -> Iterator[Measurement]:
    """Yield what the lines of a probe.jsonl hold; see `Probe` for their keys."""
    for line in read_metrics(path):
        phase, step = line.pop("phase"), line.pop("step")
        settings = {"phase": phase, "step": step, "trainable": phases[phase].trainable}
        for metric, value in line.items():
            if value is not None:
                unit = "groups" if metric == "dead_groups" else "fraction"
                yield Measurement(variant="router", metric=metric, value=value, unit=unit, settings=settings)
