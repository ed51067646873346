"""What the processes of a run say to each other; with one process all of it is the value itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from focus_exp.errors import UserError

# how long a process may wait for process 0, which evaluates
PATIENCE = timedelta(days=30)
FORWARD, DONE, FAILED = 1, 0, -1

# besides the default group: on the CPU, where a lost process is noticed at once
_waiting: dist.ProcessGroup | None = None


class LostProcess(UserError):
    """Another process of the run ended early."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this process writes: the only one, or process 0."""
    return rank() == 0


def enter_group(device: str) -> None:
    """Join the others, wherever the environment says they are; once in the life of a process."""
    global _waiting
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        _waiting = dist.new_group(backend="gloo", timeout=PATIENCE)


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for_all() -> None:
    dist.barrier(_waiting)


@contextmanager
def in_turns(devices: int) -> Iterator[None]:
    """Process 0 does the block first, whose downloads the others find in the cache, then one process of each node at a
    time, so that main memory holds one whole model. `devices` processes to a node."""
    turn = 0 if is_main() else 1 + int(os.environ["LOCAL_RANK"])
    turns = devices + 1 if world_size() > 1 else 0
    for _ in range(turn):
        wait_for_all()
    yield
    for _ in range(turn, turns):
        wait_for_all()


def agreed(value: Any) -> Any:
    """What process 0 says."""
    if world_size() == 1:
        return value
    said = [value]
    dist.broadcast_object_list(said, src=0, group=_waiting)
    return said[0]


def any_of(number: int | None) -> int | None:
    """The largest number that any process has, None where none has one."""
    if world_size() == 1:
        return number
    largest = torch.tensor(-1 if number is None else number)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=_waiting)
    return None if largest < 0 else int(largest)


def mean_of(value: Tensor) -> Tensor:
    """The mean over the processes."""
    if world_size() == 1:
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total / world_size()


def gathered(value: Any) -> list[Any]:
    """Every process's value, by number."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_waiting)
    return values


def alone(model: PreTrainedModel, work: Callable[[], object]) -> None:
    """Process 0 does `work`; the others wait, and lend their shards of `model` to every forward pass of it.

    A shard is lent by running the model on two tokens: what is gathered does not depend on the tokens.
    """
    if world_size() == 1:
        work()
    elif not is_main():
        tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
        while (said := told()) == FORWARD:
            with torch.no_grad():
                model(input_ids=tokens, use_cache=False)
        if said == FAILED:
            raise LostProcess(f"process {rank()} of {world_size()} ends: process 0 has failed")
    else:
        lend(model, work)


def lend(model: PreTrainedModel, work: Callable[[], object]) -> None:
    """`work` with the others told of each forward pass through a sharded model."""
    inside = False

    def enter(*_: Any) -> None:
        nonlocal inside
        if inside:
            raise RuntimeError("an earlier forward pass failed halfway: the processes are out of step")
        inside = True
        tell(FORWARD)

    def finish(*_: Any) -> None:
        nonlocal inside
        inside = False

    hooks = []
    if isinstance(model, FSDPModule):
        # before FSDP's own, which waits for the others
        hooks = [model.register_forward_pre_hook(enter, prepend=True), model.register_forward_hook(finish)]
    try:
        work()
    except BaseException:
        tell(FAILED)
        raise
    finally:
        for hook in hooks:
            hook.remove()
    if inside:
        raise UserError("a forward pass failed halfway, see above; the same command goes on without the others' help")
    tell(DONE)


def tell(message: int) -> None:
    dist.broadcast(torch.tensor(message), src=0, group=_waiting)


def told() -> int:
    message = torch.tensor(DONE)
    dist.broadcast(message, src=0, group=_waiting)
    return int(message)
