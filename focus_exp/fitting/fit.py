"""Fit two encoders from Python, as the command line does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.assets import cache_root
from focus_exp.attention.options import FocusDualOptions, did_you_mean, validate_options
from focus_exp.config import FitConfig
from focus_exp.data.packing import SequenceDataset, find_prefix, read_stream, write_stream
from focus_exp.errors import UserError
from focus_exp.fitting.cache import fit_attached
from focus_exp.models.attach import attach, detach
from focus_exp.training.precision import Precision

METHOD = "focus_dual"
LEARNING_RATE = 0.02  # of the short fit, as in two_encoders of conf/variant/shared.yaml


def fit(
    model: PreTrainedModel,
    texts: Iterable[str],
    density: float = 0.2,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seq_len: int = 1024,
    seed: int = 0,
    cache_dir: str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Attach two encoders per layer to a frozen model, and fit them to texts.

    The fit is that of the variant `two_encoders` at budget=embedded. It is cached by base, tokens and options: an
    interrupted one resumes, and another density takes seconds.

    Args:
        texts: documents of the kind that the model will read. `sequences` (64) sequences are drawn.
        density: fraction of the distant causal query-key pairs to keep.
        tokenizer: of the model; None loads that of `model.name_or_path`.
        seq_len: length of a sequence [tokens].
        options: keys of attention.* such as window or groups, and of recipe.fit such as steps.

    Returns:
        the model, in eval mode, with hard routing.

    Raises:
        UserError: an option is unknown or out of range, the texts are too short, or the model cannot be attached.
    """
    keys = [item.name for schema in (FocusDualOptions, FitConfig) for item in fields(schema)]
    if unknown := min(options.keys() - set(keys), default=None):
        raise UserError(f"fit has no option {unknown}{did_you_mean(unknown, keys)}")
    made = {item.name: options.pop(item.name) for item in fields(FitConfig) if item.name in options}
    recipe = FitConfig(**{"learning_rate": LEARNING_RATE} | made)
    try:
        attention = FocusDualOptions.create(density=density, **options)
        validate_options(recipe)
    except ValueError as error:
        raise UserError(str(error)) from error
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(model.name_or_path)
    sequences = draw_sequences(texts, tokenizer, seq_len, recipe.sequences, seed)
    if len(sequences) <= recipe.validation_sequences:
        raise UserError(
            f"texts must fill more than validation_sequences={recipe.validation_sequences} sequences of "
            f"seq_len={seq_len} (got {len(sequences)}). Give more text, or a smaller seq_len."
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        attach(model.eval(), METHOD, **vars(attention))
    try:
        precision = Precision(model.device, model.dtype, autocast=False, reason="the model's own")
        fit_attached(model, sequences, recipe, precision, cache_root(cache_dir), seed)
    except BaseException:
        detach(model)
        raise
    return model


def draw_sequences(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, seq_len: int, count: int, seed: int
) -> list[torch.Tensor]:
    """Return up to `count` sequences `(seq_len,)` of the texts' tokens, as a run with this seed draws them."""
    with tempfile.TemporaryDirectory() as folder:
        documents = ((str(number), text) for number, text in enumerate(texts))
        write_stream(Path(folder), "train", documents, tokenizer, limit=None)
        stream = read_stream(Path(folder), "train", "texts")
        dataset = SequenceDataset(stream, seq_len, prefix=find_prefix(tokenizer), cross_documents=True)
        return dataset.sample(count, seed + 1)
