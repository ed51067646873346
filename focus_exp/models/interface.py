"""What a model calls while a method is attached: hooks that show it hidden states and padding, and the attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from focus_exp.attention.blocked import masked_attention
from focus_exp.attention.method import AttentionMethod
from focus_exp.attention.selection import Selection, Sequence, permitted
from focus_exp.errors import UserError

IMPLEMENTATION = "focus_exp"


def method_of(module: nn.Module) -> AttentionMethod:
    """The method that is attached to an attention layer."""
    method = module.focus
    assert isinstance(method, AttentionMethod)
    return method


def pass_padding_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Let every layer see the two-dimensional mask, which attention functions are otherwise never given."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        kwargs["padding_mask"] = mask.bool()
    return args, kwargs


def route_hidden_states(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    method = method_of(module)
    if not method.enabled:
        return None
    h: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    padding_mask = kwargs.pop("padding_mask", None)
    allowed = kwargs.get("attention_mask")
    if isinstance(allowed, Tensor) and allowed.shape[-1] != h.shape[1]:
        raise cache_error()
    sequence = describe_sequence(h, padding_mask, kwargs.get("position_ids"), allowed)
    kwargs["routed"] = (sequence, method.route(h, sequence))
    return args, kwargs


def describe_sequence(
    h: Tensor,
    padding_mask: Tensor | None,
    position_ids: Tensor | None,
    allowed: Tensor | None,
) -> Sequence:
    """Starts and validity of the tokens of `h` `[B, T, E]` from whatever of padding and positions the model knows."""
    batch, length = h.shape[:2]
    index = torch.arange(length, device=h.device)
    start = torch.zeros(batch, length, dtype=torch.long, device=h.device)
    if position_ids is not None and position_ids.ndim == 2:
        start = (index - position_ids).clamp(min=0).expand(batch, length)
    if padding_mask is not None:
        if padding_mask.shape[1] != length:
            raise cache_error()
        first = padding_mask.long().argmax(dim=1, keepdim=True)
        start = torch.maximum(start, first)
    return Sequence(
        start=start, valid=padding_mask, allowed=allowed, masked=allowed is not None and padding_mask is None
    )


def cache_error() -> UserError:
    return UserError("an attached model has no key/value cache yet: call it with use_cache=False and whole sequences")


def routed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    routed: tuple[Sequence, Selection] | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls: q `[B, H, T, D]`, k and v `[B, G, T, D]` -> `[B, T, H, D]`."""
    if key.shape[2] != query.shape[2]:
        raise cache_error()
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if routed is None:
        out = full_attention(query, key, value, attention_mask, scaling, softcap, dropout)
        return out.transpose(1, 2).contiguous(), None
    sequence, selection = routed
    if sliding_window is not None and attention_mask is not None:
        sequence = replace(sequence, masked=True)
    method = method_of(module)
    out = method.attend(query, key, value, selection, sequence, scaling=scaling, softcap=softcap, dropout=dropout)
    for observer in method.observers:  # now, because some methods choose their pairs while they attend
        observer(method.shape.index, method, selection, sequence)
    return out.transpose(1, 2).contiguous(), None


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scaling: float, softcap: float | None, dropout: float
) -> Tensor:
    """Layers that nothing is attached to, next to layers that something is attached to."""
    batch, length = q.shape[0], q.shape[2]
    sequence = Sequence(Sequence.plain(batch, length, q.device).start, allowed=allowed)
    keep = permitted(sequence, slice(0, length), length)[:, None]
    return masked_attention(q, k, v, keep, None, scaling=scaling, softcap=softcap, gate_kind="log", dropout=dropout)


AttentionInterface.register(IMPLEMENTATION, routed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
