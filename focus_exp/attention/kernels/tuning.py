"""Block sizes of the Triton kernels: tuned on a GPU, one small set in the interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SIZES = {
    "forward": [(128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 2)],
    "backward": [(64, 128, 8, 2), (64, 64, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)],
}  # queries and keys of a tile, warps, stages
KEY = {"LONG", "D", "HG", "SOFTCAP", "SHARED", "GATED", "OTHERS", "PRECISION"}


def autotune(which: str, restore: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Decorate a kernel with autotuning; `restore` names the arguments that it updates in place."""
    sizes = [(32, 16, 1, 1)] if INTERPRETED else SIZES[which]
    configs = [triton.Config({"BM": m, "BN": n}, num_warps=warps, num_stages=stages) for m, n, warps, stages in sizes]

    def decorate(kernel: Any) -> Any:
        key = [name for name in kernel.arg_names if name in KEY]
        return triton.autotune(configs, key=key, restore_value=list(restore))(kernel)

    return decorate
