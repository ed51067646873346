"""Batches in an order that is a function of (seed, epoch), with exact resume in mid-epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from focus_exp.errors import UserError


class EpochShuffle(Sampler[int]):
    """This rank's share of a permutation drawn from (seed, epoch), cut to whole optimiser steps of `step` items.

    Lightning calls `set_epoch` at each epoch, and takes a short step at its end if batches to accumulate are missing.
    """

    def __init__(self, length: int, seed: int, step: int = 1, rank: int = 0, world_size: int = 1):
        self.length, self.seed, self.step, self.rank, self.world_size = length, seed, step, rank, world_size
        self.epoch = 0
        # items to skip in the next pass only
        self.start = 0

    def __len__(self) -> int:
        return self.length // self.world_size // self.step * self.step

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.length, generator=generator)[self.rank :: self.world_size][: len(self)].tolist()
        start, self.start = self.start, 0
        return iter(order[start:])


class ResumableLoader(DataLoader):
    """A DataLoader whose `state_dict` lets a new process go on with the very next batch.

    The ranks see disjoint blocks, an epoch is cut to whole steps of `accumulate` batches, and `len` is always that of a
    full epoch. Raises UserError when a rank has less than one step, or when the state is that of another loader.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int,
        *,
        accumulate: int = 1,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ):
        blocks = len(dataset)  # type: ignore[arg-type]
        if blocks // world_size < batch_size * accumulate:
            raise UserError(
                f"{blocks} blocks over {world_size} process(es): less than one step of {accumulate} x {batch_size}.\n"
                "Lower trainer.batch_size, trainer.accumulate or data.block_size, or use more text."
            )
        self.order = EpochShuffle(blocks, seed, batch_size * accumulate, rank, world_size)
        self._identity = {"blocks": blocks, "batch_size": batch_size, "seed": seed, "world_size": world_size}
        self._seen = self._resume = 0
        # without its own generator a DataLoader draws from the global one, and a resumed run would differ
        generator = torch.Generator().manual_seed(seed)
        super().__init__(
            dataset, batch_size, sampler=self.order, num_workers=workers, drop_last=True, generator=generator
        )

    def __len__(self) -> int:
        return len(self.order) // self._identity["batch_size"]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._seen, self._resume = self._resume, 0
        self.order.start = self._seen * self._identity["batch_size"]
        for batch in super().__iter__():
            # counted when handed over, so what workers have prefetched does not matter
            self._seen += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The place of the next batch: its epoch, the batches already seen there, and what the loader was."""
        epochs, seen = divmod(self._seen, len(self))
        return {"epoch": self.order.epoch + epochs, "seen": seen, **self._identity}

    def load_state_dict(self, state: dict[str, int]) -> None:
        for key, value in self._identity.items():
            if state[key] != value:
                raise UserError(
                    f"cannot resume: the checkpoint was written with {key}={state[key]}, this run has {value}.\n"
                    "Restore the old setting or start a new run."
                )
        self.order.set_epoch(state["epoch"])
        self._seen = self._resume = state["seen"]
