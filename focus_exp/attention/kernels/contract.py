"""The interface of the kernels that compute the pairs of hard routing alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from focus_exp.attention.selection import AttentionArgs, Selection, Sequence


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

    @abstractmethod
    def unsupported_reason(self, requirements: KernelRequirements) -> str | None:
        """Return why it does not serve, as words after its name; None where it serves."""

    @abstractmethod
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        """Compute what `reference_attention` does for a selection with memberships: `(B, H, T, D)`.

        Raises:
            BackendUnsupported: the values of the tensors, such as padding between tokens, are not supported.
        """
