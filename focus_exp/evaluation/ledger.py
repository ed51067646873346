"""The did-it-fire ledger: how long a task's requests were, and what the mask removed on those very requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.selection import Selection, Sequence
from focus_exp.evaluation.perplexity import PairShares

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
COUNTS = ("total", "distant", "kept_pairs")


@dataclass
class Ledger:
    """Filled while requests run. A request is one input of the model: answers that share it are one request.

    Of a generation it is the prompt and what was generated but the last token, which nothing read, as one input. It is
    counted in a pass of its own: a key/value cache sees the pairs of its steps never, recomputing sees them repeatedly.

    lengths: tokens per request. truncated: requests that were cut.
    layers: pairs per attached layer, padding left out; empty under full attention.
    """

    lengths: list[int] = field(default_factory=list)
    truncated: int = 0
    layers: dict[int, PairShares] = field(default_factory=dict)

    def observe(self, layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        """An observer for `focus_exp.models.attach.observed`."""
        self.layers.setdefault(layer, PairShares()).observe(layer, method, selection, sequence)

    @property
    def groups(self) -> list[list[float]]:
        """Shares of the tokens in each group `[layers][K]`."""
        return [shares for _, layer in sorted(self.layers.items()) for shares in layer.groups]

    def summary(self) -> dict[str, Any]:
        """The fields of a `BenchmarkRow` that the ledger knows."""
        layers = [layer for _, layer in sorted(self.layers.items())]
        every = PairShares(
            *(sum(getattr(layer, name) for layer in layers) for name in ("total", "distant", "kept_pairs"))
        )
        return {
            "requests": len(self.lengths),
            "truncated": self.truncated,
            "request_tokens": np.quantile(self.lengths, QUANTILES, method="nearest").tolist() if self.lengths else [],
            "distant_share": every.distant / every.total if every.total else None,
            "distant_pairs_kept": every.kept if layers else 1.0,
            "pairs_removed": every.removed,
            "removed_by_layer": [layer.removed for layer in layers],
            "largest_group": max((max(shares) for shares in self.groups), default=None),
        }
