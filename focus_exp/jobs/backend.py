"""Choose the kernel of hard routing on this device, and the length from which backend=auto uses it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from focus_exp.assets import cache_root
from focus_exp.attention.focus_dual import FocusDual
from focus_exp.attention.kernels import KERNELS, KernelRequirements, select_backend, unsupported_reasons
from focus_exp.config import Config, get_method_options
from focus_exp.errors import UserError
from focus_exp.models.methods import attached_methods, find_routers, set_routing
from focus_exp.results.environment import cpu_name
from focus_exp.speed.break_even import LENGTHS, REPEATS, BreakEven, break_even
from focus_exp.speed.layer import Layer
from focus_exp.speed.model import model_shape
from focus_exp.speed.timing import device_name
from focus_exp.training.precision import Precision, choose_device


def check_backend(model: PreTrainedModel, backend: str) -> None:
    """UserError where the kernel that is asked for cannot serve this model on this device."""
    if backend in KERNELS and (reason := KERNELS[backend].unsupported_reason(demand_of(model, model.dtype))):
        raise UserError(f"attention.backend={backend} cannot serve here: it {reason}; use auto")


def set_backend(model: PreTrainedModel, config: Config, precision: Precision, longest: int) -> BreakEven | None:
    """Let the attached methods use `attention.backend`; with auto, from where it is measured to pay.

    `longest` sequence to come: below the shortest length that would be measured there is nothing to choose.
    """
    attention = config.attention
    set_routing(model, hard=False, backend=attention.backend)
    options = typical_options(model, config)
    if attention.backend != "auto" or options is None or longest < LENGTHS[0]:
        return None
    dtype = torch.bfloat16 if precision.autocast else model.dtype
    if select_backend(demand_of(model, dtype)) is None:
        return None  # every length takes the masked path
    layer = Layer(model_shape(model), attention.window, options["sinks"], dtype, precision.device, repeats=REPEATS)
    device = measured_device(precision.device)
    found = break_even(layer, attention.method, options, device, cache_root(config.cache_dir))
    for method in attached_methods(model).values():
        method.sparse_from = found.sparse_from
    print(found.sentence())
    return found


def typical_options(model: PreTrainedModel, config: Config) -> dict[str, Any] | None:
    """Of a layer that stands for all that have groups, whose heads read as many of them on average; None without."""
    if find_routers(model):
        return get_method_options(config.attention)
    duals = [m for m in attached_methods(model).values() if isinstance(m, FocusDual) and m.is_routed]
    reach = [k for method in duals for k in method.groups_per_head]
    if not reach:
        return None
    return get_method_options(config.attention) | {"groups_per_layer": None, "top_k": max(1, round(fmean(reach)))}


def measured_device(device: torch.device) -> str:
    """The device as the cache knows it: machines of several kinds may share one home folder."""
    name = device_name(device)
    return name if device.type == "cuda" else f"{name} of {cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"


def dense_training(model: PreTrainedModel, config: Config) -> str | None:
    """Why training with hard groups computes all pairs here, and what to do; None where it need not."""
    hard = config.has_router and config.focus.train_with == "hard" and config.focus.backend != "masked"
    dropped = dict(attention_dropout(model.config.get_text_config().to_dict()))
    if not (hard and dropped and config.recipe.trains("all")):  # a frozen base drops nothing
        return None
    return (
        "attention.train_with=hard costs as much as full attention where everything is trained: the model drops "
        f"attention ({', '.join(f'{name}={rate}' for name, rate in dropped.items())}), which only the masked path can; "
        f"to train on the sparse path add {' '.join(f'++model.architecture.{name}=0' for name in dropped)}"
    )


def attention_dropout(fields: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The rates above 0 at which a transformers config, as a dict, drops attention weights; nested fields dotted."""
    for key, value in fields.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from attention_dropout(value, f"{name}.")
        elif "drop" in name and ("attn" in name or "attention" in name) and isinstance(value, float) and value > 0:
            yield name, value


def list_kernels(config: Config) -> None:
    """Every kernel, whether it serves on this device, and if not, why not."""
    device = choose_device(config.trainer.accelerator)
    print(f"kernels of the sparse path on {device_name(device)}, head size 64, in the order in which auto takes them:")
    for dtype in (torch.bfloat16, torch.float32):
        print(f"  {str(dtype).removeprefix('torch.')}")
        for name, reason in unsupported_reasons(KernelRequirements(device.type, dtype, 64)).items():
            note = " (the slow twin that the others are tested against; never taken by auto)" if name == "math" else ""
            print(f"    {name:<12} {'available' + note if reason is None else 'not here: it ' + reason}")
    print("what triton reached on an H200: runs/records/gpu; what it should reach: python -m focus_exp.speed.computed")
    folder = cache_root(config.cache_dir) / "break_even"
    print(f"break-even lengths measured so far, one file each in {folder}; without its file one is measured again:")
    found = [BreakEven.read(path) for path in sorted(folder.glob("*.json"))]
    print(
        "\n".join(f"  {each.sentence()}" for each in found if each)
        or "  none; the first run that needs one measures it"
    )


def demand_of(model: PreTrainedModel, dtype: torch.dtype) -> KernelRequirements:
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return KernelRequirements(model.device.type, dtype, model_shape(model).head_dim, softcap)
