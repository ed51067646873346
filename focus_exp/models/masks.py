"""Masks of an attached model, and what they say of its tokens: starts of sequences, padding, visible keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

from focus_exp.attention.selection import Sequence, band_reach, has_gaps, mark_band, sequence_starts
from focus_exp.errors import UserError
from focus_exp.models.hf_cache import GroupedLayer
from focus_exp.models.methods import IMPLEMENTATION


def make_layer_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,  # a Tensor for a static cache
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """Build the mask of one kind of layers; no T x T where padding suffices.

    Returns:
        None for plain causality, `[B, 1, 1, S]` for padding alone, else `[B, 1, T, S]`.
    """
    # an unfilled sliding window or chunk has no effect
    is_needed = local_size is not None and kv_length >= local_size
    # in a preallocated cache only a full mask tells which keys are tokens
    mask: Tensor | None
    is_needed_by_cache = isinstance(q_offset, Tensor) or kv_offset + kv_length != q_offset + q_length
    is_needed = is_needed or is_needed_by_cache
    if allow_is_causal_skip and not is_needed and (local_size is not None or mask_function is causal_mask_function):
        padding: Tensor | None = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is None or is_all_true(padding := padding[:, kv_offset : kv_offset + kv_length]):
            return None
        mask = padding.bool()[:, None, None].expand(batch_size, 1, 1, kv_length)
        if has_values(mask):
            mask.has_gaps = bool(has_gaps(padding))  # type: ignore[attr-defined]  # once for all layers
            mask.described = []  # type: ignore[attr-defined]  # tensors take attributes; see describe_cached
        return mask
    if "allow_is_bidirectional_skip" in options:  # of layers that attend to an encoder
        options["allow_is_bidirectional_skip"] = False
    options["allow_is_causal_skip"] = False
    mask = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options)
    if mask is None or not has_values(mask):
        return mask
    if local_size is not None and not is_needed_by_cache:
        mark_band(mask)  # once for all layers of a kind
    mask.described = []  # type: ignore[attr-defined]  # tensors take attributes; see describe_cached
    return mask


def has_values(x: Tensor) -> bool:
    """Return whether values can be read: not while compiling or on meta."""
    return not (torch.compiler.is_compiling() or x.is_meta)


def is_all_true(x: Tensor) -> bool:
    """Return whether all values are known to be True; on the meta device and in `unpadded` they are."""
    return x.stride(-1) == 0 or (not torch.compiler.is_compiling() and (x.is_meta or bool(x.all())))


def unpadded(tokens: Tensor) -> Tensor:
    """Return a padding mask of tokens `[B, T]` that shows by its strides that it hides none.

    Compiled models get it: from no mask transformers would conclude that rows may hold several sequences.
    """
    return tokens.new_ones(1, 1, dtype=torch.bool).expand(tokens.shape[:2])


def check_causal(mask: Tensor, past: int) -> None:
    """Raise UserError if a query of the mask `[B, 1, T, S]` sees a later key."""
    if mask.shape[-2] > 1 and has_values(mask) and bool(mask.triu(past + 1).any()):
        raise UserError(
            "the base model lets tokens see later ones (a prefix, an image, or no causal mask at all); attention "
            "methods here are causal. Call detach(model), or give it text alone."
        )


def normalize_mask(mask: Any) -> Tensor | None:
    """Convert a layer's mask to bool `[B, 1, 1 or T, S]`."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise UserError(f"attention_mask must be a tensor (got {type(mask).__name__}).")
    if mask.ndim == 2:
        mask = mask[:, None, None]
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise UserError(f"attention_mask must have shape [batch, 1, T, S] (got {tuple(mask.shape)}).")
    return mask == 0 if mask.is_floating_point() else mask.bool()


def describe_sequence(h: Tensor, mask: Any) -> Sequence:
    """Describe starts and padding of the sequences of `h` `[B, T, ...]` by the mask."""
    batch, length = h.shape[:2]
    before = torch.zeros(batch, 1, dtype=torch.long, device=h.device)
    mask = normalize_mask(mask)
    if mask is None:
        return Sequence(before.expand(batch, length))
    if reach := band_reach(mask):
        return Sequence(before.expand(batch, length), allowed=mask, reach=reach)
    if mask.shape[-1] < length or mask.shape[0] not in (1, batch):
        raise UserError(f"attention_mask must have {length} columns (got {mask.shape[-1]}).")
    gaps = getattr(mask, "has_gaps", None)
    mask = mask[..., :length]  # that of a preallocated cache is wider
    first = mask[:, 0].byte().argmax(-1).expand(batch, length)
    start = sequence_starts(first)
    allowed = None if mask.shape[2] != length else mask
    if allowed is not None:
        check_causal(mask, 0)
    valid = (mask[:, 0, 0] if allowed is None else mask[:, 0].diagonal(0, 1, 2)).expand(batch, length)
    if allowed is not None and is_all_true(valid):
        valid = None
    sequence, order = Sequence(start, valid, allowed), find_order(valid, gaps)
    return sequence if order is None else replace(sequence, order=order, compact=sequence.reorder(order))


def find_order(valid: Tensor | None, gaps: bool | None) -> Tensor | None:
    """Return an order `[B, T]` with padding first, where there is some between tokens; `gaps` where that is known.

    While compiling it is not known, and the order is that of any padding.
    """
    if valid is None or valid.is_meta or gaps is False:
        return None
    if gaps is None and has_values(valid) and not bool(has_gaps(valid)):
        return None
    return valid.byte().argsort(dim=1, stable=True)


def first_pass(mask: Any, count: int) -> Any:
    """Return the mask of `count` tokens alone, of one for an empty cache that may be preallocated.

    As from `make_layer_mask`, of whose masks `generate()` makes copies without their attributes.
    """
    if hasattr(mask, "first_pass"):
        return mask.first_pass
    if not isinstance(mask, Tensor) or mask.ndim < 4 or not mask.shape[-1] >= count == mask.shape[-2]:
        return mask
    if band_reach(mask) or count == 1 or not has_values(mask):
        return mask
    seen: Any = normalize_mask(mask)
    seen = seen[..., :count]
    valid, causal = seen[:, :, -1:], torch.ones(count, count, dtype=torch.bool, device=seen.device).tril()
    if seen.equal(causal & valid):
        seen = None if bool(valid.all()) else valid
    else:
        mark_band(seen)
    mask.first_pass = seen  # type: ignore[attr-defined]  # once for all layers
    return seen


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


def describe_layer(layer: GroupedLayer, count: int) -> CacheState:
    """Describe a cache layer before `count` new tokens."""
    groups = layer.groups
    past, (width, offset) = groups.get_seq_length(), groups.get_mask_sizes(count)
    places, is_static = None if layer.is_empty else groups.values[:, 0, :, 0], isinstance(groups, StaticLayer)
    if places is not None and not is_static:
        places = places[:, -(width - count) :]  # a sliding layer that may be cropped has more than it returns
    elif places is not None and isinstance(groups, StaticSlidingWindowLayer) and past >= groups.max_cache_len:
        places = places[:, 1:]  # it drops one before it returns the others
    return CacheState(past, past - offset, width, places, is_static, layer.is_padded)


def count_places(sequence: Sequence) -> Tensor:
    """Return `(B, T)` int32, the valid tokens of its sequence before each token; -1 at padding."""
    if sequence.valid is None:
        return (torch.arange(sequence.start.shape[1], device=sequence.start.device) - sequence.start).int()
    number = sequence.valid.cumsum(1) - 1
    return (number - number.gather(1, sequence.start)).where(sequence.valid, -1).int()


Described = tuple[Sequence, Tensor, Tensor | None, Tensor | None]


def describe_cached(h: Tensor, mask: Any, state: CacheState) -> Described:
    """Describe new tokens `h` `[B, T, ...]` after those of a cache.

    Returns:
        Starts, counted from the first new token, so that some are negative, and padding.
        `(B, T)` int32, the place of each new token in its sequence, -1 at padding.
        visible and before, see `CachedKeys`.
    """
    batch, count = h.shape[:2]
    if mask is None and not state.is_padded and not state.is_static:
        places = torch.arange(state.past, state.past + count, dtype=torch.int32, device=h.device)
        start = torch.full((batch, count), -state.past, dtype=torch.long, device=h.device)
        return Sequence(start), places.expand(batch, count), None, None
    new = torch.arange(count, device=h.device)
    known: list[Described] = getattr(mask, "described", [])  # once for all layers of a kind
    if not known:
        known.append(describe_visible(batch, new, mask, state))
    return known[0]


def describe_visible(batch: int, new: Tensor, mask: Any, state: CacheState) -> Described:
    """Compute `describe_cached` for new tokens `(T,)` from the keys that they see."""
    count, index = len(new), state.index
    rows = mask_rows(batch, new, mask, state)  # (B, 1 or T, S)
    position = (new + index).expand(batch, count)
    seen = torch.arange(state.width, device=new.device) < index
    if rows.shape[1] == count:
        valid, sizes = rows.gather(2, position[..., None])[..., 0], rows.sum(2)
        row = valid.byte().argmax(1)[:, None, None].expand(-1, 1, state.width)  # of the first token
        seen = seen & rows.gather(1, row)[:, 0]
    else:
        valid, sizes = rows[:, 0].gather(1, position), rows[:, 0].cumsum(1).gather(1, position)
        seen = seen & rows[:, 0]
    past = seen.sum(1)  # tokens of the sequence before the first new one
    if state.places is not None and state.places.shape[1]:  # keys before the first seen are gone, or of a sliding layer
        gone = state.places.gather(1, seen.byte().argmax(1, keepdim=True))[:, 0].clamp(min=0)
        past = past + gone.where(seen.any(1), 0)
    number = valid.cumsum(1) - 1 + past[:, None]
    begins = valid & (rows.byte().argmax(2) == position)  # it sees none before itself
    places = number - number.where(begins, 0).cummax(1).values
    before = (places + 1 - sizes).clamp(min=0).int()
    return Sequence(new - places, valid), places.where(valid, -1).int(), rows, before


def mask_rows(batch: int, new: Tensor, mask: Any, state: CacheState) -> Tensor:
    """Return `(B, 1 or T, S)` bool, the keys that new tokens `(T,)` see, besides causality."""
    mask = normalize_mask(mask)
    if mask is None:
        assert state.places is not None
        rows = F.pad(state.places >= 0, (0, state.width - state.places.shape[1]), value=True)[:, None]
    elif mask.shape[-1] < state.width or mask.shape[0] not in (1, batch) or mask.shape[2] not in (1, len(new)):
        raise UserError(f"attention_mask must have {state.width} columns, past and new (got {mask.shape[-1]}).")
    else:
        rows = mask[:, 0, :, : state.width]
        if not isinstance(state.index, Tensor):
            check_causal(mask, state.index)
    if state.is_static and rows.shape[1] != len(new):
        rows = rows & (torch.arange(state.width, device=new.device) <= (new + state.index)[:, None])
    return rows.expand(batch, -1, -1)


AttentionMaskInterface.register(IMPLEMENTATION, make_layer_mask)
