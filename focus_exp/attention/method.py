"""The contract every attention method fits: one module per layer with two faces, `route` and `attend`.

A method of one's own, here or outside of the package, is one Python file with a subclass of `AttentionMethod`
(`route` sees the hidden states and selects, `attend` returns the output) and the dataclass of its options, and one
YAML file that names the class, `defaults: [my_methods.Mean, _self_]`, as conf/attention/mean.yaml here or in a folder
of one's own: `PYTHONPATH=. python -m focus_exp --config-dir=conf attention=mean`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from focus_exp.attention.blocked import blocked_attention, full_attention
from focus_exp.attention.kernels import KERNELS, Backend, CannotServe, Demand, choose
from focus_exp.attention.options import Options
from focus_exp.attention.selection import PairCounts, Selection, Sequence, count_pairs, mask_of, nothing_shared
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
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Selection,
        sequence: Sequence,
        *,
        scaling: float,
        softcap: float | None = None,
        dropout: float = 0.0,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Output `[B, H, T, D]` of q `[B, H, T, D]`, k and v `[B, G, T, D]`, by the path that `backend` says.

        sink_logits: `[H]`, the score of one more key without a value that every query of the base model sees.
        """
        surrogate = self.surrogate(selection)
        if selection.keeps_all and surrogate is None:
            self.path = "full"
            return full_attention(
                q, k, v, mask_of(sequence),
                scaling=scaling, softcap=softcap, dropout=dropout, sink_logits=sink_logits,
            )  # fmt: skip
        kernel = self.sparse_kernel(q, selection, sequence, softcap, dropout)
        if kernel is not None:
            self.path = kernel.name
            if selection.query_groups is None:
                selection = nothing_shared(sequence)
            return sparse_attention(
                q, k, v, selection, sequence, kernel,
                window=self.window, sinks=self.sinks, scaling=scaling, softcap=softcap, surrogate=surrogate,
                sink_logits=sink_logits,
            )  # fmt: skip
        self.path = "masked"
        return blocked_attention(
            q, k, v, selection, sequence,
            window=self.window, sinks=self.sinks, scaling=scaling, softcap=softcap, surrogate=surrogate,
            dropout=dropout, sink_logits=sink_logits,
        )  # fmt: skip

    def surrogate(self, selection: Selection) -> float | None:
        """Slope of the gate that stands in for hard groups in the gradient of the assignment, if there is one."""
        return None

    def keeps_all(self) -> bool:
        """Whether no pair is left out, whatever the tokens, so that the layer is the base model's own."""
        return False

    def groups_of_keys(self) -> tuple[object, ...]:
        """What the groups that a cache keeps tokens by depend on; they may be read while it stays the same."""
        return (self.serial,)

    def refuses_cache(self) -> str | None:
        """Why keys and values are not kept for later tokens; None where `GroupedCache` computes what `attend` does."""
        return f"{type(self).__name__}, which computes whole sequences alone"

    def sparse_kernel(
        self, q: Tensor, selection: Selection, sequence: Sequence, softcap: float | None, dropout: float
    ) -> Backend | None:
        """The kernel of the sparse path for this call; None where the masked path is to be taken."""
        soft = selection.query_groups is None and selection.assignment is not None
        if self.backend == "masked" or soft or sequence.allowed is not None or dropout:
            return None
        if self.backend == "auto" and q.shape[2] < self.sparse_from:
            return None
        demand = Demand(q.device.type, q.dtype, q.shape[-1], softcap is not None, selection.group is not None)
        kernel = choose(demand, self.backend)
        if kernel is None and self.backend != "auto":
            reason = KERNELS[self.backend].refuses(demand)
            raise CannotServe(f"backend={self.backend} cannot serve here: it {reason}; use auto")
        return kernel

    @torch.no_grad()
    def count_pairs(self, selection: Selection, sequence: Sequence) -> PairCounts:
        """How many pairs this layer kept for what it selected."""
        return count_pairs(None if selection.keeps_all else selection, sequence, self.window, self.sinks)
