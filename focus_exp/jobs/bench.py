"""job=bench."""

from __future__ import annotations

import sys
from dataclasses import replace

from transformers import PreTrainedModel

from focus_exp.config import Config, get_method_options
from focus_exp.errors import UserError
from focus_exp.jobs.train import load_or_fit_router
from focus_exp.models.load import count_positions
from focus_exp.models.methods import set_routing
from focus_exp.runs.compose import command_overrides, compose_overrides, compose_router
from focus_exp.runs.open import Run, open_run
from focus_exp.runs.prepare import prepare
from focus_exp.runs.resume import print_finished
from focus_exp.speed.bench import SpeedBenchmark
from focus_exp.speed.layer import Methods
from focus_exp.training.precision import has_native_bf16


def bench(config: Config) -> None:
    """Time a method against full attention on this device: one layer, forward and backward, prefill, decode.

    attention.backend=<kernel> says why a kernel is not available. Those of Triton were checked and timed on an H200
    (runs/records/gpu).
    """
    settings = config.bench
    config = compose_router(config)
    attention = config.attention
    if not (attention.is_soft or config.adapter or config.is_trained):  # has no groups but its own
        raise UserError(f"recipe.fit.sequences must be > 0 with attention={attention.name} (got 0). Or type adapter=.")
    methods = compose_methods(config)
    if print_finished(config):
        return
    with open_run(config) as run:
        if settings.dtype == "bf16" and not has_native_bf16(run.precision.device):
            run.warn("bench.dtype should be float32 (got bf16): this CPU emulates bfloat16, which distorts layer times")
        setup = prepare(run)
        model = setup.model
        if settings.quality:
            setup.measure_base()
        is_trained = load_or_fit_router(run, setup)
        run.record.method |= {"methods": methods} if methods else {}
        set_routing(model, hard=True, **attention.routing)
        sequences = setup.perplexity.blocks
        timed = fit_lengths(run, model)
        benchmark = SpeedBenchmark(timed, model, sequences, run.precision, is_trained, methods)
        for measurement in benchmark.run():
            run.record.measurements.append(measurement)
        if settings.quality:
            setup.measure_attached()
            setup.write(run)


def fit_lengths(run: Run, model: PreTrainedModel) -> Config:
    """Return the configuration without whole-model lengths beyond the model's positions, and warn of these.

    One layer has no positions, so its lengths are all timed.
    """
    bench, positions = run.config.bench, count_positions(model) or sys.maxsize
    prefill = [length for length in bench.prefill_lengths if length <= positions]
    decode = [length for length in bench.decode_lengths if length <= positions]
    long = sorted({*bench.prefill_lengths, *bench.decode_lengths} - {*prefill, *decode})
    if long:
        lengths = ", ".join(map(str, long))
        run.warn(f"the whole model is not timed at {lengths} tokens: {run.config.model.name} has {positions} positions")
    return replace(run.config, bench=replace(bench, prefill_lengths=prefill, decode_lengths=decode))


def compose_methods(config: Config) -> Methods:
    """Return the options of `bench.methods`, which are names of conf/attention."""
    methods = {}
    for name in config.bench.methods:
        chosen = [f"attention={name}", "recipe=none"]
        attention = compose_overrides(command_overrides(), chosen, changes_method=True).attention
        if attention.method in ("full", config.attention.method):
            timed = f"full attention and attention={config.attention.name} are always timed"
            raise UserError(f"bench.methods must not contain {name}: {timed}.")
        methods[name] = {"method": attention.method, **get_method_options(attention)}
    return methods
