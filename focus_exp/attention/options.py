"""Options of attention methods: dataclasses whose fields carry their limits.

Nothing here imports torch (4 s on a laptop CPU), so that --help and config errors are immediate. The YAML file of a
method explains each option. Methods outside `Focus` and `FocusDual` declare theirs next to the class.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

PAIR_RULES = ("query_topk", "share")
MAX_SEED = 2**32 - 1  # NumPy's limit
FULL, WINDOW = "full", "window"  # budget entries of a layer that routes nothing
Size = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# error of pydantic -> what the value must be
EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "greater_than_equal": ">= {ge}",
    "less_than_equal": "<= {le}",
    "greater_than": "finite and > {gt}",
    "finite_number": "finite and > 0",
}


def choices(*names: str) -> Any:
    """Return the limits of a string that is one of `names`."""
    return Field(pattern=f"^({'|'.join(names)})$")


class Checked:
    """Base of dataclasses whose annotations `validate_options` checks: 1 is a number, true and "1" are not."""

    __pydantic_config__: ClassVar = ConfigDict(strict=True, revalidate_instances="always")


@dataclass
class Options(Checked):
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

    def order_reason(self, name: str, most: str) -> str | None:
        """Return why an option must not be larger than another; None where it is not, or the other is None."""
        value, bound = getattr(self, name), getattr(self, most)
        return None if bound is None or value <= bound else f"{name} must be <= {most}={bound} (got {value})"

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

    window: Size = 128
    sinks: Size = 4


@dataclass
class GroupOptions(LocalOptions):
    """Options of methods that keep the distant pairs inside groups of tokens."""

    groups: Count = 4
    top_k: Count = 1
    pair_rule: Annotated[str, choices(*PAIR_RULES)] = "query_topk"

    def invalid_reason(self) -> str | None:
        return self.order_reason("top_k", "groups")

    def routings(self, top_ks: Sequence[int] = ()) -> list[dict[str, Any]]:
        return super().routings(top_ks or (range(1, self.groups + 1) if self.is_soft else ()))


@dataclass
class FocusOptions(GroupOptions):
    """Options of `focus`, by the paper's symbols; the last four are its remedies against router collapse (table 8)."""

    is_trainable = True
    is_soft = True

    routing_dim: Count = 16
    temperature: Positive = 0.05
    normalize: bool = True
    assignment: Annotated[str, choices("balanced", "sinkhorn", "softmax")] = "balanced"
    sinkhorn_iterations: Count = 10
    balance_momentum: Fraction = 0.9
    gate: Annotated[str, choices("log", "multiplicative")] = "log"
    gate_steepness: Positive = 10.0
    gate_threshold: Fraction = 0.5
    train_with: Annotated[str, choices("soft", "hard")] = "soft"
    balance_loss: NonNegative = 0.0
    entropy_loss: NonNegative = 0.0
    detach_inputs: bool = False
    centroid_update: Annotated[str, choices("gradient", "ema", "recluster")] = "gradient"

    def invalid_reason(self) -> str | None:
        if self.gate == "multiplicative" and self.gate_threshold != 0:
            return f"gate_threshold must be 0 with gate=multiplicative (got {self.gate_threshold}). Or use gate=log."
        return super().invalid_reason()


@dataclass
class FocusDualOptions(LocalOptions):
    """Options of `focus_dual`; a fit turns `density` into `groups_per_layer`."""

    is_trainable = True
    fit_settings = ("importance", "ignored_means", "summed_queries")

    density: Fraction | None = None
    groups: Annotated[int, Field(ge=2)] = 32
    top_k: Count = 4
    heads: Annotated[str, choices("kv", "layer")] = "kv"
    counts: Annotated[str, choices("query", "pair", "head")] = "query"
    encoders: Annotated[int, Field(ge=1, le=2)] = 2
    groups_per_layer: list[Any] | None = None
    gate_steepness: Positive = 10.0

    def invalid_reason(self) -> str | None:
        if self.density is not None and self.groups_per_layer is not None:
            return f"density must be null with groups_per_layer (got {self.density}). Give one of them."
        for layer, entry in enumerate(self.groups_per_layer or []):
            counts = entry if isinstance(entry, list) else [entry]
            is_known = not isinstance(entry, list) and entry in (FULL, WINDOW)
            if not is_known and not all(type(k) is int and 0 <= k <= self.groups for k in counts):
                return (
                    f"groups_per_layer of layer {layer} must be full, window, an integer from 0 to "
                    f"groups={self.groups}, or a list of such integers, one per head (got {entry!r})"
                )
        return self.order_reason("top_k", "groups")

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


@cache
def find_adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def validate_options(options: Any, prefix: str = "") -> None:
    """Check a dataclass and those in it; ValueError names the key, its value and the constraint."""
    schema: Any = type(options)
    try:
        find_adapter(schema).validate_python(options)
    except ValidationError as error:
        wrong = error.errors()[0]
        kind, got, limits = wrong["type"], repr(wrong["input"]), wrong.get("ctx", {})
        known = EXPECTED.get(kind, "").format(**limits)
        must = known or wrong["msg"].removeprefix("Input should be ")
        if kind == "string_pattern_mismatch":
            must, got = f"one of {limits['pattern'][2:-2].replace('|', ', ')}", wrong["input"]
        key = ".".join(part for part in wrong["loc"] if isinstance(part, str))
        raise ValueError(f"{prefix}{key} must be {must} (got {got})") from None
    if isinstance(options, Options) and (reason := options.invalid_reason()):
        raise ValueError(f"{prefix}{reason}")
