"""The KV cache of an attached model: transformers' own, whose attached layers also keep the groups of their keys.

`prepare_cache` gives an empty cache layers that do to the groups what is done to the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.kernels.contract import constant
from focus_exp.attention.kv_cache import CachedKeys
from focus_exp.errors import UserError
from focus_exp.models.methods import cache_unsupported_reason

GROWTH, SPARE = 32, 16  # a layer is given room for a 32nd more tokens, and 16


def append(room: Any, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Append new tokens to `(B, G, T, D)` in the memory behind them.

    Args:
        room: memory in which `old` may be, and of which `used` tokens were written, also by copies of a layer.

    Returns:
        memory, that of `room` where the tokens fit in it, and all tokens.
    """
    count, end = old.shape[2], old.shape[2] + new.shape[2]
    is_place = room is not None and room.data_ptr() == old.data_ptr() and room.stride() == old.stride()
    if not is_place or room.used != count or room.shape[2] < end:
        with torch.inference_mode(False):  # what is made in that mode cannot be written to outside
            room = old.new_empty(*old.shape[:2], end + end // GROWTH + SPARE, old.shape[3])
        room[:, :, :count] = old
    room[:, :, count:end] = new
    room.used = end
    return room, room[:, :, :end]


class GrowingLayer(DynamicLayer):
    """Write new tokens behind the others, in room for some more, instead of copying all at each step.

    No token that was handed out is ever overwritten: after `crop`, or where `keys` were replaced, all are copied once.
    """

    rooms: tuple[Any, Any] = (None, None)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = (key_states, value_states)
        old: Any = (self.keys, self.values) if self.get_seq_length() else [x[:, :, :0] for x in new]
        is_alike = all(x.shape[:2] == y.shape[:2] and x.dtype == y.dtype for x, y in zip(old, new, strict=True))
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_alike:  # autograd keeps what it has seen
            self.rooms = (None, None)
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.rooms, (self.keys, self.values) = zip(*map(append, self.rooms, old, new), strict=True)
        return self.keys, self.values

    def offload(self) -> None:
        super().offload()
        self.rooms = (None, None)


def change_both(name: str) -> Callable[..., None]:
    """Make a method of a grouped layer that calls that of its base for the keys and for their groups."""

    def change(layer: GroupedLayer, *args: Any) -> None:
        getattr(super(GroupedLayer, layer), name)(*args)
        getattr(layer.groups, name)(*args)

    return change


class GroupedLayer(CacheLayerMixin):
    """Keep the groups of keys next to them: the part of a cache layer's class that `prepare_cache` adds.

    Attributes:
        groups: a layer of the same kind, for which what are keys here are groups `(B, Y, n, W)` int32, and values
            places of the tokens in their sequences `(B, Y, n, 1)` int32, -1 at padding.
        groups_of: what the groups depend on; None once a token was added without.
        is_expected: `update` is about to be given tokens whose groups are known.
        read: by the last step.
    """

    groups: Any
    groups_of: tuple[object, ...] | None = None
    is_empty = True
    is_padded = False
    is_expected = False
    read: CachedKeys | None = None

    reorder_cache = change_both("reorder_cache")
    crop = change_both("crop")
    batch_repeat_interleave = change_both("batch_repeat_interleave")
    batch_select_indices = change_both("batch_select_indices")

    def __reduce__(self) -> Any:
        return make_grouped, (type(self).__bases__[1],), vars(self)

    def start(self, method: AttentionMethod, source: CacheLayerMixin) -> None:
        """Begin with no tokens, with the groups of `method`, for keys as in the layer `source`."""
        kinds = (StaticSlidingWindowLayer, StaticLayer, DynamicSlidingWindowLayer)
        kind: Any = next((kind for kind in kinds if isinstance(source, kind)), GrowingLayer)
        size = getattr(source, "max_cache_len", getattr(source, "sliding_window", None))
        self.groups = kind(max_cache_len=size, sliding_window=size)
        self.groups_of = method.kv_cache_key()

    def append_groups(self, groups: Tensor, places: Tensor) -> Tensor:
        """Append `(B, Y, T, W)` and `(B, T)` of the tokens that `update` will be given; return the groups of all."""
        self.is_empty, self.is_expected = False, True
        self.groups.record_past = getattr(self, "record_past", False)  # a sliding layer that may be cropped drops none
        places = places[:, None, :, None].expand(-1, groups.shape[1], -1, -1)  # a layer has as many values as keys
        keys: Tensor = self.groups.update(groups, places)[0]
        return keys

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.groups_of = self.groups_of if self.is_expected else None
        self.is_empty, self.is_expected = False, False
        layer: Any = super()
        return layer.update(*args, **kwargs)

    def reset(self) -> None:
        change_both("reset")(self)
        self.is_empty, self.is_padded, self.read = True, False, None


@constant
def grouped_class(base: type) -> type:
    """Return the class of a cache layer `base` with groups; `_layer_type` would make it transformers' own choice."""
    kind: Any = type(f"Grouped{base.__name__}", (GroupedLayer, base), {"_layer_type": None})
    kind.__abstractmethods__ = frozenset()  # those that a layer without keys lacks
    return kind


def make_grouped(base: type) -> Any:
    """Make a layer without attributes."""
    kind: Any = grouped_class(GrowingLayer if base is DynamicLayer else base)
    return kind.__new__(kind)


def attention_cache_layers(cache: Cache | None) -> list[Any]:
    """Return the self-attention layers of a cache, also of an encoder-decoder's."""
    return [] if cache is None else getattr(cache, "self_attention_cache", cache).layers


def is_grouped(cache: Cache | None) -> bool:
    """Return whether any layer of the cache keeps the groups of its keys."""
    return any(isinstance(layer, GroupedLayer) for layer in attention_cache_layers(cache))


def find_layer(cache: Cache | None, index: int) -> GroupedLayer | None:
    """Return a layer of the cache that keeps groups; None where it is the base's."""
    layers = attention_cache_layers(cache)
    return layers[index] if index < len(layers) and isinstance(layers[index], GroupedLayer) else None


def prepare_cache(config: PreTrainedConfig, methods: dict[int, AttentionMethod], cache: Cache | None) -> Cache | None:
    """Let the layers of an empty cache keep groups; make a `DynamicCache` where there is none.

    Returns:
        The cache; None if the attached methods (by layer index) have none, and none was given.

    Raises:
        UserError: a layer has keys of unknown groups, or these methods have no cache.
    """
    if cache is None and cache_unsupported_reason(method for method in methods.values() if not method.is_dense()):
        return None
    cache = DynamicCache(config=config) if cache is None else cache
    target: Any = getattr(cache, "self_attention_cache", cache)
    layers = target.layers
    for index, method in methods.items():
        if method.is_dense() and find_layer(cache, index) is None:
            continue  # the base's own, for which no groups are needed
        while len(layers) <= index:
            layers.append(target.layer_class_to_replicate())
        layer, key = layers[index], method.kv_cache_key()
        has_groups = isinstance(layer, GroupedLayer)
        # a dummy layer attends to the keys of an earlier one
        is_empty = layer.is_empty if has_groups else isinstance(layer, DummyLayer) or not layer.get_seq_length()
        if not (is_empty or (has_groups and layer.groups_of == key)):
            raise UserError(
                f"keys of layer {index} in this KV cache were filled without the attached method as it is (by the base "
                "model, prefix tuning, another method or pair rule). Start with an empty one."
            )
        if reason := method.kv_cache_unsupported_reason():
            raise UserError(f"no KV cache for {reason}. Or pass use_cache=False, which recomputes all tokens.")
        if not has_groups:
            layers[index] = make_grouped(type(layer))
            vars(layers[index]).update(vars(layer))
        if layers[index].groups_of != key:
            layers[index].start(method, find_key_layer(config, layers, index))
    return cache


def find_key_layer(config: PreTrainedConfig, layers: list[Any], index: int) -> Any:
    """Return the cache layer whose keys a layer attends to: its own, or the last of the same kind that has any."""
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or [None] * len(layers)
    sources = (i for i in range(index, -1, -1) if kinds[i] == kinds[index] and not isinstance(layers[i], DummyLayer))
    return layers[next(sources, index)]
