"""What the options of attention methods may be, wherever they come from: Python, a configuration, an adapter's file."""

from __future__ import annotations

import difflib
import inspect
import math
from types import UnionType
from typing import Any, get_args, get_type_hints

AT_LEAST = {
    "groups": 1,
    "routing_dim": 1,
    "sinkhorn_iterations": 1,
    "window": 0,
    "sinks": 0,
    "top_k": 1,
    "balance_loss": 0,
    "entropy_loss": 0,
    "global_tokens": 0,
    "dilation": 1,
    "dilated_heads": 0,
    "features": 1,
    "tokens_per_group": 1,
    "components": 1,
    "tokens_kept": 1,
    "recent_tokens": 1,
    "hash_bits": 1,
    "hash_tables": 2,
}
ABOVE_ZERO = ("temperature", "gate_steepness")
KINDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a name", type(None): "None"}
SHARES = ("balance_momentum", "gate_threshold", "centroid_decay")


def check_options(method: Any, options: dict[str, Any]) -> None:
    """ValueError that names the option, its value and what it may be; for the keyword arguments of a method's class."""
    hints = {name: hint for name, hint in get_type_hints(method.__init__).items() if name not in ("shape", "return")}
    for name, value in options.items():
        if name not in hints:
            close = difflib.get_close_matches(name, hints, n=1)
            meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(hints)}"
            raise ValueError(f"there is no option {name}; {meant}")
        kinds = get_args(hints[name]) if isinstance(hints[name], UnionType) else (hints[name],)
        if not any(fits(value, kind) for kind in kinds):
            raise ValueError(f"{name}={value!r} is not {' or '.join(KINDS.get(kind, str(kind)) for kind in kinds)}")
        check_range(name, value)
    given = inspect.signature(method.__init__).bind_partial(None, **options)
    given.apply_defaults()
    if "top_k" in hints and given.arguments["top_k"] > given.arguments["groups"]:
        raise ValueError(
            f"top_k={given.arguments['top_k']} exceeds groups={given.arguments['groups']}; "
            f"use 1 to {given.arguments['groups']}"
        )


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind as a configuration counts: a whole number is a number, True is not."""
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) if kind in (str, bool, type(None)) else True


def check_range(name: str, value: Any) -> None:
    """ValueError for a number out of the range of the option called `name`."""
    if value is None:
        return
    if name in AT_LEAST and not value >= AT_LEAST[name]:
        raise ValueError(f"{name}={value} is impossible; use {AT_LEAST[name]} or more")
    if name in ABOVE_ZERO and not 0 < value < math.inf:
        raise ValueError(f"{name}={value} is impossible; use a number above 0")
    if name in SHARES and not 0 <= value <= 1:
        raise ValueError(f"{name}={value} is impossible; use a number from 0 to 1")
