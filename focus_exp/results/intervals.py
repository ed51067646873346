"""Every interval there is: Student's t on independent units, seeds as a second level, and how many would be enough.

A unit is a document, since windows of one work resemble each other; its weight is the number of its scored tokens.
Where fewer than three documents were scored the unit is the window, and the interval speaks of that text alone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import chdtri, ndtri, stdtridf, stdtrit

LEVEL, POWER = 0.95, 0.80
FEWEST = 3  # documents, from which on they are the units
NORMAL = float(ndtri((1 + LEVEL) / 2))


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error and that error's degrees of freedom; both None where nothing can be said."""

    value: float
    stderr: float | None = None
    freedom: float | None = None

    @property
    def bounds(self) -> tuple[float, float] | tuple[None, None]:
        """The 95 % interval by Student's t."""
        if self.stderr is None or self.freedom is None:
            return None, None
        half = student(self.freedom) * self.stderr
        return self.value - half, self.value + half


def student(freedom: float, together: int = 1) -> float:
    """Half of a 95 % interval in standard errors; of each of several where all are to hold `together` (Bonferroni)."""
    return float(stdtrit(freedom, 1 - (1 - LEVEL) / 2 / together))


def units_of(documents: Sequence[Hashable]) -> np.ndarray:
    """The number of each window's unit, from 0: its document, or itself where there are too few documents."""
    numbers = {document: number for number, document in enumerate(dict.fromkeys(documents))}
    return np.array([numbers[one] for one in documents] if len(numbers) >= FEWEST else range(len(documents)))


def estimate(values: Any, weights: Any = None, documents: Sequence[Hashable] | None = None) -> Estimate:
    """The weighted mean of `values` [windows] (weights: tokens), its error that of the units that `documents` make.

    The variance is the weighted squares of the units' residuals, each over what it is expected to be if all units vary
    alike; freedom by Satterthwaite under the same (Bell and McCaffrey, 2002). Of equal weights: s^2 / n with n - 1.
    """
    x = np.asarray(values, dtype=np.float64)
    w = np.ones(len(x)) if weights is None else np.asarray(weights, dtype=np.float64)
    if documents is not None:
        units = units_of(documents)
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


def over_seeds(found: Sequence[Estimate]) -> Estimate:
    """The mean of one difference under several seeds, each seed drawn at random, all of them on the same text.

    Var = text + seeds / m: the error by the text does not shrink with the seeds, for all score the same tokens (the
    mean of theirs stands for it); seeds is the sample variance of the m means. The freedom is that whose t is the mean
    of both parts' own, weighed by their variances (Cochran and Cox, 1950): with few seeds Satterthwaite's holds the
    truth in less than 95 %, this one in more. Under one seed it is that seed's alone.
    """
    if len(found) == 1:
        return found[0]
    value, between = float(np.mean([one.value for one in found])), seed_deviation(found) ** 2 / len(found)
    known = [(one.stderr, one.freedom) for one in found if one.stderr is not None and one.freedom is not None]
    if not known:
        return Estimate(value, math.sqrt(between), len(found) - 1)
    if len(known) < len(found):
        return Estimate(value)
    text, freedom = float(np.mean([stderr**2 for stderr, _ in known])), min(freedom for _, freedom in known)
    if not text + between:
        return Estimate(value, 0.0, freedom)
    t = (text * student(freedom) + between * student(len(found) - 1)) / (text + between)
    return Estimate(value, math.sqrt(text + between), float(stdtridf((1 + LEVEL) / 2, t)))


def seed_deviation(found: Sequence[Estimate]) -> float:
    """Sample standard deviation of the values."""
    return float(np.std([one.value for one in found], ddof=1))


def deviation_bounds(count: int) -> tuple[float, float]:
    """What a standard deviation of so many seeds may be times as large in truth, by its 95 % interval (chi-squared)."""
    low, high = (math.sqrt((count - 1) / float(chdtri(count - 1, tail))) for tail in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return low, high


def needed(deviation: float, size: float, together: int = 1) -> int:
    """Units, or seeds, of this standard deviation that show a difference of `size` with 80 % power, two-sided 5 %; of
    each of several differences where all intervals are to hold `together`."""
    # units of variance s^2 that show a difference d are this times (s / d)^2
    effort = (float(ndtri(1 - (1 - LEVEL) / 2 / together)) + float(ndtri(POWER))) ** 2
    count = max(2, math.ceil(effort * (deviation / size) ** 2))
    # of few, Student's t asks for more than the normal distribution does
    while count < (student(count - 1, together) + float(stdtrit(count - 1, POWER))) ** 2 * (deviation / size) ** 2:
        count += 1
    return count
