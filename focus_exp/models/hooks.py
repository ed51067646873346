"""Hooks of an attached model: routing of hidden states, masks and attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask
from transformers.utils import logging

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.dense import full_attention
from focus_exp.attention.kernels import BackendUnsupported
from focus_exp.attention.kv_cache import CachedKeys, pack_groups
from focus_exp.attention.selection import (
    AttentionArgs,
    Selection,
    Sequence,
    band_reach,
    has_gaps,
    mark_band,
    reorder,
    sequence_starts,
)
from focus_exp.errors import UserError
from focus_exp.models.hf_cache import CacheState, GroupedLayer, find_layer
from focus_exp.models.methods import IMPLEMENTATION, get_method

log = logging.get_logger(__name__)

# arguments of attention functions that are used, or that do not change scores: the mask contains the windows of
# sliding layers and packed sequences
KNOWN_ARGUMENTS = {
    *("sliding_window", "is_causal", "position_ids", "cache_position", "output_attentions", "use_cache"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
}


@dataclass(frozen=True)
class AttentionContext:
    """Arguments that a layer's pre-hook passes to its attention function.

    Attributes:
        given: names of the arguments of the layer.
        state: of the cache before these tokens; None without a cache.
        keys: what the tokens read of the cache; None without a cache and in its first pass.
    """

    sequence: Sequence
    selection: Selection
    mask: Any
    given: frozenset[str]
    state: CacheState | None = None
    keys: CachedKeys | None = None


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
    mask = sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        allow_is_causal_skip=False, **options,
    )  # fmt: skip
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


def route_hidden_states(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Route the hidden states that enter an attached layer: its forward pre-hook.

    names: parameters of the layer's `forward`.
    """
    method = get_method(module)
    given = dict(zip(names, args, strict=False)) | kwargs
    h, mask = given[names[0]], given.get("attention_mask")
    cache = next((x for x in given.values() if isinstance(x, Cache)), None)
    layer = find_layer(cache, method)
    if layer is not None:
        return args, kwargs | {"routed": route_cached(method, h, mask, layer, frozenset(given))}
    if method.is_dense() and cache is not None:  # the base's own, for which no groups are needed
        method.path = "full"
        return None
    sequence = describe_sequence(h, mask)
    return args, kwargs | {"routed": AttentionContext(sequence, route(method, h, sequence), mask, frozenset(given))}


def route(method: AttentionMethod, h: Tensor, sequence: Sequence) -> Selection:
    """Route hidden states `[B, T, E]`, padding between tokens before them: the selection is in that order, too."""
    selection: Selection = method("route", reorder(h, sequence.order, 1), sequence.compact or sequence)
    return selection


def route_cached(
    method: AttentionMethod, h: Tensor, mask: Any, layer: GroupedLayer, given: frozenset[str]
) -> AttentionContext:
    """Route new tokens, and append the groups that they are in to those of cached keys."""
    batch, count = h.shape[:2]
    state = layer.state(count)
    if layer.is_empty:
        sequence = describe_sequence(h, first_pass(mask, count))
        selection = route(method, h, sequence)
        whole = selection if sequence.order is None else selection.reorder(sequence.order.argsort(1))
        layer.append_groups(pack_groups(whole.key_groups, batch, count, h.device), count_places(sequence))
        layer.is_padded = sequence.valid is not None
        return AttentionContext(sequence, selection, mask, given, state)
    sequence, places, visible, before = describe_cached(h, mask, state)
    selection = route(method, h, sequence)
    keys = layer.append_groups(pack_groups(selection.key_groups, batch, count, h.device), places)
    if sequence.valid is not None and not state.is_static:
        layer.is_padded = True
    window = keys.shape[2] if selection.is_dense else method.window
    queries = pack_groups(selection.query_groups, batch, count, h.device)
    read = CachedKeys(keys, queries, visible, before, window, method.sinks)
    if not torch.compiler.is_compiling():
        layer.read = read
    return AttentionContext(sequence, selection, mask, given, state, read)


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


def count_places(sequence: Sequence) -> Tensor:
    """Return `(B, T)` int32, the valid tokens of its sequence before each token; -1 at padding."""
    if sequence.valid is None:
        return (torch.arange(sequence.start.shape[1], device=sequence.start.device) - sequence.start).int()
    number = sequence.valid.cumsum(1) - 1
    return (number - number.gather(1, sequence.start)).where(sequence.valid, -1).int()


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


Described = tuple[Sequence, Tensor, Tensor | None, Tensor | None]


def describe_cached(h: Tensor, mask: Any, state: CacheState) -> Described:
    """Describe new tokens `h` `[B, T, ...]` after those of a cache.

    Returns:
        Starts, counted from the first new token, so that some are negative, and padding.
        `(B, T)` int32, the place of each new token in its sequence, -1 at padding.
        visible and before, see `CachedKeys`.
    """
    batch, count = h.shape[:2]
    new = torch.arange(count, device=h.device)
    if mask is None and not state.is_padded and not state.is_static:
        places = (new + state.past).int().expand(batch, count)
        return Sequence((new - places).expand(batch, count)), places, None, None
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


def find_order(valid: Tensor | None, gaps: bool | None) -> Tensor | None:
    """Return an order `[B, T]` with padding first, where there is some between tokens; `gaps` where that is known.

    While compiling it is not known, and the order is that of any padding.
    """
    if valid is None or valid.is_meta or gaps is False:
        return None
    if gaps is None and has_values(valid) and not bool(has_gaps(valid)):
        return None
    return valid.byte().argsort(dim=1, stable=True)


def routed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    routed: AttentionContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: `[B, H, T, D]` -> `[B, T, H, D]`.

    Args:
        s_aux: `[H]`, attention sinks learned by the base model.
        routed: from the layer's hook; None for layers without a method.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if others.get("output_attentions"):
        log.warning_once("no attention weights are returned while a method is attached; detach(model) for them")
    is_causal = others.get("is_causal", getattr(module, "is_causal", True)) is not False
    if attention_mask is None and not is_causal and query.shape[2] > 1 and routed is not None:
        raise UserError("the base model's attention sees later tokens; attention methods here are causal")
    size = value.shape[-1]
    if routed is not None and routed.keys is not None:  # all keys of a cache stay as they are
        (query,) = cast_to_autocast(query)
    else:
        query, key, value = pad_heads(*cast_to_autocast(query, key, value))
    args = AttentionArgs(scaling, softcap, dropout, s_aux)
    if routed is None:
        out = full_attention(query, key, value, normalize_mask(attention_mask), args, is_causal)
    else:
        unknown = {name for name, value in others.items() if value is not None} - routed.given - KNOWN_ARGUMENTS
        if unknown:
            raise UserError(
                f"{type(module).__name__} passes {', '.join(sorted(unknown))} to its attention, which attached methods "
                "do not support"
            )
        out = attend(get_method(module), query, key, value, attention_mask, routed, args)
    return out[..., :size].transpose(1, 2).contiguous(), None


def attend(
    method: AttentionMethod, q: Tensor, k: Tensor, v: Tensor, mask: Any, context: AttentionContext, args: AttentionArgs
) -> Tensor:
    """Compute an attached layer, with or without tokens in a cache."""
    keys, state = context.keys, context.state
    if keys is not None and state is not None:
        if mask is not context.mask:  # the layer has changed it
            _, _, visible, before = describe_cached(q.transpose(1, 2), mask, state)
            keys = replace(keys, visible=visible, before=before)
        if keys.key_groups.shape[2] != k.shape[2]:
            raise UserError(
                f"this KV cache has {k.shape[2]} keys in layer {method.shape.index}, and the groups of "
                f"{keys.key_groups.shape[2]}: some were replaced or added without the method. Start with an empty one."
            )
        method.path = "cached"
        return keys.attend(q, k, v, args)
    if state is not None:  # a preallocated cache returns the keys of empty places, too
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    if k.shape[2] != q.shape[2]:
        raise UserError(
            f"a layer attends from {q.shape[2]} tokens to {k.shape[2]} keys, some of which are no tokens or in a KV "
            "cache without groups"
        )
    sequence = context.sequence if mask is context.mask else describe_sequence(q.transpose(1, 2), mask)
    return attend_all(method, q, k, v, context.selection, sequence, args)


def attend_all(
    method: AttentionMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    sequence: Sequence,
    args: AttentionArgs,
) -> Tensor:
    """Compute an attached layer for sequences without tokens in a cache."""
    order, sequence = sequence.order, sequence.compact or sequence
    q, k, v = (reorder(x, order, 2) for x in (q, k, v))
    try:
        out = method("attend", q, k, v, selection, sequence, args)
    except BackendUnsupported as error:
        raise UserError(str(error)) from None
    for observer in method.observers:  # only now, because some methods choose their pairs while they attend
        observer(method.shape.index, method, selection, sequence)
    return out if order is None else reorder(out, order.argsort(1), 2)


def cast_to_autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast as torch's attention does under autocast; rotary layers leave float32."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(kind)) for x in tensors]


def pad_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad heads with zeros to one size (latent attention)."""
    missing = q.shape[-1] - v.shape[-1]
    if missing > 0:
        return q, k, F.pad(v, (0, missing))
    return (F.pad(q, (0, -missing)), F.pad(k, (0, -missing)), v) if missing < 0 else (q, k, v)


AttentionInterface.register(IMPLEMENTATION, routed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, make_layer_mask)
