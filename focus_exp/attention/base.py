"""The contract of every attention method: one module per layer with two steps, `route` and `attend`.

docs/adding_a_method.md shows a method from outside the package: one Python file and one YAML file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from focus_exp.attention.dense import blocked_attention, full_attention
from focus_exp.attention.kernels import KERNELS, Backend, BackendUnsupported, KernelRequirements, select_backends
from focus_exp.attention.options import Options
from focus_exp.attention.selection import (
    AttentionArgs,
    PairCounts,
    Selection,
    Sequence,
    count_pairs,
    local_only_selection,
)

# masked: computes all pairs and masks the pruned ones; a kernel's name: computes the kept pairs alone
BACKENDS = ("auto", "masked", *KERNELS)
# length [tokens] from which "auto" takes a kernel, by device; the result is the same
SPARSE_FROM = {"cpu": 256, "cuda": 2048}

SERIALS = count()

# called with (layer index, method, selection, sequence) whenever a layer runs
Observer = Callable[[int, "AttentionMethod", Selection, Sequence], None]


@dataclass(frozen=True)
class LayerShape:
    """Describe the layer that a method joins.

    Attributes:
        width: E, model width.
        heads: H, query heads.
        head_dim: D.
        index: of the layer in the model.
        kv_heads: G; None where each query head has its own keys.
    """

    width: int
    heads: int
    head_dim: int
    index: int
    kv_heads: int | None = None


METHODS: dict[str, type[AttentionMethod]] = {}  # by declared name


class AttentionMethod(nn.Module):
    """See hidden states `(B, T, E)` in `route`, replace the layer's attention in `attend`.

    A subclass declares the dataclass of its options, which its constructor takes next to the layer's shape, and, if it
    is part of this package, its name:

        class Mean(AttentionMethod, options=MeanOptions):
            def __init__(self, shape: LayerShape, options: MeanOptions) -> None:

    Attributes:
        name: as declared, else the class's.
        causal: False if a token's output depends on later tokens.
        causal_counterpart: attributes that make a non-causal method causal.
        options: dataclass of its options.
        statistics: buffer to which forward passes of a training step add what `update_statistics` takes; of several
            processes the sum. None where nothing follows the tokens.
        is_fitted: has tensors that are fitted to the frozen base.
    """

    name: ClassVar[str]
    causal: ClassVar[bool] = True
    causal_counterpart: ClassVar[dict[str, Any]] = {}
    options: ClassVar[type[Options]] = Options
    is_fitted: bool = False

    def __init_subclass__(cls, *, name: str | None = None, options: type[Options] | None = None) -> None:
        super().__init_subclass__()
        cls.name = name or cls.__name__
        cls.options = options or cls.options
        if name is not None:
            METHODS[name] = cls

    @classmethod
    def create(cls, shape: LayerShape, **options: Any) -> Self:
        """Create the method for one layer; ValueError for an unknown option or a value out of range."""
        make: Any = cls
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.promote_types(before, torch.float32))  # see _apply
        try:
            return make(shape, cls.options.create(**options))
        finally:
            torch.set_default_dtype(before)

    def __init__(self, shape: LayerShape, window: int = 128, sinks: int = 4) -> None:
        super().__init__()
        self.shape = shape
        self.window = window
        self.sinks = sinks
        self.backend = "auto"
        self.sparse_from: int | None = None  # None: that of the device
        self.path: str | None = None  # of the last call
        self.observers: list[Observer] = []
        self.hard = True  # a router that is trained may also route softly
        self.train_with = "hard"  # or soft: routing in training mode
        self.losses: list[Tensor] | None = None  # auxiliary, of forward passes, while a training loop collects them
        self.projected: list[Tensor] | None = None  # tokens `(N, R)`, while a training loop collects them
        self.serial = next(SERIALS)
        self.statistics: Tensor
        self.register_buffer("statistics", None, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the model to its device, but not to half precision, where rounding would tie groups."""

        def move(x: Tensor) -> Tensor:
            y = fn(x)
            return x.to(y.device) if y.dtype in (torch.float16, torch.bfloat16) else y

        return super()._apply(move, recurse)

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Call "route" or "attend" as a module, so that forward hooks (FSDP2) provide its tensors."""
        return getattr(self, step)(*args, **kwargs)

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        """Select pairs for hidden states `(B, T, E)`; a method without routing selects window and sinks alone."""
        return Selection()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        """Return the output `(B, H, T, D)` of q `(B, H, T, D)` and k, v `(B, G, T, D)`, by the path of `backend`."""
        args = self.complete_args(args, selection)
        if selection.is_dense and args.ste_slope is None:
            self.path = "full"
            return full_attention(q, k, v, sequence.mask, args)
        for kernel in self.select_kernels(q, selection, sequence, args):
            self.path = kernel.name
            grouped = local_only_selection(sequence) if selection.query_groups is None else selection
            try:
                return kernel.attention(q, k, v, grouped, sequence, args)
            except BackendUnsupported:  # known from the shapes of the tensors
                if self.backend != "auto":
                    raise
        self.path = "soft" if selection.is_soft else "masked"
        return blocked_attention(q, k, v, selection, sequence, args)

    def update_statistics(self) -> None:
        """Move the buffers that follow the tokens of training by `statistics`, and set these to zero."""

    def complete_args(self, args: AttentionArgs, selection: Selection) -> AttentionArgs:
        """Add the method's own arguments to those of the model."""
        return replace(args, window=self.window, sinks=self.sinks)

    def select_kernels(self, q: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs) -> list[Backend]:
        """Return the kernels that serve this call, the preferred one first; none for the masked path."""
        if self.backend == "masked" or selection.is_soft or args.dropout:
            return []
        if sequence.allowed is not None and sequence.reach is None:
            return []
        least = SPARSE_FROM.get(q.device.type, 0) if self.sparse_from is None else self.sparse_from
        if self.backend == "auto" and q.shape[2] < least:
            return []
        groups = 1 if selection.key_groups is None else selection.key_groups.shape[-1]
        requirements = KernelRequirements(q.device.type, q.dtype, q.shape[-1], groups)
        kernels = select_backends(requirements, self.backend)
        if sequence.reach is not None:
            return [kernel for kernel in kernels if kernel.takes_reach]
        if not kernels and self.backend != "auto":
            reason = KERNELS[self.backend].unsupported_reason(requirements)
            raise BackendUnsupported(f"backend={self.backend} does not serve here: it {reason}. Use backend=auto.")
        return kernels

    def is_dense(self) -> bool:
        """Tell whether no pair is pruned, whatever the tokens, so that the layer is the base model's own."""
        return False

    def kv_cache_key(self) -> tuple[object, ...]:
        """Return what the groups of cached keys depend on; while it is unchanged the cache stays valid."""
        return (self.serial,)

    def kv_cache_unsupported_reason(self) -> str | None:
        """Return why attention to cached keys is not what `attend` computes; None where it is."""
        return f"{type(self).__name__}, which computes whole sequences only"

    @torch.no_grad()
    def count_pairs(self, selection: Selection, sequence: Sequence) -> PairCounts:
        """Count the pairs that this layer keeps for a selection."""
        keeps_all = selection.is_dense or selection.is_soft
        return count_pairs(None if keeps_all else selection, sequence, self.window, self.sinks)


def ste_slope(selection: Selection, gate_steepness: float) -> float | None:
    """Return the straight-through slope of hard routing; None where no router is trained.

    It is the slope of log sigmoid(steepness * x) where the gate is half open.
    """
    is_trained = selection.assignment is not None and selection.assignment.requires_grad
    return gate_steepness / 2 if is_trained and not selection.is_soft else None
