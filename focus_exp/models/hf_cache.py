"""The KV cache of an attached model: transformers' own, whose attached layers also keep the groups of their keys.

`prepare_cache` changes the class of cache layers, in place, to one that does to the groups what is done to the keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.kv_cache import CachedKeys
from focus_exp.errors import UserError

GROWTH, SPARE = 32, 16  # a layer is given room for a 32nd more tokens, and 16


class Room:
    """Memory for keys and values `(B, G, n, D)` of which `used` tokens were written; copies of a layer share it."""

    def __init__(self, tensors: list[Tensor], used: int) -> None:
        self.tensors, self.used = tensors, used


class GrowingLayer(DynamicLayer):
    """Write new tokens behind the others, in room for some more, instead of copying all at each step.

    No token that was handed out is ever overwritten: after `crop`, or where `keys` were replaced, all are copied once.
    """

    room: Room | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        count, new = self.get_seq_length(), (key_states, value_states)
        old: Any = (self.keys, self.values) if count else new
        is_alike = all(x.shape[:2] == y.shape[:2] and x.dtype == y.dtype for x, y in zip(old, new, strict=True))
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_alike:  # autograd keeps what it has seen
            self.room = None
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = count + key_states.shape[2]
        if self.room is None or not self.has_room(self.room, count, end):
            size = end + end // GROWTH + SPARE
            self.room = Room([x.new_empty(*x.shape[:2], size, x.shape[3]) for x in new], count)
            for x, kept in zip(self.room.tensors, old, strict=True):
                x[:, :, :count] = kept[:, :, :count]
        for x, more in zip(self.room.tensors, new, strict=True):
            x[:, :, count:end] = more
        self.room.used = end
        self.keys, self.values = (x[:, :, :end] for x in self.room.tensors)
        return self.keys, self.values

    def has_room(self, room: Room, count: int, end: int) -> bool:
        """Tell whether the layer has all that is in the room, and more can be written behind it."""
        x, y = room.tensors, [self.keys, self.values]
        if room.used != count or end > x[0].shape[2] or (x[0].is_inference() and not torch.is_inference_mode_enabled()):
            return False
        return all(
            b is not None and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
            for a, b in zip(x, y, strict=True)
        )

    def offload(self) -> None:
        super().offload()
        self.room = None

    def reset(self) -> None:
        super().reset()
        self.room = None


class CacheState(NamedTuple):
    """A cache layer before new tokens.

    past: tokens in the cache; a tensor in a static one. index: of the first new token among the keys that the layer
    will return. width: number of those keys. places: `(B, n)` int, places of the first n of them in their sequences, -1
    at padding. is_static: keys behind the new ones are empty. is_padded: some keys are padding.
    """

    past: Any
    index: Any
    width: int
    places: Tensor | None
    is_static: bool
    is_padded: bool


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
    groups_of: tuple[object, ...] | None
    is_empty = True
    is_padded = False
    is_expected = False
    read: CachedKeys | None = None

    def __reduce__(self) -> Any:
        return make_grouped, (type(self).__bases__[1],), vars(self)

    def start(self, method: AttentionMethod) -> None:
        """Begin with no tokens, with the groups of `method`."""
        self.groups, self.groups_of, self.is_empty, self.is_padded = make_twin(self), method.kv_cache_key(), True, False

    def state(self, count: int) -> CacheState:
        """Describe the layer before `count` new tokens."""
        groups = self.groups
        past, (width, offset) = groups.get_seq_length(), groups.get_mask_sizes(count)
        places = None if self.is_empty else groups.values[:, 0, :, 0]
        if places is not None and isinstance(groups, StaticSlidingWindowLayer) and past >= groups.max_cache_len:
            places = places[:, 1:]  # it drops one before it returns the others
        return CacheState(past, past - offset, width, places, isinstance(groups, StaticLayer), self.is_padded)

    def append_groups(self, groups: Tensor, places: Tensor) -> Tensor:
        """Append `(B, Y, T, W)` and `(B, T)` of the tokens that `update` will be given; return the groups of all."""
        self.is_empty, self.is_expected = False, True
        places = places[:, None, :, None].expand(-1, groups.shape[1], -1, -1)  # a layer has as many values as keys
        keys: Tensor = self.groups.update(groups, places)[0]
        return keys

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.groups_of = self.groups_of if self.is_expected else None
        self.is_expected = False
        layer: Any = super()
        return layer.update(*args, **kwargs)

    def change_both(self, name: str, *args: Any) -> None:
        """Call a method of the layer's class for its keys and for their groups."""
        getattr(super(), name)(*args)
        getattr(self.groups, name)(*args)

    def reset(self) -> None:
        self.change_both("reset")
        self.is_empty, self.is_padded, self.read = True, False, None

    def reorder_cache(self, beam_idx: Any) -> None:
        self.change_both("reorder_cache", beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        self.change_both("crop", tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change_both("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.change_both("batch_select_indices", indices)

    def activate_past_recording(self) -> None:
        if hasattr(super(), "activate_past_recording"):
            self.change_both("activate_past_recording")


@cache
def grouped_class(base: type) -> type:
    """Return the class of a cache layer `base` with groups; `_layer_type` would make it transformers' own choice."""
    parent = GrowingLayer if base is DynamicLayer else base
    return type(f"Grouped{base.__name__}", (GroupedLayer, parent), {"_layer_type": None})


def make_grouped(base: type) -> Any:
    """Make a layer without attributes, for copies and pickles."""
    kind: Any = grouped_class(DynamicLayer if base is GrowingLayer else base)
    return kind.__new__(kind)


def make_twin(layer: Any) -> Any:
    """Make an empty layer whose tokens come and go as those of `layer`."""
    if isinstance(layer, StaticLayer):
        kind = StaticSlidingWindowLayer if isinstance(layer, StaticSlidingWindowLayer) else StaticLayer
        return kind(layer.max_cache_len, sliding_window=layer.max_cache_len)
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return GrowingLayer()
    twin = DynamicSlidingWindowLayer(layer.sliding_window)
    twin.record_past = layer.record_past
    return twin


def attention_cache_layers(cache: Cache | None) -> list[Any]:
    """Return the self-attention layers of a cache, also of an encoder-decoder's."""
    return [] if cache is None else getattr(cache, "self_attention_cache", cache).layers


def is_grouped(cache: Cache | None) -> bool:
    """Return whether any layer of the cache keeps the groups of its keys."""
    return any(isinstance(layer, GroupedLayer) for layer in attention_cache_layers(cache))


def find_layer(cache: Cache | None, method: AttentionMethod) -> GroupedLayer | None:
    """Return the cache layer with groups for `method`, None where it is the base's; UserError if it cannot be read."""
    layers, index = attention_cache_layers(cache), method.shape.index
    layer = layers[index] if index < len(layers) else None
    if not isinstance(layer, GroupedLayer):
        return None
    if reason := method.kv_cache_unsupported_reason():
        raise UserError(f"this KV cache was filled with hard routing, and there is none for {reason}.")
    if layer.groups_of != method.kv_cache_key():
        raise UserError(UNKNOWN.format(index))
    return layer


UNKNOWN = (
    "keys of layer {} in this KV cache were filled without the attached method as it is (by the base model, prefix "
    "tuning, another method or pair rule), so their groups are unknown. Start with an empty one."
)


def count_keys_and_bytes(layer: Any) -> tuple[int, int]:
    """Return the keys read in the last step of a cache layer, and the memory that it holds, spare room included.

    A full sliding window has dropped one of those keys since.
    """
    length, layers = int(layer.get_seq_length()), [layer]
    read = min(int(layer.sliding_window), length) if isinstance(layer, DynamicSlidingWindowLayer) else length
    if isinstance(layer, GroupedLayer):
        read = 0 if layer.read is None else layer.read.count_pairs()
        layers.append(layer.groups)
    rooms = [getattr(x, "room", None) for x in layers]
    tensors = [x.room.tensors if room else (x.keys, x.values) for x, room in zip(layers, rooms, strict=True)]
    return read, sum(x.nbytes for pair in tensors for x in pair)


def cache_unsupported_reason(methods: Iterable[AttentionMethod]) -> str | None:
    """Return why these attached methods have no KV cache."""
    return next((reason for method in methods if (reason := method.kv_cache_unsupported_reason())), None)


def prepare_cache(config: PreTrainedConfig, methods: dict[int, AttentionMethod], cache: Cache | None) -> Cache | None:
    """Let the layers of an empty cache keep groups, in place; make a `DynamicCache` where there is none.

    Args:
        methods: the attached methods that prune pairs, by layer index.
        cache: the caller's.

    Returns:
        The cache; None if these methods have none and none was given.

    Raises:
        UserError: a layer has keys of unknown groups, or these methods have no cache.
    """
    reason = cache_unsupported_reason(methods.values())
    if cache is None and reason is not None:
        return None
    cache = DynamicCache(config=config) if cache is None else cache
    target: Any = getattr(cache, "self_attention_cache", cache)
    for index, method in methods.items():
        while len(target.layers) <= index:
            target.layers.append(target.layer_class_to_replicate())
        layer = target.layers[index]
        if not isinstance(layer, GroupedLayer):
            if layer.is_initialized and bool(layer.get_seq_length()):
                raise UserError(UNKNOWN.format(index))
            if reason is not None:
                raise UserError(f"no KV cache for {reason}. Or pass use_cache=False, which recomputes all tokens.")
            kind: Any = type(layer)
            layer.__class__ = grouped_class(kind)
            layer.start(method)
        elif layer.is_empty and layer.groups_of != method.kv_cache_key():
            layer.start(method)
    return cache
