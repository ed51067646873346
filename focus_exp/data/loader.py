"""Batches of steps, in an order of (seed, epoch); a resumed phase begins at its step."""

from __future__ import annotations

import math

import torch
from torch.utils.data import DataLoader, Dataset

from focus_exp.errors import UserError


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

    An epoch is a permutation that is cut to whole steps. The batches of a step do not depend on `world_size`: the
    processes take them in turn.

    Args:
        accumulate: batches of a step, a multiple of `world_size`.

    Raises:
        UserError: there is less than one step.
    """
    length = len(dataset)  # type: ignore[arg-type]  # Dataset declares no length; those with an order have it
    if length < batch_size * accumulate:
        raise UserError(
            f"training needs {accumulate} x {batch_size} sequences a step (got {length}).\n"
            "Lower trainer.batch_size, trainer.accumulate or data.seq_len, or use more text."
        )
    step_size = batch_size * accumulate
    epoch_steps = length // step_size
    epochs = [
        torch.randperm(length, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        for epoch in range(math.ceil(steps.stop / epoch_steps))
    ]
    items = torch.stack(epochs)[:, : epoch_steps * step_size].reshape(-1, step_size)[steps.start : steps.stop]
    order = items.reshape(-1, world_size, batch_size)[:, rank].flatten().tolist()
    # without its own generator a DataLoader draws from the global one, and a resumed run would differ
    return DataLoader(dataset, batch_size, sampler=order, generator=torch.Generator().manual_seed(seed))
