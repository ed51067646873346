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
from focus_exp.attention.kv_cache import GroupedCache
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
from focus_exp.models.hf_cache import FocusLayer, find_layer, run_eagerly
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

    past: tokens in the cache. given: names of the arguments of the layer.
    """

    sequence: Sequence
    selection: Selection
    mask: Any
    cache: GroupedCache | None
    past: int
    given: frozenset[str]


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
        return mask
    if "allow_is_bidirectional_skip" in options:  # of layers that attend to an encoder
        options["allow_is_bidirectional_skip"] = False
    mask = sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        allow_is_causal_skip=False, **options,
    )  # fmt: skip
    if mask is not None and local_size is not None and not is_needed_by_cache and has_values(mask):
        mark_band(mask)  # once for all layers of a kind
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
    selection = route(method, h, sequence)
    return args, kwargs | {"routed": AttentionContext(sequence, selection, mask, None, 0, frozenset(given))}


def route(method: AttentionMethod, h: Tensor, sequence: Sequence) -> Selection:
    """Route hidden states `[B, T, E]`, padding between tokens before them: the selection is in that order, too."""
    selection: Selection = method("route", reorder(h, sequence.order, 1), sequence.compact or sequence)
    return selection


@run_eagerly
def route_cached(
    method: AttentionMethod, h: Tensor, mask: Any, layer: FocusLayer, given: frozenset[str]
) -> AttentionContext:
    """Route new tokens after those of a grouped cache."""
    cache = layer.grouped
    layer.expected = True
    sequence = describe_sequence(h, mask, cache)
    return AttentionContext(sequence, route(method, h, sequence), mask, cache, cache.length, given)


def describe_sequence(h: Tensor, mask: Any, cache: GroupedCache | None = None) -> Sequence:
    """Describe starts and padding of the sequences of `h` `[B, T, ...]` by the mask.

    With tokens in a cache starts are counted from the first new one, so that some are negative.
    """
    batch, length = h.shape[:2]
    past = 0 if cache is None else cache.length
    before = torch.zeros(batch, 1, dtype=torch.long, device=h.device)
    if cache is not None and cache.start is not None:
        before = cache.start[:, None]
    mask = normalize_mask(mask)
    if mask is None:
        position = None if cache is None else cache.positions(length)
        return Sequence(start=(before - past).expand(batch, length), position=position)
    if not past and (reach := band_reach(mask)):
        return Sequence(before.expand(batch, length), allowed=mask, reach=reach)
    if mask.shape[-1] < past + length or mask.shape[0] not in (1, batch):
        raise UserError(f"attention_mask must have {past + length} columns, past and new (got {mask.shape[-1]}).")
    gaps = getattr(mask, "has_gaps", None)
    mask = mask[..., : past + length]  # that of a preallocated cache is wider
    if past and mask.shape[2] != length:  # it may hide cached tokens
        mask = mask & torch.ones_like(mask[..., :1, :]).expand(-1, -1, length, -1).tril(past)
    first = mask[:, 0].byte().argmax(-1).expand(batch, length)
    start = sequence_starts(first, past, before) - past
    allowed = None if mask.shape[2] != length else mask
    if allowed is not None:
        check_causal(mask, past)
    valid = (mask[:, 0, 0] if allowed is None else mask[:, 0].diagonal(past, 1, 2)).expand(batch, length)
    if allowed is not None and is_all_true(valid):
        valid = None
    if past and cache is not None:
        return Sequence(start, valid, allowed, position=cache.positions(length, mask))
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
    """Compute an attached layer, with or without tokens in a grouped cache."""
    if k.shape[2] != q.shape[2]:
        raise UserError(
            f"a layer attends from {q.shape[2]} tokens to {k.shape[2]} keys, some of which are no tokens or in a KV "
            "cache that is not grouped"
        )
    if context.cache is not None:
        return attend_cached(method, q, k, v, mask, context, args)
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


@run_eagerly
def attend_cached(
    method: AttentionMethod, q: Tensor, k: Tensor, v: Tensor, mask: Any, context: AttentionContext, args: AttentionArgs
) -> Tensor:
    """Compute an attached layer over cached and new tokens; append the new."""
    cache, selection, sequence = context.cache, context.selection, context.sequence
    assert cache is not None
    if mask is not context.mask:  # the layer has changed it
        sequence = describe_sequence(q.transpose(1, 2), mask, cache)
    if cache.length != context.past:
        raise UserError("a layer computes attention more than once; a grouped KV cache would keep its keys twice")
    if cache.length:
        method.path = "cached"
        out = cache.attend(q, k, v, selection, sequence, args)
    else:
        out = attend_all(method, q, k, v, selection, sequence, args)
        if sequence.order is not None:
            selection = selection.reorder(sequence.order.argsort(1))
    cache.append(k, v, selection, sequence)
    return out


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
