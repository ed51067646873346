"""Exact attention over one part of the pairs, by whichever kernel the device has: (out, logsumexp) and its backward.

The backward of a part takes the output and logsumexp of the *whole* row: the part's probabilities exp(s - logsumexp)
are then those of the whole softmax, and the gradients of all parts simply add up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Meeting:
    """How packed queries `[n, H, D]` and keys `[m, G, D]` of one call meet; one of two ways.

    lengths: int `[segments]`; queries and keys are the same tokens, each segment is causal in itself, and with
        `window` a query sees at most so many tokens before itself.
    bias: `[blocks, t, s]` in the dtype of q, added to the scores of equal blocks of t queries and s keys.
    """

    lengths: Tensor | None = None
    window: int | None = None
    bias: Tensor | None = None


@dataclass(frozen=True)
class Demand:
    """What a kernel has to take."""

    device: str
    dtype: torch.dtype
    head_dim: int
    softcap: bool = False


class Kernel(ABC):
    """One exact attention kernel for causal segments, and for blocks with a bias if `takes_bias`."""

    name: str
    takes_bias = False

    @abstractmethod
    def refuses(self, demand: Demand) -> str | None:
        """Why it cannot serve here, or None."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, meeting: Meeting, scaling: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Output `[n, H, D]` and natural logsumexp `[n, H]`, float32 at least; (0, -inf) for a query without keys."""

    @abstractmethod
    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        meeting: Meeting,
        scaling: float,
        softcap: float | None,
    ) -> Gradients:
        """Gradients of q, k, v, where `grad`, `out` `[n, H, D]` and `lse` `[n, H]` are those of whole rows."""


def calls(meeting: Meeting, tokens: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """The dense calls that make up a meeting: slices of queries and keys, and the bias, None for a causal segment."""
    if meeting.bias is not None:
        yield slice(0, tokens), slice(None), meeting.bias
        return
    assert meeting.lengths is not None
    begin = 0
    for length in meeting.lengths.tolist():
        if length:
            yield slice(begin, begin + length), slice(begin, begin + length), None
        begin += length


def heads_first(x: Tensor, blocks: int) -> Tensor:
    """`[blocks * t, H, D]` -> `[blocks, H, t, D]`."""
    return x.unflatten(0, (blocks, -1)).transpose(1, 2)
