"""Exact attention over one part of the pairs, by whichever kernel the device has: (out, logsumexp) and its backward.

The backward of a part takes the output and logsumexp of the *whole* row: the part's probabilities exp(s - logsumexp)
are then those of the whole softmax, and the gradients of all parts simply add up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True)
class Meeting:
    """How queries `[blocks, t, H, D]` and keys `[blocks, s, G, D]` of one call meet: all of them, or one of three ways.

    lengths: int `[segments]`; one block in which queries and keys are the same tokens, each segment is causal in
        itself, and with `window` a query sees at most so many tokens before itself.
    drop: `[blocks, t, s]` bool, the pairs of a block that are not seen.
    keep: one block; whether a query sees a key, by their rows in it, elementwise.
    """

    lengths: Tensor | None = None
    window: int | None = None
    drop: Tensor | None = None
    keep: Callable[[Tensor, Tensor], Tensor] | None = None

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """`drop` as something to add to the scores."""
        if self.drop is None:
            return None
        # where() takes 20 times as long on a CPU as the product of bool with the bits of minus infinity
        integer = INTEGERS[dtype.itemsize]
        bits = torch.tensor(float("-inf"), dtype=dtype).view(integer).item()
        return self.drop.to(integer).mul_(bits).view(dtype)


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


class Kernel(ABC):
    """One exact attention kernel.

    takes: the meetings it knows. "segments": many of them in one call, also with a window. "blocks": single segments
        and blocks with dropped pairs. "predicate": any rule.
    """

    name: str
    takes: Literal["segments", "blocks", "predicate"]

    @abstractmethod
    def refuses(self, demand: Demand) -> str | None:
        """Why it cannot serve here, or None."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, meeting: Meeting, scaling: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Output `[blocks, t, H, D]` and natural logsumexp `[blocks, t, H]`, float32 at least.

        A query without keys has (0, -inf).
        """

    @abstractmethod
    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: Whole, meeting: Meeting, scaling: float, softcap: float | None
    ) -> Gradients:
        """Gradients of q, k, v, given what the whole rows left."""
