"""Interfaces of the kernels that compute the sparse path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from focus_exp.attention.selection import AttentionArgs, Selection, Sequence

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class KernelRequirements:
    """Describe the tensors that a kernel has to support."""

    device: str
    dtype: torch.dtype
    head_dim: int
    softcap: bool = False
    one_group: bool = True  # every token is in one group only
    groups: int = 1


class BackendUnsupported(RuntimeError):
    """A kernel requested by name does not support these tensors."""


@dataclass(frozen=True)
class RowResult:
    """Results of complete softmax rows: `grad`, `out` `(blocks, t, H, D)` and `lse` `(blocks, t, H)`."""

    grad: Tensor
    out: Tensor
    lse: Tensor


class Backend(ABC):
    """Compute the sparse path."""

    name: str

    @abstractmethod
    def unsupported_reason(self, requirements: KernelRequirements) -> str | None:
        """Return why it does not serve, as words after its name; None where it serves."""


class Fused(Backend):
    """Compute a layer's attention in one pass, without partitions."""

    has_head_groups = False  # takes groups of each key/value head

    @abstractmethod
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        """Compute `sparse_attention` where all heads share one grouping."""


class Kernel(Backend):
    """Compute exact attention over one partition of the pairs.

    Every query `(blocks, t, H, D)` of a block attends to every key `(blocks, s, G, D)` of it, except for the pairs
    where `drop` `(blocks, t, s)` is True.
    """

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, drop: Tensor | None, args: AttentionArgs
    ) -> tuple[Tensor, Tensor]:
        """Return output `(blocks, t, H, D)` and natural logsumexp `(blocks, t, H)`, float32 at least.

        A query without keys has (0, -inf).
        """

    @abstractmethod
    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: RowResult, drop: Tensor | None, args: AttentionArgs
    ) -> Gradients:
        """Return the partition's share of the gradients of q, k, v.

        With the output and logsumexp of complete rows, exp(s - logsumexp) are the probabilities of the whole softmax,
        so the gradients of all partitions add up.
        """
