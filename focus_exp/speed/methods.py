"""One layer of other methods against full attention, as each is computed here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.registry import build
from focus_exp.attention.selection import AttentionArgs, Sequence
from focus_exp.errors import first_line
from focus_exp.results.measurement import Measurement
from focus_exp.speed.layer import Layer, affordable
from focus_exp.speed.timing import Work, alternate, clock, compare_times
from focus_exp.speed.workload import Tensors, full_attention, on_sparse_path

# name -> the method as the registry knows it, and its options
Methods = dict[str, tuple[str, dict[str, Any]]]


@torch.no_grad()
def method_rows(layer: Layer, length: int, methods: Methods) -> Iterator[Measurement]:
    """Routing and attention of every method, all in turn with full attention; one that fails says why."""
    tensors = Tensors.random(layer.shape, length, layer.dtype, layer.device)
    kernel, full = full_attention(tensors, layer.device)
    works: dict[str, Work] = {"full": full}
    round_seconds = clock(full, layer.device)
    built: dict[str, AttentionMethod] = {}
    errors: dict[str, str] = {}
    for name, (method, options) in methods.items():
        try:
            built[name] = layer_of(layer, method, options)
            work = partial(attention, built[name], tensors, layer.args)
            round_seconds += clock(work, layer.device)
            works[name] = work
        except (RuntimeError, ValueError) as error:
            errors[name] = f"{type(error).__name__}: {first_line(error)}"
    repeats = affordable(round_seconds, layer)
    seconds = alternate(works, repeats, layer.device)
    for name in methods:
        settings: dict[str, Any] = {
            "clock": "attention", "seq_len": length, "layer": str(layer.shape),
            "dtype": str(layer.dtype).removeprefix("torch."), "method": name, "error": errors.get(name),
        }  # fmt: skip
        if name in works:
            settings |= {"full_kernel": kernel, "path": built[name].path, "repeats": repeats}
        full_side, ours = ({"seconds": seconds["full" if side == "full" else name]} if name in works else {}
                           for side in ("full", "ours"))  # fmt: skip
        yield from compare_times(name, full_side, ours, settings)


def layer_of(layer: Layer, method: str, options: dict[str, Any]) -> AttentionMethod:
    shape = layer.shape
    found = build(method, LayerShape(shape.width, shape.heads, shape.head_dim, 0, shape.kv_heads), **options)
    return on_sparse_path(found, layer.backend, layer.device)


def attention(method: AttentionMethod, tensors: Tensors, args: AttentionArgs) -> Tensor:
    sequence = Sequence.plain(1, tensors.length, tensors.hidden.device)
    selection = method.route(tensors.hidden, sequence)
    return method.attend(tensors.q, tensors.k, tensors.v, selection, sequence, args)
