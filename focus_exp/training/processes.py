"""The processes of a run: started here, by torchrun or by srun. Process 0 writes and prints, the others help it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pytorch_lightning.plugins.environments import SLURMEnvironment

from focus_exp.config import TrainerConfig
from focus_exp.errors import UserError, first_line
from focus_exp.training.exchange import LostProcess, enter_group, is_main, leave_group, wait_for_all

# seconds that the others have to notice by themselves that one of them is gone
GRACE = 20.0
# what gloo and nccl say in a process whose peer is gone
LOST = ("gloo", "Connection closed", "Connection reset", "NCCL", "Broken pipe")


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
                stack.callback(leave_group)
            join(settings, device)
            if not is_main():
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            yield
            wait_for_all()
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
    nodes, job, step = (os.environ[f"SLURM_{name}"] for name in ("STEP_NODELIST", "JOB_ID", "STEP_ID"))
    os.environ |= {
        "RANK": os.environ["SLURM_PROCID"],
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "WORLD_SIZE": tasks,
        "GROUP_RANK": os.environ["SLURM_NODEID"],
        "MASTER_ADDR": SLURMEnvironment.resolve_root_node_address(nodes),
        "MASTER_PORT": str(15_000 + (7 * int(job) + int(step)) % 15_000),
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
    if children:
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
    if device == "cuda":
        there = torch.cuda.device_count()
        if settings.devices > there:
            raise UserError(
                f"trainer.devices={settings.devices}, but this node has {there} GPU(s); use trainer.devices={there}"
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.devices))
    enter_group(device)
