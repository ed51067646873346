"""What one does with a model that a method is attached to: switch it off, set it, swap it, watch it, freeze it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from focus_exp.attention.base import BACKENDS, AttentionMethod, Observer
from focus_exp.attention.focus import Focus
from focus_exp.attention.focus_dual import FocusDual
from focus_exp.attention.options import PAIR_RULES, TYPE_NAMES, FocusDualOptions, has_type
from focus_exp.errors import UserError

log = logging.get_logger(__name__)
IMPLEMENTATION = "focus_exp"

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# what wrappers call the one module in them: torch.compile, FSDP, activation checkpointing, DistributedDataParallel
INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """The self-attention modules by layer index; UserError naming the model's modules if there are none.

    They are those that leave attention to transformers' interface: the only place where another one can be put.
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        index, layer = getattr(module, "layer_idx", None), name.rpartition(".")[0]
        if isinstance(index, int) and index >= 0 and uses_interface(type(module).forward):
            # attention across to an encoder comes after a layer's own
            first, _ = found.setdefault(index, (layer, module))
            if first != layer:
                raise UserError(f"{type(model).__name__} has several stacks of attention layers, counted from 0 each")
    if not found:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise UserError(
            f"{type(model).__name__} has no layer that computes attention by transformers' attention interface; "
            f"its modules are {', '.join(kinds)}"
        )
    return {index: module for index, (_, module) in sorted(found.items())}


def find_decoder(model: nn.Module) -> PreTrainedModel:
    """The part of the model that runs its attention layers and is given their cache; the innermost of such parts."""
    layers = set(attention_modules(model).values())
    owners = [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
        and "past_key_values" in inspect.signature(type(part).forward).parameters
        and layers <= set(part.modules())
    ]
    if not owners:
        raise UserError(f"{type(model).__name__} has no part that runs its attention layers and takes past_key_values")
    return owners[-1]


@cache
def uses_interface(forward: Callable[..., Any]) -> bool:
    """Whether a module's `forward` calls one of transformers' attention functions by its name."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and INTERFACE in code.co_names


def offload_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of accelerate that `module` and its children have."""
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        yield from getattr(hook, "hooks", () if hook is None else (hook,))


def execution_device(*modules: nn.Module) -> torch.device:
    """Return the device that the first of `modules` with a hook of accelerate, or else with a tensor, computes on.

    Offloaded weights wait elsewhere (on the meta device, for one); packed ones are neither parameters nor buffers.
    """
    for module in modules:
        for hook in offload_hooks(module):
            if (device := getattr(hook, "execution_device", None)) is not None:
                return torch.device(device)
    tensors = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def get_method(module: nn.Module) -> AttentionMethod:
    """Return the method attached to an attention layer, below any wrapper."""
    assert isinstance(module.focus, nn.Module)
    method = unwrap(module.focus)
    if not isinstance(method, AttentionMethod):
        raise UserError(
            f"the attached method is wrapped by {type(method).__name__}, through which it cannot be reached; take the "
            "wrapper off"
        )
    return method


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module that a wrapper calls: PEFT's modules_to_save (its active copy), compile, DDP, checkpointing."""
    while True:
        children: dict[str, nn.Module] = dict(module.named_children())
        if children.keys() == {"original_module", "modules_to_save"}:
            active: Any = [] if module.disable_adapters else module.active_adapters
            copies: Any = children["modules_to_save"]
            module = next((copies[name] for name in active if name in copies), children["original_module"])
        elif len(children) == 1 and (inner := next((children[name] for name in INNER if name in children), None)):
            module = inner
        else:
            return module


def unwrapped_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict that `module` would have without any wrapper in it."""
    module = unwrap(module)
    state = {name: tensor for name, tensor in module.state_dict().items() if "." not in name}
    for name, child in module.named_children():
        state |= {f"{name}.{key}": tensor for key, tensor in unwrapped_state_dict(child).items()}
    return state


def attached_methods(model: nn.Module) -> dict[int, AttentionMethod]:
    """The attached modules by layer index."""
    return {i: get_method(m) for i, m in attention_modules(model).items() if hasattr(m, "focus")}


# what every name of a trained part has in it; the second is PEFT's
TRAINED = {"router": ".focus.", "lora": ".lora_", "all": ""}


@dataclass
class Attachment:
    """What `attach` did to a model, so that `detach` can undo it and an adapter can name it.

    implementations: the configurations that say which attention function is called, each with the base model's.
    hooks: forward pre-hooks that modules get while it acts, of which `handles` tell.
    unpacked: the base's 4-bit layers that do not repack their weights until `detach`.
    """

    method: str
    options: dict[str, Any]
    layers: list[int]
    implementations: list[tuple[PreTrainedConfig, str]]
    hooks: list[tuple[nn.Module, Callable[..., Any]]] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    unpacked: list[nn.Module] = field(default_factory=list)

    @property
    def acts(self) -> bool:
        return bool(self.handles)

    def switch(self, on: bool) -> None:
        """Have the layers call the attached method, or be those of the base model, which then pays for no hook."""
        if on == self.acts:
            return
        for handle in self.handles:
            handle.remove()
        self.handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in self.hooks if on]
        for config, own in self.implementations:
            # not through the model, whose other parts (an encoder of images) keep theirs
            config._attn_implementation_internal = IMPLEMENTATION if on else own


@contextmanager
def disable_method(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Within the block the model is the base model, by the base model's own attention kernel."""
    attachment = get_attachment(model)
    before = attachment.acts
    attachment.switch(False)
    try:
        yield model
    finally:
        attachment.switch(before)


def active_methods(model: PreTrainedModel) -> dict[int, AttentionMethod]:
    """The attached methods by layer, none while they are disabled or where nothing is attached."""
    attachment: Attachment | None = getattr(model, "focus_attachment", None)
    return attached_methods(model) if attachment and attachment.acts else {}


def get_attachment(model: PreTrainedModel) -> Attachment:
    attachment = getattr(model, "focus_attachment", None)
    if attachment is None:
        raise UserError("the model has no attention method attached; call attach(model) or load_adapter(model, folder)")
    return attachment


def is_causal(model: PreTrainedModel) -> bool:
    """False if any attached layer lets the future of a sequence change its past."""
    return all(method.causal for method in attached_methods(model).values())


def find_routers(model: nn.Module) -> dict[int, Focus]:
    """The Focus methods attached to `model`, by layer."""
    return {layer: method for layer, method in attached_methods(model).items() if isinstance(method, Focus)}


@contextmanager
def use_causal_assignment(model: PreTrainedModel) -> Iterator[None]:
    """Within the block attached routers that read the future take the causal assignment, by their frozen potential."""
    routers = [router for router in find_routers(model).values() if not router.causal]
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
    "auto", "masked" or a kernel's name, all of the same result. "auto" is masked below `sparse_from` tokens.

    Hard groups act in `model.eval()` alone: routers in training mode are as `train_with` says. What a method does not
    have is left alone; an adapter saves `top_k` and `pair_rule`. UserError for a wrong value, another `top_k` beside a
    budget, and without a method.
    """
    attachment = get_attachment(model)
    for name, given, kind in (("hard", hard, bool), ("sparse_from", sparse_from, int)):
        if given is not None and not has_type(given, kind):
            raise UserError(f"{name} must be {TYPE_NAMES[kind]} (got {given!r})")
    for name, value, choices in (("pair_rule", pair_rule, PAIR_RULES), ("backend", backend, BACKENDS)):
        if value is not None and value not in choices:
            raise UserError(f"{name}={value!r} is not one of {', '.join(choices)}")
    methods = attached_methods(model).values()
    groups = min(
        (count for method in methods if isinstance(count := getattr(method, "groups", None), int)), default=top_k
    )
    if top_k is not None and not (has_type(top_k, int) and 1 <= top_k <= (groups or 1)):
        raise UserError(f"top_k={top_k!r} is impossible; use 1 to {groups}, the number of groups")
    if top_k is not None and any(getattr(m, "budget", None) is not None and m.top_k != top_k for m in methods):
        raise UserError(f"top_k={top_k!r} would change nothing: the budget says what each head reads; use set_budget")
    chosen = {"hard": hard, "top_k": top_k, "pair_rule": pair_rule, "backend": backend, "sparse_from": sparse_from}
    for method in methods:
        for name, setting in chosen.items():
            if setting is not None and hasattr(method, name):
                setattr(method, name, setting)
    if hard and any(method.training and getattr(method, "train_with", "hard") == "soft" for method in methods):
        log.warning_once(
            "set_routing: hard=True acts in eval mode, and routers are in training mode; call model.eval()"
        )
    saved = {name for method in methods for name in ("top_k", "pair_rule") if hasattr(method.options, name)}
    attachment.options |= {name: chosen[name] for name in saved if chosen[name] is not None}
    return model


def set_budget(model: PreTrainedModel, budget: list[Any]) -> PreTrainedModel:
    """Give every layer of a model with `focus_dual` its part of `budget`, see `FocusDualOptions`; an adapter saves it.

    UserError for another method, and for a budget that does not fit the layers. What then has nothing to choose loses
    its encoders.
    """
    attachment, methods, layers = get_attachment(model), attached_methods(model), len(attention_modules(model))
    parts: list[tuple[FocusDual, list[int]]] = []
    try:
        options = FocusDualOptions.create(**attachment.options | {"groups_per_layer": budget})
        check_length(budget, layers)
        for method in methods.values():
            if not isinstance(method, FocusDual):
                raise ValueError(f"attention method {attachment.method} has no budget of groups; attach focus_dual")
            parts.append((method, method.layer_budget(budget)))
    except ValueError as error:
        raise UserError(str(error)) from None
    for method, part in parts:
        method.set_budget(part)
    attachment.options["groups_per_layer"] = options.groups_per_layer
    return model


def check_length(budget: list[Any], layers: int) -> None:
    """ValueError unless the budget has an entry for each layer of the model, whatever layers are attached."""
    if len(budget) != layers:
        raise ValueError(f"budget has {len(budget)} entries for {layers} layers; give one for each")


def freeze(model: PreTrainedModel, train: str = "router") -> list[str]:
    """Make exactly the trainable set require gradients: "router", "lora" or "all"; returns its names.

    The one predicate of the project. UserError for another word, and for routers of a model without a method.
    """
    if train not in TRAINED:
        raise UserError(f"train={train!r} is not one of {', '.join(TRAINED)}")
    if train == "router":
        get_attachment(model)
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
def observe_selections(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
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
def pause_observers(model: PreTrainedModel) -> Iterator[None]:
    """Within the block no attached layer is watched."""
    watched = {method: method.observers for method in attached_methods(model).values()}
    for method in watched:
        method.observers = []
    try:
        yield
    finally:
        for method, observers in watched.items():
            method.observers = observers


@contextmanager
def swap_methods(model: PreTrainedModel, methods: dict[int, AttentionMethod]) -> Iterator[PreTrainedModel]:
    """Within the block other methods stand in the attached layers, on the same backend: controls, probes."""
    modules = {index: module for index, module in attention_modules(model).items() if index in methods}
    before = {index: get_method(module) for index, module in modules.items()}
    replaced = {index: module.focus for index, module in modules.items()}  # with its wrapper, if it has one
    for index, module in modules.items():
        # where the one before it runs: a layer's weights may wait in main memory
        method = methods[index].to(execution_device(before[index], module, model))
        method.backend, method.sparse_from = before[index].backend, before[index].sparse_from
        module.focus = method
    try:
        yield model
    finally:
        for index, module in modules.items():
            module.focus = replaced[index]
