"""How groups of tokens go with labels of the same tokens: purity, mutual information, what stands out in a group."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score


@dataclass(frozen=True)
class Fit:
    """How well groups go with labels.

    purity: share of the tokens whose label is the most frequent one of their group. nmi: mutual information over the
    mean of both entropies; above 0 by chance too. ami: the same less what chance gives, 0 in expectation there.
    """

    purity: float
    nmi: float
    ami: float


def fit(groups: np.ndarray, labels: np.ndarray) -> Fit:
    """Of groups and labels, both ints `[N]`."""
    return Fit(
        purity(groups, labels),
        float(normalized_mutual_info_score(labels, groups)),
        float(adjusted_mutual_info_score(labels, groups)),
    )


def agreement(groups: np.ndarray, others: np.ndarray) -> float:
    """Adjusted mutual information of two groupings of the same tokens, whatever their groups are called."""
    return float(adjusted_mutual_info_score(others, groups))


def purity(groups: np.ndarray, labels: np.ndarray) -> float:
    return float(counts(groups, labels).max(axis=1).sum() / len(groups))


def counts(groups: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Tokens of each group with each label `[groups, labels]`."""
    table = np.zeros((int(groups.max()) + 1, int(labels.max()) + 1), dtype=np.int64)
    np.add.at(table, (groups, labels), 1)
    return table


def shuffled(groups: np.ndarray, seed: int) -> np.ndarray:
    """Groups of the same sizes that ignore the tokens: what chance gives."""
    return np.random.default_rng(seed).permutation(groups)


def standing_out(inside: Counter[str], everywhere: Counter[str], number: int) -> list[str]:
    """The tokens that add most to what sets a group apart, n log(p / p_everywhere); the sum of all is n times the
    Kullback-Leibler divergence. Ties by the alphabet."""
    if not inside:
        return []
    tokens, total = inside.total(), everywhere.total()
    weight = {t: n * np.log(n / tokens * total / everywhere[t]) for t, n in inside.items()}
    return sorted(weight, key=lambda token: (-round(weight[token], 9), token))[:number]
