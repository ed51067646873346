"""Format numbers and tables: Markdown and LaTeX."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from focus_exp.results.measurement import MAX_NATS

ABSENT = "-"


def format_number(value: Any, digits: int = 2) -> str:
    """Format a number with thousands separators; from 1,000 on without decimals."""
    if pd.isna(value):
        return ABSENT
    return f"{value:,.{0 if abs(value) >= 1000 else digits}f}"


def format_significant(value: Any) -> str:
    """Format a number with three significant digits."""
    if pd.isna(value):
        return ABSENT
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f}" if abs(value) >= 0.9995 else f"{value:.3g}"


def format_interval(value: Any, low: Any = None, high: Any = None, sign: bool = False) -> str:
    """Format a value with its 95 % interval: 1.5 [0.4, 2.7]."""
    if pd.isna(value):
        return ABSENT
    style = "+,.1f" if sign else ",.1f"
    text = format(value, style)
    return text if pd.isna(low) or pd.isna(high) else f"{text} [{low:{style}}, {high:{style}}]"


def to_percent(nats: Any) -> float | None:
    """Return the change of perplexity [%] of a difference in nats per token."""
    return None if pd.isna(nats) else 100 * math.expm1(min(float(nats), MAX_NATS))


def percent(fraction: Any) -> float | None:
    return None if pd.isna(fraction) else 100 * float(fraction)


SCALES = {"fraction": percent, "nats": to_percent}  # of a change, by its unit; of others as it is


def format_percent(fraction: Any, digits: int = 1) -> str:
    """Format a fraction in per cent."""
    return format_number(percent(fraction), digits)


def format_change(value: Any, low: Any, high: Any, unit: str, sign: bool = True) -> str:
    """Format a change with its 95 % interval, in per cent or points: one in nats as that of the perplexity."""
    scale = SCALES.get(unit, lambda number: number)
    return format_interval(scale(value), scale(low), scale(high), sign=sign)


def to_markdown(table: pd.DataFrame) -> str:
    """Return a pipe table; cells must be text."""
    lines = [list(table.columns), ["---"] * len(table.columns), *table.astype(str).values.tolist()]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def to_latex(table: pd.DataFrame, caption: str) -> str:
    """Return a LaTeX longtable."""
    return str(table.to_latex(index=False, escape=True, longtable=True, caption=caption))
