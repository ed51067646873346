"""Attach, fit, train and calibrate: the training part of a run."""

from __future__ import annotations

import time

import pytorch_lightning as pl
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.assets import cache_root
from focus_exp.attention.options import FocusOptions
from focus_exp.config import Config, get_method_options
from focus_exp.data import SequenceDataset
from focus_exp.errors import UserError
from focus_exp.evaluation.perplexity import PerplexityEvaluator
from focus_exp.jobs.backend import set_backend
from focus_exp.jobs.run import Run
from focus_exp.models.adapter import save_adapter
from focus_exp.models.attach import attach
from focus_exp.models.lora import add_lora, count_router_parameters, describe_lora, save_lora
from focus_exp.models.methods import attached_methods, is_causal, is_trainable
from focus_exp.results.metrics import read_metrics
from focus_exp.training.callbacks import PROBES, probe_tokens
from focus_exp.training.checkpoints import checkpoint_path, repair_checkpoints
from focus_exp.training.distributed import (
    broadcast_attached,
    broadcast_object,
    is_main,
    place_attached,
    run_on_rank_zero,
)
from focus_exp.training.focus_dual_fit.fit import fit_dual, format_fits, rebalance
from focus_exp.training.indexer_fit import fit_indexers
from focus_exp.training.measurements import fit_measurements, probe_measurements
from focus_exp.training.module import NonFiniteError
from focus_exp.training.phases import CHECKPOINTS, tokens_per_step, train_phases
from focus_exp.training.precision import Precision
from focus_exp.training.warm_start import calibrate, temporary_calibration, warm_start


def attach_method(model: PreTrainedModel, config: Config, precision: Precision) -> None:
    if config.attention.method != "full":
        pl.seed_everything(config.seed, verbose=False)
        attach(model, config.attention.method, **get_method_options(config.attention))
        set_backend(model, config, precision, max(config.eval.seq_len, config.data.seq_len))
    if config.recipe.trains("lora"):
        budget = count_router_parameters(model, config.recipe.lora.router_groups, FocusOptions.routing_dim)
        pl.seed_everything(config.seed, verbose=False)
        add_lora(model, config.recipe.lora, budget)
        added = describe_lora(model)
        print(
            f"{added['name']} on {', '.join(added['target_modules'])}: {trained_parameters(model, config):,} numbers "
            f"to train, where a router of {config.recipe.lora.router_groups} groups has {budget:,}"
        )
    place_attached(model, precision.device)


def fit(
    run: Run,
    model: PreTrainedModel,
    blocks: SequenceDataset,
    precision: Precision,
    evaluator: PerplexityEvaluator | None = None,
) -> None:
    """Warm start, phases, calibration; what was added is on disk when it returns, and after a non-finite loss too.

    With `evaluator` routers are watched on its text while they are trained, and measured between phases.
    """
    config, record = run.config, run.record
    phases, routed = config.phases, config.has_router
    if is_main():
        for sentence in repair_checkpoints(run.folder / CHECKPOINTS):
            run.warn(sentence)
    begun = broadcast_object(any(checkpoint_path(run.folder / CHECKPOINTS, name).exists() for name, _ in phases[:1]))
    fitting = fit_first(run, model, blocks, precision, begun)
    balancing = blocks.sample(config.focus.balance_sequences, config.seed + 2) if routed else []
    moved = blocks.sample(config.dual.calibration_sequences, config.seed + 2) if config.dual and phases else []

    def measure(phase: str) -> None:
        assert evaluator is not None
        with temporary_calibration(model, balancing, precision):
            evaluator.measure_phase(phase)

    def between(phase: str) -> None:
        if evaluator and routed:
            run_on_rank_zero(model, lambda: measure(phase))

    broadcast_attached(model)
    try:
        steps = train_phases(
            model, blocks, config, precision, run.folder, run.loggers,
            probed=probe_tokens(evaluator.blocks) if evaluator else None,
            between=between,
        )  # fmt: skip
    except NonFiniteError as error:
        kept = run.folder / CHECKPOINTS
        if config.recipe.trains("lora"):
            kept = save_lora(model, run.folder / "adapter", is_main())
        elif routed and not config.recipe.trains("all"):
            kept = save_adapter(model, run.folder / "adapter", {"note": f"the last good state: {error}"}, is_main())
        raise UserError(
            f"{error}; training stopped, the last good state is in {kept}. "
            "Lower recipe.phases.*.learning_rate or trainer.gradient_clip"
        ) from error
    record.steps = steps
    fitted = sum(tokens.numel() for tokens in (*fitting, *balancing, *moved))
    record.tokens_seen = steps * tokens_per_step(config) + fitted
    record.measurements += probe_measurements(read_metrics(run.folder / PROBES), config.recipe.phases)
    record.method = {
        "name": config.attention.name,
        "causal": is_causal(model),
        "trainable_parameters": trained_parameters(model, config),
    }
    if moved:
        run_on_rank_zero(model, lambda: rebalance(model, moved, precision))
    if routed:
        run_on_rank_zero(model, lambda: calibrate(model, balancing, precision))
        record.method |= get_method_options(config.attention)
    # a budget may leave no encoder anywhere, and is what a layer reads nevertheless
    if config.dual or any(method.state_dict() for method in attached_methods(model).values()):
        extra = {"trained_with": config.model.name, "substitution": record.model.get("substitution")}
        extra |= {"steps": steps, "tokens": record.tokens_seen, "seed": config.seed}
        save_adapter(model, run.folder / "adapter", extra, is_main())
    if config.recipe.trains("lora"):
        record.method |= describe_lora(model)
        save_lora(model, run.folder / "adapter", is_main())
    model.eval()


def fit_first(
    run: Run, model: PreTrainedModel, blocks: SequenceDataset, precision: Precision, begun: bool
) -> list[Tensor]:
    """Fit what is attached to the frozen base before any phase; the blocks of text that this took."""
    config, cache = run.config, cache_root(run.config.cache_dir)
    seed = config.seed
    if config.has_router and config.phases and config.focus.warm_start_sequences:
        sample = blocks.sample(config.focus.warm_start_sequences, seed + 1)
        if not begun:
            began = time.perf_counter()
            run_on_rank_zero(model, lambda: warm_start(model, sample, config.focus.warm_start_steps, precision, seed))
            print(f"routers fitted to the attention in {len(sample)} blocks ({time.perf_counter() - began:.0f} s)")
        return sample
    if config.fitting is None:
        return []
    sample = blocks.sample(config.fitting.calibration_sequences, seed + 1)
    began = time.perf_counter()
    if config.dual:
        fits, seconds = fit_dual(model, sample, config.dual, precision, cache, seed)
        run.record.measurements += fit_measurements(fits)
        print(format_fits(fits))
    else:
        seconds = fit_indexers(model, sample, config.fitting, precision, cache, seed)
    run.record.fit_seconds = seconds
    # what other runs spent on it belongs to what this one would have taken alone; an earlier part has counted its own
    run.record.train_seconds = max(run.record.train_seconds or 0.0, seconds - (time.perf_counter() - began))
    return sample


def trained_parameters(model: PreTrainedModel, config: Config) -> int:
    """Numbers trained in any phase or fitted before, by the same predicate that freezes."""
    parts = {phase.trainable for _, phase in config.phases} | ({"router"} if config.fitting else set())
    return sum(p.numel() for name, p in model.named_parameters() if any(is_trainable(name, part) for part in parts))
