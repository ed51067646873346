"""Block sizes of the Triton kernels: chosen by the head size, so that nothing depends on a timing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import triton
from triton.runtime.errors import OutOfResources

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# queries and keys of a tile, warps and stages, by kernel and by the head size up to which they serve
BLOCKS: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {
    "groups_forward": {64: [(128, 64, 4, 3)], 128: [(128, 64, 8, 3)], 256: [(64, 64, 4, 2)]},
    "window_forward": {64: [(64, 64, 4, 3)], 128: [(64, 64, 4, 3)], 256: [(64, 64, 4, 2)]},
    "backward": {64: [(64, 64, 4, 2)], 128: [(64, 64, 8, 2)], 256: [(32, 32, 4, 2)]},
}
# for float32, where larger tiles read outside of memory on an H200 (Triton 3.6), and for a GPU with less shared memory
SMALL = [(64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)]
# arguments whose values, 1 and multiples of 16 included, do not change a kernel
NUMBERS = {"n", "length", "chunks", "chunk", "first", "last", "span", "lists", "per_query", "per_key"}
NUMBERS |= {"window", "sinks", "heads", "gate_heads", "local"}
_fitting: dict[tuple[str, int, bool], int] = {}


def jit(function: Any) -> Any:
    """Compile a kernel once for all numbers of tokens, groups and heads."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in names if name in NUMBERS])


def launch(kernel: Any, grid: Callable[[int, int], tuple[int, ...]], *args: Any, **settings: Any) -> None:
    """Launch a kernel with the first block sizes that fit the device.

    Args:
        grid: returns the grid for blocks of so many queries and keys.
    """
    size, is_half = settings["BD"], args[0].element_size() == 2
    name = kernel.__name__ if kernel.__name__ in BLOCKS else "backward"
    sizes = SMALL
    if is_half:
        sizes = BLOCKS[name][next(most for most in BLOCKS[name] if size <= most)] + SMALL
    if INTERPRETED:
        sizes = [(32, 16, 1, 1)]
    for index in range(_fitting.get((name, size, is_half), 0), len(sizes)):
        queries, keys, warps, stages = sizes[index]
        try:
            kernel[grid(queries, keys)](*args, BM=queries, BN=keys, num_warps=warps, num_stages=stages, **settings)
            return
        except OutOfResources:
            if index == len(sizes) - 1:
                raise
            _fitting[name, size, is_half] = index + 1
