"""One attention layer against full attention: the kernels alone, the whole layer's attention, and a training step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from focus_exp.attention.focus import Focus
from focus_exp.attention.kernels import Kernel
from focus_exp.attention.parts import Tokens, parts
from focus_exp.attention.selection import Selection, Sequence
from focus_exp.attention.sparse import operands
from focus_exp.reporting.rows import SpeedRow
from focus_exp.speed.timing import PeakMemory, Work, alternate, clock
from focus_exp.speed.workload import Groups, Shape, Tensors, full_attention, largest_group, layer_method, pairs_kept

ROUND_SECONDS = 20.0  # where a round takes longer than its share of this, there are fewer rounds
LEAST_REPEATS = 3
MEMORY_ROUNDS = 3


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
    def scaling(self) -> float:
        return self.shape.head_dim**-0.5


@dataclass(frozen=True)
class Contender:
    """Focus with some groups, ready to be timed on one set of tensors."""

    layer: Layer
    groups: Groups
    method: Focus
    selection: Selection
    sequence: Sequence
    kernel: Kernel

    @staticmethod
    def of(layer: Layer, groups: Groups, tensors: Tensors) -> Contender:
        method = layer_method(layer.shape, groups, layer.window, layer.sinks, layer.backend, layer.device)
        selection = groups.selection(tensors.length, layer.device)
        sequence = Sequence.plain(1, tensors.length, layer.device)
        kernel = method.sparse_kernel(tensors.q, selection, sequence, None, 0.0)
        if kernel is None:
            raise RuntimeError(f"no kernel of the sparse path serves {layer.dtype} on {layer.device}")
        return Contender(layer, groups, method, selection, sequence, kernel)

    def attention(self, tensors: Tensors) -> Tensor:
        """What a layer pays: routing and selection, then sort, gather, kernels and merge for the groups to be timed."""
        self.method.route(tensors.hidden, self.sequence)
        return self.attend(tensors, self.selection)

    def attend(self, tensors: Tensors, selection: Selection) -> Tensor:
        return self.method.attend(tensors.q, tensors.k, tensors.v, selection, self.sequence, scaling=self.layer.scaling)

    def kernels(self, tensors: Tensors) -> Work:
        """The exact attention calls alone, on tokens that are gathered already."""
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (tensors.q, tensors.k, tensors.v))
        tokens = Tokens.of(self.selection, self.sequence, self.layer.sinks)
        calls = [
            (part, operands(part, q, k, v))
            for part in parts(tokens, self.kernel, self.layer.window, self.layer.scaling)
        ]

        def work() -> None:
            for part, gathered in calls:
                part.kernel.forward(*gathered, part.meeting, self.layer.scaling, None)

        return work

    def row(self, clock: Any, length: int, **numbers: Any) -> SpeedRow:
        return SpeedRow(
            clock=clock, tokens=length, groups=self.groups.count, assignment=self.groups.assignment,  # type: ignore[arg-type]
            top_k=self.groups.top_k, pair_rule=self.groups.pair_rule, window=self.layer.window,
            layer=str(self.layer.shape),
            dtype=str(self.layer.dtype).removeprefix("torch."), path=self.kernel.name,
            pairs_kept=pairs_kept(self.selection, length, self.layer.window, self.layer.sinks),
            largest_group=largest_group(self.selection), **numbers,
        )  # fmt: skip


@torch.no_grad()
def attention_rows(layer: Layer, length: int, groupings: list[Groups]) -> Iterator[SpeedRow]:
    """Clocks "kernels" and "attention" at one length, all groupings in turn with full attention."""
    memory = PeakMemory(layer.device)
    tensors = Tensors.random(layer.shape, length, layer.dtype, layer.device)
    name, full = full_attention(tensors, layer.device)
    contenders = [Contender.of(layer, groups, tensors) for groups in groupings]
    works = {"full": full}
    for number, contender in enumerate(contenders):
        works[f"{number} attention"] = lambda contender=contender: contender.attention(tensors)  # type: ignore[misc]
        works[f"{number} kernels"] = contender.kernels(tensors)
    repeats = affordable(full, layer)
    seconds = alternate(works, repeats, layer.device)
    works = {key: work for key, work in works.items() if not key.endswith("kernels")}  # they hold gathered tokens
    peaks = peaks_of(works, memory)
    for number, contender in enumerate(contenders):
        for which in ("attention", "kernels"):
            yield contender.row(
                which, length, full_kernel=name, repeats=repeats, full_seconds=seconds["full"],
                focus_seconds=seconds[f"{number} {which}"],
                full_peak_bytes=peaks["full"] if which == "attention" else None,
                focus_peak_bytes=peaks[f"{number} attention"] if which == "attention" else None,
            )  # fmt: skip


def attention_step_rows(layer: Layer, length: int, groupings: list[Groups]) -> Iterator[SpeedRow]:
    """Clock "attention step": forward and backward of q, k, v and, for Focus, of what the router assigned."""
    memory = PeakMemory(layer.device)
    tensors = Tensors.random(layer.shape, length, layer.dtype, layer.device).with_grad()
    name, full = full_attention(tensors, layer.device)
    contenders = [Contender.of(layer, groups, tensors) for groups in groupings]

    def step(forward: Work) -> Work:
        def work() -> None:
            out = forward()
            assert isinstance(out, Tensor)
            torch.autograd.grad(out, (tensors.q, tensors.k, tensors.v), torch.ones_like(out))

        return work

    def focus(contender: Contender) -> Work:
        assignment = contender.groups.selection(length, layer.device).assignment
        assert assignment is not None

        def work() -> None:
            contender.method.route(tensors.hidden, contender.sequence)
            trained = assignment.detach().requires_grad_()
            out = contender.attend(tensors, replace(contender.selection, assignment=trained))
            torch.autograd.grad(out, (tensors.q, tensors.k, tensors.v, trained), torch.ones_like(out))

        return work

    works = {"full": step(full), **{str(n): focus(contender) for n, contender in enumerate(contenders)}}
    repeats = affordable(works["full"], layer)
    seconds = alternate(works, repeats, layer.device)
    peaks = peaks_of(works, memory)
    for number, contender in enumerate(contenders):
        yield contender.row(
            "attention step", length, full_kernel=name, repeats=repeats, full_seconds=seconds["full"],
            focus_seconds=seconds[str(number)], full_peak_bytes=peaks["full"], focus_peak_bytes=peaks[str(number)],
        )  # fmt: skip


def peaks_of(works: dict[str, Work], memory: PeakMemory) -> dict[str, int | None]:
    """The least of some peaks of each work: what an allocator keeps beside what is needed is not the work's."""
    rounds = [{key: memory.of(work) for key, work in works.items()} for _ in range(MEMORY_ROUNDS)]
    return {key: min((found[key] or 0 for found in rounds), default=0) or None for key in works}


def affordable(full: Work, layer: Layer) -> int:
    """How many rounds to take, by how long full attention does."""
    return max(LEAST_REPEATS, min(layer.repeats, int(ROUND_SECONDS / max(clock(full, layer.device), 1e-9))))
