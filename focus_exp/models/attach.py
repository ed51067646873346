"""Put an attention method on a Hugging Face model, take it off, switch it off; no modelling code is copied.

The method's output replaces the layer's attention through transformers' attention interface; a forward pre-hook on
every attention module shows the method the hidden states; a pre-hook on the decoder passes the padding mask along.
All state lives in the per-layer modules, so checkpointing, copies and nested calls behave.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from focus_exp.attention.blocked import masked_attention
from focus_exp.attention.method import AttentionMethod, LayerShape, Observer
from focus_exp.attention.registry import METHODS, build
from focus_exp.attention.selection import PAIR_RULES, Selection, Sequence, permitted
from focus_exp.errors import UserError

IMPLEMENTATION = "focus_exp"
ATTENTION_MODULES = ("self_attn", "attn", "attention")


@dataclass
class Attachment:
    """What `attach` did to a model, so that `detach` can undo it and an adapter can name it."""

    method: str
    options: dict[str, Any]
    layers: list[int]
    base_implementation: str
    base_use_cache: list[tuple[Any, bool]]
    handles: list[RemovableHandle] = field(default_factory=list)


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The self-attention modules by layer index; UserError naming the model's modules if there are none."""
    found = {
        int(module.layer_idx): module
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in ATTENTION_MODULES and hasattr(module, "layer_idx")
    }
    if not found:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise UserError(
            f"{type(model).__name__} has no attention layer called {' or '.join(ATTENTION_MODULES)}; "
            f"its modules are {', '.join(kinds)}"
        )
    return dict(sorted(found.items()))


def attach(
    model: PreTrainedModel, method: str = "focus", *, layers: list[int] | None = None, **options: Any
) -> PreTrainedModel:
    """Attach `method` with its options to all layers of `model` (or to `layers`), in place.

    The base weights are left as they are; freeze them with `freeze` before training. While attached the model runs
    without a key/value cache. UserError for an unknown method, option or layer, or a model already attached.
    """
    if getattr(model, "focus_attachment", None) is not None:
        raise UserError("the model already has an attention method attached; call detach(model) first")
    if method not in METHODS:
        raise UserError(f"attention method {method!r} is not known; choose from {', '.join(METHODS)}")
    modules = attention_modules(model)
    wanted = list(modules) if layers is None else layers
    if missing := sorted(set(wanted) - set(modules)):
        raise UserError(f"layers {missing} do not exist; the model has layers {min(modules)} to {max(modules)}")

    configs = [c for c in (model.config, model.generation_config) if c is not None]
    attachment = Attachment(
        method=method,
        options=options,
        layers=wanted,
        base_implementation=model.config._attn_implementation,
        base_use_cache=[(c, c.use_cache) for c in configs],
    )
    for index in wanted:
        module = modules[index]
        weight = next(module.parameters())
        try:
            added = build(method, layer_shape(model, module, index), **options)
        except (TypeError, ValueError) as error:
            raise UserError(f"attention method {method!r} refuses its options {sorted(options)}: {error}") from None
        module.focus = added.to(weight.device).train(module.training)
        attachment.handles.append(module.register_forward_pre_hook(route_hidden_states, with_kwargs=True))
    decoder = model.base_model
    attachment.handles.append(decoder.register_forward_pre_hook(pass_padding_mask, with_kwargs=True))
    for config in configs:
        config.use_cache = False
    model.focus_attachment = attachment  # type: ignore[assignment]
    model.set_attn_implementation(IMPLEMENTATION)
    return model


def layer_shape(model: PreTrainedModel, module: nn.Module, index: int) -> LayerShape:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(module, "head_dim", None) or config.hidden_size // heads
    return LayerShape(config.hidden_size, heads, head_dim, index)


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `attach`: hooks, modules and settings are gone, the base model is as it was."""
    attachment = attachment_of(model)
    for handle in attachment.handles:
        handle.remove()
    for module in attention_modules(model).values():
        if hasattr(module, "focus"):
            del module.focus
    for config, use_cache in attachment.base_use_cache:
        config.use_cache = use_cache
    model.set_attn_implementation(attachment.base_implementation)
    del model.focus_attachment
    return model


@contextmanager
def disabled(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Within the block the model is the base model, by the base model's own attention kernel."""
    attachment, methods = attachment_of(model), attached_methods(model)
    before = {index: method.enabled for index, method in methods.items()}
    implementation = model.config._attn_implementation
    for method in methods.values():
        method.enabled = False
    model.set_attn_implementation(attachment.base_implementation)
    try:
        yield model
    finally:
        for index, method in methods.items():
            method.enabled = before[index]
        model.set_attn_implementation(implementation)


def attachment_of(model: PreTrainedModel) -> Attachment:
    attachment = getattr(model, "focus_attachment", None)
    if attachment is None:
        raise UserError("the model has no attention method attached; call attach(model) or load_adapter(model, folder)")
    return attachment


def attached_methods(model: PreTrainedModel) -> dict[int, AttentionMethod]:
    """The attached modules by layer index."""
    return {i: m.focus for i, m in attention_modules(model).items() if hasattr(m, "focus")}  # type: ignore[misc]


def is_causal(model: PreTrainedModel) -> bool:
    """False if any attached layer lets the future of a sequence change its past."""
    return all(method.causal for method in attached_methods(model).values())


def set_routing(
    model: PreTrainedModel, *, hard: bool, top_k: int | None = None, pair_rule: str | None = None
) -> PreTrainedModel:
    """Choose soft gates or hard groups, and how many groups a query reaches, in every layer that routes."""
    if pair_rule is not None and pair_rule not in PAIR_RULES:
        raise UserError(f"pair_rule={pair_rule!r} is not one of {', '.join(PAIR_RULES)}")
    for method in attached_methods(model).values():
        for name, value in (("hard", hard), ("top_k", top_k), ("pair_rule", pair_rule)):
            if value is not None and hasattr(method, name):
                setattr(method, name, value)
    return model


def freeze(model: PreTrainedModel, train: str = "router") -> list[str]:
    """Make exactly the trainable set require gradients; returns its names. The one predicate of the project."""
    names = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trainable(name, train))
        if parameter.requires_grad:
            names.append(name)
    return names


def is_trainable(name: str, train: str) -> bool:
    """Whether the parameter called `name` is trained: "router" the attached modules alone, "all" everything."""
    return train == "all" or ".focus." in name


@contextmanager
def observed(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Within the block `observer(layer, method, selection, sequence)` is called for every attached layer that runs."""
    methods = list(attached_methods(model).values())
    for method in methods:
        method.observers.append(observer)
    try:
        yield
    finally:
        for method in methods:
            method.observers.remove(observer)


@contextmanager
def swapped(model: PreTrainedModel, methods: dict[int, AttentionMethod]) -> Iterator[PreTrainedModel]:
    """Within the block other methods stand in the attached layers: controls, probes."""
    modules = {index: module for index, module in attention_modules(model).items() if index in methods}
    before = {index: module.focus for index, module in modules.items()}
    for index, module in modules.items():
        module.focus = methods[index].to(next(module.parameters()).device)
    try:
        yield model
    finally:
        for index, module in modules.items():
            module.focus = before[index]


def pass_padding_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Let every layer see the two-dimensional mask, which attention functions are otherwise never given."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        kwargs["padding_mask"] = mask.bool()
    return args, kwargs


def route_hidden_states(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    method: AttentionMethod = module.focus  # type: ignore[assignment]
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
    h: Tensor, padding_mask: Tensor | None, position_ids: Tensor | None, allowed: Tensor | None
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
    return Sequence(start=start, valid=padding_mask, allowed=allowed)


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
    method: AttentionMethod = module.focus  # type: ignore[assignment]
    for observer in method.observers:
        observer(method.shape.index, method, selection, sequence)
    out = method.attend(query, key, value, selection, sequence, scaling=scaling, softcap=softcap, dropout=dropout)
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
