"""What a model calls while a method is attached: hooks that show it hidden states, padding and cache; attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from focus_exp.attention.blocked import masked_attention
from focus_exp.attention.cached import GroupedCache
from focus_exp.attention.selection import Selection, Sequence, causal
from focus_exp.errors import UserError
from focus_exp.models.cache import FocusCache, cache_for
from focus_exp.models.modules import attached_methods, method_of

IMPLEMENTATION = "focus_exp"


def prepare_decoder(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Let every layer see the two-dimensional mask, which attention functions are otherwise never given, and put a
    cache by group in place of the empty one that transformers made or would make."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        kwargs["padding_mask"] = mask.bool()
    given, wanted = kwargs.get("past_key_values"), kwargs.get("use_cache")
    assert isinstance(decoder, PreTrainedModel)
    config = decoder.config.get_text_config()
    if wanted is None:
        wanted = config.use_cache
    if (wanted or given is not None) and not isinstance(given, FocusCache):
        active = {index: method for index, method in attached_methods(decoder).items() if method.enabled}
        if active:
            kwargs["past_key_values"] = cache_for(active, config.num_hidden_layers, given)
            kwargs["use_cache"] = kwargs["past_key_values"] is not None
    return args, kwargs


def route_hidden_states(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    method = method_of(module)
    if not method.enabled:
        return None
    h: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    padding_mask = kwargs.pop("padding_mask", None)
    cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, FocusCache)), None)
    grouped = None if cache is None else cache.layer(method.shape.index)
    past = 0 if grouped is None else grouped.length
    sequence = describe_sequence(h, padding_mask, kwargs.get("position_ids"), kwargs.get("attention_mask"), past)
    kwargs["routed"] = Routed(sequence, method.route(h, sequence), grouped)
    return args, kwargs


@dataclass(frozen=True)
class Routed:
    """What a layer's hook tells its attention; `cache` where keys and values are kept."""

    sequence: Sequence
    selection: Selection
    cache: GroupedCache | None = None


def describe_sequence(
    h: Tensor,
    padding_mask: Tensor | None,
    position_ids: Tensor | None,
    allowed: Tensor | None,
    past: int = 0,
) -> Sequence:
    """Starts and validity of the tokens of `h` `[B, T, E]` from whatever of padding and positions the model knows.

    After `past` tokens in a cache the starts are counted from the first of the new ones, so that some are negative.
    """
    batch, length = h.shape[:2]
    index = torch.arange(past, past + length, device=h.device)
    start = torch.zeros(batch, length, dtype=torch.long, device=h.device)
    if position_ids is not None and position_ids.ndim == 2:
        start = (index - position_ids).clamp(min=0).expand(batch, length)
    if padding_mask is not None:
        if padding_mask.shape[1] != past + length:
            raise UserError(
                f"attention_mask has {padding_mask.shape[1]} columns for {past} tokens in the cache and {length} new "
                "ones; give one for each"
            )
        start = torch.maximum(start, padding_mask.long().argmax(dim=1, keepdim=True))
    if allowed is not None:
        allowed = allowed[..., : past + length]  # a static cache's mask is as wide as it may grow
    return Sequence(
        start=start - past,
        valid=None if padding_mask is None else padding_mask[:, past:],
        allowed=allowed,
        masked=allowed is not None and padding_mask is None,
    )


def routed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    routed: Routed | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls: q `[B, H, T, D]`, k and v `[B, G, T, D]` -> `[B, T, H, D]`."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if routed is None:
        out = full_attention(query, key, value, attention_mask, scaling, softcap, dropout)
        return out.transpose(1, 2).contiguous(), None
    sequence, selection, cache = routed.sequence, routed.selection, routed.cache
    if sliding_window is not None and attention_mask is not None:
        sequence = replace(sequence, masked=True)
    method = method_of(module)
    if cache is not None and cache.length:
        out = cache.attend(query, key, value, selection, sequence, scaling=scaling, softcap=softcap)
        method.path = "cached"
    else:
        out = method.attend(query, key, value, selection, sequence, scaling=scaling, softcap=softcap, dropout=dropout)
        for observer in method.observers:  # now, because some methods choose their pairs while they attend
            observer(method.shape.index, method, selection, sequence)
    if cache is not None:
        cache.append(key, value, selection, sequence)
    return out.transpose(1, 2).contiguous(), None


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scaling: float, softcap: float | None, dropout: float
) -> Tensor:
    """Layers that nothing is attached to, next to layers that something is attached to; k and v may reach back."""
    if allowed is None:
        rows = slice(k.shape[2] - q.shape[2], k.shape[2])
        keep = causal(rows, k.shape[2], q.device)[None, None]
    else:
        keep = allowed[..., : k.shape[2]]
    return masked_attention(q, k, v, keep, None, scaling=scaling, softcap=softcap, gate_kind="log", dropout=dropout)


AttentionInterface.register(IMPLEMENTATION, routed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
