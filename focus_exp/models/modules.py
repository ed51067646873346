"""Where a model's attention layers are, and what is attached to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from focus_exp.attention.method import AttentionMethod
from focus_exp.errors import UserError

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


def decoder_of(model: nn.Module) -> PreTrainedModel:
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


def method_of(module: nn.Module) -> AttentionMethod:
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
    return {i: method_of(m) for i, m in attention_modules(model).items() if hasattr(m, "focus")}
