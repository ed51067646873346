"""What an expression of tables.yaml may call beside the texts of numbers."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import isclose
from statistics import mean
from typing import Any

from focus_exp.records.groups import DistantPair, GroupLayer
from focus_exp.records.speed import MethodSpeedRow, SpeedRow
from focus_exp.reporting.formats import (
    ABSENT,
    FAILED,
    distinct_text,
    mebibytes_text,
    number_text,
    share_text,
)


def mark(word: str, holds: bool = True) -> str:
    """What has to be said with a number."""
    return f" ({word})" if holds else ""


def of(row: Any, name: str) -> Any:
    """An attribute of a row that may lack."""
    return getattr(row, name, None)


def time(row: SpeedRow | None, name: str, factor: float = 1e3) -> str:
    """Seconds of a row, in ms."""
    if row is None or row.error is not None:
        return ABSENT if row is None else FAILED
    seconds = getattr(row, name)
    return number_text(None if seconds is None else factor * seconds)


def rate(row: SpeedRow | None, name: str) -> str:
    """Tokens a second."""
    seconds = getattr(row, name, None)
    return number_text(1 / seconds if seconds else None)


def part(some: float | None, whole: float | None) -> str:
    return share_text(some / whole if some is not None and whole else None)


def beside(row: SpeedRow | None, name: str) -> str:
    """Bytes of Focus over those of full attention, then both in MiB."""
    focus, full = getattr(row, f"focus_{name}", None), getattr(row, f"full_{name}", None)
    if not full or focus is None:
        return ABSENT
    return f"{number_text(focus / full)} ({mebibytes_text(focus)} / {mebibytes_text(full)})"


def kept(share: float | None) -> str:
    """A share of pairs; all of them are full attention."""
    return share_text(share) + mark("full attention", share is not None and isclose(share, 1.0))


def first_pair(row: GroupLayer, by: str) -> DistantPair | None:
    """The first of the layer's pairs by this measure."""
    return next((pair for pair in row.pairs if pair.by == by), None)


def pair_words(pair: DistantPair | None) -> str:
    return f"'{pair.query_word}' ({pair.query}) from '{pair.key_word}' ({pair.key})" if pair else ABSENT


def fits(layers: list[GroupLayer], measure: str, text: Callable[..., str], *settings: Any) -> str:
    """A measure of the trained router, of an untrained one and by chance, means over the layers."""
    routers = ("trained", "untrained", "chance")
    means = (mean(getattr(row.fit(router), measure) for row in layers) for router in routers)
    trained, *others = (text(value, *settings) for value in means)
    return trained + mark(", ".join(others))


def conditions(rows: Sequence[SpeedRow] | Sequence[MethodSpeedRow]) -> dict[str, str]:
    """On what and how often `rows` were measured."""
    return {
        "layer": distinct_text(row.layer for row in rows),
        "dtype": distinct_text(row.dtype for row in rows),
        "full attention by": distinct_text(row.full_kernel for row in rows),
        "repeats": distinct_text(row.repeats or "" for row in rows),
    }


def fields(row: Any, *without: str) -> dict[str, Any]:
    """All fields of a row, lists as words."""
    values = {name: value for name, value in asdict(row).items() if name not in without}
    return {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in values.items()}


def picked(row: Any, *names: str) -> dict[str, Any]:
    """These attributes of a row, or entries of a section of a config, None where it lacks."""
    return {name: row.get(name) if isinstance(row, dict) else getattr(row, name, None) for name in names}


def prefixed(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def fit_values(row: GroupLayer) -> dict[str, Any]:
    return {f"{name}_{fit.router}": getattr(fit, name) for fit in row.fits for name in ("purity", "nmi", "ami")}


# of a row, in a CSV
PHASE_VALUES = ("perplexity", "perplexity_low", "perplexity_high", "nll", "delta_nll", "largest_group", "causal")
CASE_VALUES = (
    *("clock", "tokens", "groups", "assignment", "top_k", "pair_rule", "window", "dtype", "pairs_kept", "bound"),
    *("pairs_computed", "kernel_bound"),
)
TIMED_VALUES = (
    *("largest_group", "full_kernel", "path", "repeats", "full_seconds", "focus_seconds", "ratio"),
    *("full_attention_seconds", "focus_attention_seconds", "full_peak_bytes", "focus_peak_bytes"),
    *("full_bytes_read", "focus_bytes_read", "error"),
)
