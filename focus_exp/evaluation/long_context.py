"""Perplexity in windows of a given length, as a task beside lm-eval's: longer than trained, the text the same."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedModel

from focus_exp.config import EvalConfig
from focus_exp.data import Blocks
from focus_exp.errors import UserError
from focus_exp.evaluation.ledger import Ledger
from focus_exp.evaluation.outcomes import NO_FILTER, Metric, Outcome
from focus_exp.evaluation.perplexity import token_losses
from focus_exp.models.methods import observe_selections
from focus_exp.progress import ProgressBar
from focus_exp.results.intervals import estimate
from focus_exp.training.precision import Precision

KIND = "perplexity"


def windows_of(
    length: int, blocks: Blocks, model: PreTrainedModel, eval_config: EvalConfig
) -> tuple[Blocks, list[int]]:
    """Windows of `length` tokens over the text of `blocks`, and those of them to score: as many tokens at any length.

    UserError where the model or the text is too short.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise UserError(f"{length} tokens exceed the {longest} positions of the model")
    windows = Blocks(blocks.stream, length, bos=blocks.bos, cross_documents=False)
    wanted = len(windows)
    if eval_config.max_sequences is not None:
        wanted = max(1, eval_config.max_sequences * eval_config.seq_len // length)
    return windows, windows.spread(wanted)


@torch.no_grad()
def run_perplexity(
    model: PreTrainedModel, windows: Blocks, indices: list[int], precision: Precision, label: str
) -> Outcome:
    """Perplexity over the windows `indices`, its standard error by the delta method, over documents.

    RuntimeError when a loss is not finite.
    """
    ledger = Ledger()
    samples: list[dict[str, Any]] = []
    with precision.context(), observe_selections(model, ledger.observe):
        places = zip(indices, windows.places(indices), strict=True)
        progress = ProgressBar(places, f"{label:<28}", len(indices), unit="window")
        for index, (document, offset) in progress:
            item = windows[index]
            scored = token_losses(model, item["input_ids"][None].to(model.device))[0, item["scored_from"] :]
            if not scored.isfinite().all():
                raise RuntimeError("a loss is not finite")
            loss = scored.double().mean().item()
            place = {"document": document, "offset": offset, "tokens": len(scored)}
            samples.append(place | {"filter": NO_FILTER, "scores": {KIND: -loss}})
            ledger.lengths.append(windows.seq_len)
    losses, tokens, documents = zip(
        *((-sample["scores"][KIND], sample["tokens"], sample["document"]) for sample in samples), strict=True
    )
    found = estimate(losses, tokens, documents)
    value = math.exp(found.value)
    stderr = None if found.stderr is None else value * found.stderr
    metric = Metric(KIND, NO_FILTER, value, stderr, higher_is_better=False)
    return Outcome([metric], samples, ledger.summary(), ledger.groups, source=windows.stream.name)
