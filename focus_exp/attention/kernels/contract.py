"""Exact attention over one part of the pairs, by whichever kernel the device has: (out, logsumexp) and its backward.

The backward of a part takes the output and logsumexp of the *whole* row: the part's probabilities exp(s - logsumexp)
are then those of the whole softmax, and the gradients of all parts simply add up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from focus_exp.attention.selection import AttentionArgs, Selection, Sequence

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Demand:
    """What a kernel has to take."""

    device: str
    dtype: torch.dtype
    head_dim: int
    softcap: bool = False
    one_group: bool = True  # a token is in one group alone


class CannotServe(RuntimeError):
    """A kernel that was asked for by its name does not take these tensors."""


@dataclass(frozen=True)
class Whole:
    """What the whole softmax left of a call's queries: `grad`, `out` `[blocks, t, H, D]` and `lse` `[blocks, t, H]`."""

    grad: Tensor
    out: Tensor
    lse: Tensor


class Backend(ABC):
    """What computes the sparse path."""

    name: str

    @abstractmethod
    def refuses(self, demand: Demand) -> str | None:
        """Why it cannot serve here, or None."""


class Fused(Backend):
    """Kernels that compute a layer's attention as a whole, without parts."""

    @abstractmethod
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        """Compute `sparse_attention` where all heads share one grouping."""


class Kernel(Backend):
    """One exact attention kernel.

    Every query `[blocks, t, H, D]` of a block meets every key `[blocks, s, G, D]` of it, but for the pairs of `drop`
    `[blocks, t, s]`.
    """

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, drop: Tensor | None, args: AttentionArgs
    ) -> tuple[Tensor, Tensor]:
        """Output `[blocks, t, H, D]` and natural logsumexp `[blocks, t, H]`, float32 at least.

        A query without keys has (0, -inf).
        """

    @abstractmethod
    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: Whole, drop: Tensor | None, args: AttentionArgs
    ) -> Gradients:
        """Gradients of q, k, v, given what the whole rows left."""
