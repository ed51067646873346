"""One attention layer against full attention: attention, kernels alone, a training step, decoding, other methods."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.focus import Focus
from focus_exp.attention.kernels import Backend
from focus_exp.attention.kv_cache import GroupedCache
from focus_exp.attention.registry import build
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence
from focus_exp.errors import first_line
from focus_exp.results.measurement import Measurement
from focus_exp.speed.timing import Work, compare_times, measure_peak, time_in_turns, time_once
from focus_exp.speed.workload import (
    Groups,
    Shape,
    Tensors,
    density,
    full_attention,
    full_attention_kernels,
    make_layer,
    run_full_step,
    use_sparse_path,
)

ROUND_SECONDS = 20.0  # total of a case: slower calls are repeated less often
MIN_REPEATS = 3
STEPS = 16  # tokens decoded one after the other in one measurement
STATIC_ROOM = 1024  # tokens that a static cache has room for beyond those that it holds

Methods = dict[str, tuple[str, dict[str, Any]]]  # name -> method in the registry and its options


@dataclass(frozen=True)
class Layer:
    """The attention layer that is timed."""

    shape: Shape
    window: int
    sinks: int
    dtype: torch.dtype
    device: torch.device
    backend: str = "auto"
    repeats: int = 7

    @property
    def args(self) -> AttentionArgs:
        return AttentionArgs(self.shape.head_dim**-0.5)

    def limit_repeats(self, seconds: float) -> int:
        """Return the repeats of a call that takes so many seconds."""
        return max(MIN_REPEATS, min(self.repeats, int(ROUND_SECONDS / max(seconds, 1e-9))))

    def describe(self, length: int, groups: Groups | None = None) -> dict[str, Any]:
        """Return the settings of a measurement that tell its case apart."""
        dtype = str(self.dtype).removeprefix("torch.")
        settings = {"seq_len": length, "layer": str(self.shape), "dtype": dtype}
        if groups is None:
            return settings
        return settings | {
            "groups": groups.count, "assignment": groups.assignment, "top_k": groups.top_k,
            "pair_rule": groups.pair_rule, "window": self.window,
        }  # fmt: skip


@dataclass(frozen=True)
class BenchmarkCase:
    """Focus with hard routing by some groups, ready to be timed."""

    layer: Layer
    groups: Groups
    method: Focus
    selection: Selection
    sequence: Sequence
    kernel: Backend

    @staticmethod
    def build(layer: Layer, groups: Groups, tensors: Tensors) -> BenchmarkCase:
        method = make_layer(layer.shape, groups, layer.window, layer.sinks, layer.backend, layer.device)
        selection = groups.select(tensors.length, layer.device)
        sequence = Sequence.plain(1, tensors.length, layer.device)
        kernels = method.select_kernels(tensors.q, selection, sequence, layer.args)
        if not kernels:
            raise RuntimeError(f"no kernel supports {layer.dtype} on {layer.device}")
        return BenchmarkCase(layer, groups, method, selection, sequence, kernels[0])

    def run(self, tensors: Tensors) -> Tensor:
        """Run what a layer pays for: routing, then attention with the groups that are timed."""
        self.method.route(tensors.hidden, self.sequence)
        return self.attend(tensors, self.selection)

    def run_step(self, tensors: Tensors) -> None:
        """Run forward and backward to q, k, v and the assignment."""
        self.method.route(tensors.hidden, self.sequence)
        assert self.selection.assignment is not None
        assignment = self.selection.assignment.detach().requires_grad_()
        out = self.attend(tensors, replace(self.selection, assignment=assignment))
        torch.autograd.grad(out, (tensors.q, tensors.k, tensors.v, assignment), torch.ones_like(out))

    def attend(self, tensors: Tensors, selection: Selection) -> Tensor:
        return self.method.attend(tensors.q, tensors.k, tensors.v, selection, self.sequence, self.layer.args)

    def compare(self, clock: str, full: dict[str, Any], ours: dict[str, Any], **settings: Any) -> list[Measurement]:
        """Return the measurements of one clock from the numbers of both sides."""
        length = self.sequence.start.shape[1]
        return compare_times(
            "focus", full, ours,
            {"clock": clock, "path": self.kernel.name, **self.layer.describe(length, self.groups), **settings},
            density=density(self.selection, length, self.layer.window, self.layer.sinks),
        )  # fmt: skip


def time_attention(layer: Layer, length: int, groupings: list[Groups], backward: bool = False) -> Iterator[Measurement]:
    """Time all groupings in turn with full attention: with routing and without, or, forward and backward, with it.

    The clocks are "attention" and "kernels", or "attention step".
    """
    clocks = ("attention step",) if backward else ("attention", "kernels")
    with torch.set_grad_enabled(backward):
        tensors = layer_tensors(layer, length, backward)
        name, full = full_attention(tensors, layer.device)
        cases = [BenchmarkCase.build(layer, groups, tensors) for groups in groupings]
        works = {"full": partial(run_full_step, full, tensors) if backward else full}
        for number, case in enumerate(cases):
            works[f"{number} {clocks[0]}"] = partial(case.run_step if backward else case.run, tensors)
            if not backward:
                works[f"{number} kernels"] = partial(case.attend, tensors, case.selection)
        repeats = layer.limit_repeats(time_once(works["full"], layer.device))
        seconds = time_in_turns(works, repeats, layer.device)
        full_peak, *peaks = measure_peaks(layer, length, groupings, name, backward)
    for number, case in enumerate(cases):
        for clock in clocks:
            theirs, ours = (full_peak, peaks[number]) if clock != "kernels" else (None, None)
            yield from case.compare(
                clock, {"seconds": seconds["full"], "peak_bytes": theirs},
                {"seconds": seconds[f"{number} {clock}"], "peak_bytes": ours}, full_kernel=name, repeats=repeats,
            )  # fmt: skip


def measure_peaks(layer: Layer, length: int, groupings: list[Groups], full: str, backward: bool) -> list[int | None]:
    """Return peak CUDA bytes of full attention by its kernel `full`, then of each grouping; None on a CPU."""

    def prepare(case: Groups | str) -> Work:
        tensors = layer_tensors(layer, length, backward)
        if isinstance(case, str):
            kernel = full_attention_kernels(tensors)[case]
            return partial(run_full_step, kernel, tensors) if backward else kernel
        focus = BenchmarkCase.build(layer, case, tensors)
        return partial(focus.run_step if backward else focus.run, tensors)

    cases: list[Groups | str] = [full, *groupings]
    return [measure_peak(partial(prepare, case), layer.device) for case in cases]


def layer_tensors(layer: Layer, length: int, backward: bool = False) -> Tensors:
    tensors = Tensors.random(layer.shape, length, layer.dtype, layer.device)
    return tensors.with_grad() if backward else tensors


@torch.no_grad()
def time_methods(layer: Layer, length: int, methods: Methods) -> Iterator[Measurement]:
    """Time routing and attention of other methods in turn with full attention; a failure has its error."""
    tensors = layer_tensors(layer, length)
    kernel, full = full_attention(tensors, layer.device)
    works: dict[str, Work] = {"full": full}
    round_seconds = time_once(full, layer.device)
    paths: dict[str, str | None] = {}
    errors: dict[str, str] = {}
    for name, (method, options) in methods.items():
        try:
            built = build_method(layer, method, options)
            work = partial(run_method, built, tensors, layer.args)
            round_seconds += time_once(work, layer.device)
            works[name], paths[name] = work, built.path
        except (RuntimeError, ValueError) as error:
            errors[name] = f"{type(error).__name__}: {first_line(error)}"
    repeats = layer.limit_repeats(round_seconds)
    seconds = time_in_turns(works, repeats, layer.device)
    for name in methods:
        settings = {"clock": "attention", **layer.describe(length), "method": name, "error": errors.get(name)}
        if name in errors:
            yield from compare_times(name, {}, {}, settings)
        else:
            settings |= {"full_kernel": kernel, "path": paths[name], "repeats": repeats}
            yield from compare_times(name, {"seconds": seconds["full"]}, {"seconds": seconds[name]}, settings)


@torch.no_grad()
def time_fitted(layer: Layer, length: int, name: str, method: AttentionMethod, hidden: Tensor) -> list[Measurement]:
    """Time routing and attention of a fitted layer in turn with full attention.

    Args:
        hidden: `(1, n, E)`, hidden states of held-out tokens, which are repeated; q, k and v are random.
    """
    tensors = layer_tensors(layer, length)
    hidden = hidden.repeat(1, -(-length // hidden.shape[1]), 1)[:, :length]
    tensors = replace(tensors, hidden=hidden.to(tensors.hidden))
    kernel, full = full_attention(tensors, layer.device)
    works: dict[str, Work] = {"full": full, "ours": partial(run_method, method, tensors, layer.args)}
    repeats = layer.limit_repeats(sum(time_once(work, layer.device) for work in works.values()))
    seconds = time_in_turns(works, repeats, layer.device)
    sequence = Sequence.plain(1, length, layer.device)
    settings = {
        "clock": "attention", **layer.describe(length), "method": name, "assignment": "trained", "full_kernel": kernel,
        "path": method.path, "repeats": repeats,
    }  # fmt: skip
    density = method.count_pairs(method.route(tensors.hidden, sequence), sequence).density
    return compare_times(name, {"seconds": seconds["full"]}, {"seconds": seconds["ours"]}, settings, density)


def build_method(layer: Layer, method: str, options: dict[str, Any]) -> AttentionMethod:
    shape = layer.shape
    built = build(method, LayerShape(shape.width, shape.heads, shape.head_dim, 0, shape.kv_heads), **options)
    return use_sparse_path(built, layer.backend, layer.device)


def run_method(method: AttentionMethod, tensors: Tensors, args: AttentionArgs) -> Tensor:
    sequence = Sequence.plain(1, tensors.length, tensors.hidden.device)
    selection = method.route(tensors.hidden, sequence)
    return method.attend(tensors.q, tensors.k, tensors.v, selection, sequence, args)


@torch.no_grad()
def time_decode(layer: Layer, length: int, groupings: list[Groups]) -> Iterator[Measurement]:
    """Time the clock "decode": attention of one token after `length` others, with a KV cache."""
    tensors = layer_tensors(layer, length)
    new = Tensors.random(layer.shape, STEPS, layer.dtype, layer.device, seed=1)
    cases = [Decoding(layer, groups, tensors, new) for groups in groupings]
    works: dict[str, Work] = {"full": full_steps(tensors, new)}
    works |= {str(number): case.run for number, case in enumerate(cases)}
    seconds = time_in_turns(works, layer.repeats, layer.device)
    token_bytes = 2 * layer.shape.kv_heads * layer.shape.head_dim * tensors.k.element_size()
    for number, case in enumerate(cases):
        settings = {
            "clock": "decode", "full_kernel": "StaticLayer, sdpa", "path": "cached", "repeats": layer.repeats,
        }  # fmt: skip
        yield from compare_times(
            "focus",
            {"seconds": seconds["full"] / STEPS, "peak_bytes": length * token_bytes},
            {"seconds": seconds[str(number)] / STEPS, "peak_bytes": case.cache_bytes},
            layer.describe(length, case.groups) | settings,
            density=mean(case.reads) / (length + 1),
        )  # fmt: skip


class Decoding:
    """A Focus layer with a cache that gets STEPS tokens one after the other."""

    def __init__(self, layer: Layer, groups: Groups, tensors: Tensors, new: Tensors) -> None:
        self.layer, self.groups, self.new = layer, groups, new
        self.method = make_layer(layer.shape, groups, layer.window, layer.sinks, "masked", layer.device)
        selection = groups.select(tensors.length + STEPS, layer.device)
        places = range(tensors.length, tensors.length + STEPS)
        self.step_selections = [slice_selection(selection, slice(place, place + 1)) for place in places]
        self.cache = GroupedCache(layer.window, layer.sinks)
        before = slice_selection(selection, slice(0, tensors.length))
        self.cache.append(tensors.k, tensors.v, before, Sequence.plain(1, tensors.length, layer.device))
        self.cache_bytes = self.cache.bytes
        self.reads: list[int] = []

    def run(self) -> None:
        """Route each token, attend over what it reads, and append it to the cache."""
        for step, selection in enumerate(self.step_selections):
            row = slice(step, step + 1)
            q, k, v = (x[:, :, row] for x in (self.new.q, self.new.k, self.new.v))
            sequence = Sequence(torch.full((1, 1), -self.cache.length, device=q.device))
            self.method.route(self.new.hidden[:, row], sequence)
            self.cache.attend(q, k, v, selection, sequence, self.layer.args)
            self.reads.append(self.cache.pairs_read)
            self.cache.append(k, v, selection, sequence)


def slice_selection(selection: Selection, rows: slice) -> Selection:
    """Return the selection of some tokens."""
    tensors: dict[str, Any] = {n: x[..., rows, :] for n, x in vars(selection).items() if isinstance(x, Tensor)}
    return replace(selection, **tensors)


def full_steps(tensors: Tensors, new: Tensors) -> Work:
    """Return decoding by full attention with a cache of fixed size, written in place."""
    from transformers.cache_utils import StaticLayer  # tests/gpu_clock.py runs without transformers

    cache = StaticLayer(max_cache_len=tensors.length + STATIC_ROOM)
    cache.update(tensors.k, tensors.v)
    places = count(tensors.length + 1)

    def run() -> None:
        for step in range(STEPS):
            q, k, v = (x[:, :, step : step + 1] for x in (new.q, new.k, new.v))
            length = next(places)
            keys, values = (x[:, :, :length] for x in cache.update(k, v))
            F.scaled_dot_product_attention(q, keys, values, enable_gqa=q.shape[1] != k.shape[1])

    return run
