"""Student's t intervals over independent units and seeds; required sample sizes.

A unit is a document, since sequences of one document are correlated; its weight is its number of scored tokens. With
fewer than three documents the unit is the sequence, and the interval holds for that text only.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri, stdtridf, stdtrit

LEVEL, POWER = 0.95, 0.80
FEWEST = 3  # documents, from which on they are the units
NORMAL = float(ndtri((1 + LEVEL) / 2))


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error and degrees of freedom; None where unknown."""

    value: float
    stderr: float | None = None
    freedom: float | None = None

    @property
    def bounds(self) -> tuple[float, float] | tuple[None, None]:
        """Return the 95 % interval by Student's t."""
        if self.stderr is None or self.freedom is None:
            return None, None
        half = student(self.freedom) * self.stderr
        return self.value - half, self.value + half


def student(freedom: float, comparisons: int = 1) -> float:
    """Return half of a 95 % interval in standard errors.

    comparisons: number of simultaneous intervals (Bonferroni).
    """
    return float(stdtrit(freedom, 1 - (1 - LEVEL) / 2 / comparisons))


def assign_units(documents: Sequence[Hashable]) -> np.ndarray:
    """Return the unit of each sequence: its document, or itself with few documents."""
    numbers = {document: number for number, document in enumerate(dict.fromkeys(documents))}
    return np.array([numbers[document] for document in documents] if len(numbers) >= FEWEST else range(len(documents)))


def estimate(values: Any, weights: Any = None, documents: Sequence[Hashable] | None = None) -> Estimate:
    """Return the weighted mean of values (sequences,) and its error over units.

    Args:
        weights: tokens of each sequence.
        documents: of each sequence; they make the units.

    The variance is the weighted sum of squared residuals of the units, each divided by its expectation under equal
    unit variances; degrees of freedom by Satterthwaite (Bell and McCaffrey, 2002). Equal weights: s^2 / n with n - 1.
    """
    x = np.asarray(values, dtype=np.float64)
    w = np.ones(len(x)) if weights is None else np.asarray(weights, dtype=np.float64)
    if documents is not None:
        units = assign_units(documents)
        sums, w = np.bincount(units, w * x), np.bincount(units, w).astype(np.float64)
        x = sums[w > 0] / w[w > 0]
    else:
        x = x[w > 0]
    w = w[w > 0] / w.sum()
    value = float(w @ x)
    if len(x) < 2:
        return Estimate(value)
    square = w @ w
    c = w**2 / (1 - 2 * w + square)
    # the variance is x'Ax, A = diag(c) - cw' - wc' + sum(c) ww'; freedom is tr(A)^2 / tr(AA)
    total, cross = c.sum(), c @ w
    trace = total - 2 * cross + total * square
    off = 2 * (c @ c) * square + 2 * cross**2 - 4 * total * cross * square + (total * square) ** 2
    traces = c @ c + 2 * (c @ (total * w**2 - 2 * c * w)) + off
    return Estimate(value, math.sqrt(c @ (x - value) ** 2), float(trace**2 / traces))


def combine_seeds(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of one difference over several seeds that scored the same text.

    Var = text + seeds / m: the variance by the text does not shrink with the seeds, since all score the same tokens
    (its mean over seeds is used); seeds is the sample variance of the m means. Degrees of freedom are those whose t is
    the mean of both parts' t, weighted by variance (Cochran and Cox, 1950): with few seeds Satterthwaite's interval
    covers less than 95 %, this one more. A single seed keeps its own interval.
    """
    if len(estimates) == 1:
        return estimates[0]
    value, between = float(np.mean([e.value for e in estimates])), seed_deviation(estimates) ** 2 / len(estimates)
    errors = [(e.stderr, e.freedom) for e in estimates if e.stderr is not None and e.freedom is not None]
    if not errors:
        return Estimate(value, math.sqrt(between), len(estimates) - 1)
    if len(errors) < len(estimates):
        return Estimate(value)
    text, freedom = float(np.mean([stderr**2 for stderr, _ in errors])), min(freedom for _, freedom in errors)
    if not text + between:
        return Estimate(value, 0.0, freedom)
    t = (text * student(freedom) + between * student(len(estimates) - 1)) / (text + between)
    return Estimate(value, math.sqrt(text + between), float(stdtridf((1 + LEVEL) / 2, t)))


def seed_deviation(estimates: Sequence[Estimate]) -> float:
    """Return the sample standard deviation of the values."""
    return float(np.std([e.value for e in estimates], ddof=1))


def required_size(deviation: float, size: float, comparisons: int = 1) -> int:
    """Return how many units show a difference of `size` (80 % power, 5 % level).

    Args:
        deviation: standard deviation of a unit or seed.
        comparisons: number of simultaneous intervals (Bonferroni).
    """
    # the sample size is this times (deviation / size)^2
    effort = (float(ndtri(1 - (1 - LEVEL) / 2 / comparisons)) + float(ndtri(POWER))) ** 2
    count = max(2, math.ceil(effort * (deviation / size) ** 2))
    # small samples need more by Student's t than by the normal distribution
    while count < (student(count - 1, comparisons) + float(stdtrit(count - 1, POWER))) ** 2 * (deviation / size) ** 2:
        count += 1
    return count
