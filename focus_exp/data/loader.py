"""Batches in an order of (seed, epoch), with exact resume within an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

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


class EpochShuffle(Sampler[int]):
    """This process's part of a permutation of (seed, epoch), in whole steps.

    The items of a step do not depend on `world_size`: each process takes `batch_size` of them in turn. Lightning calls
    `set_epoch` at each epoch, and would end it with a short step if batches to accumulate were missing.
    """

    def __init__(self, length: int, seed: int, step: int, batch_size: int, rank: int = 0, world_size: int = 1):
        self.length, self.seed, self.step, self.batch_size = length, seed, step, batch_size
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.start = 0  # items to skip in the next pass

    def __len__(self) -> int:
        return self.length // self.step * self.step // self.world_size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.length, generator=generator)[: len(self) * self.world_size]
        indices = order.view(-1, self.world_size, self.batch_size)[:, self.rank].flatten().tolist()
        start, self.start = self.start, 0
        return iter(indices[start:])


class ResumableLoader(DataLoader):
    """A DataLoader that resumes with the next step on any number of processes.

    Processes see disjoint sequences, an epoch is cut to whole steps, and `len` is that of a full epoch.

    Args:
        batch_size, accumulate: of all processes together.

    Raises:
        UserError: there is less than one step, or it cannot be split evenly.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int,
        *,
        accumulate: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ):
        length = len(dataset)  # type: ignore[arg-type]
        if length < batch_size * accumulate:
            raise UserError(
                f"training needs {accumulate} x {batch_size} sequences a step (got {length}).\n"
                "Lower trainer.batch_size, trainer.accumulate or data.seq_len, or use more text."
            )
        self.split = split_step(batch_size, accumulate, world_size)
        self.order = EpochShuffle(length, seed, batch_size * accumulate, self.split.batch_size, rank, world_size)
        self._seen = self._resume = 0
        # without its own generator a DataLoader draws from the global one, and a resumed run would differ
        generator = torch.Generator().manual_seed(seed)
        super().__init__(dataset, self.split.batch_size, sampler=self.order, drop_last=True, generator=generator)

    def __len__(self) -> int:
        return len(self.order) // self.split.batch_size

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._seen, self._resume = self._resume, 0
        self.order.start = self._seen * self.split.batch_size
        for batch in super().__iter__():
            self._seen += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the position of the next batch."""
        epochs, seen = divmod(self._seen, len(self))
        return {"epoch": self.order.epoch + epochs, "seen": seen * self.split.parallel}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.order.set_epoch(state["epoch"])
        self._seen = self._resume = state["seen"] // self.split.parallel
