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

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from focus_exp.attention.focus import Focus
from focus_exp.attention.method import BACKENDS, AttentionMethod, LayerShape, Observer
from focus_exp.attention.registry import METHODS, build
from focus_exp.attention.selection import PAIR_RULES
from focus_exp.errors import UserError
from focus_exp.models.interface import IMPLEMENTATION, prepare_decoder, route_hidden_states
from focus_exp.models.modules import attached_methods, attention_modules, method_of

# what every name of a trained part has in it; the second is PEFT's
TRAINED = {"router": ".focus.", "lora": ".lora_", "all": ""}


@dataclass
class Attachment:
    """What `attach` did to a model, so that `detach` can undo it and an adapter can name it."""

    method: str
    options: dict[str, Any]
    layers: list[int]
    base_implementation: str
    handles: list[RemovableHandle] = field(default_factory=list)


def attach(
    model: PreTrainedModel, method: str = "focus", *, layers: list[int] | None = None, **options: Any
) -> PreTrainedModel:
    """Attach `method` with its options to all layers of `model` (or to `layers`), in place.

    The base weights are left as they are; freeze them with `freeze` before training. With hard groups `generate()`
    keeps keys and values by group (`FocusCache`). UserError for an unknown method, option or layer, or a model already
    attached.
    """
    if getattr(model, "focus_attachment", None) is not None:
        raise UserError("the model already has an attention method attached; call detach(model) first")
    if method not in METHODS:
        raise UserError(f"attention method {method!r} is not known; choose from {', '.join(METHODS)}")
    modules = attention_modules(model)
    wanted = list(modules) if layers is None else layers
    if missing := sorted(set(wanted) - set(modules)):
        raise UserError(f"layers {missing} do not exist; the model has layers {min(modules)} to {max(modules)}")

    attachment = Attachment(
        method=method,
        options=options,
        layers=wanted,
        base_implementation=model.config._attn_implementation,
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
    attachment.handles.append(decoder.register_forward_pre_hook(prepare_decoder, with_kwargs=True))
    if not is_causal(model):
        model.prepare_inputs_for_generation = refuse_generation  # type: ignore[assignment]
    model.focus_attachment = attachment  # type: ignore[assignment]
    model.set_attn_implementation(IMPLEMENTATION)
    return model


def refuse_generation(*_: Any, **__: Any) -> None:
    raise UserError(
        "this attention reads the future: a token's groups depend on the tokens after it, so no text can be generated "
        "token by token; use a causal one, such as attention=focus (assignment balanced)"
    )


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
    vars(model).pop("prepare_inputs_for_generation", None)
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


def is_causal(model: PreTrainedModel) -> bool:
    """False if any attached layer lets the future of a sequence change its past."""
    return all(method.causal for method in attached_methods(model).values())


def routers_of(model: nn.Module) -> dict[int, Focus]:
    """The Focus methods attached to `model`, by layer."""
    return {layer: method for layer, method in attached_methods(model).items() if isinstance(method, Focus)}


@contextmanager
def causal_assignment(model: PreTrainedModel) -> Iterator[None]:
    """Within the block attached routers that read the future take the causal assignment, by their frozen potential."""
    routers = [router for router in routers_of(model).values() if not router.causal]
    before = [router.assignment for router in routers]
    for router in routers:
        router.assignment = "balanced"
    try:
        yield
    finally:
        for router, assignment in zip(routers, before, strict=True):
            router.assignment = assignment


def set_routing(
    model: PreTrainedModel,
    *,
    hard: bool,
    top_k: int | None = None,
    pair_rule: str | None = None,
    backend: str | None = None,
    sparse_from: int | None = None,
) -> PreTrainedModel:
    """Choose soft gates or hard groups, how many groups a query reaches, and the path that computes hard groups:
    "auto", "masked" or a kernel's name, all of the same result. "auto" is masked below `sparse_from` tokens."""
    for name, value, choices in (("pair_rule", pair_rule, PAIR_RULES), ("backend", backend, BACKENDS)):
        if value is not None and value not in choices:
            raise UserError(f"{name}={value!r} is not one of {', '.join(choices)}")
    for method in attached_methods(model).values():
        chosen = {
            "hard": hard, "top_k": top_k, "pair_rule": pair_rule, "backend": backend, "sparse_from": sparse_from,
        }  # fmt: skip
        for name, setting in chosen.items():
            if setting is not None and hasattr(method, name):
                setattr(method, name, setting)
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
    """Whether the parameter called `name` is trained: "router" or "lora" what was added alone, "all" everything."""
    return TRAINED[train] in name


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
    """Within the block other methods stand in the attached layers, on the same backend: controls, probes."""
    modules = {index: module for index, module in attention_modules(model).items() if index in methods}
    before = {index: method_of(module) for index, module in modules.items()}
    for index, module in modules.items():
        # where the one before it runs: a layer's weights may wait in main memory
        method = methods[index].to(next(before[index].parameters(), next(module.parameters())).device)
        method.backend, method.sparse_from = before[index].backend, before[index].sparse_from
        module.focus = method
    try:
        yield model
    finally:
        for index, module in modules.items():
            module.focus = before[index]
