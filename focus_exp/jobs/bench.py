"""job=bench."""

from __future__ import annotations

from typing import Any

from hydra.core.hydra_config import HydraConfig

from focus_exp.config import Config, get_method_options
from focus_exp.errors import UserError
from focus_exp.jobs.adapter import with_adapter
from focus_exp.jobs.backend import list_kernels
from focus_exp.jobs.prepare import check_length, describe, headline, load, prepare, training_blocks
from focus_exp.jobs.router import put_router, trains_router
from focus_exp.jobs.run import already_finished, open_run, run_folder
from focus_exp.jobs.variants import compose_shared
from focus_exp.models.methods import set_routing
from focus_exp.results.run_dir import earlier_record
from focus_exp.speed.bench import SpeedBenchmark
from focus_exp.speed.layer import Methods
from focus_exp.training.precision import choose_precision, has_native_bf16


def bench(config: Config) -> None:
    """Time Focus against full attention on this device: layer, prefill, training step, decode.

    bench.list=true lists the kernels that are available and why others are not. Triton's kernels and torch's flash
    attention were checked and timed on an H200 (runs/records/gpu); FlashAttention 3, 4 and flash-attn have not run yet.
    """
    if config.bench.list:
        list_kernels(config)
        return
    if config.adapter:
        config = with_adapter(config)
    refuse_untimed(config)
    methods = other_methods(config)
    refuse_other_options(config, methods)
    if already_finished(config):
        return
    precision = choose_precision(config.trainer.precision, config.trainer.accelerator, config.recipe.trains("all"))
    router = f"the router in {config.adapter}" if config.adapter else headline(config)
    timed = "Focus" if config.has_router else config.attention.name
    print(f"speed of {timed} against full attention; {router}; {describe(precision)}")
    print(f"run folder: {run_folder(config)}")
    with open_run(config, describe(precision)) as run:
        if config.has_router and config.bench.dtype == "bf16" and not has_native_bf16(precision.device):
            run.warn(
                "bench.dtype=bf16 is emulated on this CPU, so its times of a layer say nothing; use bench.dtype=float32"
            )
        timed_too = {"methods": recorded(methods)} if methods else {}
        run.record.method = dict(timed_too)  # what an interrupted run has timed is theirs
        loaded, corpus = load(run, precision)
        model, evaluators = prepare(run, loaded, corpus, precision)
        blocks = training_blocks(config, loaded, corpus) if trains_router(config) else None
        longest = max([config.eval.seq_len, *config.bench.prefill_lengths, *config.bench.step_lengths])
        check_length(model, "bench.prefill_lengths or bench.step_lengths", longest, config.model.name)
        if config.bench.quality:
            evaluators.measure_base()
        trained = put_router(run, model, blocks, precision, longest)
        run.record.method |= timed_too
        if config.has_router:
            set_routing(model, hard=True, top_k=config.focus.top_k, pair_rule=config.focus.pair_rule)
        elif config.dual:  # an adapter may be timed at another number of groups
            set_routing(model, hard=True, top_k=config.dual.top_k)
        held_out = evaluators.perplexity.blocks
        benchmark = SpeedBenchmark(config, model, held_out, precision, run.folder, trained, methods)
        for measurement in benchmark.run():
            run.record.measurements.append(measurement)
            if measurement.metric == "speedup":
                run.save()
        if config.bench.quality:
            evaluators.measure_attached()
            evaluators.write_final(run.record, run.folder)


def refuse_untimed(config: Config) -> None:
    """UserError for what no clock is for: no router, or two encoders otherwise than fitted and in a prefill."""
    name, settings = config.attention.name, config.bench
    if config.has_router:
        return
    if not config.dual:
        raise UserError(f"job=bench times routers, not attention={name}; use attention=focus or attention=focus_dual")
    for key in ("lengths", "step_lengths", "decode_lengths", "methods"):
        if getattr(settings, key):
            raise UserError(f"bench.{key} is for attention=focus; of attention={name} a prefill is timed: leave it out")
    if not settings.prefill_lengths:
        raise UserError(f"attention={name} is timed in a prefill of the whole model; give bench.prefill_lengths=[4096]")
    if not (config.adapter or config.fitting or config.phases):
        raise UserError(
            f"attention={name} is timed once it is fitted; give adapter=, or attention.calibration_sequences above 0"
        )


def other_methods(config: Config) -> Methods:
    """`bench.methods`, each a name of conf/attention, with its options. UserError for one that has no layer to time."""
    found = {}
    for name in config.bench.methods:
        attention = compose_shared(HydraConfig.get().overrides.task, [f"attention={name}", "recipe=none"]).attention
        if attention.method in ("full", "focus"):
            raise UserError(f"bench.methods={name}: full attention and Focus are timed by every bench; name others")
        found[name] = (attention.method, get_method_options(attention))
    return found


def recorded(methods: Methods) -> dict[str, dict[str, Any]]:
    """The same as a record has them."""
    return {name: {"method": method, **options} for name, (method, options) in methods.items()}


def refuse_other_options(config: Config, methods: Methods) -> None:
    """UserError where a run of this name, which tells of `bench.methods` the names alone, has timed other options."""
    record = None if config.overwrite else earlier_record(config)
    for name, then in (record.method.get("methods", {}) if record else {}).items():
        now = recorded(methods)[name]
        changed = [f"{key}={value}" for key, value in then.items() if now.get(key, value) != value]
        if changed:
            raise UserError(
                f"bench.methods={name}: {run_folder(config)} was made with its {', '.join(changed)}; overwrite=true "
                "makes it anew, another runs_dir leaves it alone"
            )
