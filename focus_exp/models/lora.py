"""LoRA by PEFT, as a baseline with as many parameters as a router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model_state_dict
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as FAMILY_TARGETS
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from focus_exp.config import LoraConfig
from focus_exp.errors import UserError
from focus_exp.models.attach import layer_shape
from focus_exp.models.load import gather_tensor
from focus_exp.models.methods import attention_modules, is_trainable
from focus_exp.storage import atomic_write

ADAPTER = "default"  # PEFT's name for a single adapter
FILES = ("adapter_model.safetensors", "adapter_config.json")
PREFIX = "base_model.model."  # of names in PEFT's wrapper
Linear = nn.Linear | Conv1D


def add_lora(model: PreTrainedModel, options: LoraConfig, budget: int) -> PreTrainedModel:
    """Add LoRA to linear layers, in place and in float32.

    LoRA (arXiv 2106.09685, eq. 3): h = W x + alpha/r B A x, with A `[r, in]` random and B `[out, r]` zero.

    Args:
        options: target modules, rank and alpha; without a rank the one nearest to `budget` parameters.

    Raises:
        UserError: a target is no linear layer.
    """
    targets = options.target_modules or list(FAMILY_TARGETS.get(model.config.model_type, ("q_proj", "v_proj")))
    layers = find_target_layers(model, targets)
    # rank 1 has in + out parameters
    rank = options.rank or max(1, round(budget / sum(sum(layer.weight.shape) for layer in layers)))
    config = PeftLoraConfig(
        task_type="CAUSAL_LM",
        revision=getattr(model.config, "_commit_hash", None),
        r=rank,
        lora_alpha=options.alpha or 2 * rank,
        lora_dropout=0.0,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers),
    )
    model.add_adapter(config, ADAPTER)
    for name, parameter in model.named_parameters():
        if is_trainable(name, "lora"):
            parameter.data = parameter.data.float()
    return model


def find_target_layers(model: PreTrainedModel, targets: list[str]) -> list[Linear]:
    """Find the linear layers whose names end in one of `targets`."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    matches = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    for target, names in matches.items():
        if not names:
            raise UserError(
                f"recipe.lora.target_modules must be linear layers of {type(model).__name__} (got {target}). Use "
                f"{', '.join(sorted({name.rsplit('.', 1)[-1] for name in linear}))}."
            )
    return [linear[name] for name in dict.fromkeys(name for names in matches.values() for name in names)]


def count_router_parameters(model: PreTrainedModel, groups: int, routing_dim: int) -> int:
    """Count the parameters of Focus: layers (E R + K R), R = `routing_dim`."""
    shapes = [layer_shape(model, module, index) for index, module in attention_modules(model).items()]
    return sum((shape.width + groups) * routing_dim for shape in shapes)


def describe_lora(model: PreTrainedModel) -> dict[str, Any]:
    """Describe the LoRA of a model for records; `name` is such as `lora_r4`."""
    config: Any = model.peft_config[ADAPTER]
    return {
        "name": f"lora_r{config.r}",
        "rank": config.r,
        "alpha": config.lora_alpha,
        "target_modules": sorted(config.target_modules),
    }


def save_lora(model: PreTrainedModel, folder: str | Path, write: bool = True) -> Path:
    """Write the adapter into `folder`, atomically, in PEFT's format.

    write: False for all but one process of a sharded model; all must call this.
    """
    folder = Path(folder)
    # looking for changed embeddings, PEFT would ask the Hub
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    tensors = {PREFIX + name: gather_tensor(tensor.detach()).cpu().contiguous() for name, tensor in state.items()}
    if not write:
        return folder
    description = cast(PeftLoraConfig, model.peft_config[ADAPTER]).to_dict()
    with atomic_write(folder / FILES[0]) as weights, atomic_write(folder / FILES[1]) as text:
        save_file(tensors, weights, metadata={"format": "pt"})
        text.write_text(json.dumps(description, indent=2, sort_keys=True, default=sorted), encoding="utf-8")
    return folder
