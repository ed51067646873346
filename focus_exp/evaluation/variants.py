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
from focus_exp.attention.registry import find
from focus_exp.config import Config
from focus_exp.errors import UserError, first_line
from focus_exp.identity import hash_adapter
from focus_exp.models.adapter import adapter_name, build_adapter_methods, read_description
from focus_exp.models.lora import describe_lora
from focus_exp.models.methods import (
    attached_methods,
    disable_method,
    get_attachment,
    is_causal,
    set_routing,
    swap_methods,
    use_causal_counterparts,
)
from focus_exp.results.measurement import hard_variant, soft_variant

BASE = "base"
WINDOW_ONLY, WIDE_WINDOW = "window_only", "window_density_matched"
RANDOM_GROUPS = "random_size_matched"
COUNTERPART: Literal["causal_counterpart"] = "causal_counterpart"
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
        """Return the fraction of tokens in the largest group, where each is in several; None without a router."""
        memberships = (self.top_k or 1) if self.pair_rule == "share" else 1
        is_routed = self.method != "full" and find(self.method).options.is_trainable
        return min(1.0, largest * memberships) if is_routed and largest is not None else None


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
        with without_method(model):
            yield Variant(name=name, kind="trained")
    if attention.method == "full":
        return
    if attention.is_soft:
        yield from router_variants(model, config, match_density)
    else:
        set_routing(model, hard=True, **attention.routing)  # an adapter may be measured at another number of groups
        yield Variant(name=attention.name, kind="control", method=attention.method, causal=is_causal(model))
    yield from adapter_variants(model, config, adapters)


def router_variants(
    model: PreTrainedModel, config: Config, match_density: Callable[[], int] | None
) -> Generator[Variant]:
    """Yield soft routing, every hard routing, and the controls of the configured one."""
    attention: Any = config.attention
    bounds = config.eval.bounds or match_density is None
    if match_density and bounds:
        yield soft_routing(model)
    for routing in config.scored_routings if match_density else [attention.routing]:
        variant = hard_routing(model, routing)
        yield variant
        if routing == attention.routing:
            configured = variant
    is_calibrated = bool(config.recipe.router and config.recipe.router.balance_sequences)
    has_counterpart = any(method.causal_counterpart for method in attached_methods(model).values())
    if match_density and not is_causal(model) and is_calibrated and has_counterpart:
        yield from causal_counterparts(model, attention.routing)
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
    """Set soft routing, and return its variant."""
    set_routing(model, hard=False)
    method = get_attachment(model).method
    return Variant(name=soft_variant(method), kind="soft", method=method, causal=is_causal(model), phase=phase)


def hard_routing(model: PreTrainedModel, routing: dict[str, Any], phase: str | None = None) -> Variant:
    """Set hard routing, and return its variant."""
    set_routing(model, hard=True, **routing)
    method = get_attachment(model).method
    facts: dict[str, Any] = {"method": method, "causal": is_causal(model), "phase": phase}
    return Variant(name=hard_variant(method, **routing), kind="hard", **facts, **routing)


def causal_counterparts(model: PreTrainedModel, routing: dict[str, Any]) -> Generator[Variant]:
    """Yield a non-causal router with groups that depend on each token alone."""
    with use_causal_counterparts(model):
        soft = replace(soft_routing(model), name=soft_variant(COUNTERPART), kind=COUNTERPART)
        yield soft
        set_routing(model, hard=True, **routing)
        yield replace(soft, name=hard_variant(COUNTERPART, **routing), **routing)


def adapter_variants(model: PreTrainedModel, config: Config, adapters: Iterable[str]) -> Generator[Variant]:
    """Yield adapters of other runs in place of what is attached; one that no longer fits has its error."""
    described = [(folder, adapter_name(folder), read_description(folder)) for folder in adapters]
    names, methods = ([x[1] for x in described], [x[2]["method"] for x in described])
    own = [] if config.attention.is_soft else [config.attention.name]
    for folder, name, description in described:
        method = description["method"]
        if names.count(name) > 1:
            name = f"{name} of {Path(folder).absolute().parent.name}"
        shown = method if [*own, *methods].count(method) == 1 else f"{method}, {name}"
        cost: dict[str, Any] = {key: description.get(key) for key in ("tokens", "fit_seconds")}
        variant = Variant(name=shown, kind="control", method=method, **cost)
        try:
            attached = build_adapter_methods(model, folder, check_base=config.check_base)
        except UserError as error:  # its base was trained meanwhile
            yield replace(variant, error=first_line(error))
            continue
        with swap_methods(model, attached):
            set_routing(model, hard=True)
            yield replace(variant, causal=is_causal(model), definition=json.dumps(hash_adapter(str(folder))))


def without_method(model: PreTrainedModel) -> AbstractContextManager[Any]:
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
    model: PreTrainedModel, fractions: list[list[float]], attention: Any, seed: int
) -> dict[int, AttentionMethod]:
    """Build groups that ignore the tokens, of the sizes `fractions` [layers][K]."""
    options = {name: getattr(attention, name) for name in ("groups", "window", "sinks")} | attention.routing
    return {
        index: RandomGroups.create(method.shape, seed=seed, shares=sizes, **options)
        for (index, method), sizes in zip(attached_methods(model).items(), fractions, strict=True)
    }
