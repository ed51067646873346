"""The interface of the kernels that compute the pairs of hard routing alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.selection import AttentionArgs, Selection, Sequence

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class KernelRequirements:
    """Describe the tensors that a kernel has to support."""

    device: str
    dtype: torch.dtype
    head_dim: int
    groups: int = 1


@dataclass(frozen=True)
class EncoderWeights:
    """Hold two encoders for hidden states that are not standardized.

    Attributes:
        weight: `(E, N * (2 K + 1))`, of queries and keys `(N, 2, K)`, then of the importance of a query `(N,)`.
        bias: `(N, 2, K)`.
        worth_bias: `(N,)`.
        limits: `(N,)`, which scores have to pass; at the largest float a query reads its `top_k` `(N,)` groups.
    """

    weight: Tensor
    bias: Tensor
    worth_bias: Tensor
    limits: Tensor
    top_k: Tensor

    @cached_property
    def halves(self) -> Tensor:
        """Weights as the sum of two numbers of bfloat16, side by side."""
        return halve(self.weight)

    @cached_property
    def packed(self) -> Tensor:
        """Weights in blocks of 16 columns, padded with zeros: `(columns / 16, E, 16)`."""
        columns = F.pad(self.weight, (0, -self.weight.shape[1] % 16))
        return columns.unflatten(1, (-1, 16)).transpose(0, 1).contiguous()


def halve(weight: Tensor) -> Tensor:
    """Return float32 weights `(E, R)` as two matrices of bfloat16 side by side, whose sum they are: `(E, 2 R)`."""
    high = weight.bfloat16()
    return torch.cat([high, (weight - high).bfloat16()], 1)


class BackendUnsupported(RuntimeError):
    """A kernel requested by name does not support these tensors."""


class Backend(ABC):
    """Compute hard Focus attention without the pruned pairs, forward and backward."""

    name: str
    device: str
    place: str  # where it runs, in words
    dtypes: tuple[torch.dtype, ...]
    takes_reach = False  # serves sliding layers of the base model
    is_automatic = True  # may be chosen by backend=auto
    trains_router = True  # gives hard routing's straight-through gradient

    def unsupported_reason(self, requirements: KernelRequirements) -> str | None:
        """Return why it does not serve, as words after its name; None where it serves."""
        if requirements.device != self.device:
            return f"runs on {self.place}, the tensors are on {requirements.device}"
        if requirements.dtype not in self.dtypes:
            return f"does not take {str(requirements.dtype).removeprefix('torch.')}"
        if requirements.head_dim > MAX_HEAD_DIM:
            return f"takes head sizes up to {MAX_HEAD_DIM}, not {requirements.head_dim}"
        return None

    @abstractmethod
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        """Compute what `reference_attention` does for a selection with memberships: `(B, H, T, D)`.

        Raises:
            BackendUnsupported: the values of the tensors, such as padding between tokens, are not supported.
        """
