"""Options as methods declare them: a dataclass beside the class, every field with its limits and a sentence.

Nothing here needs torch, so that a configuration is shown and refused without waiting for it.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

PAIR_RULES = ("query_topk", "share")
MAX_SEED = 2**32 - 1  # NumPy's limit
KINDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a name", type(None): "None"}


def option(
    default: Any,
    *,
    least: float | None = None,
    most: float | str | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare a dataclass field with its limits; its meaning stands in the YAML file of the method.

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
    """What the options of every method descend from."""

    @classmethod
    def of(cls, **given: Any) -> Self:
        """These options, the others at their defaults; ValueError for one that there is not, and as `check` has it."""
        names = [item.name for item in fields(cls)]
        for name in given:
            if name not in names:
                raise ValueError(f"there is no option {name}{instead(name, names)}")
        options = cls(**given)
        check(options)
        return options

    def refuse(self) -> str | None:
        """Why values that are allowed one by one do not go together; None where they do."""
        return None


@dataclass
class NearOptions(Options):
    """Of the methods that keep the tokens around a query, and the first ones."""

    window: int = option(128, least=0)
    sinks: int = option(4, least=0)


@dataclass
class FitOptions(Options):
    """How a method is fitted to the base model before any phase trains it; the method itself takes none of it."""

    calibration_sequences: int = option(64, least=0)
    validation_sequences: int = option(16, least=1)
    fit_steps: int = option(600, least=4)


@dataclass
class GroupOptions(NearOptions):
    """Of the methods that keep the distant pairs inside groups of tokens."""

    groups: int = option(4, least=1)
    top_k: int = option(1, least=1, most="groups")
    pair_rule: str = option("query_topk", choices=PAIR_RULES)


def instead(name: str, names: list[str]) -> str:
    """What to write in place of `name`, as the end of a sentence: the nearest of `names`, or all where none is near."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(names)}"


def check(options: Any, prefix: str = "") -> None:
    """ValueError for what a dataclass, or one in it, may not hold: names the option, its value and what it may be."""
    hints = get_type_hints(type(options))
    for item in fields(options):
        name, value, limits = prefix + item.name, getattr(options, item.name), item.metadata
        for key, inner in (value if isinstance(value, dict) else {"": value}).items():
            if is_dataclass(inner):
                check(inner, f"{name}.{key}." if key else f"{name}.")
        hint = hints[item.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if not any(fits(value, kind) for kind in kinds):
            raise ValueError(f"{name}={value!r} is not {' or '.join(KINDS.get(kind, str(kind)) for kind in kinds)}")
        if not limits or value is None:
            continue
        for each in value if isinstance(value, list) else [value]:
            shown = f"{name} holds {each}, which" if isinstance(value, list) else f"{name}={each}"
            check_limits(shown, each, limits)
        bound = getattr(options, limits["most"]) if isinstance(limits["most"], str) else None
        if bound is not None and value > bound:
            raise ValueError(
                f"{name}={value} exceeds {prefix}{limits['most']}={bound}; use {limits['least']} to {bound}"
            )
    if isinstance(options, Options) and (why := options.refuse()):
        raise ValueError(f"{prefix}{why}")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind as a configuration counts: a whole number is a number, True is not."""
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) if kind in (str, bool, type(None)) else True


def check_limits(shown: str, value: Any, limits: Any) -> None:
    least, most, above, choices = (limits[key] for key in ("least", "most", "above", "choices"))
    if choices and value not in choices:
        raise ValueError(f"{shown} is not one of {', '.join(choices)}")
    if isinstance(most, (int, float)):
        if not least <= value <= most:
            raise ValueError(f"{shown} is impossible; use a number from {least} to {most}")
    elif least is not None and not value >= least:
        raise ValueError(f"{shown} is impossible; use {least} or more")
    if above is not None and not above < value < math.inf:
        raise ValueError(f"{shown} is impossible; use a number above {above}")
