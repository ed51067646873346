"""Measure a KV cache: the keys that a step reads, and memory."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicSlidingWindowLayer

from focus_exp.models.hf_cache import GroupedLayer


def count_keys_and_bytes(layer: Any) -> tuple[int, int]:
    """Return the keys read in the last step of a cache layer, and the memory that it holds, spare room included.

    Groups of their own of several heads count by their average. A full sliding window has dropped one of its keys.
    """
    length, layers = int(layer.get_seq_length()), [layer]
    read = min(int(layer.sliding_window), length) if isinstance(layer, DynamicSlidingWindowLayer) else length
    if isinstance(layer, GroupedLayer):
        layers.append(layer.groups)
        if (keys := layer.read) is not None:
            kept = keys.keep_mask(slice(0, keys.query_groups.shape[2]))
            read = int(kept.sum()) // kept.shape[1]
        else:
            read = 0
    tensors = [y for x in layers for y in (*getattr(x, "rooms", ()), x.keys, x.values) if y is not None]
    return read, sum({x.data_ptr(): x.nbytes for x in reversed(tensors)}.values())
