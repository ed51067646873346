"""What `focus_dual` may be told; apart from the method itself, as its configuration is read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from focus_exp.attention.options import FitOptions, NearOptions, fits, option

FULL, WINDOW = "full", "window"


@dataclass
class FocusDualOptions(NearOptions):
    groups: int = option(32, "K, groups of keys", least=1)
    top_k: int = option(4, "groups that a query reads", least=1, most="groups")
    heads: str = option(
        "kv", "whether key/value heads have encoders of their own or share them", choices=("kv", "layer")
    )
    counts: str = option(
        "query", "query: each reads the groups that promise enough, top_k on average, where a fit has set how much "
        "that is; pair: that promise enough for each distant key; head: all queries of a head read as many",
        choices=("query", "pair", "head"),
    )  # fmt: skip
    encoders: int = option(2, "2: of queries and of keys; 1: a query reads by what it is as a key", least=1, most=2)
    rank: int = option(0, "of the encoders, whose heads then share a projection; 0: linear classifiers", least=0)
    budget: list[Any] | None = option(
        None, "of each layer of the model: full, window, the groups that a query reads, or a list of those by head"
    )
    gate_steepness: float = option(
        10.0, "lambda, of the gate that stands in for hard groups in the routers' gradient", above=0
    )

    def refuse(self) -> str | None:
        given: object = self.budget
        if not (given is None or isinstance(given, list)):
            return f"budget={given!r} is not a list with an entry for each layer"
        for layer, entry in enumerate(self.budget or []):
            counts = entry if isinstance(entry, list) else [entry]
            known = not isinstance(entry, list) and entry in (FULL, WINDOW)
            if not known and not all(fits(k, int) and 0 <= k <= self.groups for k in counts):
                return (
                    f"budget holds {entry!r} for layer {layer}; give full, window, a number of groups from 0 to "
                    f"groups={self.groups}, or a list of such numbers, one for each head"
                )
        return None


@dataclass
class EncoderTraining(FitOptions):
    pairs: float | None = option(
        None, "share of the distant pairs for which layers and heads get their budgets; null: top_k for all",
        least=0, most=1,
    )  # fmt: skip
    fit_to: str = option(
        "loss", "what a pair is worth: the squared change of the loss without it, or its attention",
        choices=("loss", "attention"),
    )  # fmt: skip
