"""How several processes train one model: the Lightning strategy, the sharding of a base, what must be exchanged.

ddp: every process holds the whole model. fsdp: the base is sharded over the processes layer by layer (FSDP2) as soon as
it is loaded, and stays so for its evaluation; what is attached later, a router or LoRA, is whole in every process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from focus_exp.attention.options import FitOptions
from focus_exp.config import Config, TrainerConfig
from focus_exp.data.loader import Share, share_of
from focus_exp.errors import UserError
from focus_exp.models.load import gather_tensor
from focus_exp.models.methods import attached_methods, is_trainable
from focus_exp.training.checkpoints import read
from focus_exp.training.exchange import rank, world_size


def strategy_name(settings: TrainerConfig) -> str:
    """What is asked for: single, ddp or fsdp."""
    if settings.strategy != "auto":
        return settings.strategy
    return "single" if settings.devices * settings.num_nodes == 1 else "ddp"


def in_use(settings: TrainerConfig) -> str:
    """single, ddp or fsdp: jobs that start no processes are one, whatever the settings."""
    return strategy_name(settings) if dist.is_initialized() else "single"


def check_strategy(config: Config, device: torch.device) -> None:
    """UserError for settings of trainer.* and model.quantization that exclude each other, before any process starts."""
    settings, chosen = config.trainer, strategy_name(config.trainer)
    count = settings.devices * settings.num_nodes
    if chosen == "single" and count > 1:
        raise UserError(f"trainer.strategy=single is one process, not {count}; use ddp or fsdp, or trainer.devices=1")
    share_of(settings.batch_size, settings.accumulate, count)
    if settings.cpu_offload and chosen != "fsdp":
        raise UserError(f"trainer.cpu_offload=true goes with trainer.strategy=fsdp, not {chosen}; use fsdp")
    if settings.cpu_offload and device.type != "cuda":
        raise UserError("trainer.cpu_offload=true relieves a GPU, and there is none; use trainer.cpu_offload=false")
    if config.has_router and config.focus.balance_loss and count > 1:
        raise UserError(
            f"attention.balance_loss={config.focus.balance_loss} is of a whole batch, of which each of {count} "
            "processes would see a part; use trainer.devices=1"
        )
    if isinstance(config.attention, FitOptions) and config.attention.calibration_sequences and chosen == "fsdp":
        raise UserError(
            f"attention={config.attention.name} is fitted by a whole model, which trainer.strategy=fsdp has sharded; "
            "use trainer.strategy=ddp, or attention.calibration_sequences=0 with the adapter of a run that fitted it"
        )
    if config.recipe.lora.dora and config.recipe.trains("lora") and chosen == "fsdp":
        raise UserError(
            "recipe.lora.dora=true starts from the lengths of whole weights, which trainer.strategy=fsdp has sharded; "
            "use trainer.strategy=ddp, or recipe=lora"
        )
    if config.model.quantization == "none":
        return
    key = f"model.quantization={config.model.quantization}"
    if device.type != "cuda":
        raise UserError(f"{key} needs a CUDA GPU; use model.quantization=none, or trainer.accelerator=gpu on one")
    if config.recipe.trains("all"):
        raise UserError(f"{key} is for a frozen base, but recipe={config.recipe.name} trains it; use none, or retrofit")
    if chosen == "fsdp":
        raise UserError(f"{key} cannot be sharded; use trainer.strategy=ddp or single, or model.quantization=none")


def place(model: PreTrainedModel, config: Config, device: torch.device) -> None:
    """Put a loaded base on the device of this process; with fsdp, only this process's shard of it."""
    if in_use(config.trainer) == "fsdp":
        shard(model, config.trainer, device)
    else:
        to_device(model, device)


def to_device(model: PreTrainedModel, device: torch.device) -> None:
    """Where it is to run, unless it is there for good: sharded or quantised."""
    if not is_sharded(model) and not getattr(model, "is_quantized", False):
        nn.Module.to(model, device)


def shard(model: PreTrainedModel, settings: TrainerConfig, device: torch.device) -> None:
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    # embeddings and head, the rest of the root, stay on the device: `model.device` says where batches go
    offload = CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy()
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh, offload_policy=offload)
    # after a forward pass too, so that whoever looks at the parameters finds shards
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def place_added(model: PreTrainedModel, device: torch.device) -> None:
    """Routers and LoRA, where they run: they were put beside weights that may wait in main memory."""
    for method in attached_methods(model).values():
        method.to(device)
    for name, parameter in model.named_parameters():
        if is_trainable(name, "lora"):
            parameter.data = parameter.data.to(device)


def lightning_strategy(settings: TrainerConfig) -> Strategy | str:
    """What the Trainer is given; "auto" is its own single device."""
    match in_use(settings):
        case "ddp":
            return DDPStrategy()
        case "fsdp":
            return ShardedStrategy()
    return "auto"


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 on a model that `place` has sharded. Its checkpoints are as of one process: the trained part, whole.

    Lightning's own would gather the frozen base at every checkpoint, and number the optimiser's states differently.
    """

    lightning_restore_optimizer = True

    def __init__(self) -> None:
        super().__init__(data_parallel_size=world_size(), tensor_parallel_size=1, save_distributed_checkpoint=False)

    def model_to_device(self) -> None:
        """It is there; with cpu_offload, where it is to wait."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        module: Any = self.lightning_module
        state = module.model.state_dict()
        return {f"model.{name}": gather_tensor(state[name]).cpu() for name in state if module.changes(name)}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return read(Path(checkpoint_path), mmap=True)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        module: Any = self.lightning_module
        own = module.state_dict()
        state = {name: like(own[name], tensor) for name, tensor in checkpoint["state_dict"].items()}
        module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = getattr(optimizer, "_optimizer", optimizer).state_dict()
        state["state"] = {
            index: {
                name: gather_tensor(value).cpu() if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
            for index, values in state["state"].items()
        }
        return dict(state)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for index, values in saved["state"].items():
                own = parameters[index]
                for name, value in values.items():
                    values[name] = like(own, value) if value.shape == own.shape else value
            optimizer.load_state_dict(saved)


def like(own: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` sharded as `own` is, where it is."""
    if not isinstance(own, DTensor):
        return tensor
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


@torch.no_grad()
def share_added(model: PreTrainedModel) -> None:
    """Give every process what process 0 holds of what is not sharded: routers, LoRA, their buffers."""
    if world_size() > 1:
        for name, tensor in model.state_dict().items():
            if not isinstance(tensor, DTensor) and (is_trainable(name, "router") or is_trainable(name, "lora")):
                dist.broadcast(tensor, src=0)


@torch.no_grad()
def average_gradients(parameters: list[nn.Parameter]) -> None:
    """The mean over the processes of gradients that FSDP does not see, in one exchange."""
    gradients = [p.grad for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
    if world_size() == 1 or not gradients:
        return
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    parts = flat.div_(world_size()).split([g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def global_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm of all of them, where they are sharded as if they were not."""
    if not gradients:
        return torch.tensor(0.0)
    shards = [g.to_local() for g in gradients if isinstance(g, DTensor)]
    if not shards:
        return torch.stack([g.norm() for g in gradients]).norm()
    squares = torch.stack([g.float().square().sum() for g in shards]).sum()
    dist.all_reduce(squares)
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            squares += gradient.square().sum().to(squares.device)
    return squares.sqrt()


@contextmanager
def batches_together(model: PreTrainedModel, share: Share) -> Iterator[None]:
    """Within the block what moves with its batches sees those that a single process would see, in their order."""
    split = world_size() // share.parallel

    def together(rows: Tensor) -> tuple[list[Tensor], int]:
        parts = [torch.empty_like(rows) for _ in range(world_size())]
        dist.all_gather(parts, rows.contiguous())
        return [torch.cat(parts[i : i + split]) for i in range(0, world_size(), split)], rank() // split

    methods = attached_methods(model).values() if world_size() > 1 else ()
    for method in methods:
        method.together = together
    try:
        yield
    finally:
        for method in methods:
            method.together = None
