"""Callbacks of a phase: metrics, checkpoints and signals, gate annealing, centroid updates, router statistics."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.focus import Focus
from focus_exp.attention.router import follow_means, kmeans
from focus_exp.attention.selection import Selection, Sequence
from focus_exp.config import FocusConfig, PhaseConfig
from focus_exp.data import SequenceDataset
from focus_exp.errors import STOP_SIGNALS, Interrupted
from focus_exp.models.methods import find_routers, observe_selections, temporary_attributes
from focus_exp.progress import ProgressBar
from focus_exp.results.measurement import Measurement
from focus_exp.results.metrics import read_metrics, write_metrics
from focus_exp.training.distributed import all_gather_tensor, all_reduce_max, broadcast_object, is_main
from focus_exp.training.module import LanguageModelTask
from focus_exp.training.precision import Precision

log = logging.getLogger(__name__)


class StepLog:
    """Lines of a JSONL file by phase and step; loggers, which draw one curve per run, get steps of the run.

    Args:
        first_step: optimizer steps of earlier phases.
    """

    def __init__(self, path: Path, phase: str, first_step: int) -> None:
        self.path, self.phase, self.first_step = path, phase, first_step

    def truncate(self, step: int) -> None:
        """Drop this phase's lines after `step`, which a resumed phase writes again."""
        lines = read_metrics(self.path)
        write_metrics(self.path, [x for x in lines if x["phase"] != self.phase or x["step"] <= step])

    def write(self, trainer: pl.Trainer, step: int, values: dict[str, Any], prefix: str, **of_run: Any) -> None:
        """Append a line; `of_run` replaces values for loggers."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"phase": self.phase, "step": step, **values}) + "\n")
        shown = {f"{prefix}/{name}": value for name, value in (values | of_run).items() if value is not None}
        for logger in trainer.loggers:
            logger.log_metrics(shown, self.first_step + step)


class Metrics(Callback):
    """Write loss, learning rate and speed every `log_every` optimizer steps, and move the progress bar.

    Everything but `seconds` and `tokens_per_second` is a function of config and seed.
    """

    def __init__(self, lines: StepLog, log_every: int, tokens_per_step: int, bar: ProgressBar) -> None:
        self.lines, self.log_every, self.tokens_per_step, self.bar = lines, log_every, tokens_per_step, bar
        self.losses: list[Tensor] = []  # since the last line, which may be older than the checkpoint

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = state_dict["losses"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.lines.truncate(trainer.global_step)
        self.began = self.last = time.perf_counter()
        self.last_step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(module, LanguageModelTask)
        self.losses.append(module.last_loss)
        step = trainer.global_step
        if not self.bar.disable:
            self.bar.set_postfix(loss=f"{module.last_loss.item():.3f}", refresh=False)
            self.bar.update(step - self.bar.n)
        if trainer.fit_loop._should_accumulate() or step == self.last_step or step % self.log_every:
            return
        now = time.perf_counter()
        values = {
            "loss": torch.stack(self.losses).mean().item(),
            "learning_rate": module.learning_rate,
            "gradient_norm": module.gradient_norm.item(),
            "tokens": step * self.tokens_per_step,
            "tokens_per_second": (step - self.last_step) * self.tokens_per_step / (now - self.last),
            "seconds": now - self.began,
        }
        run_tokens = (self.lines.first_step + step) * self.tokens_per_step
        self.lines.write(trainer, step, values, "train", phase=self.lines.phase, tokens=run_tokens)
        self.losses, self.last, self.last_step = [], now, step


class Checkpoint(Callback):
    """Save `path` every `every` optimizer steps, at the end, and before a signal ends the run.

    Only at the end of an accumulation window: partial gradients are not part of a checkpoint.

    Args:
        minutes: at least, between the checkpoints that `every` asks for.
    """

    def __init__(self, path: Path, every: int, minutes: float = 0.0) -> None:
        self.path = path
        self.every, self.minutes = every, minutes
        self.last = time.monotonic()  # checkpoint, or start
        self.received: int | None = None
        self.handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if is_main() and 0 < trainer.global_step < trainer.max_steps:
            log.info("%s: resuming from step %d of %d", self.path.stem, trainer.global_step, trainer.max_steps)
        # after Lightning has installed its own handlers
        for signum in STOP_SIGNALS:
            self.handlers[signum] = signal.signal(signum, self._receive)

    def _receive(self, signum: int, frame: Any) -> None:
        if signum == self.received != signal.SIGUSR2:  # the second time: at once
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        self.received = signum
        log.warning("stopping after this step; send the signal again to stop at once")

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        # not into self.received: a signal that arrives during the all-reduce would be lost
        received = all_reduce_max(self.received)
        done = trainer.global_step == trainer.max_steps
        if received is not None or done or (trainer.global_step % self.every == 0 and self._is_due()):
            trainer.save_checkpoint(self.path)
            broadcast_object(None)  # once process 0 has written it
            self.last = time.monotonic()
        if received is not None and not done:
            self.received = received
            raise Interrupted(received, f"at step {trainer.global_step} of {trainer.max_steps}")

    def _is_due(self) -> bool:
        """Return whether enough minutes have passed, by the clock of process 0: all processes save together."""
        return not self.minutes or broadcast_object(time.monotonic() - self.last >= 60 * self.minutes)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._restore_handlers()
        if (received := all_reduce_max(self.received)) is not None:
            raise Interrupted(received, f"after the last of {trainer.max_steps} steps")

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self._restore_handlers()
        # SLURM also signals the processes of loggers and data workers, which end at once
        if self.received is not None and isinstance(exception, (ConnectionError, RuntimeError)):
            raise Interrupted(self.received, f"after step {trainer.global_step} of {trainer.max_steps}") from exception

    def _restore_handlers(self) -> None:
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)
        self.handlers = {}


class GateAnnealing(Callback):
    """Anneal the gate steepness linearly from gate_steepness_start to gate_steepness.

    A shallow gate passes gradients of pairs that it would prune; a steep one approaches hard routing.
    """

    def __init__(self, start: float, final: float) -> None:
        self.start, self.final = start, final

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        progress = trainer.global_step / max(1, trainer.max_steps - 1)
        assert isinstance(module, LanguageModelTask)
        for router in find_routers(module.model).values():
            router.gate_steepness = self.start + (self.final - self.start) * progress


class CentroidUpdates(Callback):
    """Move centroids without a gradient, by the tokens of whole steps of all processes.

    ema: after every step towards the means of their tokens. recluster: every recluster_every steps to k-means centres,
    at the average norm that they had.
    """

    def __init__(self, model: nn.Module, attention: FocusConfig) -> None:
        self.update = attention.centroid_update
        self.decay = attention.centroid_decay
        self.every = attention.recluster_every
        self.methods = find_routers(model) if self.update != "gradient" else {}
        self.last_step = 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.last_step = trainer.global_step
        self._record()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step == self.last_step:
            return
        self.last_step = step
        # not at the last step, after which nothing is trained on the new groups
        due = self.update == "ema" or (step % self.every == 0 and step < trainer.max_steps)
        for layer, method in self.methods.items() if due else ():
            assert method.projected is not None
            tokens = all_gather_tensor(torch.stack(method.projected))  # (batches, N, R) by process
            # in the order of a single process: k-means starts from some of them
            self._move(method, torch.stack(tokens, 1).flatten(0, -2), seed=step + 1_000_003 * layer)
        self._record()

    @torch.no_grad()
    def _move(self, method: Focus, tokens: Tensor, seed: int) -> None:
        router, before = method.router, method.router.centroids
        if self.update == "ema":
            after = follow_means(before, tokens, router.compare(tokens).argmax(-1), self.decay)
        else:
            # scores are dot products: a longer centroid would attract tokens that are nearer to another
            after = nn.functional.normalize(kmeans(tokens, len(before), seed), dim=-1) * before.norm(dim=-1).mean()
        before.copy_(after)

    def _record(self) -> None:
        """Start a new list of projected tokens per method."""
        for method in self.methods.values():
            method.projected = []


PROBES = "probe.jsonl"
MAX_TOKENS = 1024
PROBES_PER_PHASE = 20  # unless trainer.probe_every is set
DEAD_FRACTION = 0.01  # of the tokens, below which a group is dead


def probe_tokens(blocks: SequenceDataset) -> Tensor:
    """Return token ids `(B, T)` spread evenly over `blocks`, at most MAX_TOKENS in all."""
    count = max(1, min(len(blocks), MAX_TOKENS // blocks.seq_len))
    indices = np.linspace(0, len(blocks) - 1, count).round()
    return torch.stack([blocks[int(index)]["input_ids"][:MAX_TOKENS] for index in indices])


class Probe(Callback):
    """Write router statistics before, every `every` steps during, and after a phase.

    dominance: fraction of tokens in the largest group, mean over layers.
    dead_groups: groups with less than DEAD_FRACTION of the tokens, mean over layers.
    assignment_overlap: fraction of tokens in the same group as at the previous probe (the paper's stability).
    confidence: mean maximum of the tokens' assignments.
    """

    def __init__(
        self, lines: StepLog, every: int, model: PreTrainedModel, tokens: Tensor, precision: Precision
    ) -> None:
        self.lines, self.every = lines, every
        self.model, self.tokens, self.precision = model, tokens, precision
        self.groups: Tensor | None = None  # (layers, N) at the last probe
        self.last_step = -1

    def state_dict(self) -> dict[str, Any]:
        return {"groups": self.groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.groups = state_dict["groups"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        resumed = self.groups is not None
        self.last_step = trainer.global_step if resumed else -1
        if is_main():
            self.lines.truncate(self.last_step)
        self.probe(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step % self.every == 0 or trainer.global_step == trainer.max_steps:
            self.probe(trainer)

    def probe(self, trainer: pl.Trainer) -> None:
        """Write this step's statistics once; all processes compute them, process 0 writes."""
        step = trainer.global_step
        if step == self.last_step:
            return
        self.last_step = step
        assignments = route_tokens(self.model, self.tokens, self.precision)
        groups = torch.stack([assignment.argmax(-1) for assignment in assignments])
        statistics = router_statistics(assignments, groups, self.groups)
        self.groups = groups
        if is_main():
            self.lines.write(trainer, step, statistics, "probe")


@torch.no_grad()
def route_tokens(model: PreTrainedModel, tokens: Tensor, precision: Precision) -> list[Tensor]:
    """Return the assignments `(B * T, K)` of each layer to tokens `(B, T)` in eval mode, on the CPU.

    Gates are soft or hard as in training. The model's state does not change.
    """
    assignments: dict[int, Tensor] = {}

    def observe(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        assert selection.assignment is not None
        assignments[layer] = selection.assignment.flatten(0, -2).cpu()

    with eval_mode(model), observe_selections(model, observe), precision.context():
        model(input_ids=tokens.to(model.device), use_cache=False, logits_to_keep=1)
    return [assignments[layer] for layer in sorted(assignments)]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules in eval mode, with gates as hard as `train_with` has them."""
    routers = list(find_routers(model).values())
    is_hard = any(router.train_with == "hard" for router in routers)
    with temporary_attributes(model.modules(), training=False), temporary_attributes(routers, hard=is_hard):
        yield


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
