"""Block sizes of the Triton kernels: chosen by the bytes of a row, so that nothing depends on a timing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import triton
from triton.runtime.errors import OutOfResources

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL = [(64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)]  # where a GPU has less shared memory
# queries and keys of a tile, warps and stages, by kernel and by bytes of a row up to which they serve
BLOCKS: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {
    "groups_forward": {128: [(128, 64, 4, 3)], 256: [(128, 64, 8, 3)], 512: [(64, 64, 4, 2)], 1024: []},
    "window_forward": {128: [(64, 64, 4, 3)], 256: [(64, 64, 4, 3)], 512: [(64, 64, 4, 2)], 1024: []},
    "backward": {128: [(64, 64, 4, 2)], 256: [(64, 64, 8, 2)], 512: [(32, 32, 4, 2)], 1024: []},
}
NUMBERS = frozenset(
    ("n", "length", "chunks", "chunk", "first", "last", "span", "lists", "per_query", "per_key", "window", "sinks",
     "heads", "gate_heads", "local")
)  # arguments whose values, 1 and multiples of 16 included, do not change a kernel  # fmt: skip
_fitting: dict[tuple[str, int], int] = {}


def jit(function: Any) -> Any:
    """Compile a kernel once for all numbers of tokens, groups and heads."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in names if name in NUMBERS])


def launch(kernel: Any, grid: Callable[[int, int], tuple[int, ...]], *args: Any, **settings: Any) -> None:
    """Launch a kernel with the first block sizes that fit the device.

    Args:
        grid: returns the grid for blocks of so many queries and keys.
    """
    row = settings["BD"] * args[0].element_size()
    name = kernel.__name__ if kernel.__name__ in BLOCKS else "backward"
    sizes = BLOCKS[name][next(most for most in BLOCKS[name] if row <= most)] + SMALL
    if INTERPRETED:
        sizes = [(32, 16, 1, 1)]
    for index in range(_fitting.get((name, row), 0), len(sizes)):
        queries, keys, warps, stages = sizes[index]
        try:
            kernel[grid(queries, keys)](*args, BM=queries, BN=keys, num_warps=warps, num_stages=stages, **settings)
            return
        except OutOfResources:
            if index == len(sizes) - 1:
                raise
            _fitting[name, row] = index + 1
