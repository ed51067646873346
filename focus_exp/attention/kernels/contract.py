"""The interface of the kernels that compute the pairs of hard routing alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
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


class BackendUnsupported(RuntimeError):
    """A kernel requested by name does not support these tensors."""


class Backend(ABC):
    """Compute hard Focus attention without the pruned pairs, forward and backward."""

    name: str
    device: str
    place: str  # where it runs, in words
    dtypes: tuple[torch.dtype, ...]

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
