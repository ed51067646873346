"""The interface of the kernels that compute the pairs of hard routing alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from focus_exp.attention.selection import AttentionArgs, Selection, Sequence

T = TypeVar("T")

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
        packed: the same numbers as the device's kernel reads them, see its `pack_weights`.
        bias: `(N, 2, K)`.
        worth_bias: `(N,)`.
        limits: `(N,)`, which scores have to pass; at the largest float a query reads its `top_k` `(N,)` groups.
    """

    weight: Tensor
    packed: Tensor
    bias: Tensor
    worth_bias: Tensor
    limits: Tensor
    top_k: Tensor


def constant(function: Callable[..., T]) -> Callable[..., T]:
    """Cache a function, whose result torch.compile takes as a constant."""
    cached = cache(function)

    @wraps(function)
    def call(*args: Any) -> T:
        return cached(*args)

    call.cache_clear = cached.cache_clear  # type: ignore[attr-defined]  # functions take attributes
    marked: Callable[..., T] = torch.compiler.assume_constant_result(call)
    return marked


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
