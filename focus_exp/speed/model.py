"""The whole model with Focus against the whole model without: prefill, and one training step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.selection import PairCounts, Selection, Sequence
from focus_exp.models.methods import (
    attached_methods,
    attention_modules,
    disable_method,
    find_routers,
    freeze,
    observe_selections,
)
from focus_exp.results.measurement import Measurement
from focus_exp.speed.timing import PeakMemory, Work, alternate, clock, compare_times, synchronize
from focus_exp.speed.workload import Shape, largest_group
from focus_exp.training.precision import Precision

STEP_LEARNING_RATE = 1e-5


@dataclass
class Attended:
    """Seconds spent in attention layers, their projections left out."""

    seconds: float = 0.0


@torch.no_grad()
def prefill(model: PreTrainedModel, tokens: Tensor, precision: Precision) -> None:
    with precision.context():
        model(input_ids=tokens, use_cache=False, logits_to_keep=1)


def time_prefill(
    model: PreTrainedModel, tokens: Tensor, precision: Precision, repeats: int, variant: str, **settings: Any
) -> list[Measurement]:
    """Time logits of the token after `tokens` (1, T): what is attached, with hard routing, in turn with `disabled`."""
    memory = PeakMemory(precision.device)

    attached = partial(prefill, model, tokens, precision)

    def full() -> None:
        with disable_method(model):
            attached()

    works: dict[str, Work] = {"full": full, "ours": attached}
    seconds = alternate(works, repeats, precision.device)
    sides = {name: {"seconds": seconds[name], "peak_bytes": memory.of(work)} for name, work in works.items()}
    for name, work in works.items():
        with attention_clock(model) as attended:
            whole = clock(work, precision.device)
        sides[name]["attention_seconds"] = attended.seconds / whole * seconds[name]
    facts, fractions = describe_pass(model, tokens, precision)
    settings = {"clock": "prefill", "seq_len": tokens.shape[1], "repeats": repeats, **settings, **facts}
    return compare_times(variant, sides["full"], sides["ours"], settings, **fractions)


def prefill_row(model: PreTrainedModel, tokens: Tensor, precision: Precision, repeats: int) -> list[Measurement]:
    """Clock "prefill" of Focus."""
    return time_prefill(model, tokens, precision, repeats, "focus", **setting_of(model))


def method_prefill_row(
    name: str, model: PreTrainedModel, tokens: Tensor, precision: Precision, repeats: int
) -> list[Measurement]:
    """Clock "prefill" of the method that is attached to the model, whatever it is."""
    return time_prefill(model, tokens, precision, repeats, name, method=name)


def model_step_row(model: PreTrainedModel, tokens: Tensor, precision: Precision) -> list[Measurement]:
    """Clock "model step": loss, backward and update of all weights, with gradient checkpointing, once each.

    Focus trains with hard groups, its routers included; without it the same weights train under full attention.
    """
    freeze(model, "all")
    methods = list(find_routers(model).values())
    before = [m.train_with for m in methods]
    for method in methods:
        method.train_with = "hard"
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    memory = PeakMemory(precision.device)

    def focus() -> None:
        with precision.context():
            logits = model(input_ids=tokens, use_cache=False).logits
            F.cross_entropy(logits[0, :-1].float(), tokens[0, 1:]).backward()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.grad is not None], STEP_LEARNING_RATE)
        optimizer.step()
        model.zero_grad(set_to_none=True)

    def full() -> None:
        with disable_method(model):
            focus()

    try:
        # so long that warming up would double what it costs
        peaks, seconds = {}, {}
        for name, work in {"full": full, "focus": focus}.items():
            began = time.perf_counter()
            peaks[name] = memory.of(work)
            seconds[name] = time.perf_counter() - began
    finally:
        model.load_state_dict(state)
        for method, train_with in zip(methods, before, strict=True):
            method.train_with = train_with
        model.activation_checkpointing_disable()
        model.eval()
        freeze(model, "router")

    facts, fractions = describe_pass(model, tokens, precision)
    settings = {"clock": "model step", "seq_len": tokens.shape[1], "repeats": 1, **setting_of(model), **facts}
    full_side, ours = ({"seconds": seconds[name], "peak_bytes": peaks[name]} for name in ("full", "focus"))
    return compare_times("focus", full_side, ours, settings, **fractions)


def describe_pass(
    model: PreTrainedModel, tokens: Tensor, precision: Precision
) -> tuple[dict[str, Any], dict[str, float | None]]:
    """Return the shapes and kernels of a pass over these tokens, and its density and largest group."""
    counts: list[PairCounts] = []
    largest: list[float] = []

    def observe(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        counts.append(method.count_pairs(selection, sequence))
        if selection.key_groups is not None:
            largest.append(largest_group(selection))

    with observe_selections(model, observe):
        prefill(model, tokens, precision)
    facts = {
        **number_format(model, precision),
        "full_kernel": attention_name(model),
        "path": ", ".join(sorted({m.path or "" for m in attached_methods(model).values()})),
    }
    density = mean(pairs.density for pairs in counts)
    return facts, {"density": density, "largest_group_fraction": mean(largest) if largest else None}


def setting_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return the settings of the Focus router that is attached to the model."""
    method = next(iter(find_routers(model).values()))
    return {
        "groups": method.groups,
        "top_k": method.top_k,
        "pair_rule": method.pair_rule,
        "window": method.window,
        "assignment": "trained",
    }


def number_format(model: PreTrainedModel, precision: Precision) -> dict[str, Any]:
    """Return shape and precision of a model as settings of its measurements."""
    dtype = "bf16-mixed" if precision.autocast else str(model.dtype).removeprefix("torch.")
    return {"layer": str(shape_of(model)), "dtype": dtype}


def attention_dtype(model: PreTrainedModel, precision: Precision) -> torch.dtype:
    """What keys and values are computed in."""
    return torch.bfloat16 if precision.autocast else model.dtype


def attention_name(model: PreTrainedModel) -> str:
    """The base model's own attention implementation."""
    with disable_method(model):
        return str(model.config._attn_implementation)


@contextmanager
def attention_clock(model: PreTrainedModel) -> Iterator[Attended]:
    """Within the block the seconds between a layer's entering its attention and leaving it, projections left out."""
    attended, handles = Attended(), []
    started: dict[nn.Module, float] = {}
    device = model.device

    def enter(module: nn.Module, *_: Any) -> None:
        synchronize(device)
        started[module] = time.perf_counter()

    def leave(sign: int) -> Any:
        def hook(module: nn.Module, *_: Any) -> None:
            synchronize(device)
            attended.seconds += sign * (time.perf_counter() - started.pop(module))

        return hook

    for layer in attention_modules(model).values():
        timed = {layer: 1, **{m: -1 for m in layer.children() if not isinstance(m, AttentionMethod)}}
        for module, sign in timed.items():
            # before the hook that routes
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(leave(sign)))
    try:
        yield attended
    finally:
        for handle in handles:
            handle.remove()


def shape_of(model: PreTrainedModel) -> Shape:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(config.hidden_size, heads, getattr(config, "num_key_value_heads", None) or heads, head_dim)
