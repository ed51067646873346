"""The contract every attention method fits: one module per layer with two faces, `route` and `attend`.

A method of one's own, here or outside of the package, is one Python file with a subclass of `AttentionMethod`
(`route` sees the hidden states and selects, `attend` returns the output) and the dataclass of its options, and one
YAML file that names the class, `defaults: [my_methods.Mean, _self_]`, as conf/attention/mean.yaml here or in a folder
of one's own: `PYTHONPATH=. python -m focus_exp --config-dir=conf attention=mean`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from focus_exp.attention.blocked import blocked_attention, full_attention
from focus_exp.attention.kernels import KERNELS, Backend, CannotServe, Demand, choose
from focus_exp.attention.options import Options
from focus_exp.attention.selection import (
    AttentionArgs,
    PairCounts,
    Selection,
    Sequence,
    count_pairs,
    mask_of,
    nothing_shared,
)
from focus_exp.attention.sparse import sparse_attention

# masked: all pairs are computed and the dropped ones masked; a kernel's name: the sparse path on that kernel
BACKENDS = ("auto", "masked", *KERNELS)
# tokens from which "auto" takes the sparse path where nobody has measured it; the masked path is the same function
SPARSE_FROM = 2048

SERIALS = count()

# called with (layer index, method, selection, sequence) whenever a layer runs
Observer = Callable[[int, "AttentionMethod", Selection, Sequence], None]


@dataclass(frozen=True)
class LayerShape:
    """What a method must know of the layer it joins: model width E, query heads H, head size D, position, and the
    key/value heads G, None where each query head has its own."""

    width: int
    heads: int
    head_dim: int
    index: int
    kv_heads: int | None = None


# those that have declared a name
METHODS: dict[str, type[AttentionMethod]] = {}


class AttentionMethod(nn.Module):
    """Sees hidden states `[B, T, E]` in `route`, replaces the layer's attention in `attend`.

    A method declares in its class statement the dataclass of its options, which its constructor takes beside the
    layer's shape, and, if it is part of this package, its name:

        class Mean(AttentionMethod, options=MeanOptions):
            def __init__(self, shape: LayerShape, options: MeanOptions) -> None:

    `together` is set where several processes train: it gives the batches, of those computed at the same time, whose
    parts the processes hold, from this one's part, and which of them is this one's.
    """

    name: ClassVar[str]  # that it has declared, else its class's
    causal: ClassVar[bool] = True
    options: ClassVar[type[Options]] = Options
    fitting: ClassVar[type[Options] | None] = None  # options of attention.* beside its own: how it is fitted

    def __init_subclass__(cls, *, name: str | None = None, options: type[Options] | None = None) -> None:
        super().__init_subclass__()
        cls.name = name or cls.__name__
        cls.options = options or cls.options
        if name is not None:
            METHODS[name] = cls

    @classmethod
    def of(cls, shape: LayerShape, **options: Any) -> Self:
        """For one layer, with its options by name; ValueError for one that it has not, or a value that it refuses."""
        make: Any = cls
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.promote_types(before, torch.float32))  # see _apply
        try:
            return make(shape, cls.options.of(**options))
        finally:
            torch.set_default_dtype(before)

    def __init__(self, shape: LayerShape, window: int = 128, sinks: int = 4) -> None:
        super().__init__()
        self.shape = shape
        self.window = window
        self.sinks = sinks
        self.backend = "auto"
        self.sparse_from = SPARSE_FROM
        self.path: str | None = None  # which one the last call took
        self.observers: list[Observer] = []
        self.serial = next(SERIALS)
        self.together: Callable[[Tensor], tuple[list[Tensor], int]] | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves follow the model; in half precision, as of `model.bfloat16()`, groups would be ties of rounding."""

        def moved(x: Tensor) -> Tensor:
            y = fn(x)
            return x.to(y.device) if y.dtype in (torch.float16, torch.bfloat16) else y

        return super()._apply(moved, recurse)

    def batches(self, rows: Tensor, valid: Tensor | None) -> tuple[list[tuple[Tensor, Tensor | None]], int]:
        """The batches that a single process would see in turn, each with its mask, and which of them is this one's."""
        if self.together is None:
            return [(rows, valid)], 0
        found, own = self.together(rows)
        masks = [None] * len(found) if valid is None else self.together(valid)[0]
        return list(zip(found, masks, strict=True)), own

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Call "route" or "attend" as a module, so that forward hooks (offload, FSDP2) provide its own tensors."""
        return getattr(self, step)(*args, **kwargs)

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        """What this layer selects for hidden states `[B, T, E]`; methods without routing select nothing."""
        return Selection()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        """Return the output `(B, H, T, D)` of q `(B, H, T, D)` and k, v `(B, G, T, D)`, by the path of `backend`."""
        args = self.complete_args(args, selection)
        if selection.keeps_all and args.ste_slope is None:
            self.path = "full"
            return full_attention(q, k, v, mask_of(sequence), args)
        kernel = self.sparse_kernel(q, selection, sequence, args)
        if kernel is not None:
            self.path = kernel.name
            if selection.query_groups is None:
                selection = nothing_shared(sequence)
            return sparse_attention(q, k, v, selection, sequence, args, kernel)
        self.path = "soft" if selection.is_soft else "masked"
        return blocked_attention(q, k, v, selection, sequence, args)

    def complete_args(self, args: AttentionArgs, selection: Selection) -> AttentionArgs:
        """Add the method's own arguments to those of the model."""
        return replace(args, window=self.window, sinks=self.sinks)

    def keeps_all(self) -> bool:
        """Whether no pair is left out, whatever the tokens, so that the layer is the base model's own."""
        return False

    def groups_of_keys(self) -> tuple[object, ...]:
        """What the groups that a cache keeps tokens by depend on; they may be read while it stays the same."""
        return (self.serial,)

    def refuses_cache(self) -> str | None:
        """Why keys and values are not kept for later tokens; None where `GroupedCache` computes what `attend` does."""
        return f"{type(self).__name__}, which computes whole sequences alone"

    def sparse_kernel(self, q: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs) -> Backend | None:
        """Choose the kernel of the sparse path for this call; None for the masked path."""
        if self.backend == "masked" or selection.is_soft or sequence.allowed is not None or args.dropout:
            return None
        if self.backend == "auto" and q.shape[2] < self.sparse_from:
            return None
        demand = Demand(q.device.type, q.dtype, q.shape[-1], args.softcap is not None, selection.group is not None)
        kernel = choose(demand, self.backend)
        if kernel is None and self.backend != "auto":
            reason = KERNELS[self.backend].refuses(demand)
            raise CannotServe(f"backend={self.backend} cannot serve here: it {reason}; use auto")
        return kernel

    @torch.no_grad()
    def count_pairs(self, selection: Selection, sequence: Sequence) -> PairCounts:
        """How many pairs this layer kept for what it selected."""
        return count_pairs(None if selection.keeps_all else selection, sequence, self.window, self.sinks)


def ste_slope(selection: Selection, gate_steepness: float) -> float | None:
    """Return the straight-through slope of hard routing; None where no router is trained.

    It is the slope of log sigmoid(steepness * x) where the gate is half open.
    """
    is_trained = selection.assignment is not None and selection.assignment.requires_grad
    return gate_steepness / 2 if is_trained and not selection.is_soft else None
