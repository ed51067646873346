"""One attention layer against full attention: the kernels alone, the whole layer's attention, and a training step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from focus_exp.attention.focus import Focus
from focus_exp.attention.kernels import Backend, Kernel
from focus_exp.attention.kernels.fused import Triton
from focus_exp.attention.kernels.layout import Plan
from focus_exp.attention.parts import Part, Tokens, pairs_computed, parts, rows_of
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence
from focus_exp.attention.side_by_side import side_by_side
from focus_exp.attention.sparse import blocks_of
from focus_exp.results.measurement import Measurement
from focus_exp.speed.timing import PeakMemory, Work, alternate, clock, compare_times, in_fresh_process
from focus_exp.speed.workload import (
    Groups,
    Shape,
    Tensors,
    full_attention,
    full_attention_kernels,
    full_step,
    largest_group,
    layer_method,
    pairs_kept,
)

ROUND_SECONDS = 20.0  # where a round takes longer than its share of this, there are fewer rounds
LEAST_REPEATS = 3
MEMORY_FROM = 4096  # tokens below which a layer holds too little to be told from noise


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


@dataclass(frozen=True)
class Contender:
    """Focus with some groups, ready to be timed on one set of tensors."""

    layer: Layer
    groups: Groups
    method: Focus
    selection: Selection
    sequence: Sequence
    kernel: Backend

    @staticmethod
    def of(layer: Layer, groups: Groups, tensors: Tensors) -> Contender:
        method = layer_method(layer.shape, groups, layer.window, layer.sinks, layer.backend, layer.device)
        selection = groups.selection(tensors.length, layer.device)
        sequence = Sequence.plain(1, tensors.length, layer.device)
        kernel = method.select_kernel(tensors.q, selection, sequence, layer.args)
        if kernel is None:
            raise RuntimeError(f"no kernel of the sparse path serves {layer.dtype} on {layer.device}")
        return Contender(layer, groups, method, selection, sequence, kernel)

    def attention(self, tensors: Tensors) -> Tensor:
        """What a layer pays: routing and selection, then sort, gather, kernels and merge for the groups to be timed."""
        self.method.route(tensors.hidden, self.sequence)
        return self.attend(tensors, self.selection)

    def step(self, tensors: Tensors) -> None:
        """Forward and backward, down to q, k, v and the assignment."""
        self.method.route(tensors.hidden, self.sequence)
        assert self.selection.assignment is not None
        trained = self.selection.assignment.detach().requires_grad_()
        out = self.attend(tensors, replace(self.selection, assignment=trained))
        torch.autograd.grad(out, (tensors.q, tensors.k, tensors.v, trained), torch.ones_like(out))

    def attend(self, tensors: Tensors, selection: Selection) -> Tensor:
        return self.method.attend(tensors.q, tensors.k, tensors.v, selection, self.sequence, self.layer.args)

    def kernels(self, tensors: Tensors) -> Work:
        """The exact attention calls alone, with lists made, or tokens gathered for what reads no lists."""
        window, sinks, args = self.layer.window, self.layer.sinks, self.layer.args
        if isinstance(self.kernel, Triton):
            plan = Plan.of(self.selection, self.sequence, window, sinks)
            return partial(self.kernel.run_kernels, tensors.q, tensors.k, tensors.v, plan, args)
        assert isinstance(self.kernel, Kernel)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (tensors.q, tensors.k, tensors.v))
        tokens, kernel = Tokens.of(self.selection, self.sequence, sinks), self.kernel

        def gathered(part: Part) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
            keys, values = rows_of(k, part.keys), rows_of(v, part.keys)
            return [
                (asking[:, some], keys[:, seen], values[:, seen], drop)
                for queries, calls in part.blocks
                for asking in [blocks_of(q, queries, len(keys))]
                for some, seen, drop in calls
            ]

        def computed(calls: list[tuple[Tensor, Tensor, Tensor, Tensor | None]]) -> None:
            for call in calls:
                kernel.forward(*call, args)

        laid_out = [gathered(part) for part in chain.from_iterable(parts(tokens, window))]

        def work() -> None:
            for _ in side_by_side(computed, laid_out, q.device):
                pass

        return work

    def compare_times(
        self, clock: str, length: int, full: dict[str, Any], ours: dict[str, Any], **settings: Any
    ) -> list[Measurement]:
        """Return the measurements of one clock; full, ours: the numbers of both sides."""
        return compare_times(
            "focus", full, ours, {"clock": clock, "path": self.kernel.name, **describe(self.layer, self.groups, length),
            **settings},
            density=pairs_kept(self.selection, length, self.layer.window, self.layer.sinks),
            computed_density=self.pairs_computed, largest_group_fraction=largest_group(self.selection),
        )  # fmt: skip

    @cached_property  # several clocks report it, and it lays all blocks out
    def pairs_computed(self) -> float | None:
        """Share of the causal pairs that the kernel's blocks compute, where those are known."""
        length = self.sequence.start.shape[1]
        layout = self.selection, self.sequence, self.layer.window, self.layer.sinks
        if self.kernel.name == "triton":
            return Plan.of(*layout).pairs_in_tiles() / (length * (length + 1) / 2)
        return pairs_computed(*layout) if isinstance(self.kernel, Kernel) else None


def describe(layer: Layer, groups: Groups, length: int) -> dict[str, Any]:
    """Return the settings of a layer's measurements that tell the case apart."""
    return {
        "seq_len": length, "groups": groups.count, "assignment": groups.assignment, "top_k": groups.top_k,
        "pair_rule": groups.pair_rule, "window": layer.window, "layer": str(layer.shape),
        "dtype": str(layer.dtype).removeprefix("torch."),
    }  # fmt: skip


def attention_rows(layer: Layer, length: int, groupings: list[Groups]) -> Iterator[Measurement]:
    """Clocks "kernels" and "attention" at one length, all groupings in turn with full attention."""
    with torch.no_grad():
        tensors = Tensors.random(layer.shape, length, layer.dtype, layer.device)
        name, full = full_attention(tensors, layer.device)
        contenders = [Contender.of(layer, groups, tensors) for groups in groupings]
        works = {"full": full}
        for number, contender in enumerate(contenders):
            works[f"{number} attention"] = partial(contender.attention, tensors)
            works[f"{number} kernels"] = contender.kernels(tensors)
        repeats = affordable(clock(full, layer.device), layer)
        seconds = alternate(works, repeats, layer.device)
        peaks = peaks_of(layer, length, groupings, name, backward=False)
    for number, contender in enumerate(contenders):
        for which in ("attention", "kernels"):
            full_peak, peak = (peaks[0], peaks[1 + number]) if which == "attention" else (None, None)
            yield from contender.compare_times(
                which, length, {"seconds": seconds["full"], "peak_bytes": full_peak},
                {"seconds": seconds[f"{number} {which}"], "peak_bytes": peak}, full_kernel=name, repeats=repeats,
            )  # fmt: skip


def attention_step_rows(layer: Layer, length: int, groupings: list[Groups]) -> Iterator[Measurement]:
    """Clock "attention step": forward and backward of q, k, v and, for Focus, of what the router assigned."""
    tensors = Tensors.random(layer.shape, length, layer.dtype, layer.device).with_grad()
    name, full = full_attention(tensors, layer.device)
    contenders = [Contender.of(layer, groups, tensors) for groups in groupings]
    works = {"full": partial(full_step, full, tensors)}
    works |= {str(number): partial(contender.step, tensors) for number, contender in enumerate(contenders)}
    repeats = affordable(clock(works["full"], layer.device), layer)
    seconds = alternate(works, repeats, layer.device)
    peaks = peaks_of(layer, length, groupings, name, backward=True)
    for number, contender in enumerate(contenders):
        yield from contender.compare_times(
            "attention step", length, {"seconds": seconds["full"], "peak_bytes": peaks[0]},
            {"seconds": seconds[str(number)], "peak_bytes": peaks[1 + number]}, full_kernel=name, repeats=repeats,
        )  # fmt: skip


def peaks_of(layer: Layer, length: int, groupings: list[Groups], full: str, backward: bool) -> list[int | None]:
    """Peak bytes of full attention by its kernel `full` and of Focus with each grouping; unknown where it is too
    little to be told."""
    if length < MEMORY_FROM:
        return [None] * (1 + len(groupings))
    # a CPU's allocator keeps what others have freed, and hands out the pieces
    measure = partial(in_fresh_process, peak) if layer.device.type == "cpu" else peak
    contenders: list[Groups | str] = [full, *groupings]
    return [measure(layer, length, works, backward) for works in contenders]


def peak(layer: Layer, length: int, works: Groups | str, backward: bool) -> int | None:
    """Peak bytes of Focus with these groups, or of full attention by this kernel; inputs included."""
    with torch.set_grad_enabled(backward):
        # what libraries keep for good once they have run is not the work's
        work_on(layer, random_tensors(layer, min(length, MEMORY_FROM), backward), works, backward)()
        memory = PeakMemory(layer.device)
        tensors = random_tensors(layer, length, backward)
        return memory.of(work_on(layer, tensors, works, backward))


def random_tensors(layer: Layer, length: int, backward: bool) -> Tensors:
    tensors = Tensors.random(layer.shape, length, layer.dtype, layer.device)
    return tensors.with_grad() if backward else tensors


def work_on(layer: Layer, tensors: Tensors, works: Groups | str, backward: bool) -> Work:
    if isinstance(works, str):
        full = full_attention_kernels(tensors)[works]
        return partial(full_step, full, tensors) if backward else full
    contender = Contender.of(layer, works, tensors)
    return partial(contender.step if backward else contender.attention, tensors)


def affordable(seconds: float, layer: Layer) -> int:
    """How many rounds to take, where one takes so long."""
    return max(LEAST_REPEATS, min(layer.repeats, int(ROUND_SECONDS / max(seconds, 1e-9))))
