"""From how many tokens the sparse path pays on this device: measured once, kept in the cache."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from focus_exp.speed.layer import Layer, build_method, run_method
from focus_exp.speed.timing import Work, time_in_turns, time_once
from focus_exp.speed.workload import Tensors, full_attention
from focus_exp.storage import replace_file

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
REPEATS = 5
NEVER = 1 << 40  # tokens


@dataclass(frozen=True)
class BreakEven:
    """Lengths [tokens] from which the sparse path is faster, None if at none that was measured.

    than_masked: than the masked path, which computes the same function: where backend=auto changes over.
    than_full: than full attention, which keeps every pair.
    setting: of the layer, whose router was a random one, and of the machine.
    measured: the day, as another run than the one that reads it may have measured it.
    """

    than_masked: int | None
    than_full: int | None
    seconds: dict[str, dict[str, float]]
    setting: dict[str, Any]
    measured: str

    @property
    def sparse_from(self) -> int:
        return NEVER if self.than_masked is None else self.than_masked

    @staticmethod
    def read(path: Path) -> BreakEven | None:
        """None where there is nothing whole."""
        try:
            return BreakEven(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def sentence(self) -> str:
        """What backend=auto does here, in words."""
        setting = self.setting
        method = f"{setting['method']}, K={setting['groups']}, k={setting['top_k']}"
        named = f"one layer with a random router, {method}, {setting['device']}, {setting['dtype']}"
        where = f"{named}, {setting['kernel']}, measured {self.measured}"
        if self.than_masked is None:
            longest = max(map(int, self.seconds))
            return f"hard groups take the masked path: the sparse one is not faster up to {longest:,} tokens ({where})"
        full = "never" if self.than_full is None else f"from {self.than_full:,}"
        return (
            f"hard groups take the sparse path from {self.than_masked:,} tokens, the masked one below; "
            f"faster than full attention {full} ({where})"
        )


def break_even(layer: Layer, method: str, options: dict[str, Any], device_name: str, cache: Path) -> BreakEven:
    """Of a layer of the method with these options: read from the cache, or measured in some seconds and kept there."""
    setting = {
        "device": device_name,
        "torch": torch.__version__,
        "dtype": str(layer.dtype).removeprefix("torch."),
        **asdict(layer.shape),
        "method": method,
        **options,
        "kernel": layer.backend,
    }
    name = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:16]
    path = cache / "break_even" / f"{name}.json"
    found = BreakEven.read(path)
    if found is None:
        print("measuring from how many tokens the sparse path pays here: once, in less than a minute")
        found = measure(layer, method, options, setting)
        replace_file(path, (json.dumps(asdict(found), indent=2) + "\n").encode())
    return found


@torch.no_grad()
def measure(layer: Layer, method: str, options: dict[str, Any], setting: dict[str, Any]) -> BreakEven:
    with torch.random.fork_rng(devices=[]):  # a run draws the same numbers whether it measures or reads
        sparse, masked = (build_method(layer, method, options) for _ in range(2))
    masked.backend = "masked"
    seconds: dict[str, dict[str, float]] = {}
    for length in LENGTHS:
        tensors = Tensors.random(layer.shape, length, layer.dtype, layer.device)
        works: dict[str, Work] = {
            "full": full_attention(tensors, layer.device)[1],
            "masked": partial(run_method, masked, tensors, layer.args),
            "sparse": partial(run_method, sparse, tensors, layer.args),
        }
        round_seconds = sum(time_once(work, layer.device) for work in works.values())
        seconds[str(length)] = time_in_turns(works, layer.limit_repeats(round_seconds), layer.device)
        if sparse_wins(seconds, "full"):
            break
    than_masked, than_full = (sparse_wins(seconds, other) for other in ("masked", "full"))
    setting = setting | {"kernel": sparse.path}
    return BreakEven(than_masked, than_full, seconds, setting, date.today().isoformat())


def sparse_wins(seconds: dict[str, dict[str, float]], other: str) -> int | None:
    """The least measured length from which on the sparse path is faster at all of them."""
    won = None
    for length, taken in sorted(((int(key), value) for key, value in seconds.items()), reverse=True):
        if taken["sparse"] >= taken[other]:
            break
        won = length
    return won
