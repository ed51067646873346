"""What can be wrong with the files of a model: each is one sentence."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.errors import UserError, first_line

TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")  # a tokenizer has one
BESIDE_TOKENIZER = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
NO_TOKENIZER = (
    f"it has no tokenizer: {', '.join(TOKENIZER[:-1])} or {TOKENIZER[-1]} is missing; put there what "
    "tokenizer.save_pretrained writes"
)


def check_weights(model: PreTrainedModel, loading: dict[str, Any], name: str) -> None:
    """UserError where some are missing, for which transformers draws random ones, or are no numbers."""
    reasons = [f"{weight} is missing" for weight in sorted(loading["missing_keys"])]
    reasons += [f"{weight} has another shape" for weight, *_ in sorted(loading["mismatched_keys"])]
    spoilt = (f"{weight} holds NaN or infinity" for weight, p in model.named_parameters() if not p.isfinite().all())
    if reason := next(chain(reasons, spoilt), None):
        raise UserError(f"{name}: its weights are damaged ({reason}); get the model again, or give another model.path")


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """UserError for one that knows no text: without its files transformers makes an empty one."""
    if not set(tokenizer("The quick brown fox", add_special_tokens=False)["input_ids"]) - {tokenizer.unk_token_id}:
        raise UserError(f"{name}: {NO_TOKENIZER}")


def unreadable(folder: str, part: str, error: Exception) -> UserError:
    """For a config, tokenizer or weights in a folder of the user's."""
    if part == "tokenizer" and not any((Path(folder) / name).exists() for name in TOKENIZER):
        return UserError(f"{folder}: {NO_TOKENIZER}")
    return UserError(
        f"{folder}: its {part} cannot be read ({first_line(error)}); copy the folder again, or give another with "
        "model.path="
    )


def missing(name: str, error: Exception) -> UserError:
    """For what the hub does not give."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(
        f"{name}: {reason}\n"
        "Check model.hub_id and model.revision; a gated model needs its terms accepted and `hf auth login`."
    )
