"""Estimate the time of job=train: forward passes over a sequence, times the seconds of one on this machine."""

from __future__ import annotations

import torch

from focus_exp.attention.options import FitOptions
from focus_exp.config import AttentionConfig, Config, get_method_options
from focus_exp.evaluation.perplexity import PerplexityEvaluator
from focus_exp.evaluation.variants import BASE
from focus_exp.fitting.importance import fitted_methods
from focus_exp.models.methods import is_causal, swap_attachment

# Passes that other work takes, measured with SmolLM2-135M on two CPU cores: of a sequence under a method, trained on,
# or observed for a fit; a step of the warm start of all layers; and a step of a fit, for equally many parameters.
ROUTED, TRAINED, OBSERVED, WARMED, FITTED = 0.85, 3.0, 4.0, 0.27, 10.0


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
        bounds, controls = config.eval.bounds, config.eval.controls
        attached += len(config.scored_top_ks) - 1 + bounds + controls * (2 + bounds)
        attached += 2 * max(0, len(config.phases) - 1) + 2 * (not causal and config.focus.balance_sequences > 0)
    return base, attached


def count_passes(config: Config, evaluator: PerplexityEvaluator, variants: list[AttentionConfig]) -> dict[str, float]:
    """Count the passes of job=train by stage.

    Args:
        variants: options of eval.fit_variants, fitted to the base too.
    """
    model, focus, rounds = evaluator.model, config.focus if config.has_router else None, evaluator.rounds
    total, first, last = sum(map(len, rounds)), len(rounds[0]), len(rounds[-1])
    trainer = config.trainer
    passes = {"training": TRAINED * sum(p.steps for _, p in config.phases) * trainer.accumulate * trainer.batch_size}
    base, rows = count_scored(config, len(variants), is_causal(model))
    passes["scoring"] = (base + ROUTED * rows) * total
    if focus:
        controls = config.eval.controls
        if evaluator.is_base_frozen:  # the router before its training, and controls that are matched in each round
            passes["scoring"] += ROUTED * ((rows - len(variants)) * first + 2 * controls * (total - last - first))
        passes["training"] += 1.3 * focus.warm_start_sequences + WARMED * focus.warm_start_steps
        passes["training"] += 2 * ROUTED * focus.balance_sequences
    size, fits = sum(p.numel() for p in model.parameters()), [*variants, config.attention]
    for options in fits:
        if isinstance(options, FitOptions) and options.calibration_sequences:
            with torch.random.fork_rng(devices=[]), swap_attachment(model, options.method, get_method_options(options)):
                fitted = sum(p.numel() for method in fitted_methods(model).values() for p in method.parameters())
            steps = FITTED * options.fit_steps * fitted / size
            passes["fit"] = passes.get("fit", 0.0) + OBSERVED * options.calibration_sequences + steps
    return {stage: count for stage, count in passes.items() if count}


def estimate(config: Config, evaluator: PerplexityEvaluator, variants: list[AttentionConfig]) -> str:
    """Return one line on the minutes that job=train takes; fits in the cache take none.

    The seconds of a pass are those of the base on the first sequences.
    """
    if BASE not in evaluator.scores:
        return "estimate: none, because the base could not be scored"
    seconds = evaluator.scores[BASE].seconds / len(evaluator.scored)
    passes = count_passes(config, evaluator, variants)
    parts = ", ".join(f"{stage} {count:.0f}" for stage, count in passes.items())
    minutes = sum(passes.values()) * seconds / 60
    without = ", without eval.tasks" if config.eval.tasks else ""
    return f"estimate: {minutes:.1f} minutes, {sum(passes.values()):.0f} passes of {seconds:.2f} s ({parts}{without})"
