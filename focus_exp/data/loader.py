"""Batches in an order that is a function of (seed, epoch), with exact resume in mid-epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from focus_exp.errors import UserError


@dataclass(frozen=True)
class Share:
    """What one of `world_size` processes does of an optimiser step of `accumulate` batches of `batch_size` items.

    A batch is split over as many processes as divide it, `batch_size` items each; with more processes than that
    `parallel` batches of the step are computed at the same time, and each process accumulates `accumulate` of them.
    """

    batch_size: int
    accumulate: int
    parallel: int


def share_of(batch_size: int, accumulate: int, world_size: int) -> Share:
    """UserError where a step cannot be dealt out evenly."""
    if batch_size * accumulate % world_size:
        raise UserError(
            f"trainer.batch_size={batch_size} x trainer.accumulate={accumulate} sequences in a step cannot be split "
            f"evenly over {world_size} processes; make their product a multiple of {world_size}, or change "
            "trainer.devices"
        )
    split = math.gcd(batch_size, world_size)
    parallel = world_size // split
    return Share(batch_size // split, accumulate // parallel, parallel)


class EpochShuffle(Sampler[int]):
    """This process's share of a permutation drawn from (seed, epoch), cut to whole optimiser steps of `step` items.

    The items of a step are the same whatever `world_size`: `batch_size` of them to every process in turn. Lightning
    calls `set_epoch` at each epoch, and takes a short step at its end if batches to accumulate are missing.
    """

    def __init__(self, length: int, seed: int, step: int, batch_size: int, rank: int = 0, world_size: int = 1):
        self.length, self.seed, self.step, self.batch_size = length, seed, step, batch_size
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        # items to skip in the next pass only
        self.start = 0

    def __len__(self) -> int:
        return self.length // self.step * self.step // self.world_size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.length, generator=generator)[: len(self) * self.world_size]
        own = order.view(-1, self.world_size, self.batch_size)[:, self.rank].flatten().tolist()
        start, self.start = self.start, 0
        return iter(own[start:])


class ResumableLoader(DataLoader):
    """A DataLoader whose `state_dict` lets new processes, of whatever number, go on with the very next step.

    `batch_size` and `accumulate` are those of all processes together, which see disjoint blocks. An epoch is cut to
    whole steps, and `len` is always that of a full epoch. Raises UserError when there is less than one step, when it
    cannot be split, or when the state is that of another loader.
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
        if blocks < batch_size * accumulate:
            raise UserError(
                f"{blocks} blocks are less than one step of {accumulate} x {batch_size}.\n"
                "Lower trainer.batch_size, trainer.accumulate or data.seq_len, or use more text."
            )
        self.share = share_of(batch_size, accumulate, world_size)
        self.order = EpochShuffle(blocks, seed, batch_size * accumulate, self.share.batch_size, rank, world_size)
        self._identity = {"blocks": blocks, "batch_size": batch_size, "seed": seed}
        self._seen = self._resume = 0
        # without its own generator a DataLoader draws from the global one, and a resumed run would differ
        generator = torch.Generator().manual_seed(seed)
        super().__init__(
            dataset, self.share.batch_size, sampler=self.order, num_workers=workers, drop_last=True, generator=generator
        )

    def __len__(self) -> int:
        return len(self.order) // self.share.batch_size

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._seen, self._resume = self._resume, 0
        self.order.start = self._seen * self.share.batch_size
        for batch in super().__iter__():
            # counted when handed over, so what workers have prefetched does not matter
            self._seen += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The place of the next batch: its epoch, the batches already seen there, and what the loader was."""
        epochs, seen = divmod(self._seen, len(self))
        return {"epoch": self.order.epoch + epochs, "seen": seen * self.share.parallel, **self._identity}

    def load_state_dict(self, state: dict[str, int]) -> None:
        for key, value in self._identity.items():
            if state[key] != value:
                raise UserError(
                    f"cannot resume: the checkpoint was written with {key}={state[key]}, this run has {value}.\n"
                    "Restore the old setting or start a new run."
                )
        self.order.set_epoch(state["epoch"])
        self._seen = self._resume = state["seen"] // self.share.parallel
