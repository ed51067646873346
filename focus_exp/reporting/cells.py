"""What an expression of tables.yaml may call beside the texts of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from math import isclose
from statistics import mean
from typing import Any

from focus_exp.records.groups import DistantPair, GroupLayer
from focus_exp.records.record import Record
from focus_exp.records.speed import MethodSpeedRow, SpeedRow
from focus_exp.reporting.formats import (
    ABSENT,
    FAILED,
    decimals_text,
    distinct_text,
    mebibytes_text,
    number_text,
    share_text,
)
from focus_exp.reporting.speed import groups_text, label, setting


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
    return (
        f"{number_text(focus / full)} ({mebibytes_text(focus)} / {mebibytes_text(full)})"
        if full and focus is not None
        else ABSENT
    )


def kept(share: float | None) -> str:
    """A share of pairs; all of them are full attention."""
    return share_text(share) + mark("full attention", share is not None and isclose(share, 1.0))


def groups(record: Record, row: SpeedRow) -> str:
    return groups_text(record, setting(row))


def three(value: float | None) -> str:
    return decimals_text(value, 3)


def first_pair(row: GroupLayer, by: str) -> DistantPair | None:
    """The first of the layer's pairs by this measure."""
    return next((pair for pair in row.pairs if pair.by == by), None)


def pair_words(pair: DistantPair | None) -> str:
    return f"'{pair.query_word}' ({pair.query}) from '{pair.key_word}' ({pair.key})" if pair else ABSENT


def fits(layers: list[GroupLayer], measure: str, text: Callable[[float], str]) -> str:
    """A measure of the trained router, of an untrained one and by chance, means over the layers."""
    routers = ("trained", "untrained", "chance")
    trained, *others = (text(mean(getattr(row.fit(router), measure) for row in layers)) for router in routers)
    return trained + mark(", ".join(others))


def failed_timings(record: Record, rows: Iterable[SpeedRow]) -> list[str]:
    return [
        f"{row.clock}, {label(record, setting(row))}, {row.tokens:,} tokens failed: {row.error}"
        for row in rows
        if row.error is not None
    ]


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


def picked_settings(record: Record, *names: str) -> dict[str, Any]:
    """Of the attention."""
    return {name: record.setting("attention", name) for name in names}


def picked(row: Any, *names: str) -> dict[str, Any]:
    """These attributes of a row, None where the row lacks."""
    return {name: getattr(row, name, None) for name in names}


def prefixed(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def retained(paper: dict[str, Any]) -> float | None:
    """The share of distant pairs in a row of the paper's table 7."""
    percent = paper.get("pairs_retained_percent")
    return percent / 100 if percent else None


def fit_values(row: GroupLayer) -> dict[str, Any]:
    return {f"{name}_{fit.router}": getattr(fit, name) for fit in row.fits for name in ("purity", "nmi", "ami")}


ASSIGNMENTS = {"balanced": "balanced", "trained": "trained router"}
PHASE_VALUES = ["perplexity", "perplexity_low", "perplexity_high", "nll", "delta_nll", "largest_group", "causal"]
CASE_VALUES = [
    "clock",
    "tokens",
    "groups",
    "assignment",
    "top_k",
    "pair_rule",
    "window",
    "dtype",
    "pairs_kept",
    "bound",
]
TIMED_VALUES = (
    *("largest_group", "full_kernel", "path", "repeats", "full_seconds", "focus_seconds", "ratio"),
    *("full_attention_seconds", "focus_attention_seconds", "full_peak_bytes", "focus_peak_bytes"),
    *("full_bytes_read", "focus_bytes_read", "error"),
)
