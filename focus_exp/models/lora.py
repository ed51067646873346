"""LoRA and DoRA, by PEFT: the usual small changes to a frozen model, as baselines for a router of the same size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
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

ADAPTER = "default"  # PEFT's own name for an only adapter
FILES = ("adapter_model.safetensors", "adapter_config.json")
PREFIX = "base_model.model."  # how PEFT calls the model inside its own wrapper
Linear = nn.Linear | Conv1D


def add_lora(model: PreTrainedModel, options: LoraConfig, budget: int) -> PreTrainedModel:
    """Put LoRA on the linear layers that `options.target_modules` names, in place, starting as the base model.

    LoRA (arXiv 2106.09685, eq. 3): h = W x + alpha/r B A x, with A `[r, in]` random and B `[out, r]` zero. DoRA
    (arXiv 2402.09353, eq. 5) also learns the length of every output's weights, `[out]`. All of it is float32,
    whatever the base is. Without a rank, the one whose number of parameters comes closest to `budget`.
    `model.disable_adapters()` gives the base model's logits. UserError for a target that names no linear layer.
    """
    targets = options.target_modules or list(FAMILY_TARGETS.get(model.config.model_type, ("q_proj", "v_proj")))
    layers = target_layers(model, targets)
    rank = options.rank or closest_rank(layers, options.dora, budget)
    config = PeftLoraConfig(
        task_type="CAUSAL_LM",
        revision=getattr(model.config, "_commit_hash", None),
        r=rank,
        lora_alpha=options.alpha or 2 * rank,
        lora_dropout=0.0,
        use_dora=options.dora,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers),
    )
    model.add_adapter(config, ADAPTER)
    for name, parameter in model.named_parameters():
        if is_trainable(name, "lora"):
            parameter.data = parameter.data.float()
    for layer in model.modules():
        # PEFT has computed the lengths in the base's bfloat16: rounded, they would not start as the base
        if isinstance(layer, LoraLayer) and ADAPTER in layer.lora_magnitude_vector:
            dora: Any = layer.lora_magnitude_vector[ADAPTER]
            dora.update_layer(
                base_layer=layer.get_base_layer(),
                lora_A=layer.lora_A[ADAPTER].weight,
                lora_B=layer.lora_B[ADAPTER].weight,
                scaling=layer.scaling[ADAPTER],
            )
    return model


def target_layers(model: PreTrainedModel, targets: list[str]) -> list[Linear]:
    """The linear layers whose names end in one of `targets`, whole parts of a name."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    found = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    for target, names in found.items():
        if not names:
            there = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linear}))
            raise UserError(
                f"recipe.lora.target_modules holds {target}, which is no linear layer of {type(model).__name__}; "
                f"it has {there}"
            )
    return [linear[name] for name in dict.fromkeys(name for names in found.values() for name in names)]


def count_lora_parameters(layers: list[Linear], rank: int, dora: bool) -> int:
    """rank (in + out) numbers for every layer, and out more with DoRA."""
    outputs = [layer.nf if isinstance(layer, Conv1D) else layer.out_features for layer in layers]
    return rank * sum(sum(layer.weight.shape) for layer in layers) + dora * sum(outputs)


def closest_rank(layers: list[Linear], dora: bool, budget: int) -> int:
    """The rank, at least 1, with which the number of parameters is nearest to `budget`; of two, the smaller."""
    per_rank = count_lora_parameters(layers, 1, dora=False)
    below = max(1, (budget - count_lora_parameters(layers, 0, dora)) // per_rank)
    return min((below, below + 1), key=lambda rank: abs(count_lora_parameters(layers, rank, dora) - budget))


def count_router_parameters(model: PreTrainedModel, groups: int, routing_dim: int) -> int:
    """What Focus would train on this model: layers (E d_g + K d_g)."""
    shapes = [layer_shape(model, module, index) for index, module in attention_modules(model).items()]
    return sum((shape.width + groups) * routing_dim for shape in shapes)


def describe_lora(model: PreTrainedModel) -> dict[str, Any]:
    """What `add_lora` put on the model, for records; `name` as in "LoRA r=4"."""
    config: Any = model.peft_config[ADAPTER]
    return {
        "name": f"{'DoRA' if config.use_dora else 'LoRA'} r={config.r}",
        "rank": config.r,
        "alpha": config.lora_alpha,
        "target_modules": sorted(config.target_modules),
    }


def save_lora(model: PreTrainedModel, folder: str | Path, write: bool = True) -> Path:
    """Write the adapter into `folder` in PEFT's own format, which `PeftModel.from_pretrained` reads.

    An error leaves an older adapter in `folder` as it was. Of a sharded one all processes call this.
    """
    folder = Path(folder)
    # told not to look for embeddings, PEFT need not ask the hub what the base model's were
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    tensors = {PREFIX + name: gather_tensor(tensor.detach()).cpu().contiguous() for name, tensor in state.items()}
    if not write:
        return folder
    description = cast(PeftLoraConfig, model.peft_config[ADAPTER]).to_dict()
    with atomic_write(folder / FILES[0]) as weights, atomic_write(folder / FILES[1]) as text:
        save_file(tensors, weights, metadata={"format": "pt"})
        text.write_text(json.dumps(description, indent=2, sort_keys=True, default=sorted), encoding="utf-8")  # of sets
    return folder
