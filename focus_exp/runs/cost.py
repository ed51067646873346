"""Estimate the time of job=train from one timed pass."""

from __future__ import annotations

from focus_exp.config import Config
from focus_exp.evaluation.perplexity import PerplexityEvaluator
from focus_exp.evaluation.variants import BASE
from focus_exp.models.methods import is_causal

# Passes of the base that other work takes, measured with SmolLM2-135M on two CPU cores: of a sequence under a method,
# trained on, or observed for a fit; and a step of the warm start or of a fit, of all layers.
ROUTED, TRAINED, OBSERVED, FITTED = 0.85, 3.0, 4.0, 0.27


def estimate_time(config: Config, evaluator: PerplexityEvaluator) -> str:
    """Return one line on the minutes that job=train takes; fits in the cache take none.

    Passes over a sequence, times the seconds of one of the base, on the first sequences.
    """
    if BASE not in evaluator.scores:
        return "estimate: none, because the base could not be scored"
    recipe, settings, trainer = config.recipe, config.eval, config.trainer
    trained = sum(phase.steps for _, phase in config.phases) * trainer.accumulate * trainer.batch_size
    passes = {"training": TRAINED * trained, "fit": 0.0}
    rows = 1.0 + len(settings.adapters) if config.attention.method != "full" else 0.0
    if router := recipe.router:
        passes["training"] += router.warm_start_sequences + FITTED * router.warm_start_steps
        passes["training"] += 2 * ROUTED * router.balance_sequences
        # hard routings next to the soft one, controls, causal counterparts, and both routings after earlier phases
        rows += len(config.scored_routings) - 1 + settings.bounds + settings.controls * (2 + settings.bounds)
        rows += 2 * max(0, len(config.phases) - 1) + 2 * (
            not is_causal(evaluator.model) and router.balance_sequences > 0
        )
    total, first = sum(map(len, evaluator.rounds)), len(evaluator.rounds[0])
    before = first * (bool(recipe.router) and evaluator.is_base_frozen)  # the router before its training
    bases = 1 + (recipe.trains("lora") or recipe.trains("all"))
    passes["scoring"] = bases * total + ROUTED * rows * (total + before)
    if fitting := config.fitting:
        passes["fit"] += OBSERVED * fitting.sequences + FITTED * fitting.steps
    seconds = evaluator.scores[BASE].seconds / len(evaluator.scored)
    count = sum(passes.values())
    parts = ", ".join(f"{stage} {count:.0f}" for stage, count in passes.items() if count)
    without = ", without eval.tasks" if settings.tasks else ""
    name = f" of {config.variant}" if config.variant else ""
    minutes, detail = count * seconds / 60, f"{count:.0f} passes of {seconds:.2f} s ({parts}{without})"
    return f"estimate{name}: {minutes:.1f} minutes, {detail}"
