"""One attention layer against full attention: attention, kernels alone, a training step, other methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.focus import Focus
from focus_exp.attention.kernels import Backend
from focus_exp.attention.registry import build
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence
from focus_exp.errors import first_line
from focus_exp.results.measurement import Measurement
from focus_exp.speed.timing import Work, compare_times, measure_peak, time_in_turns, time_once
from focus_exp.speed.workload import (
    Groups,
    Shape,
    Tensors,
    full_attention,
    full_attention_kernels,
    run_full_step,
)

ROUND_SECONDS = 20.0  # total of a case: slower calls are repeated less often
MIN_REPEATS = 3

Methods = dict[str, dict[str, Any]]  # name -> method in the registry and its options


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
    method: AttentionMethod
    selection: Selection
    sequence: Sequence
    kernel: Backend

    @staticmethod
    def build(layer: Layer, groups: Groups, tensors: Tensors) -> BenchmarkCase:
        method = build_method(
            layer, "focus", groups=groups.count, window=layer.window, sinks=layer.sinks, top_k=groups.top_k,
            pair_rule=groups.pair_rule, train_with="hard",
        )  # fmt: skip
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
        """Run forward and backward to q, k, v and, where the kernel trains a router, the assignment."""
        self.method.route(tensors.hidden, self.sequence)
        assert self.selection.assignment is not None
        assignment = self.selection.assignment.detach().requires_grad_(self.kernel.trains_router)
        out = self.attend(tensors, replace(self.selection, assignment=assignment))
        leaves = (x for x in (tensors.q, tensors.k, tensors.v, assignment) if x.requires_grad)
        torch.autograd.grad(out, tuple(leaves), torch.ones_like(out))

    def attend(self, tensors: Tensors, selection: Selection) -> Tensor:
        return self.method.attend(tensors.q, tensors.k, tensors.v, selection, self.sequence, self.layer.args)


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
        kept = case.method.count_pairs(case.selection, case.sequence).density
        for clock in clocks:
            theirs, ours = (full_peak, peaks[number]) if clock != "kernels" else (None, None)
            settings = {
                "clock": clock, "path": case.kernel.name, **layer.describe(length, case.groups), "full_kernel": name,
                "repeats": repeats,
            }  # fmt: skip
            yield from compare_times(
                "focus", {"seconds": seconds["full"], "peak_bytes": theirs},
                {"seconds": seconds[f"{number} {clock}"], "peak_bytes": ours}, settings, kept,
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
def time_methods(
    layer: Layer, length: int, builders: Mapping[str, Callable[[], AttentionMethod]], hidden: Tensor | None = None
) -> Iterator[Measurement]:
    """Time routing and attention of methods in turn with full attention; a failure has its error.

    Args:
        builders: of the methods by name.
        hidden: `(1, n, E)`, hidden states of held-out tokens, which are repeated, for methods that were fitted; q, k
            and v are random.
    """
    tensors, sequence = layer_tensors(layer, length), Sequence.plain(1, length, layer.device)
    case: dict[str, Any] = {"clock": "attention", **layer.describe(length)}
    if hidden is not None:
        hidden = hidden.repeat(1, -(-length // hidden.shape[1]), 1)[:, :length]
        tensors, case["assignment"] = replace(tensors, hidden=hidden.to(tensors.hidden)), "trained"
    case["full_kernel"], full = full_attention(tensors, layer.device)
    works: dict[str, Work] = {"full": full}
    round_seconds = time_once(full, layer.device)
    methods: dict[str, AttentionMethod] = {}
    errors: dict[str, str] = {}
    for name, build_one in builders.items():
        try:
            method = build_one()
            work = partial(run_method, method, tensors, layer.args)
            round_seconds += time_once(work, layer.device)
            works[name], methods[name] = work, method
        except (RuntimeError, ValueError) as error:
            errors[name] = f"{type(error).__name__}: {first_line(error)}"
    case["repeats"] = layer.limit_repeats(round_seconds)
    seconds = time_in_turns(works, case["repeats"], layer.device)
    for name in builders:
        if name in errors:
            yield from compare_times(name, {}, {}, case | {"method": name, "error": errors[name]})
            continue
        method, kept = methods[name], None
        if hidden is not None:
            kept = method.count_pairs(method.route(tensors.hidden, sequence), sequence).density
        settings = case | {"method": name, "path": method.path}
        yield from compare_times(name, {"seconds": seconds["full"]}, {"seconds": seconds[name]}, settings, kept)


def build_method(layer: Layer, method: str, **options: Any) -> AttentionMethod:
    """Build a layer of a method with hard routing, on the sparse path at every length where it has these."""
    shape = layer.shape
    built = build(method, LayerShape(shape.width, shape.heads, shape.head_dim, 0, shape.kv_heads), **options)
    if isinstance(built, Focus):
        built.hard = True
    built.backend, built.sparse_from = layer.backend, 0
    return built.to(layer.device).eval()


def run_method(method: AttentionMethod, tensors: Tensors, args: AttentionArgs) -> Tensor:
    sequence = Sequence.plain(1, tensors.length, tensors.hidden.device)
    selection = method.route(tensors.hidden, sequence)
    return method.attend(tensors.q, tensors.k, tensors.v, selection, sequence, args)
