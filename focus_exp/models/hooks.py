"""What a model calls while a method is attached: a hook that shows it hidden states, a mask function, attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask
from transformers.utils import logging

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.dense import full_attention
from focus_exp.attention.kernels import BackendUnsupported
from focus_exp.attention.kv_cache import GroupedCache
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, reorder, sequence_starts, stable_order
from focus_exp.errors import UserError
from focus_exp.models.hf_cache import FocusLayer, count_cached_tokens, find_layer, run_eagerly
from focus_exp.models.methods import IMPLEMENTATION, get_method

log = logging.get_logger(__name__)


# what attention functions are told beside the tensors and is heeded, or says nothing of the scores: a mask has the
# windows of sliding layers and packed sequences in it
UNDERSTOOD = {
    *("sliding_window", "is_causal", "position_ids", "cache_position", "output_attentions", "use_cache"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
}


@dataclass(frozen=True)
class Routed:
    """What a layer's hook tells its attention. past: tokens in the cache; given: names of what the layer was given."""

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
    q_offset: Any = 0,  # a Tensor where the cache is static
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """The mask of a kind of layers, for `full_attention`: nothing is T x T where causality and padding say it all.

    transformers calls it with the rule `mask_function` of the layers and the two-dimensional mask (see `sdpa_mask`).
    """
    acts = local_size is not None and kv_length >= local_size  # chunks and windows that no text fills leave no trace
    # of a preallocated cache only a whole mask tells which of the keys are tokens
    acts = acts or isinstance(q_offset, Tensor) or kv_offset + kv_length != q_offset + q_length
    if allow_is_causal_skip and not acts and (local_size is not None or mask_function is causal_mask_function):
        given: Tensor | None = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if given is None:
            return None
        padding = given[:, kv_offset : kv_offset + kv_length]
        if holds_everywhere(padding):
            return None
        return padding.bool()[:, None, None].expand(batch_size, 1, 1, kv_length)
    if "allow_is_bidirectional_skip" in options:  # layers that attend to an encoder look at what they get
        options["allow_is_bidirectional_skip"] = False
    mask: Tensor | None = sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        allow_is_causal_skip=False, **options,
    )  # fmt: skip
    return mask


def has_values(x: Tensor) -> bool:
    """Whether they can be looked at: not while a graph is compiled, nor where a plan computes with shapes alone."""
    return not (torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor))


def holds_everywhere(x: Tensor) -> bool:
    """Whether all are known to be True; a plan knows of no padding."""
    return not torch.compiler.is_compiling() and (not has_values(x) or bool(x.all()))


def refuse_future(mask: Tensor, past: int) -> None:
    """UserError if a query sees a later key by the mask `[B, 1, T, S]`, whose queries come after `past` keys."""
    if mask.shape[-2] > 1 and has_values(mask) and bool(mask.triu(past + 1).any()):
        raise UserError(
            "the base model lets tokens see later ones (a prefix, an image, or no causal mask at all); "
            "attention methods here are causal: detach(model), or give it text alone"
        )


def mask_of_layer(mask: Any) -> Tensor:
    """A layer's mask as `full_attention` takes it, from the form that a model has made of it; UserError if unknown."""
    if not isinstance(mask, Tensor):
        raise UserError(f"an attention mask that is a {type(mask).__name__} is not understood; give a tensor")
    if mask.ndim == 2:
        mask = mask[:, None, None]
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise UserError(f"an attention mask of shape {tuple(mask.shape)} is not understood; give [batch, 1, T, S]")
    return mask == 0 if mask.is_floating_point() else mask.bool()


def pairs_seen(mask: Any) -> Tensor | None:
    return None if mask is None else mask_of_layer(mask)


def route_hidden_states(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The hook of an attached layer, whose `forward` has parameters of these `names`."""
    method = get_method(module)
    given = dict(zip(names, args, strict=False)) | kwargs
    h = given[names[0]]
    mask = given.get("attention_mask")
    cache = next((x for x in given.values() if isinstance(x, Cache)), None)
    mask = given.get("attention_mask")
    layer = find_layer(cache, method)
    if layer is not None:
        return args, kwargs | {"routed": route_cached(method, h, mask, layer, frozenset(given))}
    if method.is_dense() and takes_base_path(method, cache, h.shape[1]):
        method.path = "full"
        return None
    sequence = describe_sequence(h, mask)
    selection = method("route", reorder(h, sequence.order, 1), sequence)
    return args, kwargs | {"routed": Routed(sequence, selection, mask, None, 0, frozenset(given))}


@run_eagerly
def route_cached(method: AttentionMethod, h: Tensor, mask: Any, layer: FocusLayer, given: frozenset[str]) -> Routed:
    """Route new tokens after those of a grouped cache."""
    cache = layer.grouped
    layer.expected = True
    step = (cache.length, cache.changes, *h.shape[:2], h.device)
    sequence = layer.memo.get(mask, step, lambda: describe_sequence(h, mask, cache))
    selection = method("route", reorder(h, sequence.order, 1), sequence)
    return Routed(sequence, selection, mask, cache, cache.length, given)


def takes_base_path(method: AttentionMethod, cache: Cache | None, new: int) -> bool:
    """Return whether a layer that keeps all pairs may skip routing: nobody looks at what it selects."""
    if cache is None:
        return False
    if not method.observers and not torch.is_grad_enabled():
        return True
    return count_cached_tokens(cache, method.shape.index, new) > 0


def describe_sequence(h: Tensor, mask: Tensor | None, cache: GroupedCache | None = None) -> Sequence:
    """Return where the sequences of `h` `[B, T, ...]` begin and which tokens are padding, by the layer's mask.

    After tokens in a cache starts are counted from the first of the new ones, so that some are negative.
    """
    batch, length = h.shape[:2]
    past, before = (0, None) if cache is None else (cache.length, cache.start)
    mask = pairs_seen(mask)
    valid = allowed = order = kept = None
    if mask is None:
        first = torch.zeros(batch, length, dtype=torch.long, device=h.device)
    elif mask.shape[-1] < past + length or mask.shape[0] not in (1, batch):
        raise UserError(
            f"attention_mask has {mask.shape[-1]} columns for {past} tokens in the cache and {length} new ones; "
            "give one for each"
        )
    else:
        # the mask of a preallocated cache is as wide as it may grow; layers of one kind go on sharing theirs
        mask = mask if mask.shape[-1] == past + length else mask[..., : past + length]
        whole = mask.shape[2] == length
        if whole:
            refuse_future(mask, past)
        mask, order, kept = move_padding(mask, batch, length, cache)
        if kept is not None and cache is not None:
            before = cache.start_after(kept)
        first = mask[:, 0].byte().argmax(-1).expand(batch, length)
        if whole:
            allowed = mask
            valid = mask[:, 0].diagonal(past, 1, 2).expand(batch, length)
            valid = None if holds_everywhere(valid) else valid
        else:  # padding alone; of a single query it is as good to know all that it sees
            valid = mask[:, 0, 0, past:].expand(batch, length)
    start = sequence_starts(first, past, 0 if before is None else before[:, None])
    return Sequence(start=start - past, valid=valid, allowed=allowed, order=order, kept=kept)


def move_padding(
    mask: Tensor, batch: int, length: int, cache: GroupedCache | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Move masked places inside a row behind its new tokens, so that a row in a batch is computed as it is alone.

    Args:
        mask: `[B or 1, 1, 1 or T, past + T]` bool; columns as the model counts them.
        length: T, the number of new tokens.
        cache: of the tokens before them.

    Returns:
        the mask by the places of the rearranged tokens; `order` and `kept` of the `Sequence`.
    """
    past, whole = 0 if cache is None else cache.length, mask.shape[2] == length
    seen = shown_by(mask, past, length).expand(batch, -1)
    known = has_values(mask)
    if not known and not torch.compiler.is_compiling():
        return mask, None, None
    begun = seen.cumsum(1) > 0
    gap = begun & ~seen
    if cache is None:  # what follows a text needs no care where no text follows again
        gap = (gap.cumsum(1) > 0) & seen
    moves = not known or bool(gap.any()) or (cache is not None and cache.visible is not None)
    order, kept = stable_order(~seen[:, past:]), None
    columns = past + order
    if cache is not None and past and (moves or not whole):
        held = cache.visible_tokens(seen)
        hidden = held & ~seen[:, :past]
        if whole:  # a window of the base's hides what is before it, too
            hidden = hidden & begun[:, :past]
        held = held & ~hidden
        if bool(hidden.any()):
            moves, kept = True, held
        columns = torch.cat([stable_order(held), columns], 1)
    if not moves:
        return mask, None, None
    mask = mask.expand(batch, -1, -1, -1)
    mask = mask.gather(-1, columns[:, None, None].expand_as(mask))
    if whole:
        mask = reorder(mask, order, 2)
    unmoved = known and bool(seen[:, past:].all())
    return mask, None if unmoved else order, kept


def shown_by(mask: Tensor, past: int, length: int) -> Tensor:
    """Return `[B or 1, past + T]` bool: the tokens that a mask `[B or 1, 1, 1 or T, past + T]` does not hide."""
    if mask.shape[2] != length:
        return mask[:, 0, 0]
    new = mask[:, 0].diagonal(past, 1, 2)
    if not past:
        return new
    row = new.byte().argmax(1)  # the first new token
    before = mask[:, 0].gather(1, row[:, None, None].expand(-1, 1, mask.shape[-1]))[:, 0, :past]
    return torch.cat([before, new], 1)


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
    routed: Routed | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls: q `[B, H, T, D]`, k and v `[B, G, T, D]` -> `[B, T, H, D]`.

    `s_aux` `[H]` are attention sinks that the base model learned. Value heads may differ in size from the others.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if others.get("output_attentions"):
        log.warning_once("no attention weights are returned while a method is attached; detach(model) for them")
    is_causal = others.get("is_causal", getattr(module, "is_causal", True)) is not False
    if attention_mask is None and not is_causal and query.shape[2] > 1 and routed is not None:
        raise UserError("the base model's attention sees later tokens; attention methods here are causal")
    size = value.shape[-1]
    query, key, value = of_one_size(*of_one_precision(query, key, value))
    arguments = AttentionArgs(scaling, softcap, dropout, s_aux)
    if routed is None:
        out = full_attention(query, key, value, pairs_seen(attention_mask), arguments, is_causal)
    else:
        refuse_unknown(module, {name for name, value in others.items() if value is not None} - routed.given)
        out = attend(get_method(module), query, key, value, attention_mask, routed, arguments)
    return out[..., :size].transpose(1, 2).contiguous(), None


def attend(
    method: AttentionMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    routed: Routed,
    args: AttentionArgs,
) -> Tensor:
    """Compute an attached layer, with or without tokens in a cache."""
    if routed.cache is not None:
        return attend_cached(method, q, k, v, mask, routed, args)
    if k.shape[2] != q.shape[2]:
        if not method.is_dense():
            raise UserError(
                f"a layer attends from {q.shape[2]} tokens to {k.shape[2]} keys, some of which are no tokens"
            )
        method.path = "full"  # a preallocated cache of the base's
        out = full_attention(q, k, v, pairs_seen(mask), args)
        for observer in method.observers:
            observer(method.shape.index, method, routed.selection, routed.sequence)
        return out
    sequence = routed.sequence if mask is routed.mask else describe_sequence(q.transpose(1, 2), mask)
    return attend_whole(method, q, k, v, routed.selection, sequence, args)


def attend_whole(
    method: AttentionMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    sequence: Sequence,
    args: AttentionArgs,
) -> Tensor:
    """Compute an attached layer for whole sequences."""
    q, k, v = (reorder(x, sequence.order, 2) for x in (q, k, v))
    try:
        out = method("attend", q, k, v, selection, sequence, args)
    except BackendUnsupported as error:
        raise UserError(str(error)) from None
    for observer in method.observers:  # now, because some methods choose their pairs while they attend
        observer(method.shape.index, method, selection, sequence)
    return restore(out, sequence)


@run_eagerly
def attend_cached(
    method: AttentionMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    routed: Routed,
    args: AttentionArgs,
) -> Tensor:
    """Compute an attached layer over the cached and the new tokens, and append the new ones."""
    cache, selection = routed.cache, routed.selection
    assert cache is not None
    sequence = routed.sequence
    if mask is not routed.mask:  # the layer took more away
        sequence = describe_sequence(q.transpose(1, 2), mask, cache)
    if k.shape[2] != q.shape[2]:
        raise UserError(f"a layer attends from {q.shape[2]} tokens to {k.shape[2]} keys, some of which are no tokens")
    if cache.length != routed.past:
        raise UserError("a layer computes attention more than once, so that a cache by group would keep its keys twice")
    if cache.length:
        if sequence.kept is not None:
            cache.keep_only(sequence.kept)
        method.path = "cached"
        q, new_k, new_v = (reorder(x, sequence.order, 2) for x in (q, k, v))
        out = restore(cache.attend(q, new_k, new_v, selection, sequence, args), sequence)
    else:
        out = attend_whole(method, q, k, v, selection, sequence, args)
        new_k, new_v = reorder(k, sequence.order, 2), reorder(v, sequence.order, 2)
    cache.append(new_k, new_v, selection, sequence)
    return out


def restore(x: Tensor, sequence: Sequence) -> Tensor:
    """Put the tokens of x `[B, H, T, D]` back where they stood before `sequence.order` moved them."""
    return x if sequence.order is None else reorder(x, sequence.order.argsort(1), 2)


def of_one_precision(*tensors: Tensor) -> list[Tensor]:
    """What torch's own attention makes of its arguments under autocast: a layer that rotates q and k leaves these in
    float32 beside v in bfloat16."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(kind)) for x in tensors]


def of_one_size(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with zeros where heads of values and of queries differ in size (latent attention)."""
    missing = q.shape[-1] - v.shape[-1]
    if missing > 0:
        return q, k, F.pad(v, (0, missing))
    return (F.pad(q, (0, -missing)), F.pad(k, (0, -missing)), v) if missing < 0 else (q, k, v)


def refuse_unknown(module: nn.Module, names: set[str] | frozenset[str]) -> None:
    """UserError where a layer itself tells its attention something that is not heeded here."""
    if unknown := sorted(names - UNDERSTOOD):
        raise UserError(
            f"{type(module).__name__} gives its attention {', '.join(unknown)}, which attached methods do not know"
        )


AttentionInterface.register(IMPLEMENTATION, routed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, make_layer_mask)
