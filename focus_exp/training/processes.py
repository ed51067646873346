"""The process group of a run that torchrun or srun started. Process 0 writes, the others help it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pytorch_lightning.plugins.environments import SLURMEnvironment

from focus_exp.config import TrainerConfig
from focus_exp.errors import UserError, first_line
from focus_exp.training.exchange import LostProcess, enter_group, leave_group, wait_for_all

# in messages of gloo and nccl to a process whose peer is gone
LOST = ("gloo", "Connection closed", "Connection reset", "NCCL", "Broken pipe")

SINGLE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@contextmanager
def processes(settings: TrainerConfig, device: str) -> Iterator[None]:
    """Form a process group of trainer.devices x trainer.num_nodes processes for the block.

    Raises:
        UserError: if another number of processes was started.
        LostProcess: if one of them ends early.
    """
    wanted, before = settings.devices * settings.num_nodes, dict(os.environ)
    adopt_srun()
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != wanted:
        nodes = f"--nnodes={settings.num_nodes} " if settings.num_nodes > 1 else "--standalone "
        command = shlex.join(["-m", "focus_exp", *sys.argv[1:]])
        raise UserError(
            f"trainer.devices={settings.devices} x trainer.num_nodes={settings.num_nodes} must be the number of "
            f"processes (got {started}). Start with torchrun {nodes}--nproc-per-node={settings.devices} {command}, or "
            "with srun and one task a device."
        )
    single = "RANK" not in os.environ
    if single and settings.strategy in ("auto", "single"):
        yield
        return
    if single:  # a group of one, for strategy=fsdp
        os.environ |= SINGLE
    try:
        join(settings, device)
        yield
        wait_for_all()
    except RuntimeError as error:
        if wanted == 1 or not any(sign in str(error) for sign in LOST):
            raise
        raise LostProcess(f"one of {wanted} processes has ended ({first_line(error)}). Run again to resume.") from error
    finally:
        if single:
            leave_group()
        os.environ.clear()  # Lightning's teardown removes WORLD_SIZE
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
        "MASTER_ADDR": SLURMEnvironment.resolve_root_node_address(nodes),
        "MASTER_PORT": str(15_000 + (7 * int(job) + int(step)) % 15_000),
    }


def join(settings: TrainerConfig, device: str) -> None:
    """Enter the group; on a GPU that of the process's own number."""
    if device == "cuda":
        available = torch.cuda.device_count()
        if settings.devices > available:
            raise UserError(f"trainer.devices must be <= {available}, this node's GPUs (got {settings.devices}).")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.devices))
    enter_group(device)
