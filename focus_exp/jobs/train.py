"""job=train, and the training part of other jobs."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.assets import cache_root
from focus_exp.attention.options import FocusOptions
from focus_exp.config import Config, EvalConfig, RecipeConfig, TuneConfig, get_method_options
from focus_exp.data import SequenceDataset
from focus_exp.errors import UserError, first_line
from focus_exp.fitting.balance import balance_groups
from focus_exp.fitting.cache import fit_attached
from focus_exp.fitting.focus import temporary_calibration, warm_start
from focus_exp.jobs.evaluate import load_trained
from focus_exp.models.adapter import save_adapter
from focus_exp.models.attach import attach
from focus_exp.models.load import fingerprint, gather_tensor
from focus_exp.models.lora import add_lora, count_router_parameters, describe_lora, save_lora
from focus_exp.models.methods import attached_methods, is_causal, is_trainable, set_routing
from focus_exp.results.measurement import soft_variant
from focus_exp.results.record import Record, Trial
from focus_exp.results.run_dir import run_folder
from focus_exp.runs.cost import estimate_time
from focus_exp.runs.open import Run, open_run
from focus_exp.runs.prepare import Setup, prepare, training_sequences
from focus_exp.runs.resume import finished_record, print_finished
from focus_exp.storage import atomic_write, file_lock
from focus_exp.training.callbacks import PROBES, probe_tokens, read_probes
from focus_exp.training.checkpoints import checkpoint_path, remove_damaged
from focus_exp.training.distributed import (
    broadcast_attached,
    broadcast_object,
    is_main,
    is_sharded,
    process_group,
    run_on_rank_zero,
    sequential_by_rank,
)
from focus_exp.training.phases import CHECKPOINTS, tokens_per_step, train_phases
from focus_exp.training.precision import choose_device

TRIALS = "tries"  # experiment of the learning-rate trials


def train(config: Config) -> None:
    """Measure the base, attach, train, switch to hard routing, measure again.

    A run is written to runs/<experiment>/<model>-<data>-<device>/<method or variant>-seed<n>-<config hash>:
    config.yaml, metrics.jsonl, probe.jsonl (router load on held-out tokens during training), adapter/, model/ where all
    weights are trained, record.json, measurements.csv, losses.csv, table.md, figures/ and a W&B run (online with a key;
    logger.wandb=disabled writes none). Re-run the same command to resume, to the same numbers; overwrite=true repeats a
    finished run. With a frozen base perplexity is measured on 4 sequences before a router is trained, then on 16, 64,
    ... and all; the table is printed and written each time.

    assets=auto|hub|embedded chooses where weights and data may come from. A substitute is named in the first lines,
    in the path and in every table. Shorter than 256 tokens on a CPU and 2,048 on a GPU, masked attention gives the
    same result without a speedup.
    """
    if print_finished(config):
        return
    device = choose_device(config.trainer.accelerator)
    if config.model.quantization != "none" and device.type != "cuda":
        key = f"model.quantization={config.model.quantization}"
        raise UserError(f"{key} needs a CUDA GPU (got {device.type}). Use model.quantization=none.")
    tuned, trials = tune_learning_rate(config)
    with process_group(config.trainer, device.type), open_run(config) as run:
        run.config, run.record.config, run.record.trials = tuned, asdict(tuned), trials
        if trials:
            print(f"learning rate {last_rate(tuned):g}, the best of {len(trials)} on validation text")
        with sequential_by_rank(config.trainer.devices):
            setup = prepare(run)
        model = setup.model
        sequences = training_sequences(tuned, setup)
        has_lora = tuned.recipe.trains("lora")  # which cannot be switched off
        if has_lora:
            run_on_rank_zero(model, setup.measure_base)
        attach_method(model, tuned)
        if not has_lora:
            run_on_rank_zero(model, setup.measure_base)
        if run.record.wall_seconds is None and tuned.trainer.devices * tuned.trainer.num_nodes == 1:  # not resumed
            print(estimate_time(tuned, setup.perplexity))
        with run.count_training_time():
            fit(run, model, sequences, setup)
            if tuned.recipe.trains("all"):
                save_weights(run.folder, model, setup.tokenizer)
                run.record.method["weights"] = fingerprint(model)  # of the base of runs with model.path=<this model>

        def print_round(scored: int, total: int) -> None:
            print_table(run, setup, f"{scored} of {total} sequences scored")

        run_on_rank_zero(model, lambda: setup.measure_attached(print_round))
        setup.write(run)


def print_table(run: Run, setup: Setup, progress: str) -> None:
    """Print and write the table of what has been scored; `progress` says how much that is."""
    setup.write(run)
    run.record.error = progress
    print(f"{progress}:")
    run.write_report()


def save_weights(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save the trained base and its tokenizer for model.path=; routers are in the adapter."""
    # sharded: of the weights that the architecture may tie, those that this model ties
    tied = set(model.all_tied_weights_keys) if is_sharded(model) else set()
    state = {}
    for name, tensor in model.state_dict().items():
        if ".focus." not in name and name not in tied:
            whole = gather_tensor(tensor)
            if is_main():
                state[name] = whole.cpu() if is_sharded(model) else whole
    if not is_main():
        return
    with atomic_write(folder / "model") as new:
        model.save_pretrained(new, state_dict=state)
        tokenizer.save_pretrained(new)


def load_or_fit_router(run: Run, setup: Setup) -> bool:
    """Attach the adapter's router, or train one as recipe and method say; False if it stays untrained."""
    config, model = run.config, setup.model
    if config.adapter:
        load_trained(run, model)
        return True
    sequences = training_sequences(config, setup) if config.is_trained else None
    attach_method(model, config)
    run.record.method = {"name": config.attention.name, "causal": is_causal(model)}
    if sequences is not None:
        fit(run, model, sequences)
    return sequences is not None


def attach_method(model: PreTrainedModel, config: Config) -> None:
    """Attach the method and LoRA that the configuration names."""
    lora = config.recipe.lora
    if config.attention.method != "full":
        pl.seed_everything(config.seed, verbose=False)
        attach(model, config.attention.method, **get_method_options(config.attention))
        set_routing(model, hard=False, backend=config.attention.backend)
    if config.recipe.trains("lora"):
        router = count_router_parameters(model, lora.router_groups, FocusOptions.routing_dim)
        pl.seed_everything(config.seed, verbose=False)
        add_lora(model, lora, router)
        description = describe_lora(model)
        print(
            f"{description['name']} on {', '.join(description['target_modules'])}: "
            f"{count_trainable(model, config):,} parameters (a router of {lora.router_groups} groups: {router:,})"
        )


def fit(run: Run, model: PreTrainedModel, sequences: SequenceDataset, setup: Setup | None = None) -> None:
    """Warm start, training phases and calibration; saves the adapter.

    Args:
        setup: its held-out text is used to probe routers while they train, and to measure them after the warm start
            and between phases.
    """
    config, record, precision = run.config, run.record, run.precision
    evaluator = setup.perplexity if setup else None
    attention, is_soft, adapter = config.attention, config.attention.is_soft, run.folder / "adapter"
    if is_main():
        for warning in remove_damaged(run.folder / CHECKPOINTS, [name for name, _ in config.phases]):
            run.warn(warning)
    is_resumed = broadcast_object(
        any(checkpoint_path(run.folder / CHECKPOINTS, name).exists() for name, _ in config.phases[:1])
    )
    fitting = fit_before_training(run, model, sequences, is_resumed)
    balancing = sequences.sample(config.balance_sequences, config.seed + 2)

    def measure(phase: str) -> None:
        assert evaluator is not None
        with temporary_calibration(model, balancing, precision):
            evaluator.measure_phase(phase)

    if setup and evaluator and is_soft and fitting and evaluator.is_base_frozen and not is_resumed:
        run_on_rank_zero(model, lambda: preview(run, setup, balancing))

    def between(phase: str) -> None:
        if evaluator and is_soft:
            run_on_rank_zero(model, lambda: measure(phase))

    broadcast_attached(model)
    probed, folder, loggers = probe_tokens(evaluator.blocks) if evaluator else None, run.folder, run.loggers
    record.steps = train_phases(model, sequences, config, precision, folder, loggers, probed=probed, between=between)
    fitted_tokens = sum(tokens.numel() for tokens in (*fitting, *balancing))
    record.tokens_seen = record.steps * tokens_per_step(config) + fitted_tokens
    record.measurements += read_probes(run.folder / PROBES, config.recipe.phases)
    record.method = {
        "name": attention.name,
        "causal": is_causal(model),
        "trainable_parameters": count_trainable(model, config),
    }
    if balancing:
        run_on_rank_zero(model, lambda: balance_groups(model, balancing, precision))
    if attention.method != "full":
        record.method |= get_method_options(attention)
    # a budget of groups is part of the adapter, also where it leaves no layer with parameters
    if attention.is_trainable or any(method.state_dict() for method in attached_methods(model).values()):
        extra = {"trained_with": config.model.name, "substitution": record.model.get("substitution")}
        extra |= {"steps": record.steps, "tokens": record.tokens_seen, "seed": config.seed}
        save_adapter(model, adapter, extra, is_main())
    if config.recipe.trains("lora"):
        record.method |= describe_lora(model)
        save_lora(model, adapter, is_main())
    model.eval()


def preview(run: Run, setup: Setup, balancing: list[Tensor]) -> None:
    """Print and write the table of the first sequences with the router that the warm start left."""
    evaluator = setup.perplexity
    with temporary_calibration(setup.model, balancing, run.precision):
        evaluator.measure_preview()
    scored, total = len(evaluator.scored), len(evaluator.indices)
    print_table(run, setup, f"the router before its training, {scored} of {total} sequences scored")
    run.record.error = None


def fit_before_training(run: Run, model: PreTrainedModel, sequences: SequenceDataset, is_resumed: bool) -> list[Tensor]:
    """Fit the attached method to the frozen base; returns the sequences that it took."""
    config, seed, precision = run.config, run.config.seed, run.precision
    start = time.perf_counter()
    router = config.recipe.router
    if router and config.phases and router.warm_start_sequences:
        sample = sequences.sample(router.warm_start_sequences, seed + 1)
        if not is_resumed:
            run_on_rank_zero(model, lambda: warm_start(model, sample, router.warm_start_steps, precision, seed))
            print(f"warm start: {len(sample)} sequences, {time.perf_counter() - start:.1f} s")
        return sample
    options = config.fitting
    if options is None:
        return []
    cache = cache_root(config.cache_dir)
    sample = sequences.sample(options.sequences, seed + 1)
    if len(sample) <= options.validation_sequences:
        raise UserError(
            f"the training text must have more than {options.validation_sequences} sequences of data.seq_len="
            f"{sequences.seq_len} for the fit (got {len(sample)}). Use more text, a smaller data.seq_len, or a smaller "
            "recipe.fit.validation_sequences."
        )
    if len(sample) < options.sequences:
        run.warn(f"fitted to {len(sample)} sequences: the training text has no more")
    measurements, seconds = fit_attached(model, sample, options, precision, cache, seed)
    run.record.measurements += measurements
    run.record.fit_seconds = seconds
    # the fit counts as training time also where it comes from the cache
    run.record.train_seconds = max(run.record.train_seconds or 0.0, seconds - (time.perf_counter() - start))
    return sample


def count_trainable(model: PreTrainedModel, config: Config) -> int:
    """Return the number of parameters that are trained in any phase or fitted before."""
    parts = {phase.trainable for _, phase in config.phases} | ({"router"} if config.fitting else set())
    return sum(p.numel() for name, p in model.named_parameters() if any(is_trainable(name, part) for part in parts))


def tune_learning_rate(config: Config) -> tuple[Config, list[Trial]]:
    """Return the configuration with the learning rate of the lowest validation loss, and all trials.

    Raises:
        UserError: if no trial has a loss.
    """
    if not (config.recipe.tune.factors and any(phase.steps for _, phase in config.phases[-1:])):
        return config, []
    configs = [make_trial(config, factor) for factor in config.recipe.tune.factors]
    trials = []
    for number, trial in enumerate(configs):
        if trial.overwrite or not finished_record(trial):
            print(f"\nlearning rate {number + 1} of {len(configs)} on validation text: {last_rate(trial):g}")
        trials.append(run_trial(trial))
    losses = [(trial.nll, trial.learning_rate) for trial in trials if trial.nll is not None]
    if not losses:
        reasons = "; ".join(f"{trial.learning_rate:g}: {trial.error}" for trial in trials)
        raise UserError(f"recipe.tune.factors must have a learning rate with a finite loss ({reasons}).")
    return replace(config, recipe=with_rate(config, min(losses)[1])), trials


def make_trial(config: Config, factor: float) -> Config:
    """Return the trial of `factor` times the last phase's learning rate, shared by all seeds and experiments."""
    tune = config.recipe.tune
    seeded: dict[str, Any] = {"seed": tune.seed} if hasattr(config.attention, "seed") else {}
    kept: dict[str, Any] = {name: getattr(config.eval, name) for name in ("seq_len", "batch_size", "bounds")}
    kept["top_k"] = [config.attention.routing["top_k"]] if config.attention.is_soft else []
    scored = EvalConfig(TRIALS, split="validation", max_sequences=tune.sequences, controls=False, **kept)
    trial = replace(config, experiment=TRIALS, variant=config.variant or config.recipe.name, seed=tune.seed)
    attention = replace(config.attention, **seeded)
    return replace(trial, eval=scored, attention=attention, recipe=with_rate(config, factor * last_rate(config)))


def run_trial(config: Config) -> Trial:
    """Run a trial unless it finished. Other commands with the same trial wait, unless it runs in several processes."""
    rate, folder = last_rate(config), run_folder(config)
    is_single = config.trainer.devices * config.trainer.num_nodes == 1
    lock = file_lock(folder.with_name(f".{folder.name}.making"), str(folder), wait=True)
    with lock if is_single else nullcontext():
        try:
            if config.overwrite or not finished_record(config):
                train(config)
        except UserError as error:
            return Trial(learning_rate=rate, error=first_line(error))
    record = finished_record(config)
    return Trial(learning_rate=rate, **read_loss(record)) if record else Trial(learning_rate=rate, error="no result")


def read_loss(record: Record) -> dict[str, Any]:
    """Return loss or error of a trial; of soft routing if there is any: pruning changes the hard loss."""
    for variant in (soft_variant(record.config["attention"]["method"]), record.primary_variant):
        if (nll := record.find("nll", variant)) is not None:
            return {"nll": nll}
    failed = (m for m in record.measurements if m.variant == record.primary_variant and m.settings.get("error"))
    return {"error": next((m.settings["error"] for m in failed), "no result")}


def last_rate(config: Config) -> float:
    """Return the learning rate of the last phase."""
    return config.phases[-1][1].learning_rate


def with_rate(config: Config, rate: float) -> RecipeConfig:
    """Return the recipe with another learning rate in its last phase, and no trials."""
    name, phase = config.phases[-1]
    phases = {**config.recipe.phases, name: replace(phase, learning_rate=rate)}
    return replace(config.recipe, phases=phases, tune=TuneConfig())
