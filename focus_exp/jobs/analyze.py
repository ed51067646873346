"""job=analyze."""

from __future__ import annotations

from focus_exp.config import Config
from focus_exp.evaluation.groups import GroupAnalysis
from focus_exp.jobs.train import load_or_fit_router
from focus_exp.models.adapter import read_adapter
from focus_exp.runs.compose import compose_router
from focus_exp.runs.open import open_run
from focus_exp.runs.prepare import prepare, training_sequences
from focus_exp.runs.resume import print_finished

CALIBRATION_SEQUENCES = 8  # of the untrained router, where recipe.router says none


def analyze(config: Config) -> None:
    """Describe a router's groups and what they prune.

    Word classes against an untrained router and chance, agreement with the routers in analyze.others (other seeds),
    long-range pairs, and the cost of pruning.
    """
    config = compose_router(config)
    if print_finished(config):
        return
    others = config.analyze.others
    with open_run(config) as run:
        setup = prepare(run)
        sequences = training_sequences(config, setup)
        for other in others:  # checked before a router is trained
            read_adapter(setup.model, other, check_base=config.check_base)
        load_or_fit_router(run, setup)
        count = config.recipe.router.balance_sequences if config.recipe.router else 0
        calibration = sequences.sample(count or CALIBRATION_SEQUENCES, config.seed + 2)
        held_out = setup.perplexity.blocks
        analysis = GroupAnalysis(setup.model, setup.tokenizer, held_out, calibration, config, run.precision)
        run.record.measurements += analysis.measure()
