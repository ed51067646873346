"""Variants that are measured, and controls that replace a trained router."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.baselines.random_groups import RandomGroups
from focus_exp.attention.baselines.window import WindowOnly
from focus_exp.config import Config, FocusConfig
from focus_exp.models.lora import describe_lora
from focus_exp.models.methods import attached_methods, disable_method, is_causal, set_routing
from focus_exp.results.measurement import hard_variant

BASE, SOFT = "base", "focus_soft"
WINDOW_ONLY, WIDE_WINDOW = "window_only", "window_density_matched"
RANDOM_GROUPS = "random_size_matched"
COUNTERPART = "causal_counterpart"
Kind = Literal["base", "trained", "soft", "hard", "causal_counterpart", "control"]  # in the order of a table


@dataclass(kw_only=True)
class Variant:
    """A variant: its name as in `results.measurement`, and its settings.

    Args:
        window: local window [tokens], where it is not the configured one.
        phase: after which it is measured, where others follow.
        error: why it has no numbers.
        tokens, fit_seconds: of the training of an adapter that the run did not train itself.
    """

    name: str
    kind: Kind
    method: str = "full"
    causal: bool = True
    top_k: int | None = None
    pair_rule: str | None = None
    window: int | None = None
    phase: str | None = None
    error: str | None = None
    tokens: int | None = None
    fit_seconds: float | None = None

    @property
    def key(self) -> str:
        """Return its name among the losses."""
        return f"{self.name}, after {self.phase}" if self.phase else self.name

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of every measurement of it."""
        causal = None if self.causal else False
        return {"kind": self.kind, "method": self.method, "causal": causal, "error": self.error}

    def density(self, sparsity: float | None) -> float | None:
        """Return the fraction of the causal QK pairs that it keeps."""
        return 1.0 if self.kind in ("base", "trained") else None if sparsity is None else 1 - sparsity

    def group_fraction(self, largest: float | None) -> float | None:
        """Return the fraction of tokens in the largest group, where each is in several."""
        memberships = (self.top_k or 1) if self.pair_rule == "share" else 1
        return None if largest is None else min(1.0, largest * memberships)


def trained_variant(model: PreTrainedModel, config: Config) -> Variant:
    """Return the variant of trained base weights: `trained`, or `lora_r4`."""
    name = str(describe_lora(model)["name"]) if config.recipe.trains("lora") else "trained"
    return Variant(name=name, kind="trained")


def method_variant(model: PreTrainedModel, config: Config) -> Variant:
    """Return the variant of an attached method without a Focus router."""
    attention = config.attention
    return Variant(name=attention.name, kind="control", method=attention.method, causal=is_causal(model))


def route_hard(model: PreTrainedModel, top_k: int, pair_rule: str, phase: str | None = None) -> Variant:
    """Set hard routing of Focus, and return its variant."""
    set_routing(model, hard=True, top_k=top_k, pair_rule=pair_rule)
    return Variant(
        name=hard_variant("focus", top_k, pair_rule), kind="hard", method="focus", causal=is_causal(model),
        top_k=top_k, pair_rule=pair_rule, phase=phase,
    )  # fmt: skip


def full_attention(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Run the model without the attached method, if there is one, in the block."""
    return disable_method(model) if getattr(model, "focus_attachment", None) else nullcontext()


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
    """Build groups that ignore the tokens, of the sizes `fractions` [layers][K]."""
    methods = attached_methods(model).items()
    return {
        index: RandomGroups.create(
            method.shape, groups=attention.groups, window=attention.window, sinks=attention.sinks,
            top_k=attention.top_k, pair_rule=attention.pair_rule, seed=seed, shares=sizes,
        )
        for (index, method), sizes in zip(methods, fractions, strict=True)
    }  # fmt: skip
