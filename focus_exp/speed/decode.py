"""One more token after many: a step of one layer and of the whole model, by group and with the library's own caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from focus_exp.attention.kv_cache import GroupedCache
from focus_exp.attention.selection import Selection, Sequence
from focus_exp.models.hf_cache import count_keys_and_bytes
from focus_exp.models.methods import attached_methods, disable_method
from focus_exp.results.measurement import Measurement
from focus_exp.speed.layer import Layer, describe
from focus_exp.speed.model import attention_dtype, attention_name, number_format, setting_of, shape_of
from focus_exp.speed.timing import Work, alternate, compare_times
from focus_exp.speed.workload import Groups, Tensors, largest_group, layer_method
from focus_exp.training.precision import Precision

STEPS = 16  # tokens in one measurement, each after the other
MODEL_STEPS = 8
ROOM = 1024  # tokens that a static cache is made for beyond those that are there


def decode_rows(layer: Layer, length: int, groupings: list[Groups]) -> Iterator[Measurement]:
    """Clock "decode": seconds of a layer's attention for one token after `length` others, its cache kept."""
    with torch.no_grad():
        tensors = Tensors.random(layer.shape, length, layer.dtype, layer.device)
        new = Tensors.random(layer.shape, STEPS, layer.dtype, layer.device, seed=1)
        full = {"DynamicLayer, sdpa": dynamic_steps(tensors, new), "StaticLayer, sdpa": static_steps(tensors, new)}
        contenders = [Decoding(layer, groups, tensors, new) for groups in groupings]
        works: dict[str, Work] = {**full, **{str(number): each.steps for number, each in enumerate(contenders)}}
        seconds = alternate(works, layer.repeats, layer.device)
    name = min(full, key=lambda name: seconds[name])
    token_bytes = 2 * layer.shape.kv_heads * layer.shape.head_dim * tensors.k.element_size()
    for number, contender in enumerate(contenders):
        read = mean(contender.reads)
        settings = {"clock": "decode", "full_kernel": name, "path": "cached", "repeats": layer.repeats}
        full_side = {
            "seconds": seconds[name] / STEPS,
            "peak_bytes": length * token_bytes,
            "bytes_read": (length + 1) * token_bytes,
        }
        ours = {
            "seconds": seconds[str(number)] / STEPS,
            "peak_bytes": contender.held,
            "bytes_read": round(read * token_bytes),
        }
        yield from compare_times(
            "focus", full_side, ours, describe(layer, contender.groups, length) | settings,
            density=read / (length + 1), largest_group_fraction=largest_group(contender.selection),
        )  # fmt: skip


class Decoding:
    """A Focus layer that has read some tokens and now gets one after the other."""

    def __init__(
        self, layer: Layer, groups: Groups, tensors: Tensors, new: Tensors, selection: Selection | None = None
    ) -> None:
        """`selection`: of all tokens, in place of what `groups` make of them."""
        self.layer, self.groups, self.new = layer, groups, new
        self.method = layer_method(layer.shape, groups, layer.window, layer.sinks, "masked", layer.device)
        self.selection = selection or groups.selection(tensors.length + STEPS, layer.device)
        places = range(tensors.length, tensors.length + STEPS)
        self.selected = [part(self.selection, slice(place, place + 1)) for place in places]
        self.cache = GroupedCache(layer.window, layer.sinks)
        before = part(self.selection, slice(0, tensors.length))
        self.cache.append(tensors.k, tensors.v, before, Sequence.plain(1, tensors.length, layer.device))
        self.held = self.cache.bytes
        self.reads: list[int] = []

    def steps(self) -> None:
        """STEPS tokens: routing, attention over what each reads, and its place in the cache."""
        for step, selection in enumerate(self.selected):
            one = slice(step, step + 1)
            q, k, v = (x[:, :, one] for x in (self.new.q, self.new.k, self.new.v))
            start = torch.full((1, 1), -self.cache.length, device=q.device)
            sequence = Sequence(start)
            self.method.route(self.new.hidden[:, one], sequence)
            self.cache.attend(q, k, v, selection, sequence, self.layer.args)
            self.reads.append(self.cache.pairs_read)
            self.cache.append(k, v, selection, sequence)


def part(selection: Selection, rows: slice) -> Selection:
    """Of these tokens alone."""
    parts: dict[str, Any] = {
        name: x[..., rows] if name == "group" else x[..., rows, :]
        for name, x in vars(selection).items() if isinstance(x, Tensor)
    }  # fmt: skip
    return replace(selection, **parts)


def dynamic_steps(tensors: Tensors, new: Tensors) -> Work:
    cache = DynamicLayer()
    cache.update(tensors.k, tensors.v)
    return partial(full_steps, lambda k, v: cache.update(k, v), new)


def static_steps(tensors: Tensors, new: Tensors) -> Work:
    """A cache of fixed size, written in place; attention over what is filled of it."""
    cache = StaticLayer(max_cache_len=tensors.length + ROOM)
    cache.update(tensors.k, tensors.v)
    places = count(tensors.length)

    def update(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = cache.update(k, v)
        length = next(places) + 1
        return keys[:, :, :length], values[:, :, :length]

    return partial(full_steps, update, new)


def full_steps(update: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], new: Tensors) -> None:
    for step in range(STEPS):
        one = slice(step, step + 1)
        keys, values = update(new.k[:, :, one], new.v[:, :, one])
        F.scaled_dot_product_attention(new.q[:, :, one], keys, values, enable_gqa=new.q.shape[1] != keys.shape[1])


def decode_model_row(model: PreTrainedModel, tokens: Tensor, precision: Precision, repeats: int) -> list[Measurement]:
    """Clock "decode model": seconds of the whole model for one token after `tokens` `[1, T]`."""
    focus = Continuation(model, tokens, precision)
    with disable_method(model):
        full = Continuation(model, tokens, precision)

    def full_steps() -> None:
        with disable_method(model):
            full.steps()

    seconds = alternate({"full": full_steps, "focus": focus.steps}, repeats, precision.device)
    shape = shape_of(model)
    token_bytes = 2 * shape.kv_heads * shape.head_dim * attention_dtype(model, precision).itemsize
    (full_read, full_held), (read, held) = full.read_and_held(), focus.read_and_held()
    settings = {
        "clock": "decode model", "seq_len": tokens.shape[1], "repeats": repeats, "path": "cached",
        "full_kernel": f"DynamicCache, {attention_name(model)}", **setting_of(model), **number_format(model, precision),
    }  # fmt: skip
    full_side = {
        "seconds": seconds["full"] / MODEL_STEPS,
        "peak_bytes": full_held,
        "bytes_read": full_read * token_bytes,
    }
    ours = {"seconds": seconds["focus"] / MODEL_STEPS, "peak_bytes": held, "bytes_read": read * token_bytes}
    return compare_times("focus", full_side, ours, settings, density=read / full_read)


class Continuation:
    """A model that has read a text and writes on, greedily."""

    def __init__(self, model: PreTrainedModel, tokens: Tensor, precision: Precision) -> None:
        self.model, self.precision = model, precision
        self.cache: Cache | None = None
        self.token = tokens
        self.step()

    @torch.no_grad()
    def step(self) -> None:
        with self.precision.context():
            out = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache, self.token = out.past_key_values, out.logits[:, -1:].argmax(-1)

    def steps(self) -> None:
        for _ in range(MODEL_STEPS):
            self.step()

    def read_and_held(self) -> tuple[int, int]:
        """Keys that the last step read and bytes of those that are kept with their values, over the attached layers."""
        assert self.cache is not None
        attached = attached_methods(self.model)
        layers = [count_keys_and_bytes(layer) for index, layer in enumerate(self.cache.layers) if index in attached]
        return sum(read for read, _ in layers), sum(held for _, held in layers)
