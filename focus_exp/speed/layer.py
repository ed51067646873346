"""One attention layer against full attention: attention, kernels alone, a training step, other methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from focus_exp.attention.base import AttentionMethod, LayerShape
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
    full_work,
    rank_full_attention,
)

ROUND_SECONDS = 20.0  # total of a case: slower calls are repeated less often
MIN_REPEATS = 3
GRAPH = ", graph"  # what the path of a captured CUDA graph ends in
FULL = "full "  # what the name of a kernel of full attention begins with

Methods = dict[str, dict[str, Any]]  # name -> method in the registry and its options


@dataclass(frozen=True)
class Layer:
    """The attention layer that is timed.

    graphs: time it captured in CUDA graphs, too.
    """

    shape: Shape
    window: int
    sinks: int
    dtype: torch.dtype
    device: torch.device
    backend: str = "auto"
    repeats: int = 7
    graphs: bool = False

    @property
    def args(self) -> AttentionArgs:
        return AttentionArgs(self.shape.head_dim**-0.5)

    def limit_repeats(self, seconds: float) -> int:
        """Return the repeats of a call that takes so many seconds."""
        return max(MIN_REPEATS, min(self.repeats, int(ROUND_SECONDS / max(seconds, 1e-9))))


@dataclass
class Case:
    """A method of the layer that is timed.

    Attributes:
        variant: its name in measurements.
        settings: tell it apart from others.
        build: makes the method.
        groups: whose pairs are attended to, next to the method's routing; None for those that it selects.
    """

    layer: Layer
    variant: str
    settings: dict[str, Any]
    build: Callable[[], AttentionMethod]
    groups: Groups | None = None

    @staticmethod
    def from_groups(layer: Layer, method: str, groups: Groups) -> Case:
        """Return the case of hard routing by some groups in place of the method's own."""
        routing = {"top_k": groups.top_k, "pair_rule": groups.pair_rule, "window": layer.window}
        build = partial(build_method, layer, method, groups=groups.count, sinks=layer.sinks, **routing)
        settings = {"groups": groups.count, "assignment": groups.assignment, **routing}
        return Case(layer, method, settings, build, groups)

    @cached_property
    def method(self) -> AttentionMethod:
        return self.build()

    def select(self, tensors: Tensors) -> Selection:
        """Return the pairs that are attended to."""
        if self.groups is None:
            return self.route(tensors)
        return self.groups.select(tensors.length, self.layer.device)

    def route(self, tensors: Tensors) -> Selection:
        return self.method.route(tensors.hidden, plain_sequence(tensors))

    def attend(self, tensors: Tensors, selection: Selection) -> Tensor:
        sequence, args = plain_sequence(tensors), self.layer.args
        return self.method.attend(tensors.q, tensors.k, tensors.v, selection, sequence, args)

    def work(self, clock: str, tensors: Tensors) -> Work:
        """Return what a clock times: "attention", the same without routing ("kernels"), or forward and backward.

        Raises:
            RuntimeError: no kernel takes these groups.
        """
        selection = self.select(tensors)
        if self.groups is not None and not self.find_kernels(tensors, selection):
            raise RuntimeError(f"no kernel supports {self.layer.dtype} on {self.layer.device}")
        run = {"attention": self.run, "kernels": self.attend, "attention step": self.step}[clock]
        return partial(run, tensors, selection)

    def find_kernels(self, tensors: Tensors, selection: Selection) -> list[Backend]:
        return self.method.select_kernels(tensors.q, selection, plain_sequence(tensors), self.layer.args)

    def run(self, tensors: Tensors, selection: Selection) -> Tensor:
        """Run what a layer pays for: routing, then attention."""
        routed = self.route(tensors)
        return self.attend(tensors, routed if self.groups is None else selection)

    def step(self, tensors: Tensors, selection: Selection) -> None:
        """Run forward and backward to q, k, v and, where the kernel trains a router, the assignment."""
        self.route(tensors)
        kernels, leaves = self.find_kernels(tensors, selection), [tensors.q, tensors.k, tensors.v]
        if selection.assignment is not None and kernels and kernels[0].trains_router:
            assignment = selection.assignment.detach().requires_grad_()
            selection, leaves = replace(selection, assignment=assignment), [*leaves, assignment]
        out = self.attend(tensors, selection)
        torch.autograd.grad(out, leaves, torch.ones_like(out))


def time_cases(
    layer: Layer, length: int, cases: list[Case], clocks: tuple[str, ...] = ("attention",), hidden: Tensor | None = None
) -> Iterator[Measurement]:
    """Time cases in turn with full attention; one that fails has its error.

    Args:
        clocks: "attention" and "kernels", or "attention step" alone.
        hidden: `(1, n, E)`, hidden states of held-out tokens, which are repeated, for methods that were fitted; q, k
            and v are random.
    """
    backward, device = "attention step" in clocks, layer.device
    works, errors = dict[str, Work](), dict[str, str]()
    with torch.set_grad_enabled(backward):
        tensors = layer_tensors(layer, length, backward, hidden)
        # as graphs another one may be the fastest
        kernels = rank_full_attention(tensors, device)[: None if layer.graphs else 1]
        makers: dict[str, Callable[[Tensors], Work]] = {f"{FULL}{name}": partial(full_work, name) for name in kernels}
        makers |= {f"{n} {clock}": partial(case.work, clock) for n, case in enumerate(cases) for clock in clocks}
        total = 0.0
        for name, make in makers.items():
            try:
                work = make(tensors)
                if device.type == "cuda":
                    work()  # compiles, which takes longer than what is timed
                total += time_once(work, device)
                works[name] = work
            except (RuntimeError, ValueError) as error:
                errors[name] = f"{type(error).__name__}: {first_line(error)}"
        repeats = layer.limit_repeats(total)

        def prepare(name: str) -> Work:
            return makers[name](layer_tensors(layer, length, backward, hidden))

        peaks = {name: measure_peak(partial(prepare, name), device) for name in works}
        captured = {name + GRAPH: capture(work) for name, work in works.items()} if layer.graphs else {}
        works |= {name: work for name, work in captured.items() if work is not None}
        seconds = time_in_turns(works, repeats, device)
    fastest = min((name for name in seconds if name.startswith(FULL)), key=lambda name: seconds[name])
    full = {"seconds": seconds[fastest], "peak_bytes": peaks[fastest.removesuffix(GRAPH)]}
    shared = {"seq_len": length, "full_kernel": fastest.removeprefix(FULL), "repeats": repeats}
    shared |= {"layer": str(layer.shape), "dtype": str(layer.dtype).removeprefix("torch.")}
    for (number, case), clock in product(enumerate(cases), clocks):
        name, settings = f"{number} {clock}", {"clock": clock, **shared, **case.settings}
        if name in errors:
            yield from compare_times(case.variant, {}, {}, settings | {"error": errors[name]})
            continue
        kept = None
        if case.groups is not None or hidden is not None:
            kept = case.method.count_pairs(case.select(tensors), plain_sequence(tensors)).density
        for way in ("", GRAPH):
            if name + way in seconds:
                ours = {"seconds": seconds[name + way], "peak_bytes": peaks[name]}
                yield from compare_times(
                    case.variant, full, ours, settings | {"path": f"{case.method.path}{way}"}, kept
                )


def plain_sequence(tensors: Tensors) -> Sequence:
    return Sequence.plain(1, tensors.length, tensors.hidden.device)


def capture(work: Work) -> Work | None:
    """Return the replay of a CUDA graph of the work; None where something in it waits for the device."""
    try:
        for _ in range(2):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        return None
    return graph.replay


def layer_tensors(layer: Layer, length: int, backward: bool = False, hidden: Tensor | None = None) -> Tensors:
    tensors = Tensors.random(layer.shape, length, layer.dtype, layer.device)
    if hidden is not None:
        hidden = hidden.repeat(1, -(-length // hidden.shape[1]), 1)[:, :length]
        tensors = replace(tensors, hidden=hidden.to(tensors.hidden))
    return tensors.with_grad() if backward else tensors


def build_method(layer: Layer, method: str, **options: Any) -> AttentionMethod:
    """Build a layer of a method with hard routing, on the sparse path at every length where it has these."""
    shape = layer.shape
    built = build(method, LayerShape(shape.width, shape.heads, shape.head_dim, 0, shape.kv_heads), **options)
    built.hard = True
    built.backend, built.sparse_from = layer.backend, 0
    return built.to(layer.device).eval()
