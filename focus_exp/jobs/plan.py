"""job=plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from focus_exp.checks import check_processes
from focus_exp.config import Config, PhaseConfig
from focus_exp.errors import UserError
from focus_exp.jobs.train import attach_method
from focus_exp.models.files import find_local_model
from focus_exp.models.lora import Linear
from focus_exp.models.methods import is_trainable
from focus_exp.models.random import architecture_config
from focus_exp.runs.compose import compose_adapter, compose_variants
from focus_exp.runs.prepare import check_length
from focus_exp.speed.model import model_shape
from focus_exp.training.checkpoints import checkpoint_bytes
from focus_exp.training.phases import tokens_per_step

GIB = 2**30
USABLE = 0.9  # fraction of the GPU's memory for tensors; CUDA context, workspaces and fragmentation take the rest
QUANTIZED = {"none": 2.0, "int8": 1.0, "nf4": (4 + 32 / 64) / 8}  # bytes of a weight; nf4 has a float32 scale for 64
# GPU -> GiB of memory, and dense bfloat16 TFLOP/s, from NVIDIA's data sheets
MEMORY = {"l4": 22.5, "rtx_4090": 24, "l40s": 45, "a100_40": 40, "a100": 80, "h100": 79.6, "h200": 140.4, "b200": 179}
PEAK = {"l4": 121, "rtx_4090": 165, "l40s": 362, "a100_40": 312, "a100": 312, "h100": 989, "h200": 989, "b200": 2250}


def plan(config: Config) -> None:
    """Estimate memory, GPUs and hours of training before anything is downloaded; refuse what the run would refuse."""
    rows, errors = [], []
    run = {config.model.name: compose_adapter(config) if config.adapter else config}
    for name, planned in (compose_variants(config) if config.variants else run).items():
        try:
            rows.append({"run": name} | plan_run(planned))
        except UserError as error:
            errors.append(f"{name}: {error}")
    if rows:
        print(pd.DataFrame(rows).to_string(index=False, float_format="{:,.3g}".format))
        print(f"GiB on each {config.plan.gpu}. Hours of training at {config.plan.utilization:.0%} of its peak FLOP/s.")
    if errors:
        raise UserError("\n  ".join(errors))


def plan_run(config: Config) -> dict[str, Any]:
    """Estimate GiB, PFLOP and hours on the fewest GPUs that the run fits.

    Weights take 2 bytes (frozen base), 4 (trained base, or precision=float32), or those of the quantization; gradients
    4 bytes (DDP: 8, with its buckets) and AdamW's two moments 8 bytes of a trainable parameter. FSDP shards the base,
    and what is kept of its training, evenly, and gathers embeddings, head and two layers at a time.

    Raises:
        UserError: if the run is refused, or on every number of GPUs that it fits.
    """
    model, trainer, settings = build_model(config), config.trainer, config.plan
    phases, trains_base = [phase for _, phase in config.phases], config.recipe.trains("all")
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    linear = sum(m.weight.numel() for layer in layers for m in layer.modules() if isinstance(m, Linear))
    layer = sum(p.numel() for p in layers[0].parameters())
    attach_method(model, config)
    size, kinds = model.num_parameters(), {phase.trainable for phase in phases}
    trained = sum(p.numel() for name, p in model.named_parameters() if any(is_trainable(name, kind) for kind in kinds))
    stored = 4.0 if trains_base or trainer.precision == "float32" else 2.0
    linear_bytes = QUANTIZED[config.model.quantization] if stored == 2 else stored
    flops = sum(p.steps * tokens_per_step(config) * flops_per_token(config, model, linear, p) for p in phases)
    flops *= 1 + len(config.recipe.tune.factors)
    configured, kept = trainer.devices * trainer.num_nodes, step_bytes(config, model, linear)
    for gpus in [configured] if configured > 1 else [2**i for i in range((settings.gpus or 1024).bit_length())]:
        automatic = ["single"] if gpus == 1 else ["ddp", "fsdp"]
        for strategy in automatic if trainer.strategy == "auto" else [trainer.strategy]:
            weights = linear * linear_bytes + (size - linear) * stored
            optimizer = (16.0 if strategy == "ddp" else 12.0) * trained
            if strategy == "fsdp":
                weights = weights / gpus + stored * (size - layer * (len(layers) - (4 if trains_base else 2)))
                optimizer /= gpus if trains_base else 1
            held = (weights + optimizer + kept) / GIB
            if held > USABLE * MEMORY[settings.gpu]:
                continue
            layout = replace(trainer, devices=gpus, num_nodes=1, strategy=strategy)
            if reason := next(check_processes(replace(config, job="train", trainer=layout)), None):
                raise UserError(f"it fits {gpus} GPUs with trainer.strategy={strategy}, which are refused: {reason}")
            row = {"strategy": strategy, "gpus": gpus, "parameters": size, "trainable": trained}
            row |= {"held": held, "weights": weights / GIB, "checkpoint": checkpoint_bytes(trained) / GIB}
            hours = flops / (3600 * gpus * PEAK[settings.gpu] * 1e12 * settings.utilization)
            return row | {"pflop": flops / 1e15, "hours": hours}
    raise UserError(
        f"{held:,.1f} GiB exceed {USABLE:.0%} of each of {gpus} GPUs. Type another plan.gpu, more plan.gpus, "
        "trainer.gradient_checkpointing=true, model.quantization=nf4 or a smaller trainer.batch_size."
    )


def flops_per_token(config: Config, model: PreTrainedModel, linear: int, phase: PhaseConfig) -> float:
    """Training FLOPs of one token: 2 N for each pass over the N weights of linear layers and head.

    A trained base takes 3 passes (forward, gradients of inputs, of weights), a frozen one 2; causal attention 7
    products of 2 H D (T + 1) / 2 FLOPs a layer (2 forward, 5 backward; Dao 2023, arXiv:2307.08691). Distillation and
    checkpointing each add a forward pass.
    """
    shape, cfg = model_shape(model), model.config
    pairs = 2.0 * cfg.num_hidden_layers * shape.heads * shape.head_dim * (config.data.seq_len + 1)
    extra = (phase.objective == "distill") + config.trainer.gradient_checkpointing
    matrices = 2.0 * (linear + cfg.vocab_size * shape.width)
    return ((3 if phase.trainable == "all" else 2) + extra) * matrices + (3.5 + extra) * pairs


def step_bytes(config: Config, model: PreTrainedModel, linear: int) -> float:
    """Return what a step keeps for its backward pass, or an evaluation of its logits [bytes].

    A layer keeps `4 F + (2 H + 2 G) D + 4.5 E` elements of 2 bytes a token (MLP, attention, norms), with a trained base
    under autocast 13 E in place of 4.5 E. Soft routing keeps 4.5 bytes of each of the H T^2 pairs. Checkpointing keeps
    the layers' inputs, 2 E bytes a token, and all of one layer. Constants fit traces of GPT-2, Llama and Mistral.
    """
    shape, cfg, trainer, length = model_shape(model), model.config, config.trainer, config.data.seq_len
    if not config.phases:
        return 6.0 * config.eval.batch_size * config.eval.seq_len * cfg.vocab_size  # bfloat16 and float32
    trains_base, saving = config.recipe.trains("all"), trainer.gradient_checkpointing
    elements = 4.0 * (getattr(cfg, "intermediate_size", None) or 4 * shape.width)
    elements += 2 * (shape.heads + shape.kv_heads) * shape.head_dim + (13 if trains_base else 4.5) * shape.width
    is_soft = config.attention.is_soft and any(phase.trainable != "lora" for _, phase in config.phases)
    layer = 2 * length * elements + is_soft * 4.5 * shape.heads * length**2
    inputs = 2.0 * length * shape.width * (2 if trains_base else 1)
    kept = inputs * cfg.num_hidden_layers + layer if saving else layer * cfg.num_hidden_layers
    casts = 2.0 * linear if trains_base and trainer.precision != "float32" else 0.0  # to bfloat16, by autocast
    return trainer.batch_size * (kept + 12.0 * length * cfg.vocab_size) + casts


def build_model(config: Config) -> PreTrainedModel:
    """Build the model on the meta device; nothing is downloaded."""
    settings = config.model
    if config.attention.backend == "cpu":
        raise UserError("attention.backend must run on a GPU (got cpu). Type auto.")
    if not (settings.architecture or settings.path):
        raise UserError("model.path must be set with job=plan, which downloads nothing. Type model.path=<folder>.")
    if settings.path:
        architecture = AutoConfig.from_pretrained(find_local_model(settings.path)[0], local_files_only=True)
    else:
        architecture = architecture_config(settings)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(architecture.get_text_config(), dtype=torch.float32)
    for key, length in (("data.seq_len", config.data.seq_len), ("eval.seq_len", config.eval.seq_len)):
        check_length(model, key, length, settings.name)
    return model
