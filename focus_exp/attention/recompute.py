"""Gradient checkpointing repeats forward passes in the backward: what each one had used, found again by its input."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

REMEMBERED = 16  # forward passes of a layer that may await their backward at the same time
SAME = 1e-2  # a repetition's input differs by rounding, at most; inputs are normalised or of the order of 1


@dataclass
class Noted:
    """A forward pass: the digest of its tokens, its value, and its statistics until they have been taken in."""

    digest: Tensor
    value: Tensor
    pending: Any


class Forwards:
    """Running statistics of training passes, updated once for each, however often checkpointing repeats it.

    Several passes may be pending (a loss over two texts, as in DPO), and their backwards come in any order. Without
    gradients nothing is updated: reentrant checkpointing, whose first pass has none, updates in its backward.
    """

    def __init__(self) -> None:
        self.noted: deque[Noted] = deque(maxlen=REMEMBERED)

    def value(
        self, x: Tensor, valid: Tensor | None, compute: Callable[[], tuple[Tensor, T]], update: Callable[[T], None]
    ) -> Tensor:
        """Return the value for the tokens x `(B, T, N)`; in a backward the one that their forward pass had.

        Args:
            valid: `(B, T)` bool, False on padding.
            compute: returns the value and this pass's statistics.
            update: takes these statistics into the running ones.

        Raises:
            RuntimeError: a backward repeats a pass that is no longer known (on a GPU a device-side assertion).
        """
        own = digest(x.detach(), valid)
        if in_backward() and self.noted:
            latest = list(reversed(self.noted))
            distance = torch.stack([(noted.digest - own).abs().amax() for noted in latest])
            best = distance.argmin()
            torch._assert_async(distance.amin() < SAME, f"more than {REMEMBERED} checkpointed passes await a backward")
            if any(noted.pending is not None for noted in latest):
                repeated = latest[int(best)]
                if repeated.pending is not None:
                    update(repeated.pending)
                    repeated.pending = None
            return torch.stack([noted.value for noted in latest]).index_select(0, best[None])[0]
        value, statistics = compute()
        updates = torch.is_grad_enabled()
        if updates:
            update(statistics)
        self.noted.append(Noted(own, value, None if updates else statistics))
        return value


def digest(x: Tensor, valid: Tensor | None) -> Tensor:
    """`[2 N]`: mean and root mean square of every coordinate of the tokens x `[B, T, N]`, padding left out."""
    rows = x.flatten(0, -2) if valid is None else x[valid]
    rows = rows.double() if rows.device.type == "cpu" else rows.float()
    return torch.cat([rows.mean(0), rows.square().mean(0).sqrt()])


def in_backward() -> bool:
    """Whether autograd is running, as when gradient checkpointing recomputes a forward pass."""
    return torch._C._current_graph_task_id() != -1
