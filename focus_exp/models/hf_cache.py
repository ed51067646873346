"""The KV cache of an attached model: `FocusLayer`s in a `Cache` of transformers.

With hard routing a layer stores keys and values by group, so that a new token reads only its own groups, the local
window and the sinks. The cache object keeps its class and identity; only the attached entries of `cache.layers` change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
)

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.kv_cache import GroupedCache
from focus_exp.errors import UserError

# its sizes are Python numbers that change with every token
run_eagerly = torch.compiler.disable(
    reason="a grouped KV cache cannot be compiled; pass use_cache=False, or leave fullgraph=False"
)


class FocusLayer(DynamicLayer):
    """Keys and values of one attached layer, by group.

    `update` returns the new tokens alone; attention appends them once their groups are known. `keys` and `values` are
    assembled on access, `[B, G, length, D]`, zero at padding, and up to `max_cache_len` in a static cache.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, method: AttentionMethod, max_cache_len: int | None = None) -> None:
        self.window, self.sinks, self.groups_of = method.window, method.sinks, method.kv_cache_key()
        self.max_cache_len = max_cache_len
        self.grouped = GroupedCache(self.window, self.sinks)
        self.expected = False  # set by the layer's hook: its attention can read groups
        self.is_initialized = False

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return self.assemble(0)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self.assemble(1)

    def assemble(self, index: int) -> Tensor | None:
        if not self.grouped.length:
            return None
        x = self.grouped.keys_and_values()[index][..., : self.sizes[index]]
        return x if self.max_cache_len is None else F.pad(x, (0, 0, 0, max(self.max_cache_len - x.shape[2], 0)))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.sizes = key_states.shape[-1], value_states.shape[-1]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.expected:
            raise UserError(
                "this KV cache is grouped, which the base model without its attached method cannot read. Start with an "
                "empty cache inside disable_method(model) and after detach(model)."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.expected = False
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.grouped.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.grouped.length

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    def offload(self) -> None:
        """Do nothing: grouped keys stay on their device."""

    def prefetch(self) -> None:
        """Do nothing: grouped keys stay on their device."""

    def reset(self) -> None:
        self.grouped = GroupedCache(self.window, self.sinks)
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; `tokens_to_remove` is negative or 0."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be <= 0 (got {tokens_to_remove})")
        self.grouped.crop(self.grouped.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.grouped.reorder_rows(beam_idx)


def attention_cache_layers(cache: Cache | None) -> list[Any]:
    """Return the self-attention layers of a cache, also of an encoder-decoder's."""
    return [] if cache is None else getattr(cache, "self_attention_cache", cache).layers


def is_grouped(cache: Cache | None) -> bool:
    """Return whether any layer of the cache stores its keys by group."""
    return any(isinstance(layer, FocusLayer) for layer in attention_cache_layers(cache))


def find_layer(cache: Cache | None, method: AttentionMethod) -> FocusLayer | None:
    """Return the grouped cache layer for `method`; None where it is the base's.

    Raises:
        UserError: the method cannot read the cache.
    """
    layers, index = attention_cache_layers(cache), method.shape.index
    layer = layers[index] if index < len(layers) else None
    if isinstance(layer, FocusLayer):
        if reason := method.kv_cache_unsupported_reason():
            raise UserError(f"this KV cache was filled with hard routing, and there is none for {reason}.")
        if layer.groups_of != method.kv_cache_key():
            raise UserError(
                "this KV cache was filled with other groups (another method or pair rule). Start with an empty one."
            )
        return layer
    if not method.is_dense() and is_grouped(cache):
        raise UserError("this KV cache was filled while all pairs were kept. Start with an empty one.")
    return None


def count_keys_and_bytes(layer: Any) -> tuple[int, int]:
    """Return the keys read in the last step of a cache layer, and its bytes.

    A full sliding window has dropped one of those keys since.
    """
    if isinstance(layer, FocusLayer):
        return layer.grouped.pairs_read, layer.grouped.bytes
    length = int(layer.get_seq_length())
    window = int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else length
    return min(window, length), layer.keys.nbytes + layer.values.nbytes


def cache_unsupported_reason(methods: Iterable[AttentionMethod]) -> str | None:
    """Return why these attached methods have no KV cache."""
    return next((reason for method in methods if (reason := method.kv_cache_unsupported_reason())), None)


@run_eagerly
def prepare_cache(config: PreTrainedConfig, methods: dict[int, AttentionMethod], cache: Cache | None) -> Cache | None:
    """Put `FocusLayer`s into an empty cache, in place, or into a new `DynamicCache`.

    Args:
        methods: the attached methods that prune pairs, by layer index.
        cache: the caller's.

    Returns:
        The cache; None if these methods have none and none was given.

    Raises:
        UserError: the given cache is not empty, or these methods have none.
    """
    if cache is not None and cache.get_seq_length():
        raise UserError(
            "this KV cache was filled without the attached method, as by prefix tuning (unsupported). Start with an "
            "empty one."
        )
    if reason := cache_unsupported_reason(methods.values()):
        if cache is None:
            return None
        raise UserError(f"no KV cache for {reason}. Or pass use_cache=False, which recomputes all tokens.")
    if cache is None:
        cache = DynamicCache(config=config)
    target = getattr(cache, "self_attention_cache", cache)
    before = dict(enumerate(target.layers))
    target.layers = [
        make_layer(layer, before.get(index), methods.get(index))
        for index, layer in enumerate(DynamicCache(config=config).layers)
    ]
    return cache


def make_layer(dynamic: Any, before: Any, method: AttentionMethod | None) -> Any:
    """Make the cache layer for one layer of the model.

    Args:
        dynamic: layer of the model's own `DynamicCache`.
        before: empty layer of the caller's cache, if it has one.
        method: the attached method, if it prunes pairs.
    """
    layer = dynamic
    if method is not None:
        layer = FocusLayer(method, before.get_max_length() if type(before) is StaticLayer else None)
    elif isinstance(dynamic, DynamicSlidingWindowLayer):
        # attached layers keep tokens beyond a sliding window, and layers of one kind share their mask
        layer = DynamicLayer()
    if getattr(before, "record_past", False) and hasattr(layer, "activate_past_recording"):
        layer.activate_past_recording()
    return layer
