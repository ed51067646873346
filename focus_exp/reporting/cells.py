"""What an expression of tables.yaml may call beside the texts of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def pair_words(pair: DistantPair | None) -> str:
    return f"'{pair.query_word}' ({pair.query}) from '{pair.key_word}' ({pair.key})" if pair else ABSENT


def pair_distance(pair: DistantPair | None) -> str:
    return str(pair.query - pair.key) if pair else ABSENT


def class_shares(record: Record) -> list[tuple[str, float]]:
    """Word classes of the text, the most frequent first."""
    return sorted(record.groups.class_shares.items(), key=lambda item: -item[1]) if record.groups else []


def failed_timings(record: Record, lines: Iterable[Any]) -> list[str]:
    rows = [row for line in lines for row in line.rows if row.error is not None]
    return [
        f"{row.clock}, {label(record, setting(row))}, {row.tokens:,} tokens failed: {' '.join(row.error.split())}"
        for row in rows
    ]


def timing(record: Record, lines: Iterable[Any]) -> dict[str, Any]:
    """What a speed record was asked for, and on what it was measured."""
    rows = [row for line in lines for row in line.rows]
    asked = record.config.get("bench") or {}
    return {**asked, **conditions(rows), "window": distinct_text(row.window for row in rows)}


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
    """These attributes of a row, None where the row lacks."""
    return {name: getattr(row, name, None) for name in names}


def prefixed(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def layer_values(row: GroupLayer) -> dict[str, Any]:
    """The numbers of a layer, those of its groups in a line."""
    fits = {f"{name}_{fit.router}": getattr(fit, name) for fit in row.fits for name in ("purity", "nmi", "ami")}
    seeds, shares = (" ".join(map(str, values)) for values in (row.agreement, row.shares))
    return {
        **fields(row, "groups", "fits", "pairs", "agreement"),
        **fits,
        "agreement_seeds": seeds,
        "group_shares": shares,
        "distant_mass_kept": row.distant_mass_kept,
    }


CELLS: dict[str, Any] = {
    cell.__name__: cell
    for cell in (
        mark, of, time, rate, part, beside, kept, groups, pair_words, pair_distance, class_shares, failed_timings,
        timing, conditions, fields, picked, prefixed, merged, layer_values, mean,
    )
}  # fmt: skip
CELLS |= {
    "ASSIGNMENTS": {"balanced": "balanced", "trained": "trained router"},
    "PHASE_VALUES": (
        *("perplexity", "perplexity_low", "perplexity_high", "nll", "delta_nll", "largest_group", "causal"),
    ),
    "CASE_VALUES": (
        *("clock", "tokens", "groups", "assignment", "top_k", "pair_rule", "window", "dtype", "pairs_kept", "bound"),
    ),
    "TIMED_VALUES": (
        *("largest_group", "full_kernel", "path", "repeats", "full_seconds", "focus_seconds", "ratio"),
        *("full_attention_seconds", "focus_attention_seconds", "full_peak_bytes", "focus_peak_bytes"),
        *("full_bytes_read", "focus_bytes_read", "error"),
    ),
}
