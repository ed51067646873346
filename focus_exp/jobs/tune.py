"""Learning-rate trials: each a run of its own, scored on validation text; the best rate is used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from focus_exp.config import Config, RecipeConfig, TuneConfig
from focus_exp.errors import UserError, first_line
from focus_exp.evaluation.controls import SOFT
from focus_exp.jobs.base import share_scores
from focus_exp.jobs.run import finished_record, run_folder
from focus_exp.results.measurement import Measurement
from focus_exp.results.record import Record, Trial
from focus_exp.storage import file_lock

TRIES = "tries"  # their experiment


def tuned(config: Config, train: Callable[[Config], None]) -> tuple[Config, list[Trial]]:
    """`config` with the learning rate that led to the lowest validation loss of what is trained, and all tries.

    Tries that are finished are read. UserError where none led to a loss.
    """
    if not (config.recipe.tune.factors and any(phase.steps for _, phase in config.phases[-1:])):
        return config, []  # nothing is trained
    trials = [trial(config, factor) for factor in config.recipe.tune.factors]
    tries = []
    for number, each in enumerate(trials):
        rate = last_rate(each)
        if each.overwrite or not finished_record(each):
            print(f"\nlearning rate {number + 1} of {len(trials)} on validation text: {rate:g}")
            share_scores(each, [other for other in trials if finished_record(other)])
        tries.append(tried(each, rate, train))
    scored = [(one.nll, one.learning_rate) for one in tries if one.nll is not None]
    if not scored:
        raise UserError(f"no learning rate of recipe.tune led to a loss; {tries[0].learning_rate:g}: {tries[0].error}")
    return replace(config, recipe=with_rate(config, min(scored)[1])), tries


def trial(config: Config, factor: float) -> Config:
    """The run that tries `factor` of the last phase's learning rate; the same whatever the seed and the experiment."""
    tune = config.recipe.tune
    drawn: dict[str, Any] = {"seed": tune.seed} if hasattr(config.attention, "seed") else {}
    attention = replace(config.attention, **drawn)
    top_k = [config.focus.top_k] if config.has_router else []
    evaluation = replace(
        config.eval, split="validation", max_sequences=tune.sequences, tasks=[], controls=False, top_k=top_k,
        pair_rules=[], limit=None, long_range_limit=None,
    )  # fmt: skip
    recipe = with_rate(config, factor * last_rate(config))
    name = config.variant or config.recipe.name
    return replace(
        config, experiment=TRIES, variant=name, recipe=recipe, eval=evaluation, attention=attention, seed=tune.seed
    )


def tried(config: Config, rate: float, train: Callable[[Config], None]) -> Trial:
    """What a try led to. Commands that share it wait for each other, unless it runs in several processes."""
    alone = config.trainer.devices * config.trainer.num_nodes == 1
    folder = run_folder(config)
    with file_lock(folder.with_name(f".{folder.name}.making"), str(folder), wait=True) if alone else nullcontext():
        try:
            if config.overwrite or not finished_record(config):
                train(config)
        except UserError as error:
            return Trial(learning_rate=rate, error=first_line(error))
    record = finished_record(config)
    return Trial(learning_rate=rate, **read_loss(record)) if record else Trial(learning_rate=rate, error="no result")


def read_loss(record: Record) -> dict[str, Any]:
    """Return loss or error of what is trained: soft routing before hard, whose loss falls where it prunes less."""
    for variant in (SOFT, record.primary_variant):
        if (nll := record.find("nll", variant)) is not None:
            return {"nll": nll}
    failed = (m for m in record.measurements if m.variant == record.primary_variant and m.settings.get("error"))
    return {"error": next((m.settings["error"] for m in failed), "no result")}


def trial_measurement(trial: Trial) -> Measurement:
    settings = {"learning_rate": trial.learning_rate, "error": trial.error}
    return Measurement(variant="lr_trial", metric="validation_nll", value=trial.nll, unit="nats", settings=settings)


def last_rate(config: Config) -> float:
    """The learning rate of the last phase that runs."""
    return config.phases[-1][1].learning_rate


def with_rate(config: Config, rate: float) -> RecipeConfig:
    """Whose last phase that runs has this learning rate, so that nothing is left to tune."""
    name, phase = config.phases[-1]
    phases = {**config.recipe.phases, name: replace(phase, learning_rate=rate)}
    return replace(config.recipe, phases=phases, tune=TuneConfig())
