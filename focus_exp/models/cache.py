"""The key/value cache of an attached model, as transformers' own code handles it: `generate()`, beams, crop, reset.

With hard groups keys and values are kept by group (`FocusCache`), so that a new token reads its own groups, the
window and the sinks: token by token the logits of the whole sequence at once, in greedy search, sampling, beams, left
padding, chunks, crop and prompt lookup. A method that reads the future refuses to generate; soft gates and the other
published methods have no cache and say so (`use_cache=False` computes all tokens anew).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from focus_exp.attention.cached import GroupedCache
from focus_exp.attention.method import AttentionMethod
from focus_exp.attention.selection import Sequence
from focus_exp.errors import UserError


class FocusLayer(CacheLayerMixin):
    """One attached layer. `update` hands the new tokens on; attention adds them when it knows their groups."""

    is_croppable = True
    is_sliding = False

    def __init__(self, method: AttentionMethod) -> None:
        super().__init__()
        self.begin(method)

    def begin(self, method: AttentionMethod) -> None:
        self.window, self.sinks, self.groups_of = method.window, method.sinks, method.groups_of_keys()
        self.grouped = GroupedCache(self.window, self.sinks)
        self.expected = False  # attention that knows of groups is about to ask

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.expected:
            raise UserError(
                "this key/value cache keeps tokens by group, which the base model without its attached method cannot "
                "read; begin with an empty cache inside disabled(model) and after detach(model)"
            )
        self.is_initialized, self.expected = True, False
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
        self.grouped.choose(torch.arange(self.grouped.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.grouped.choose(torch.arange(self.grouped.batch)[indices.cpu()])


class FocusHybridLayer(FocusLayer, LinearAttentionAndFullAttentionLayer):
    """An attached layer that keeps the states of linear attention too."""

    device: Any
    dtype: Any

    def __init__(self, method: AttentionMethod, own: LinearAttentionLayer) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states=own.number_of_states)
        self.begin(method)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        FocusLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        FocusLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Any) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        FocusLayer.reorder_cache(self, beam_idx)


class FocusCache(Cache):
    """Attached layers by group, others as transformers keeps them."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self.described: dict[tuple[object, ...], tuple[object, Sequence]] = {}

    def of_all(self, mask: object, tokens: tuple[object, ...], describe: Callable[[], Sequence]) -> Sequence:
        """What `describe` says under a layer's `mask` of new `tokens`: what is before them, their shape, their device.

        It is asked by the first of the layers that have the same.
        """
        key = (id(mask), *tokens)
        of, sequence = self.described.get(key, (None, None))
        if sequence is None or of is not mask:
            if any(tokens != other[1:] for other in self.described):
                self.described.clear()
            sequence = describe()
            self.described[key] = mask, sequence
        return sequence

    def serve(self, method: AttentionMethod) -> GroupedCache | None:
        """What is kept of the layer of `method`, which is about to attend; None where the model's own code keeps it."""
        layer = self.layers[method.shape.index]
        if isinstance(layer, FocusLayer):
            if reason := method.refuses_cache():
                raise UserError(f"this key/value cache was filled by hard groups, and there is none for {reason}")
            if layer.groups_of != method.groups_of_keys():
                raise UserError(
                    "this key/value cache was filled with other groups (by another attached method or pair rule); "
                    "begin with an empty one"
                )
            layer.expected = True
            return layer.grouped
        if not method.keeps_all():
            raise UserError("this key/value cache was filled while every pair was kept; begin with an empty one")
        return None

    @property
    def grouped(self) -> list[GroupedCache]:
        """Of the attached layers, in order."""
        return [layer.grouped for layer in self.layers if isinstance(layer, FocusLayer)]

    @property
    def bytes(self) -> int:
        """Held by the attached layers, the room for tokens to come included."""
        return sum(layer.bytes for layer in self.grouped)


def keys_and_bytes(layer: Any) -> tuple[int, int]:
    """Keys that the last step read in a layer of a cache, by group or the model's own, and the bytes of keys and values
    that it keeps: a full sliding window dropped one of those after it."""
    if isinstance(layer, FocusLayer):
        return layer.grouped.pairs_read, layer.grouped.bytes
    length = int(layer.get_seq_length())
    window = int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else length
    return min(window, length), layer.keys.nbytes + layer.values.nbytes


def tokens_before(cache: Cache | None, index: int, new: int) -> int:
    """How many tokens a layer's own cache of the model holds before it is given `new` ones."""
    layers: list[Any] = [] if cache is None else getattr(cache, "self_attention_cache", cache).layers
    if index < len(layers) and isinstance(layers[index], CacheLayerMixin):
        return int(layers[index].get_seq_length())
    # it reads the keys of an earlier layer, which has the new tokens already; a layer to come has none
    return max((int(layer.get_seq_length()) for layer in layers if isinstance(layer, CacheLayerMixin)), default=0) - new


def refusal(methods: Iterable[AttentionMethod]) -> str | None:
    """Why nothing can be kept for these attached methods; None if it can."""
    return next((why for method in methods if (why := method.refuses_cache())), None)


def cache_for(config: PreTrainedConfig, methods: dict[int, AttentionMethod], given: Cache | None) -> Cache | None:
    """A cache by group in place of `given`, the empty one that transformers made; None where none can be had.

    A given cache of whatever class becomes that cache itself, since its owner may go on with this very object.
    methods: what leaves out pairs, by layer index. UserError where a cache was given all the same: somebody,
    `generate()` most likely, counts on it.
    """
    if reason := refusal(methods.values()):
        if given is None:
            return None
        raise UserError(f"no key/value cache for {reason}; or pass use_cache=False, which computes all tokens anew")
    if given is not None and given.get_seq_length():
        raise UserError("this key/value cache was filled without the attached method; begin with an empty one")
    own = DynamicCache(config=config).layers
    cache = FocusCache([cache_layer(layer, methods.get(index)) for index, layer in enumerate(own)])
    if given is None:
        return cache
    given.__dict__ = vars(cache)
    given.__class__ = FocusCache
    return given


def cache_layer(own: Any, method: AttentionMethod | None) -> Any:
    """What keeps a layer's keys and values, whose model's `own` choice without a method is given."""
    if method is not None:
        return FocusHybridLayer(method, own) if isinstance(own, LinearAttentionLayer) else FocusLayer(method)
    # attached layers keep places beyond a sliding window, and layers of one kind share their mask
    return DynamicLayer() if isinstance(own, DynamicSlidingWindowLayer) else own
