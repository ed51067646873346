"""job=analyze."""

from __future__ import annotations

from focus_exp.config import Config
from focus_exp.errors import UserError
from focus_exp.evaluation.groups import GroupAnalysis
from focus_exp.jobs.adapter import with_adapter
from focus_exp.jobs.inputs import digest_of
from focus_exp.jobs.prepare import describe, headline, load, prepare, training_blocks
from focus_exp.jobs.router import put_router
from focus_exp.jobs.run import already_finished, open_run, run_folder
from focus_exp.models.adapter import read_adapter
from focus_exp.training.precision import choose_precision

# for the untrained router, where the trained one comes from an adapter that does not say
CALIBRATION_BLOCKS = 8


def analyze(config: Config) -> None:
    """Describe a router's groups and what they prune.

    Word classes against an untrained router and chance, agreement with the routers in analyze.others (other seeds),
    long-range pairs, and the cost of pruning. passage.html in the run folder shows a passage coloured by group.
    """
    if config.adapter:
        config = with_adapter(config)
    if not (config.has_router or config.dual):
        raise UserError(f"job=analyze describes the groups of a router, not attention={config.attention.name}")
    if already_finished(config):
        return
    settings = config.analyze
    precision = choose_precision(config.trainer.precision, config.trainer.accelerator, config.recipe.trains("all"))
    router = f"the router in {config.adapter}" if config.adapter else headline(config)
    print(
        f"groups of {settings.tokens:,} held-out tokens, a passage of {settings.passage_tokens:,}; {router}; "
        f"{describe(precision)}"
    )
    print(f"run folder: {run_folder(config)}")
    with open_run(config, describe(precision)) as run:
        others = {"others": [digest_of(other) for other in settings.others]} if settings.others else {}
        run.record.method = dict(others)  # what an interrupted run has observed is theirs
        loaded, corpus = load(run, precision)
        model, evaluators = prepare(run, loaded, corpus, precision)
        blocks = training_blocks(config, loaded, corpus)
        for other in settings.others:  # what is wrong with them is known before a router is trained
            read_adapter(model, other, check_base=config.check_base)
        put_router(run, model, blocks, precision, config.eval.seq_len)
        run.record.method |= others
        balancing = config.focus.balance_sequences if config.has_router else 0
        calibration = blocks.sample(balancing or CALIBRATION_BLOCKS, config.seed + 2)
        windows = evaluators.perplexity.blocks
        analysis = GroupAnalysis(
            model, loaded.tokenizer, windows, calibration, config, precision, run.folder / "groups"
        )  # fmt: skip
        run.record.measurements += analysis.measure()
