"""Token-weighted means of losses `[windows, T]`: all together, by window, by position."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from focus_exp.records.rows import PositionBin

BINS = 16


def window_means(nll: np.ndarray) -> np.ndarray:
    """Mean loss of each window's scored tokens; every window has some."""
    sums, counts = window_sums(nll)
    return sums / counts


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
