"""Several processes: the group that torchrun or srun started, its collectives, and the placement of the model.

Process 0 writes and evaluates; the others lend it their shards. With one process every collective is the identity.
ddp: every process holds the whole model. fsdp: the base is sharded layer by layer (FSDP2) when it is loaded, also for
evaluation; routers and LoRA are replicated.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.plugins.environments import SLURMEnvironment
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from focus_exp.config import Config, TrainerConfig
from focus_exp.errors import UserError, first_line
from focus_exp.models.methods import is_trainable

EVALUATION_TIMEOUT = timedelta(days=30)
FORWARD, DONE, FAILED = "forward", "done", "failed"  # what process 0 tells the others

# in messages of gloo and nccl to a process whose peer is gone
PEER_LOST = ("gloo", "Connection closed", "Connection reset", "NCCL", "Broken pipe")

# for control messages: on the CPU, where a lost peer is noticed at once
_control: dist.ProcessGroup | None = None


@contextmanager
def process_group(settings: TrainerConfig, device: str) -> Iterator[None]:
    """Form a process group of trainer.devices x trainer.num_nodes processes.

    Raises:
        UserError: if another number of processes was started, or one of them ends early.
    """
    count, environment = settings.devices * settings.num_nodes, dict(os.environ)
    adopt_srun_environment()
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != count:
        nodes = f"--nnodes={settings.num_nodes} " if settings.num_nodes > 1 else "--standalone "
        command = shlex.join(["-m", "focus_exp", *sys.argv[1:]])
        raise UserError(
            f"trainer.devices={settings.devices} x trainer.num_nodes={settings.num_nodes} must be the number of "
            f"processes (got {started}). Start with torchrun {nodes}--nproc-per-node={settings.devices} {command}, or "
            "with srun and one task a device."
        )
    alone = "RANK" not in os.environ
    if alone and settings.strategy in ("auto", "single"):
        yield
        return
    try:
        join_group(settings, device)
        yield
        dist.barrier(_control)
    except RuntimeError as error:
        if count == 1 or not any(sign in str(error) for sign in PEER_LOST):
            raise
        raise UserError(f"one of {count} processes has ended ({first_line(error)}). Run again to resume.") from error
    finally:
        if alone and dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()  # Lightning's teardown removes WORLD_SIZE
        os.environ.update(environment)


def adopt_srun_environment() -> None:
    """Set torchrun's variables from those of srun."""
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


def join_group(settings: TrainerConfig, device: str) -> None:
    """Choose this process's GPU or threads, and join the group once per process."""
    global _control
    if device == "cuda":
        available = torch.cuda.device_count()
        if settings.devices > available:
            raise UserError(f"trainer.devices must be <= {available}, this node's GPUs (got {settings.devices}).")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.devices))
    if not dist.is_initialized():
        # without torchrun a group of one, for strategy=fsdp
        alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", **alone)
        _control = dist.new_group(backend="gloo", timeout=EVALUATION_TIMEOUT)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return whether this process writes: the only one, or process 0."""
    return rank() == 0


@contextmanager
def sequential_by_rank(devices: int) -> Iterator[None]:
    """Let process 0 run the block first, then one process of each node at a time.

    The others find downloads in the cache, and main memory holds one whole model.

    Args:
        devices: processes of a node.
    """
    own = 0 if is_main() else 1 + int(os.environ["LOCAL_RANK"])
    for turn in range(devices + 1 if world_size() > 1 else 1):
        if turn == own:
            yield
        if world_size() > 1:
            dist.barrier(_control)


def broadcast_object(value: Any) -> Any:
    """Return process 0's value."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_control)
    return values[0]


def all_gather_object(value: Any) -> list[Any]:
    """Return the values of all processes by rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_control)
    return values


def run_on_rank_zero(model: PreTrainedModel, work: Callable[[], object]) -> None:
    """Run `work` in process 0; the others wait and gather their shards for its forward passes.

    Shards are gathered by running the model on two tokens: which ones does not matter.
    """
    if world_size() == 1:
        work()
    elif is_main():
        event = FAILED
        try:
            with announce_passes(model):
                work()
            event = DONE
        finally:
            broadcast_object(event)
    else:
        tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
        while (event := broadcast_object(None)) == FORWARD:
            with torch.no_grad():
                model(input_ids=tokens, use_cache=False)
        if event == FAILED:
            raise UserError(f"process {rank()} of {world_size()} ends: process 0 has failed")


@contextmanager
def announce_passes(model: PreTrainedModel) -> Iterator[None]:
    """Tell the other processes of each forward pass of a sharded model in the block."""
    unfinished: list[str] = []

    def before(*_: Any) -> None:
        if unfinished:
            raise RuntimeError("an earlier forward pass failed halfway: the processes are out of step")
        unfinished.append(FORWARD)
        broadcast_object(FORWARD)

    hooks = []
    if is_sharded(model):
        # before FSDP's own, which waits for the others
        hooks.append(model.register_forward_pre_hook(before, prepend=True))
        hooks.append(model.register_forward_hook(lambda *_: unfinished.clear()))
    try:
        yield
        if unfinished:
            raise UserError("a forward pass failed halfway, see above. Re-run the same command to resume.")
    finally:
        for hook in hooks:
            hook.remove()


def strategy_name(settings: TrainerConfig) -> str:
    """Return the configured strategy: single, ddp or fsdp."""
    if settings.strategy != "auto":
        return settings.strategy
    return "single" if settings.devices * settings.num_nodes == 1 else "ddp"


def place_base(model: PreTrainedModel, config: Config, device: torch.device) -> None:
    """Move a loaded base to this process's device, or its shard with fsdp in jobs that form a process group."""
    if dist.is_initialized() and strategy_name(config.trainer) == "fsdp":
        shard(model, device)
    elif not getattr(model, "is_quantized", False):  # which is there
        nn.Module.to(model, device)


def shard(model: PreTrainedModel, device: torch.device) -> None:
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh)
    # after a forward pass too, so that whoever reads the parameters gets shards
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


@torch.no_grad()
def broadcast_attached(model: PreTrainedModel) -> None:
    """Send process 0's routers, LoRA and their buffers to all processes."""
    if world_size() > 1:
        for name, tensor in model.state_dict().items():
            if not isinstance(tensor, DTensor) and (is_trainable(name, "router") or is_trainable(name, "lora")):
                dist.broadcast(tensor, src=0)


@torch.no_grad()
def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Average over processes the gradients that FSDP does not handle, such as those of an expert without tokens."""
    for parameter in parameters if world_size() > 1 else ():
        if not isinstance(parameter, DTensor):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            parameter.grad = gradient.div_(world_size())
