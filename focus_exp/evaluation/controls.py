"""Names of table rows, and the controls that replace a trained router while they are measured."""

from __future__ import annotations

import re

from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.baselines.random_groups import RandomGroups
from focus_exp.attention.baselines.window import WindowOnly
from focus_exp.config import Config
from focus_exp.config_attention import FocusConfig
from focus_exp.models.lora import describe_lora
from focus_exp.models.methods import attached_methods

BASE = "base, full attention"
SOFT = "Focus soft"
WINDOW_ONLY = "window + sinks only"
RANDOM_GROUPS = "random groups, size-matched"
COUNTERPART = "causal counterpart"


def hard_name(top_k: int, pair_rule: str) -> str:
    """Return the name of a hard row; with one group per token all pair rules keep the same pairs."""
    return f"Focus hard k={top_k}" + (f" ({pair_rule})" if top_k > 1 else "")


def trained_name(model: PreTrainedModel, config: Config) -> str:
    """Return the name of the row of trained base weights under full attention."""
    return (
        f"{describe_lora(model)['name']}, trained"
        if config.recipe.trains("lora")
        else "full attention, trained weights"
    )


def slug(name: str) -> str:
    """Return `name` as part of a path."""
    return re.sub(r"[^a-z0-9@.]+", "_", name.lower()).strip("_")


def window_only(model: PreTrainedModel, window: int, sinks: int) -> dict[int, AttentionMethod]:
    """Build window and sinks without distant pairs for each attached layer."""
    methods = attached_methods(model).items()
    return {index: WindowOnly.create(method.shape, window=window, sinks=sinks) for index, method in methods}


def random_groups(
    model: PreTrainedModel, fractions: list[list[float]], attention: FocusConfig, seed: int
) -> dict[int, AttentionMethod]:
    """Build groups that ignore the tokens, of the sizes `fractions` [layers][K], for each attached layer."""
    methods = attached_methods(model).items()
    return {
        index: RandomGroups.create(
            method.shape, groups=attention.groups, window=attention.window, sinks=attention.sinks,
            top_k=attention.top_k, pair_rule=attention.pair_rule, seed=seed, shares=sizes,
        )
        for (index, method), sizes in zip(methods, fractions, strict=True)
    }  # fmt: skip
