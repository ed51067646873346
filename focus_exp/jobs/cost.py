"""Estimate the time and memory of job=train from single passes on this machine.

The passes run on untrained copies of the attached layers, so that they change no number of the run.
"""

from __future__ import annotations

import math
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from focus_exp.assets import cache_root
from focus_exp.attention.options import FitOptions
from focus_exp.config import AttentionConfig, Config, get_method_options
from focus_exp.data import SequenceDataset
from focus_exp.evaluation.controls import full_attention
from focus_exp.evaluation.perplexity import PerplexityEvaluator, score
from focus_exp.models.methods import find_routers, is_causal, set_routing, swap_attachment
from focus_exp.speed.timing import Work, peak_memory, time_once
from focus_exp.training.fits import count_remaining, fit_one_layer, record
from focus_exp.training.focus_dual_fit.importance import (
    count_fit_threads,
    fitted_methods,
    map_in_threads,
)
from focus_exp.training.module import LanguageModelTask
from focus_exp.training.phases import set_training_mode

TIMED_STEPS = (4, 64)  # steps of a layer-wise fit: the difference leaves out what does not grow with them
PASSES = 2


def count_scored(config: Config, fit_variants: int, causal: bool) -> tuple[int, float]:
    """Count the passes over the held-out sequences without and with the method, each sequence once in a row.

    Args:
        fit_variants: still to be scored.
        causal: whether the method is; others are scored as their causal counterpart too.
    """
    base = 1 + (config.recipe.trains("lora") or config.recipe.trains("all"))
    if config.attention.method == "full":
        return base, 0.0
    attached = 1.0 + len(config.eval.adapters) + fit_variants
    if config.has_router:  # soft routing, hard ones, controls, counterparts, and both routings after earlier phases
        attached += len(config.scored_top_ks) + 3 * config.eval.controls + 2 * max(0, len(config.phases) - 1)
        attached += 2 * (not causal and config.focus.balance_sequences > 0)
    return base, attached


@dataclass
class CostEstimator:
    """Time one pass of each kind and add up those of a run.

    seconds: of each stage. memory: bytes at the moments that no timed pass reaches.

    Args:
        sequences: of training.
        evaluator: of the run.
        variants: options and text of eval.fit_variants that are still to be fitted.
    """

    config: Config
    evaluator: PerplexityEvaluator
    sequences: SequenceDataset
    variants: list[tuple[AttentionConfig, SequenceDataset]]

    def __post_init__(self) -> None:
        self.model, self.precision = self.evaluator.model, self.evaluator.precision
        self.seconds = dict.fromkeys(("training", "fit", "scoring"), 0.0)
        self.memory: list[int] = []

    def estimate(self) -> str:
        """Return one line on the minutes and the memory of what is left of the run."""
        attachment: Any = getattr(self.model, "focus_attachment", None)
        copies = swap_attachment(self.model, attachment.method, attachment.options) if attachment else nullcontext()
        with torch.random.fork_rng(devices=[]), copies:
            self.time_training()
            self.time_scoring()
            own = [(self.config.attention, self.sequences)] if self.config.fitting else []
            for options, sequences in [*own, *self.variants]:
                with swap_attachment(self.model, options.method, get_method_options(options)):
                    self.time_fit(options, sequences)
        minutes = {stage: seconds / 60 for stage, seconds in self.seconds.items()}
        parts = ", ".join(f"{stage} {value:.1f}" for stage, value in minutes.items() if value)
        gigabytes = max([peak_memory(), *self.memory]) / 1e9
        without = ", without eval.tasks" if self.config.eval.tasks else ""
        return f"estimate: {sum(minutes.values()):.1f} minutes ({parts}{without}), {gigabytes:.1f} GB"

    def time_pass(self, work: Work) -> float:
        """Return the seconds of the fastest pass; the first one allocates."""
        return min(time_once(work, self.precision.device) for _ in range(PASSES))

    def add(self, stage: str, count: float, work: Work) -> None:
        if count:
            self.seconds[stage] += count * self.time_pass(work)

    def time_scoring(self) -> None:
        """Add what `PerplexityEvaluator.measure_attached` and, between phases, `measure_phase` score."""
        config, evaluator, model = self.config, self.evaluator, self.model
        size, indices = config.eval.batch_size, evaluator.indices
        one = partial(score, model, evaluator.blocks, indices[:size], size, self.precision, "estimating the time")
        batches = math.ceil(len(indices) / size)
        base, attached = count_scored(config, len(self.variants), is_causal(model))
        with full_attention(model):
            self.add("scoring", base * batches, one)
        if config.has_router:
            # two controls are matched again in each round
            repeated = [*accumulate(map(len, evaluator.rounds))][:-1] if evaluator.is_base_frozen else []
            attached += 2 * config.eval.controls * sum(repeated) / len(indices)
        if attached:
            set_routing(model, hard=True)
            self.add("scoring", attached * batches, one)

    def time_training(self) -> None:
        """Add the steps of every phase; the warm start, probes and calibration of the balance are left out (3 %)."""
        config, model = self.config, self.model
        if not any(phase.steps for _, phase in config.phases):
            return
        if config.has_router:  # of each layer the warm start keeps (T, E) and (T, T) in bfloat16
            length, warm_start = config.data.seq_len, config.focus.warm_start_sequences
            elements = sum(length * (method.shape.width + length) for method in find_routers(model).values())
            self.memory.append(peak_memory() + 2 * warm_start * elements)
        batch = torch.stack(self.sequences.sample(config.trainer.batch_size, 0)).to(self.precision.device)
        for name, phase in config.phases:
            task = LanguageModelTask(model, phase, name)
            set_training_mode(model, phase)

            def step(task: LanguageModelTask = task) -> None:
                with self.precision.context():
                    task.training_step({"input_ids": batch}, 0).backward()
                model.zero_grad()

            self.add("training", phase.steps * config.trainer.accumulate, step)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.memory.append(peak_memory() + 8 * trained)  # AdamW
        model.requires_grad_(False).eval()

    def time_fit(self, options: AttentionConfig, sequences: SequenceDataset) -> None:
        """Add what is left of the importance pass over the calibration sequences and of the fit of every layer."""
        assert isinstance(options, FitOptions)
        seed, cache = self.config.seed, cache_root(self.config.cache_dir)
        sample = sequences.sample(options.calibration_sequences, seed + 1)
        passes, remaining = count_remaining(self.model, sample, options, self.precision, cache, seed)
        if not passes and not remaining:
            return
        methods, tokens = fitted_methods(self.model), sample[0]
        changed: Any = options
        device, layers = self.precision.device, list(methods)[: count_fit_threads(self.precision.device)]
        with tempfile.TemporaryDirectory() as folder:
            folders = (Path(folder) / str(number) for number in range(PASSES))
            pass_over = partial(record, self.model, methods, [tokens], options, self.precision)
            self.seconds["fit"] += passes * self.time_pass(lambda: pass_over(next(folders)))
            paths = [*Path(folder, "1").iterdir()] * (options.calibration_sequences - options.validation_sequences)

            def fit(steps: int, layer: int) -> None:
                generator = torch.Generator().manual_seed(0)
                fit_one_layer(methods[layer], paths, layer, replace(changed, fit_steps=steps), generator)

            def fit_layers(steps: int) -> list[None]:
                return list(map_in_threads(partial(fit, steps), layers, device))

            if remaining:
                short, long = (self.time_pass(partial(fit_layers, steps)) for steps in TIMED_STEPS)
                step = max(0.0, long - short) / (TIMED_STEPS[1] - TIMED_STEPS[0])
                seconds = max(0.0, short + step * (options.fit_steps - TIMED_STEPS[0]))
                self.seconds["fit"] += seconds * remaining / len(layers)
