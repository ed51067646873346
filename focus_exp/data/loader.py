"""Batches of steps, in an order of (seed, epoch); a resumed phase begins at its step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset

from focus_exp.errors import UserError


@dataclass(frozen=True)
class StepSplit:
    """One process's part of an optimizer step.

    batch_size: items of a batch in this process.
    accumulate: batches that this process accumulates.
    parallel: batches of the step computed at the same time, by different processes.
    """

    batch_size: int
    accumulate: int
    parallel: int


def split_step(batch_size: int, accumulate: int, world_size: int) -> StepSplit:
    """Split a step over processes; raises UserError if it is uneven."""
    if batch_size * accumulate % world_size:
        raise UserError(
            f"trainer.batch_size={batch_size} x trainer.accumulate={accumulate} must be a multiple of {world_size} "
            f"processes. Change it to a multiple of {world_size}, or change trainer.devices."
        )
    processes = math.gcd(batch_size, world_size)  # that share a batch
    parallel = world_size // processes
    return StepSplit(batch_size // processes, accumulate // parallel, parallel)


def make_loader(
    dataset: Dataset,
    batch_size: int,
    seed: int,
    steps: range,
    *,
    accumulate: int = 1,
    rank: int = 0,
    world_size: int = 1,
) -> DataLoader:
    """Return this process's batches of `steps`, in an order of (seed, epoch).

    An epoch is a permutation that is cut to whole steps. The items of a step do not depend on `world_size`: each
    process takes as many as fit its batch in turn.

    Args:
        batch_size, accumulate: of all processes together.

    Raises:
        UserError: there is less than one step, or it cannot be split evenly.
    """
    length = len(dataset)  # type: ignore[arg-type]  # Dataset declares no length; those with an order have it
    if length < batch_size * accumulate:
        raise UserError(
            f"training needs {accumulate} x {batch_size} sequences a step (got {length}).\n"
            "Lower trainer.batch_size, trainer.accumulate or data.seq_len, or use more text."
        )
    size = split_step(batch_size, accumulate, world_size).batch_size
    step_size = batch_size * accumulate
    epoch_steps = length // step_size
    epochs = [
        torch.randperm(length, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        for epoch in range(math.ceil(steps.stop / epoch_steps))
    ]
    items = torch.stack(epochs)[:, : epoch_steps * step_size].reshape(-1, step_size)[steps.start : steps.stop]
    order = items.reshape(-1, world_size, size)[:, rank].flatten().tolist()
    # without its own generator a DataLoader draws from the global one, and a resumed run would differ
    return DataLoader(dataset, size, sampler=order, generator=torch.Generator().manual_seed(seed))
