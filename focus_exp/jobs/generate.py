"""job=generate."""

from __future__ import annotations

from dataclasses import asdict

from focus_exp.config import Config
from focus_exp.errors import UserError
from focus_exp.evaluation.generation import Generation
from focus_exp.jobs.train import load_or_fit_router
from focus_exp.models.methods import is_causal
from focus_exp.runs.compose import compose_router
from focus_exp.runs.open import open_run
from focus_exp.runs.prepare import check_length, prepare
from focus_exp.runs.resume import print_finished


def generate(config: Config) -> None:
    """Continue held-out prompts under full attention and under hard routing."""
    config = compose_router(config)
    if print_finished(config):
        return
    with open_run(config) as run:
        setup = prepare(run)
        length = config.generate.prompt_tokens + config.generate.new_tokens
        check_length(setup.model, "generate.prompt_tokens + generate.new_tokens", length, config.model.name)
        load_or_fit_router(run, setup)
        if not is_causal(setup.model):
            raise UserError(f"attention must be causal with job=generate (got {config.attention.name}).")
        sequences = setup.perplexity.blocks
        for row in Generation(setup.model, setup.tokenizer, sequences, config, run.precision).rows():
            run.record.continuations.append(asdict(row))
            run.record.measurements += row.measurements()
            run.save()
            result = f"failed: {row.error}" if row.error else f"{row.base_nll:.3f} nats per token under the base"
            print(f"prompt {row.prompt}, {row.variant:<28} {result}")
