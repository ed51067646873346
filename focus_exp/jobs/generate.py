"""job=generate."""

from __future__ import annotations

from dataclasses import asdict

from focus_exp.config import Config
from focus_exp.errors import UserError
from focus_exp.evaluation.generation import Continuation, Generation
from focus_exp.jobs.adapter import with_adapter
from focus_exp.jobs.prepare import check_length, describe, headline, load, prepare, training_blocks
from focus_exp.jobs.router import put_router, trains_router
from focus_exp.jobs.run import already_finished, open_run, run_folder
from focus_exp.models.methods import is_causal
from focus_exp.training.precision import choose_precision


def generate(config: Config) -> None:
    """Continue held-out prompts under full attention and under hard routing."""
    if config.adapter:
        config = with_adapter(config)
    if not (config.has_router or config.dual):
        raise UserError(f"job=generate compares Focus with its base, not attention={config.attention.name}")
    if already_finished(config):
        return
    settings = config.generate
    precision = choose_precision(config.trainer.precision, config.trainer.accelerator, config.recipe.trains("all"))
    router = f"the router in {config.adapter}" if config.adapter else headline(config)
    print(
        f"{settings.prompts} prompts of {settings.prompt_tokens:,} tokens, each continued by {settings.new_tokens:,}; "
        f"{router}; {describe(precision)}"
    )
    print(f"run folder: {run_folder(config)}")
    with open_run(config, describe(precision)) as run:
        loaded, corpus = load(run, precision)
        model, evaluators = prepare(run, loaded, corpus, precision)
        blocks = training_blocks(config, loaded, corpus) if trains_router(config) else None
        written = settings.prompt_tokens + settings.new_tokens
        check_length(model, "generate.prompt_tokens + generate.new_tokens", written, config.model.name)
        put_router(run, model, blocks, precision, config.eval.seq_len)
        if not is_causal(model):
            raise UserError("this attention reads the future and cannot generate; use attention=focus")
        windows = evaluators.perplexity.blocks
        generation = Generation(model, loaded.tokenizer, windows, config, precision, run.folder / "continuations")
        for row in generation.rows():
            run.record.continuations.append(asdict(row))
            run.record.measurements += row.measurements()
            say(row)
            run.save()


def say(row: Continuation) -> None:
    if row.error is not None:
        print(f"prompt {row.prompt}, {row.variant} failed: {row.error}")
        return
    speed = f", {row.tokens / row.seconds:.1f} tokens/s" if row.seconds else ""
    print(f"prompt {row.prompt}, {row.variant:<28} {row.base_nll:.3f} nats per token under the base{speed}")
