"""Hooks of an attached model: routing of hidden states, and attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, Cache
from transformers.utils import logging

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.dense import full_attention
from focus_exp.attention.kernels import BackendUnsupported
from focus_exp.attention.kv_cache import CachedKeys, pack_groups
from focus_exp.attention.selection import (
    AttentionArgs,
    Selection,
    Sequence,
    reorder,
)
from focus_exp.errors import UserError
from focus_exp.models.hf_cache import GroupedLayer, find_layer
from focus_exp.models.masks import (
    CacheState,
    count_places,
    describe_cached,
    describe_layer,
    describe_sequence,
    first_pass,
    normalize_mask,
)
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
        mask: that the layer was given.
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
    layer = find_layer(cache, method.shape.index)
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
    state = describe_layer(layer, count)
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
        if attention_mask is not routed.mask:  # it may hide a token from itself, as only padding is here
            raise UserError(
                f"{type(module).__name__} changes its attention mask, which attached methods do not support"
            )
        out = attend(get_method(module), query, key, value, routed, args)
    return out[..., :size].transpose(1, 2).contiguous(), None


def attend(
    method: AttentionMethod, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, args: AttentionArgs
) -> Tensor:
    """Compute an attached layer, with or without tokens in a cache."""
    keys, state = context.keys, context.state
    if keys is not None and state is not None:
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
    return attend_all(method, q, k, v, context.selection, context.sequence, args)


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
