"""Token-weighted means, bootstrap intervals over windows, and paired differences, on losses `[windows, T]`."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from focus_exp.records.rows import PositionBin

LEVEL = 0.95
BINS = 16


class Bootstrap:
    """One set of resampled windows, shared by all rows, so that differences are paired."""

    def __init__(self, windows: int, samples: int, seed: int) -> None:
        draws = np.random.default_rng(seed).integers(0, windows, (samples, windows))
        self.weights = np.stack([np.bincount(draw, minlength=windows) for draw in draws])  # [samples, windows]

    def interval(self, sums: np.ndarray, counts: np.ndarray) -> tuple[float, float] | tuple[None, None]:
        """Bounds of sum(sums) / sum(counts), both per window; of one window nothing can be said."""
        if len(sums) < 2:
            return None, None
        means = (self.weights @ sums) / (self.weights @ counts)
        low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)


def paired(nll: np.ndarray, other: np.ndarray, bootstrap: Bootstrap) -> tuple[float, float | None, float | None]:
    """Mean difference per token of losses on the same tokens, and its interval."""
    sums, counts = window_sums(nll - other)
    low, high = bootstrap.interval(sums, counts)
    return float(sums.sum() / counts.sum()), low, high


def window_sums(nll: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss and number of scored tokens per window, in float64."""
    return np.nan_to_num(nll.astype(np.float64)).sum(axis=1), (~np.isnan(nll)).sum(axis=1)


def mean(nll: np.ndarray) -> float | None:
    """Mean over scored tokens, each token the same weight; None without tokens."""
    sums, counts = window_sums(nll)
    return float(sums.sum() / counts.sum()) if counts.sum() else None


def by_position(nll: np.ndarray, window: int) -> list[PositionBin]:
    """Mean losses by position in about BINS bins of equal width, of which one begins where the attention window ends.

    Where that width exceeds the window, the window is a bin of its own.
    """
    length = nll.shape[1]
    # halves of the window while there are few bins, its multiples when there would be too many
    width = window if 0 < window < length else length
    while width > 1 and width % 2 == 0 and 2 * length <= BINS * width:
        width //= 2
    while length > BINS * width:
        width *= 2
    bins: list[PositionBin] = []
    offset = window % width if 0 < window < length else 0
    edges = [*([0] if offset else []), *range(offset, length, width), length]
    for start, end in pairwise(edges):
        part = nll[:, start:end]
        tokens = int(np.sum(~np.isnan(part)))
        value = mean(part)
        if value is not None:
            bins.append({"start": start, "end": end, "nll": value, "tokens": tokens})
    return bins
