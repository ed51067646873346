"""What happens around the training steps: progress, metrics, checkpoints, a clean end on a signal."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

from focus_exp.config_attention import FocusConfig
from focus_exp.errors import STOP_SIGNALS, Interrupted
from focus_exp.models.methods import find_routers
from focus_exp.progress import ProgressBar
from focus_exp.results.metrics import read_metrics, write_metrics
from focus_exp.training.exchange import any_of, is_main
from focus_exp.training.module import LanguageModelTask


class Metrics(Callback):
    """One line of `path` (JSONL) per logged optimiser step: phase, step, loss, learning rate, tokens, speed.

    `seconds` counts this process's training time; all else is a function of configuration and seed. Steps and tokens
    are those of the phase; loggers, who draw one curve, get those of the run, `before` steps of earlier phases
    included.
    """

    def __init__(self, path: Path, phase: str, before: int, log_every: int, tokens_per_step: int) -> None:
        self.path = path
        self.phase = phase
        self.before = before
        self.log_every = log_every
        self.tokens_per_step = tokens_per_step
        self.losses: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}  # since the last line, where lines are rarer than checkpoints

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = state_dict["losses"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        kept = [m for m in read_metrics(self.path) if m["phase"] != self.phase or m["step"] <= trainer.global_step]
        write_metrics(self.path, kept)
        self.began = self.last = time.perf_counter()
        self.last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(module, LanguageModelTask)
        self.losses.append(module.last_loss)
        step = trainer.global_step
        if trainer.fit_loop._should_accumulate() or step == self.last_step or step % self.log_every:
            return
        now = time.perf_counter()
        line = {
            "phase": self.phase,
            "step": step,
            "loss": torch.stack(self.losses).mean().item(),
            "learning_rate": module.learning_rate,
            "gradient_norm": module.gradient_norm,
            "tokens": step * self.tokens_per_step,
            "tokens_per_second": (step - self.last_step) * self.tokens_per_step / (now - self.last),
            "seconds": now - self.began,
        }
        module.log("tokens/s", line["tokens_per_second"], prog_bar=True, logger=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        of_run = {name: value for name, value in line.items() if name != "step"}
        of_run["tokens"] = (self.before + step) * self.tokens_per_step
        for logger in trainer.loggers:
            logger.log_metrics({f"train/{name}": value for name, value in of_run.items()}, self.before + step)
        self.losses, self.last, self.last_step = [], now, step


class Checkpoint(Callback):
    """Saves `path` every so many optimiser steps, at the end, and before a signal or an error ends the run.

    Always at the end of an accumulation window: partial gradients are not part of a checkpoint.
    """

    def __init__(self, path: Path, every: int) -> None:
        self.path = path
        self.every = every
        self.received: int | None = None
        self.handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if is_main() and 0 < trainer.global_step < trainer.max_steps:
            print(f"{self.path.stem}: going on from step {trainer.global_step} of {trainer.max_steps}")
        # after Lightning has put its own handlers in place
        for signum in STOP_SIGNALS:
            self.handlers[signum] = signal.signal(signum, self._receive)

    def _receive(self, signum: int, frame: Any) -> None:
        if signum == self.received != signal.SIGUSR2:  # asked twice: at once
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        self.received = signum
        print("\nstopping after this step; once more to stop at once", file=sys.stderr)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        # not into self.received: a signal that comes while processes agree would be lost
        agreed = any_of(self.received)
        done = trainer.global_step == trainer.max_steps
        if agreed is not None or done or trainer.global_step % self.every == 0:
            trainer.save_checkpoint(self.path)
        if agreed is not None and not done:
            self.received = agreed
            raise Interrupted(agreed, f"at step {trainer.global_step} of {trainer.max_steps}")

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._restore()
        if (agreed := any_of(self.received)) is not None:
            raise Interrupted(agreed, f"after the last of {trainer.max_steps} steps")

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()
        # SLURM signals the processes of a logger or of the data as well, and they are gone at once
        if self.received is not None and isinstance(exception, (ConnectionError, RuntimeError)):
            raise Interrupted(self.received, f"after step {trainer.global_step} of {trainer.max_steps}") from exception

    def _restore(self) -> None:
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)
        self.handlers = {}


class GateAnnealing(Callback):
    """Steepens the soft gates from gate_steepness_start to gate_steepness, linearly in the steps of a phase.

    A shallow gate lets gradients see the pairs it would drop; a steep one is the hard mask that is used in the end.
    """

    def __init__(self, attention: FocusConfig) -> None:
        self.final = attention.gate_steepness
        self.start = self.final if attention.gate_steepness_start is None else attention.gate_steepness_start

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._set(module, self.start + (self.final - self.start) * trainer.global_step / max(1, trainer.max_steps - 1))

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._set(module, self.final)

    def _set(self, module: pl.LightningModule, steepness: float) -> None:
        assert isinstance(module, LanguageModelTask)
        for router in find_routers(module.model).values():
            router.gate_steepness = steepness


class Progress(Callback):
    """One bar for the whole phase: loss, tokens/s and the time left."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.bar = ProgressBar(
            total=trainer.max_steps, initial=trainer.global_step, desc=f"training {self.phase}", unit="step", leave=True
        )

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(module, LanguageModelTask)
        speed = trainer.progress_bar_metrics.get("tokens/s", 0)
        shown = {"loss": f"{module.last_loss.item():.3f}", "tokens/s": f"{speed:,.0f}"}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(trainer.global_step - self.bar.n)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.bar.close()

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        if hasattr(self, "bar"):
            self.bar.close()
