"""Find, switch, swap, observe and freeze the methods attached to a model."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from focus_exp.attention.base import BACKENDS, AttentionMethod, Observer
from focus_exp.attention.registry import find
from focus_exp.errors import UserError

log = logging.get_logger(__name__)

IMPLEMENTATION = "focus_exp"  # in transformers' attention and mask interfaces
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# trainable part -> what the names of its parameters contain; the second is PEFT's
TRAINABLE = {"router": ".focus.", "lora": ".lora_", "all": ""}


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Return the modules that call transformers' attention interface, by layer.

    Raises:
        UserError: there are none, or several stacks of them.
    """
    modules: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        index, layer = getattr(module, "layer_idx", None), name.rpartition(".")[0]
        if isinstance(index, int) and index >= 0 and uses_interface(type(module).forward):
            # cross-attention comes after the self-attention of its layer
            first, _ = modules.setdefault(index, (layer, module))
            if first != layer:
                raise UserError(f"{type(model).__name__} has several stacks of attention layers, each counted from 0")
    if not modules:
        raise UserError(
            f"{type(model).__name__} has no layer that computes attention by transformers' attention interface; its "
            f"modules are {', '.join(sorted({type(module).__name__ for module in model.modules()}))}"
        )
    return {index: module for index, (_, module) in sorted(modules.items())}


@cache
def uses_interface(forward: Callable[..., Any]) -> bool:
    """Return whether `forward` looks up a transformers attention function."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and INTERFACE in code.co_names


def find_device(*modules: nn.Module) -> torch.device:
    """Return the device of the first module with a tensor; packed weights are none."""
    tensors = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def get_method(module: nn.Module) -> AttentionMethod:
    """Return the method attached to an attention module."""
    if not isinstance(module.focus, AttentionMethod):
        raise UserError(f"the attached method is hidden in a {type(module.focus).__name__}. Remove that wrapper.")
    return module.focus


def attached_methods(model: nn.Module) -> dict[int, AttentionMethod]:
    """Return the attached methods by layer index."""
    return {i: get_method(m) for i, m in attention_modules(model).items() if hasattr(m, "focus")}


@dataclass
class Attachment:
    """Changes by `attach`, which `detach` undoes and an adapter describes.

    implementations: configurations that name the attention function, each with the base model's.
    handles: of the forward pre-hooks. They keep their place among others and do nothing while `is_active` is False.
    unpacked: 4-bit layers kept from repacking their weights until `detach`.
    """

    method: str
    options: dict[str, Any]
    layers: list[int]
    implementations: list[tuple[PreTrainedConfig, str]]
    handles: list[RemovableHandle] = field(default_factory=list)
    unpacked: list[nn.Module] = field(default_factory=list)
    is_active: bool = False

    def register(self, module: nn.Module, hook: Callable[..., Any], **options: Any) -> None:
        """Register a forward pre-hook, called while the method is active, with `options`."""
        self.handles.append(
            module.register_forward_pre_hook(partial(self.call_if_active, hook, options), with_kwargs=True)
        )

    def call_if_active(self, hook: Callable[..., Any], options: dict[str, Any], *inputs: Any) -> Any:
        return hook(*inputs, **options) if self.is_active else None

    def set_active(self, active: bool) -> None:
        """Switch the hooks, and name the attention function that the layers call."""
        self.is_active = active
        for config, base in self.implementations:
            # not by set_attn_implementation, which also changes other parts, such as an image encoder
            config._attn_implementation_internal = IMPLEMENTATION if active else base


def get_attachment(model: PreTrainedModel) -> Attachment:
    attachment = getattr(model, "focus_attachment", None)
    if attachment is None:
        raise UserError("the model has no attention method attached. Use attach(model) or load_adapter(model, folder).")
    return attachment


def active_methods(model: PreTrainedModel) -> dict[int, AttentionMethod]:
    """Return the attached methods by layer; none while they are disabled."""
    attachment: Attachment | None = getattr(model, "focus_attachment", None)
    return attached_methods(model) if attachment and attachment.is_active else {}


def cache_unsupported_reason(methods: Iterable[AttentionMethod]) -> str | None:
    """Return why these methods have no KV cache."""
    return next((reason for method in methods if (reason := method.kv_cache_unsupported_reason())), None)


def hash_methods(model: nn.Module) -> str:
    """Hash the tensors of the attached methods, of a sharded one this process's part; "" if none has any."""
    methods = attached_methods(model).items()
    tensors = {f"{layer} {name}": x for layer, method in methods for name, x in method.state_dict().items()}
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(f"{name} {tuple(local.shape)} ".encode())
        digest.update(local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16] if tensors else ""


def find_routers(model: nn.Module) -> dict[int, Any]:
    """Return the attached methods that route softly, too, by layer."""
    return {layer: method for layer, method in attached_methods(model).items() if method.options.is_soft}


def update_balance(model: nn.Module) -> None:
    """Move balancing biases, and centroids without a gradient, by the batches since the last call.

    Call it after `optimizer.step()`. Of a process group all must call it: they move alike. Without it a router is
    trained as well, but the bias that it has in eval mode stays.
    """
    for method in attached_methods(model).values():
        if method.statistics is not None:
            if dist.is_initialized():
                dist.all_reduce(method.statistics)
            method.update_statistics()


def is_causal(model: PreTrainedModel) -> bool:
    """Return whether no attached layer lets later tokens change earlier ones."""
    return all(method.causal for method in attached_methods(model).values())


@contextmanager
def disable_method(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Run the base model, with its own attention kernel, in the block."""
    attachment = get_attachment(model)
    before = attachment.is_active
    attachment.set_active(False)
    try:
        yield model
    finally:
        attachment.set_active(before)


@contextmanager
def temporary_attributes(objects: Iterable[Any], **values: Any) -> Iterator[None]:
    """Set attributes of all objects in the block."""
    before = [(item, {name: getattr(item, name) for name in values}) for item in objects]
    for item, _ in before:
        for name, value in values.items():
            setattr(item, name, value)
    try:
        yield
    finally:
        for item, attributes in before:
            for name, value in attributes.items():
                setattr(item, name, value)


@contextmanager
def use_causal_counterparts(model: PreTrainedModel) -> Iterator[None]:
    """Make non-causal methods that have a causal counterpart that one in the block."""
    with ExitStack() as stack:
        for method in attached_methods(model).values():
            if not method.causal:
                stack.enter_context(temporary_attributes([method], **method.causal_counterpart))
        yield


@contextmanager
def observe_selections(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Call `observer(layer, method, selection, sequence)` after each attached layer."""
    methods = list(attached_methods(model).values())
    for method in methods:
        method.observers.append(observer)
    try:
        yield
    finally:
        for method in methods:
            method.observers.remove(observer)


def pause_observers(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Call no observers in the block."""
    return temporary_attributes(attached_methods(model).values(), observers=[])


@contextmanager
def swap_methods(model: PreTrainedModel, methods: dict[int, AttentionMethod]) -> Iterator[PreTrainedModel]:
    """Replace the attached methods by `methods` in the block."""
    modules = {index: module for index, module in attention_modules(model).items() if index in methods}
    before = {index: get_method(module) for index, module in modules.items()}
    for index, module in modules.items():
        current = before[index]
        method = methods[index].to(find_device(current, module, model))
        method.backend, method.sparse_from = current.backend, current.sparse_from
        module.focus = method
    try:
        yield model
    finally:
        for index, module in modules.items():
            module.focus = before[index]


def set_routing(
    model: PreTrainedModel,
    *,
    hard: bool,
    top_k: int | None = None,
    pair_rule: str | None = None,
    backend: str | None = None,
) -> PreTrainedModel:
    """Set how attached methods route; settings that a method lacks are ignored.

    Args:
        hard: hard routing, which needs `model.eval()`, or soft routing. In training mode `train_with` decides.
        top_k: groups of a query. Saved with an adapter.
        pair_rule: which query-key pairs of groups are kept. Saved with an adapter.
        backend: auto, masked, or a kernel's name; all give the same result.

    Raises:
        UserError: a value is wrong, no method is attached, or a budget decides on `top_k`.
    """
    attachment = get_attachment(model)
    if backend is not None and backend not in BACKENDS:
        raise UserError(f"backend must be one of {', '.join(BACKENDS)} (got {backend!r}).")
    methods = attached_methods(model).values()
    if any(getattr(m, "budget", None) is not None and top_k not in (None, m.top_k) for m in methods):
        raise UserError(f"top_k must be unset where a budget sets it per head (got {top_k!r}). Use set_budget.")
    schema = find(attachment.method).options
    saved = {"top_k": top_k, "pair_rule": pair_rule}
    saved = {name: value for name, value in saved.items() if value is not None and hasattr(schema, name)}
    try:
        schema.create(**attachment.options | saved)
    except ValueError as error:
        raise UserError(str(error)) from None
    settings = saved | {"hard": hard, "backend": backend}
    for method in methods:
        for name, value in settings.items():
            if value is not None and hasattr(method, name):
                setattr(method, name, value)
    attachment.options |= saved
    if hard and any(method.training and method.train_with == "soft" for method in methods):
        log.warning_once("set_routing: hard=True needs eval mode; call model.eval()")
    return model


def set_budget(model: PreTrainedModel, budget: list[Any]) -> PreTrainedModel:
    """Set the groups of each layer and head of a method with `groups_per_layer`; adapters save them.

    Heads without any group to choose lose their encoders.

    Raises:
        UserError: another method is attached, or the budget does not fit the layers.
    """
    attachment, methods = get_attachment(model), dict[int, Any](attached_methods(model))
    schema, given = find(attachment.method).options, {"groups_per_layer": budget, "density": None}
    if not hasattr(schema, "groups_per_layer"):
        raise UserError(f"attention method {attachment.method} has no budget of groups. Attach focus_dual.")
    try:
        schema.create(**attachment.options | given).check_layers(len(attention_modules(model)))
        parts = {layer: method.layer_budget(budget) for layer, method in methods.items()}
    except ValueError as error:
        raise UserError(str(error)) from None
    for layer, part in parts.items():
        methods[layer].set_budget(part)
    attachment.options |= given
    return model


def freeze(model: PreTrainedModel, train: str = "router") -> list[str]:
    """Make exactly one part of the model require gradients.

    Args:
        train: router, lora or all.

    Returns:
        The names of the trainable parameters.
    """
    if train not in TRAINABLE:
        raise UserError(f"train must be one of {', '.join(TRAINABLE)} (got {train!r}).")
    if train == "router":
        get_attachment(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trainable(name, train))
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def is_trainable(name: str, train: str) -> bool:
    """Return whether a parameter belongs to the part `train`."""
    return TRAINABLE[train] in name
