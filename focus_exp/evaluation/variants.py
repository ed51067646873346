"""Variants that are measured: the base, what is attached or trained, its controls, adapters of other runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.baselines.random_groups import RandomGroups
from focus_exp.attention.baselines.window import WindowOnly
from focus_exp.config import Config, FocusConfig
from focus_exp.config_hash import hash_adapter
from focus_exp.errors import UserError, first_line
from focus_exp.models.adapter import adapter_name, build_adapter_methods, read_description
from focus_exp.models.lora import describe_lora
from focus_exp.models.methods import (
    attached_methods,
    disable_method,
    is_causal,
    set_routing,
    swap_methods,
    use_causal_assignment,
)
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
        definition: what it depends on besides its name, the configuration and the weights.
        group_fractions: of the tokens [layers][K], set by what scores it.
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
    definition: str = ""
    group_fractions: list[list[float]] | None = None

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


def attached_variants(
    model: PreTrainedModel,
    config: Config,
    adapters: Iterable[str] = (),
    match_density: Callable[[], int] | None = None,
) -> Generator[Variant]:
    """Yield each variant of what is attached or trained, in the order of a table, while the model is set to it.

    Args:
        adapters: of other runs, in place of what is attached.
        match_density: returns the window of the configured routing's density, once that is scored.
            Without it there are only the configured routing and the controls that it can be told from.
    """
    attention, recipe = config.attention, config.recipe
    if recipe.trains("lora") or recipe.trains("all"):
        name = str(describe_lora(model)["name"]) if recipe.trains("lora") else "trained"
        with full_attention(model):
            yield Variant(name=name, kind="trained")
    if attention.method == "full":
        return
    if config.has_router:
        yield from focus_variants(model, config, match_density)
    else:
        set_routing(model, hard=True, **attention.routing)  # an adapter may be measured at another number of groups
        yield Variant(name=attention.name, kind="control", method=attention.method, causal=is_causal(model))
    yield from adapter_variants(model, config, adapters)


def focus_variants(
    model: PreTrainedModel, config: Config, match_density: Callable[[], int] | None
) -> Generator[Variant]:
    """Yield soft routing, every hard routing, and the controls of the configured one."""
    attention, bounds = config.focus, config.eval.bounds or match_density is None
    if match_density and bounds:
        yield soft_routing(model)
    top_ks = config.scored_top_ks if match_density else [attention.top_k]
    for variant in (hard_routing(model, top_k, attention.pair_rule) for top_k in top_ks):
        yield variant
        if variant.top_k == attention.top_k:
            configured = variant
    is_calibrated = bool(config.recipe.router and config.recipe.router.balance_sequences)
    if match_density and not is_causal(model) and is_calibrated:
        yield from causal_counterparts(model, config)
    set_routing(model, hard=True, **attention.routing)
    if configured.group_fractions is None or not config.eval.controls:
        return
    window, random = Variant(name=WINDOW_ONLY, kind="control", method="window"), configured.group_fractions
    if bounds:
        with swap_methods(model, window_only(model, attention.window, attention.sinks)):
            yield window
    if match_density:
        wide = match_density()
        with swap_methods(model, window_only(model, wide, attention.sinks)):
            yield replace(window, name=WIDE_WINDOW, window=wide, definition=str(wide))
    with swap_methods(model, random_groups(model, random, attention, config.seed)):
        yield Variant(
            name=RANDOM_GROUPS, kind="control", method="random_groups", top_k=attention.top_k, definition=repr(random)
        )


def soft_routing(model: PreTrainedModel, phase: str | None = None) -> Variant:
    """Set soft routing of Focus, and return its variant."""
    set_routing(model, hard=False)
    return Variant(name=SOFT, kind="soft", method="focus", causal=is_causal(model), phase=phase)


def hard_routing(model: PreTrainedModel, top_k: int, pair_rule: str, phase: str | None = None) -> Variant:
    """Set hard routing of Focus, and return its variant."""
    set_routing(model, hard=True, top_k=top_k, pair_rule=pair_rule)
    return Variant(
        name=hard_variant("focus", top_k, pair_rule), kind="hard", method="focus", causal=is_causal(model),
        top_k=top_k, pair_rule=pair_rule, phase=phase,
    )  # fmt: skip


def causal_counterparts(model: PreTrainedModel, config: Config) -> Generator[Variant]:
    """Yield a non-causal router with groups that depend on each token alone."""
    top_k, rule = config.focus.top_k, config.focus.pair_rule
    soft = Variant(name=f"{COUNTERPART}_soft", kind="causal_counterpart", method="focus")
    with use_causal_assignment(model):
        set_routing(model, hard=False)
        yield soft
        set_routing(model, hard=True, top_k=top_k, pair_rule=rule)
        yield replace(soft, name=hard_variant(COUNTERPART, top_k, rule), top_k=top_k, pair_rule=rule)


def adapter_variants(model: PreTrainedModel, config: Config, adapters: Iterable[str]) -> Generator[Variant]:
    """Yield adapters of other runs in place of what is attached; one that no longer fits has its error."""
    described = [(folder, adapter_name(folder), read_description(folder)) for folder in adapters]
    names, methods = ([x[1] for x in described], [x[2]["method"] for x in described])
    own = [] if config.has_router else [config.attention.name]
    for folder, name, description in described:
        method = description["method"]
        if names.count(name) > 1:
            name = f"{name} of {Path(folder).absolute().parent.name}"
        variant = Variant(
            name=method if [*own, *methods].count(method) == 1 else f"{method}, {name}", kind="control", method=method,
            tokens=description.get("tokens"), fit_seconds=description.get("fit_seconds"),
        )  # fmt: skip
        try:
            attached = build_adapter_methods(model, folder, check_base=config.check_base)
        except UserError as error:  # its base was trained meanwhile
            yield replace(variant, error=first_line(error))
            continue
        with swap_methods(model, attached):
            set_routing(model, hard=True)
            yield replace(variant, causal=is_causal(model), definition=json.dumps(hash_adapter(str(folder))))


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
