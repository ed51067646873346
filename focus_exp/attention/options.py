"""Options of attention methods: dataclasses whose fields carry their limits.

Nothing here imports torch (4 s on a laptop CPU), so that --help and config errors are immediate. The YAML file of a
method explains each option. Methods outside `Focus` and `FocusDual` declare theirs next to the class.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

PAIR_RULES = ("query_topk", "share")
MAX_SEED = 2**32 - 1  # NumPy's limit
FULL, WINDOW = "full", "window"  # budget entries of a layer that routes nothing
TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "null"}


def option(
    default: Any,
    *,
    least: float | None = None,
    most: float | str | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare a dataclass field with its limits.

    Args:
        default: default value; lists and dicts are copied.
        least: smallest allowed value, of each entry of a list.
        most: largest allowed value, or the name of another option that bounds it.
        above: exclusive lower bound.
        choices: allowed values.
    """
    limits = {"least": least, "most": most, "above": above, "choices": choices}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=limits)
    return field(default=default, metadata=limits)


@dataclass
class Options:
    """Base of the options of every method; what they say of it needs no import of torch.

    Attributes:
        is_trainable: a phase with trainable: router trains the method's parameters alone.
        fit_settings: keys of recipe.fit for its fit alone.
        is_soft: `route` may return an assignment `(B, T, K)` alone, which gates every pair. Hard routing is then
            `select(assignment, top_k, pair_rule)`. Both are measured, at every `top_k`, next to controls of the same
            group sizes, and balanced groups are timed in place of the method's own.
    """

    is_trainable: ClassVar[bool] = False
    fit_settings: ClassVar[tuple[str, ...]] = ()
    is_soft: ClassVar[bool] = False

    @classmethod
    def create(cls, **values: Any) -> Self:
        """Create options from values by name; ValueError for an unknown name or an invalid value."""
        names = [item.name for item in fields(cls)]
        for name in values:
            if name not in names:
                raise ValueError(f"unknown option {name}{did_you_mean(name, names)}")
        options = cls(**values)
        validate_options(options)
        return options

    def invalid_reason(self) -> str | None:
        """Return why values that are valid one by one do not go together."""
        return None

    def needs_fit(self) -> bool:
        """Return whether an option has no meaning before a fit to the base."""
        return False

    def check_layers(self, count: int) -> None:
        """Raise ValueError where the options are not for a model of `count` layers."""

    @property
    def routing(self) -> dict[str, Any]:
        """Return what `set_routing` is given for the configured hard routing."""
        return {name: getattr(self, name) for name in ("top_k", "pair_rule") if hasattr(self, name)}

    def routings(self, top_ks: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Return what `set_routing` is given for each of `top_ks`, by default for those that are measured."""
        return [self.routing | {"top_k": k} for k in top_ks if "top_k" in self.routing] or [self.routing]


@dataclass
class LocalOptions(Options):
    """Options of methods with a local window and sinks."""

    window: int = option(128, least=0)
    sinks: int = option(4, least=0)


@dataclass
class GroupOptions(LocalOptions):
    """Options of methods that keep the distant pairs inside groups of tokens."""

    groups: int = option(4, least=1)
    top_k: int = option(1, least=1, most="groups")
    pair_rule: str = option("query_topk", choices=PAIR_RULES)

    def routings(self, top_ks: Sequence[int] = ()) -> list[dict[str, Any]]:
        return super().routings(top_ks or (range(1, self.groups + 1) if self.is_soft else ()))


@dataclass
class FocusOptions(GroupOptions):
    """Options of `focus`, by the paper's symbols; the last four are its remedies against router collapse (table 8)."""

    is_trainable = True
    is_soft = True

    routing_dim: int = option(16, least=1)
    temperature: float = option(0.05, above=0)
    normalize: bool = option(True)
    assignment: str = option("balanced", choices=("balanced", "sinkhorn", "softmax"))
    sinkhorn_iterations: int = option(10, least=1)
    balance_momentum: float = option(0.9, least=0, most=1)
    gate: str = option("log", choices=("log", "multiplicative"))
    gate_steepness: float = option(10.0, above=0)
    gate_threshold: float = option(0.5, least=0, most=1)
    train_with: str = option("soft", choices=("soft", "hard"))
    balance_loss: float = option(0.0, least=0)
    entropy_loss: float = option(0.0, least=0)
    detach_inputs: bool = option(False)
    centroid_update: str = option("gradient", choices=("gradient", "ema", "recluster"))

    def invalid_reason(self) -> str | None:
        if self.gate == "multiplicative" and self.gate_threshold != 0:
            return f"gate_threshold must be 0 with gate=multiplicative (got {self.gate_threshold}). Or use gate=log."
        return None


@dataclass
class FocusDualOptions(LocalOptions):
    """Options of `focus_dual`; a fit turns `density` into `groups_per_layer`."""

    is_trainable = True
    fit_settings = ("importance", "ignored_means", "summed_queries")

    density: float | None = option(None, least=0, most=1)
    groups: int = option(32, least=2)
    top_k: int = option(4, least=1, most="groups")
    heads: str = option("kv", choices=("kv", "layer"))
    counts: str = option("query", choices=("query", "pair", "head"))
    encoders: int = option(2, least=1, most=2)
    groups_per_layer: list[Any] | None = option(None)
    gate_steepness: float = option(10.0, above=0)

    def invalid_reason(self) -> str | None:
        if self.density is not None and self.groups_per_layer is not None:
            return f"density must be null with groups_per_layer (got {self.density}). Give one of them."
        given: object = self.groups_per_layer
        if not (given is None or isinstance(given, list)):
            return f"groups_per_layer must be a list with an entry per layer (got {given!r})"
        for layer, entry in enumerate(self.groups_per_layer or []):
            counts = entry if isinstance(entry, list) else [entry]
            is_known = not isinstance(entry, list) and entry in (FULL, WINDOW)
            if not is_known and not all(has_type(k, int) and 0 <= k <= self.groups for k in counts):
                return (
                    f"groups_per_layer of layer {layer} must be full, window, an integer from 0 to "
                    f"groups={self.groups}, or a list of such integers, one per head (got {entry!r})"
                )
        return None

    def needs_fit(self) -> bool:
        return self.density is not None

    def check_layers(self, count: int) -> None:
        budget = self.groups_per_layer
        if budget is not None and len(budget) != count:
            raise ValueError(f"budget must have an entry for each of {count} layers (got {len(budget)}).")

    @property
    def routing(self) -> dict[str, Any]:
        has_budget = self.groups_per_layer is not None or self.density is not None  # for each head, not `top_k`
        return {} if has_budget else super().routing


def did_you_mean(name: str, names: list[str]) -> str:
    """Return the end of an error about an unknown name: the nearest of `names`, or all of them."""
    if not names:
        return ""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else f"; use one of {', '.join(names)}"


def validate_options(options: Any, prefix: str = "") -> None:
    """Check a dataclass and those in it; ValueError names the key, its value and the constraint."""
    hints = get_type_hints(type(options))
    for item in fields(options):
        name, value, limits = prefix + item.name, getattr(options, item.name), item.metadata
        for key, inner in (value if isinstance(value, dict) else {"": value}).items():
            if is_dataclass(inner):
                validate_options(inner, f"{name}.{key}." if key else f"{name}.")
        hint = hints[item.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if not any(has_type(value, kind) for kind in kinds):
            expected = " or ".join(TYPE_NAMES.get(kind, str(kind)) for kind in kinds)
            raise ValueError(f"{name} must be {expected} (got {value!r})")
        if not limits or value is None:
            continue
        most = limits["most"]
        bound = getattr(options, most) if isinstance(most, str) else None
        for entry in value if isinstance(value, list) else [value]:
            constraint = violated_constraint(entry, limits)
            if constraint is None and bound is not None and entry > bound:
                constraint = f"at most {prefix}{most}={bound}"
            if constraint is not None:
                raise ValueError(f"{name} must be {constraint} (got {value})")
    if isinstance(options, Options) and (reason := options.invalid_reason()):
        raise ValueError(f"{prefix}{reason}")


def has_type(value: Any, kind: Any) -> bool:
    """Check a type as a configuration counts: an integer is a number, True is not."""
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) if kind in (str, bool, type(None)) else True


def violated_constraint(value: Any, limits: Any) -> str | None:
    """Return the constraint of `option` that a value violates, as words after "must be"."""
    least, most, above, choices = (limits[key] for key in ("least", "most", "above", "choices"))
    if choices and value not in choices:
        return f"one of {', '.join(choices)}"
    if isinstance(most, (int, float)):
        return None if least <= value <= most else f"from {least} to {most}"
    if least is not None and not value >= least:
        return f">= {least}"
    return f"finite and > {above}" if above is not None and not above < value < math.inf else None
