"""The key/value cache of an attached model, as transformers' own code handles it: `generate()`, beams, crop, reset."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from focus_exp.attention.cached import GroupedCache
from focus_exp.attention.method import AttentionMethod
from focus_exp.errors import UserError


class FocusLayer(CacheLayerMixin):
    """One attached layer. `update` hands the new tokens on; attention adds them when it knows their groups."""

    is_croppable = True
    is_sliding = False

    def __init__(self, method: AttentionMethod) -> None:
        super().__init__()
        self.window, self.sinks = method.window, method.sinks
        self.grouped = GroupedCache(self.window, self.sinks)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.grouped.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.grouped.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.grouped = GroupedCache(self.window, self.sinks)
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, as many as the negative number says."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the tokens to remove as a negative number")
        self.grouped.crop(self.grouped.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.grouped.choose(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.grouped.choose(torch.arange(len(self.grouped.sequences)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.grouped.choose(torch.arange(len(self.grouped.sequences))[indices.cpu()])


class FocusCache(Cache):
    """Attached layers by group, others as transformers keeps them."""

    def __init__(self, methods: list[AttentionMethod | None]) -> None:
        """`methods`: what is attached to each attention layer of the model, in order."""
        super().__init__(layers=[DynamicLayer() if method is None else FocusLayer(method) for method in methods])

    def layer(self, index: int) -> GroupedCache:
        layer = self.layers[index]
        assert isinstance(layer, FocusLayer)
        return layer.grouped

    @property
    def grouped(self) -> list[GroupedCache]:
        """Of the attached layers, in order."""
        return [layer.grouped for layer in self.layers if isinstance(layer, FocusLayer)]

    @property
    def bytes(self) -> int:
        """Held by the attached layers, the room for tokens to come included."""
        return sum(layer.bytes for layer in self.grouped)


def refusal(methods: Iterable[AttentionMethod]) -> str | None:
    """Why nothing can be kept for these attached methods; None if it can."""
    return next((why for method in methods if (why := method.refuses_cache())), None)


def cache_for(methods: dict[int, AttentionMethod], layers: int, given: Cache | None) -> Cache | None:
    """A cache by group in place of `given`, the empty one that transformers made; None where none can be had.

    methods: what is attached, by layer index, of so many layers. UserError where one was given all the same: somebody,
    `generate()` most likely, counts on it.
    """
    if reason := refusal(methods.values()):
        if given is None:
            return None
        raise UserError(f"no key/value cache for {reason}; or pass use_cache=False, which computes all tokens anew")
    if given is not None and given.get_seq_length():
        raise UserError("this key/value cache was filled without the attached method; begin with an empty one")
    return FocusCache([methods.get(index) for index in range(layers)])
