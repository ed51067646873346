"""The processes of a run: started here, by torchrun or by srun. Process 0 writes and prints, the others help it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.plugins.environments import SLURMEnvironment
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from focus_exp.config import TrainerConfig
from focus_exp.errors import UserError, first_line

# seconds that the others have to notice by themselves that one of them is gone
GRACE = 20.0
# how long a process may wait for process 0, which evaluates
PATIENCE = timedelta(days=30)
FORWARD, DONE, FAILED = 1, 0, -1
# what gloo and nccl say in a process whose peer is gone
LOST = ("gloo", "Connection closed", "Connection reset", "NCCL", "Broken pipe")

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


@contextmanager
def processes(settings: TrainerConfig, device: str, command: list[str], message: str) -> Iterator[None]:
    """Within the block `trainer.devices` x `trainer.num_nodes` processes form a group; the others print nothing.

    Those that neither torchrun nor srun has started are started here: `command`, with `message` on their standard
    input, which stays open as long as this process lives. UserError where their number does not fit, and where one of
    them is lost.
    """
    wanted = settings.devices * settings.num_nodes
    before = dict(os.environ)
    try:
        with contextlib.ExitStack() as stack:
            adopt_srun()
            if "RANK" in os.environ:
                if (started := int(os.environ["WORLD_SIZE"])) != wanted:
                    raise UserError(
                        f"{started} processes were started, but trainer.devices={settings.devices} x "
                        f"trainer.num_nodes={settings.num_nodes} makes {wanted}; make them equal"
                    )
            elif settings.num_nodes > 1:
                raise UserError(
                    f"trainer.num_nodes={settings.num_nodes}, but this process is alone; start the same command on "
                    "every node with srun, one task per device, or with torchrun --nnodes"
                )
            elif wanted == 1 and settings.strategy in ("auto", "single"):
                yield
                return
            else:
                children = start(wanted, command, message)
                stack.push(lambda kind, *_: stop(children, failed=kind is not None))
                stack.callback(leave)
            join(settings, device)
            if not is_main():
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            yield
            dist.barrier(_waiting)
    except RuntimeError as error:
        if wanted > 1 and any(sign in str(error) for sign in LOST):
            raise LostProcess(
                f"process {os.environ['RANK']} of {wanted} has lost another one ({first_line(error)}); "
                "the same command goes on from the last checkpoint"
            ) from error
        raise
    finally:
        os.environ.clear()
        os.environ.update(before)


def adopt_srun() -> None:
    """Give what srun says of its tasks the names that torchrun uses."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in os.environ or tasks == "1":
        return
    environment = SLURMEnvironment(auto_requeue=False)
    os.environ |= {
        "RANK": os.environ["SLURM_PROCID"],
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "WORLD_SIZE": tasks,
        "GROUP_RANK": os.environ["SLURM_NODEID"],
        "MASTER_ADDR": environment.main_address,
        "MASTER_PORT": str(environment.main_port),
    }


def start(count: int, command: list[str], message: str) -> list[subprocess.Popen[bytes]]:
    """Make this one process 0 of `count` and start the others, in sessions of their own: signals come here alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(count), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    children = []
    for number in range(1, count):
        environment = {**os.environ, "RANK": str(number), "LOCAL_RANK": str(number)}
        child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
        assert child.stdin is not None
        child.stdin.write(message.encode() + b"\n")
        child.stdin.flush()
        children.append(child)
    threading.Thread(target=watch, args=(children,), daemon=True).start()
    return children


def watch(children: list[subprocess.Popen[bytes]]) -> None:
    """End this process, which may hang in a collective operation, if a child is lost and it does not notice."""
    while all(child.returncode is None for child in children):
        if any(child.poll() for child in children):
            time.sleep(GRACE)
            if all(child.stdin and not child.stdin.closed for child in children):
                print("error: a process of the run is lost; the same command goes on", file=sys.stderr)
                for child in children:
                    child.kill()
                os._exit(2)
            return
        time.sleep(1)


def stop(children: list[subprocess.Popen[bytes]], failed: bool) -> None:
    """Let the children end, or make them."""
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
        if failed:
            child.kill()
    deadline = time.monotonic() + GRACE
    for child in children:
        try:
            child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def follow_input() -> None:
    """End this process when its standard input does: process 0 is gone."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def join(settings: TrainerConfig, device: str) -> None:
    """Enter the group; on a GPU that of the process's own number."""
    global _waiting
    if device == "cuda":
        own, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if settings.devices > there:
            raise UserError(
                f"trainer.devices={settings.devices}, but this node has {there} GPU(s); use trainer.devices={there}"
            )
        torch.cuda.set_device(own)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.devices))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        _waiting = dist.new_group(backend="gloo", timeout=PATIENCE)


def leave() -> None:
    """Of the group, which outlasts a run where torchrun or srun has started the processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def main_first() -> Iterator[None]:
    """Process 0 does the block alone, then the others do, who find in the cache what it has put there."""
    if world_size() > 1 and not is_main():
        dist.barrier(_waiting)
    yield
    if world_size() > 1 and is_main():
        dist.barrier(_waiting)


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
