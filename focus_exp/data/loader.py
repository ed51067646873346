"""Batches of steps, in an order of (seed, epoch); a resumed phase begins at its step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from focus_exp.errors import UserError


class StepSampler(Sampler[list[int]]):
    """Yield the items of each step from `start` on; its length is that of all steps, as Lightning counts them."""

    def __init__(self, order: list[list[int]], start: int) -> None:
        self.order, self.start = order, start

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.order[self.start :])

    def __len__(self) -> int:
        return len(self.order)


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
    """Return what this process takes of each of `steps`, in an order of (seed, epoch).

    An epoch is a permutation that is cut to whole steps. The batches of a step do not depend on `world_size`: the
    processes take them in turn. The length of the loader counts the steps before the first one too.

    Args:
        batch_size: items of a forward pass.
        accumulate: forward passes of a step, a multiple of `world_size`.

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
    items = torch.stack(epochs)[:, : epoch_steps * step_size].reshape(-1, step_size)[: steps.stop]
    order = items.reshape(steps.stop, -1, world_size, batch_size)[:, :, rank].flatten(1).tolist()
    # without its own generator a DataLoader draws from the global one, and a resumed run would differ
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(dataset, batch_sampler=StepSampler(order, steps.start), generator=generator)
