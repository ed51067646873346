"""Perplexity in windows of a given length, as a task beside lm-eval's: longer than trained, the text the same."""

from __future__ import annotations

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from focus_exp.config import EvalConfig
from focus_exp.data import Blocks
from focus_exp.errors import UserError
from focus_exp.evaluation.ledger import Ledger
from focus_exp.evaluation.outcomes import NO_FILTER, Metric, Outcome
from focus_exp.evaluation.perplexity import token_losses
from focus_exp.models.attached import observed
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
    if eval_config.max_windows is not None:
        wanted = max(1, eval_config.max_windows * eval_config.window // length)
    count = min(wanted, len(windows))
    return windows, [int(index) for index in np.linspace(0, len(windows) - 1, count).round()]


@torch.no_grad()
def run_perplexity(
    model: PreTrainedModel, windows: Blocks, indices: list[int], part: int, precision: Precision, label: str
) -> Outcome:
    """Perplexity over the windows `indices`, its standard error by the delta method.

    A document is about `part` tokens of a window: a few long windows are as many documents as many short ones, or there
    would be no interval where texts are longest. RuntimeError when a loss is not finite.
    """
    ledger = Ledger()
    losses: list[float] = []
    documents: list[str] = []
    with precision.context(), observed(model, ledger.observe):
        for index in tqdm(indices, desc=f"{label:<28}", unit="window", leave=False, disable=None):
            item = windows[index]
            scored = token_losses(model, item["input_ids"][None].to(model.device))[0, item["scored_from"] :]
            if not scored.isfinite().all():
                raise RuntimeError("a loss is not finite")
            parts = scored.double().tensor_split(-(-windows.block_size // part))
            # parts differ by a token: scaled so that their mean is that of the tokens
            losses += [len(parts) * loss.sum().item() / len(scored) for loss in parts]
            documents += [f"window/{index}/{number}" for number in range(len(parts))]
            ledger.lengths.append(windows.block_size)
    value = float(np.exp(np.mean(losses)))
    stderr = value * float(np.std(losses, ddof=1)) / len(losses) ** 0.5 if len(losses) > 1 else None
    metric = Metric(KIND, NO_FILTER, value, stderr, higher_is_better=False)
    samples = [
        {"document": document, "filter": NO_FILTER, "scores": {KIND: -loss}}
        for document, loss in zip(documents, losses, strict=True)
    ]
    return Outcome([metric], samples, ledger.summary(), ledger.groups, source=windows.stream.name)
