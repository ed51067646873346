"""Token-weighted means of losses (sequences, T); NaN is not scored."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np


def sequence_means(nll: np.ndarray) -> np.ndarray:
    """Return the mean loss of each sequence's scored tokens."""
    sums, counts = sequence_sums(nll)
    return sums / counts


def sequence_sums(nll: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the float64 sum of losses and the scored tokens of each sequence."""
    return np.nan_to_num(nll.astype(np.float64)).sum(axis=1), (~np.isnan(nll)).sum(axis=1)


def token_mean(nll: np.ndarray) -> float | None:
    """Return the mean over scored tokens, each of the same weight; None without any."""
    sums, counts = sequence_sums(nll)
    return float(sums.sum() / counts.sum()) if counts.sum() else None


def read_arrays(path: Path) -> dict[str, np.ndarray] | None:
    """Read an .npz file; None where it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as data:
            return dict(data)
    # every way in which a damaged archive has been seen to fail
    except (OSError, EOFError, ValueError, KeyError, IndexError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return None
