"""Estimate the time and memory of job=train from single passes on this machine.

The passes run on untrained copies of the attached layers, so that they change no number of the run.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
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
from focus_exp.models.methods import (
    attached_methods,
    find_routers,
    is_causal,
    set_routing,
    swap_attachment,
    swap_methods,
)
from focus_exp.speed.timing import Work, peak_memory, time_once
from focus_exp.training.callbacks import PROBES_PER_PHASE, probe_tokens, route_tokens
from focus_exp.training.fits import count_remaining, fit_one_layer
from focus_exp.training.focus_dual_fit.importance import (
    count_fit_threads,
    map_in_threads,
    read_observations,
    record_observations,
)
from focus_exp.training.module import LanguageModelTask
from focus_exp.training.phases import set_training_mode
from focus_exp.training.warm_start import AttentionProbe, fit_router, run_forward

TIMED_STEPS = (4, 64)  # steps of a layer-wise fit: the difference leaves out what does not grow with them
PASSES, TIMING_SECONDS = (2, 4), 4.0  # passes that are timed, at least and at most; seconds that end the latter


class CostEstimator:
    """Time one pass of each kind and add up those of a run.

    seconds: of each stage. memory: bytes at the moments that no timed pass reaches.

    Args:
        sequences: of training.
        evaluator: of the run.
        variants: options of eval.fit_variants that are still to be fitted.
    """

    def __init__(
        self,
        config: Config,
        evaluator: PerplexityEvaluator,
        sequences: SequenceDataset,
        variants: list[AttentionConfig],
    ) -> None:
        self.config, self.evaluator, self.sequences = config, evaluator, sequences
        self.model, self.precision = evaluator.model, evaluator.precision
        self.fits = [*([config.attention] if config.fitting else []), *variants]
        self.rows = len(evaluator.adapters) + len(variants)
        self.seconds = dict.fromkeys(("training", "fit", "scoring"), 0.0)
        self.memory: list[int] = []

    def estimate(self) -> str:
        """Return one line on the minutes and the memory of what is left of the run."""
        attachment: Any = getattr(self.model, "focus_attachment", None)
        copies = swap_attachment(self.model, attachment.method, attachment.options) if attachment else nullcontext()
        with torch.random.fork_rng(devices=[]), copies:
            self.time_training()
            self.time_scoring()
            for options in self.fits:
                with swap_attachment(self.model, options.method, get_method_options(options)):
                    self.time_fit(options)
        minutes = {stage: seconds / 60 for stage, seconds in self.seconds.items()}
        parts = ", ".join(f"{stage} {value:.1f}" for stage, value in minutes.items() if value)
        gigabytes = max([peak_memory(), *self.memory]) / 1e9
        without = ", without eval.tasks" if self.config.eval.tasks else ""
        return f"estimate: {sum(minutes.values()):.1f} minutes ({parts}{without}), {gigabytes:.1f} GB"

    def time_pass(self, work: Work) -> float:
        """Return the least seconds of several passes: other programs only add to them, and the first one allocates."""
        seconds: list[float] = []
        least, most = PASSES
        while len(seconds) < least or (len(seconds) < most and sum(seconds) < TIMING_SECONDS):
            seconds.append(time_once(work, self.precision.device))
        return min(seconds)

    def add(self, stage: str, count: float, work: Work) -> None:
        if count:
            self.seconds[stage] += count * self.time_pass(work)

    def add_layers(self, stage: str, layers: float, steps: int, fit: Callable[[int], Any]) -> None:
        """Add layer-wise fits of so many steps; fit(steps) fits one layer, or as many as run at a time."""
        if layers:
            short, long = (self.time_pass(partial(fit, count)) for count in TIMED_STEPS)
            step = max(0.0, long - short) / (TIMED_STEPS[1] - TIMED_STEPS[0])
            self.seconds[stage] += layers * max(0.0, short + step * (steps - TIMED_STEPS[0]))

    def time_scoring(self) -> None:
        """Add what `PerplexityEvaluator.measure_attached` and, between phases, `measure_phase` score."""
        config, evaluator, model = self.config, self.evaluator, self.model
        size, indices = config.eval.batch_size, evaluator.indices
        one = partial(score, model, evaluator.blocks, indices[:size], size, self.precision, "estimating the time")
        batches = math.ceil(len(indices) / size)
        with full_attention(model):
            self.add("scoring", (1 + (config.recipe.trains("lora") or config.recipe.trains("all"))) * batches, one)
        soft, hard = 0.0, float(config.attention.method != "full") * (1 + self.rows)
        if config.has_router:
            earlier = max(0, len(config.phases) - 1)
            counterparts = 2 * (not is_causal(model) and config.focus.balance_sequences > 0)
            soft = 1 + earlier
            hard = len(evaluator.hard_top_ks()) + 3 * config.eval.controls + self.rows + counterparts + earlier
            # two controls are matched again in each round
            repeated = [*accumulate(map(len, evaluator.rounds))][:-1] if evaluator.is_base_frozen else []
            hard += 2 * config.eval.controls * sum(repeated) / len(indices)
        for is_hard, count in ((False, soft), (True, hard)):
            if count:
                set_routing(model, hard=is_hard)
                self.add("scoring", count * batches, one)

    def time_training(self) -> None:
        """Add the warm start, the steps and probes of every phase, and the calibration of the balance."""
        config, model, steps = self.config, self.model, [phase.steps for _, phase in self.config.phases]
        if not any(steps):
            return
        if config.has_router and config.focus.warm_start_sequences:
            self.time_warm_start()
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
        if find_routers(model):
            set_routing(model, hard=False)
            probe, every = probe_tokens(self.evaluator.blocks), config.trainer.probe_every
            spacings = [max(1, n // PROBES_PER_PHASE) if every is None else every for n in steps]
            probes = sum(
                1 + math.ceil(n / spacing) for n, spacing in zip(steps, spacings, strict=True) if n and spacing
            )
            self.add("training", probes, lambda: route_tokens(model, probe, self.precision))
            sample = self.sequences.sample(1, 0)
            forward = partial(run_forward, model, sample, self.precision, "estimating the time")
            self.add("training", config.focus.balance_sequences, torch.no_grad()(forward))

    def time_warm_start(self) -> None:
        focus, sample, methods = self.config.focus, self.sequences.sample(1, 0), find_routers(self.model)
        probes = {i: AttentionProbe(m.shape, m.window, m.sinks) for i, m in methods.items()}

        @torch.no_grad()
        def record() -> None:
            run_forward(self.model, sample, self.precision, "estimating the time")

        with swap_methods(self.model, dict(probes)):
            self.add("training", focus.warm_start_sequences, record)
        stored = sum(x.nbytes for probe in probes.values() for x in (probe.hidden[0], probe.mass[0]))
        self.memory.append(peak_memory() + focus.warm_start_sequences * stored)
        layer, method = next(iter(methods.items()))
        generator = torch.Generator().manual_seed(0)
        self.add_layers("training", len(methods), focus.warm_start_steps,
                        lambda steps: fit_router(method, probes[layer], steps, generator))  # fmt: skip

    def time_fit(self, options: AttentionConfig) -> None:
        """Add what is left of the importance pass over the calibration sequences and of the fit of every layer."""
        assert isinstance(options, FitOptions)
        seed, cache = self.config.seed, cache_root(self.config.cache_dir)
        sample = self.sequences.sample(options.calibration_sequences, seed + 1)
        passes, remaining = count_remaining(self.model, sample, options, self.precision, cache, seed)
        if not passes and not remaining:
            return
        methods, tokens = attached_methods(self.model), sample[0]
        changed: Any = options
        device, layers = self.precision.device, list(methods)[: count_fit_threads(self.precision.device)]
        with tempfile.TemporaryDirectory() as folder:
            folders = (Path(folder) / str(number) for number in range(PASSES[1]))
            record = partial(record_observations, self.model, methods, [tokens], self.precision)
            seconds = self.time_pass(lambda: record(next(folders)))
            self.seconds["fit"] += seconds * passes
            paths = [*Path(folder, "1").iterdir()] * (options.calibration_sequences - options.validation_sequences)

            def fit(steps: int, layer: int) -> None:
                observations, generator = read_observations(paths, layer), torch.Generator().manual_seed(0)
                fit_one_layer(methods[layer], observations, replace(changed, fit_steps=steps), generator)

            self.add_layers("fit", remaining / len(layers), options.fit_steps,
                            lambda steps: list(map_in_threads(partial(fit, steps), layers, device)))  # fmt: skip
