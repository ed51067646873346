"""Controls beside a trained router: what stands in the attached layers while they are measured."""

from __future__ import annotations

from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.baselines.random_groups import RandomGroups
from focus_exp.attention.baselines.window import WindowOnly
from focus_exp.config_attention import FocusConfig
from focus_exp.models.methods import attached_methods

BASE = "base, full attention"
SOFT = "Focus soft"
WINDOW_ONLY = "window + sinks only"
RANDOM_GROUPS = "random groups, same sizes"


def hard_name(top_k: int, pair_rule: str) -> str:
    """Of a row; with one group both rules keep the same pairs, so none is named."""
    return f"Focus hard k={top_k}" + (f" ({pair_rule})" if top_k > 1 else "")


def window_only(model: PreTrainedModel, window: int, sinks: int) -> dict[int, AttentionMethod]:
    """Per attached layer: the window and the sinks, no distant pair."""
    return {
        index: WindowOnly.create(method.shape, window=window, sinks=sinks)
        for index, method in attached_methods(model).items()
    }


def random_groups(
    model: PreTrainedModel, shares: list[list[float]], attention: FocusConfig, seed: int
) -> dict[int, AttentionMethod]:
    """Per attached layer: groups that ignore the text, as large as `shares` `[layers][K]` says, so equally dense."""
    methods = attached_methods(model).items()
    return {
        index: RandomGroups.create(
            method.shape, groups=attention.groups, window=attention.window, sinks=attention.sinks,
            top_k=attention.top_k, pair_rule=attention.pair_rule, seed=seed, shares=layer_shares,
        )
        for (index, method), layer_shares in zip(methods, shares, strict=True)
    }  # fmt: skip
