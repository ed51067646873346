"""What `focus_dual` may be told; apart from the method itself, as its configuration is read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from focus_exp.attention.options import FitOptions, NearOptions, fits, option

FULL, WINDOW = "full", "window"


@dataclass
class FocusDualOptions(NearOptions):
    groups: int = option(32, least=1)
    top_k: int = option(4, least=1, most="groups")
    heads: str = option("kv", choices=("kv", "layer"))
    counts: str = option("query", choices=("query", "pair", "head"))
    encoders: int = option(2, least=1, most=2)
    rank: int = option(0, least=0)
    groups_per_layer: list[Any] | None = option(None)
    gate_steepness: float = option(10.0, above=0)

    def refuse(self) -> str | None:
        given: object = self.groups_per_layer
        if not (given is None or isinstance(given, list)):
            return f"groups_per_layer={given!r} is not a list with an entry for each layer"
        for layer, entry in enumerate(self.groups_per_layer or []):
            counts = entry if isinstance(entry, list) else [entry]
            known = not isinstance(entry, list) and entry in (FULL, WINDOW)
            if not known and not all(fits(k, int) and 0 <= k <= self.groups for k in counts):
                return (
                    f"groups_per_layer holds {entry!r} for layer {layer}; give full, window, a number of groups from 0 "
                    f"to groups={self.groups}, or a list of such numbers, one for each head"
                )
        return None


@dataclass
class EncoderTraining(FitOptions):
    density: float | None = option(None, least=0, most=1)
    fit_to: str = option("loss", choices=("loss", "attention"))
