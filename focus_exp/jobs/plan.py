"""job=plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from hydra import compose
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from focus_exp.attention.kernels import KERNELS
from focus_exp.attention.kernels.contract import MAX_HEAD_DIM
from focus_exp.attention.options import FocusOptions
from focus_exp.checks import check_processes
from focus_exp.config import Config, DualConfig, PhaseConfig, get_method_options
from focus_exp.errors import UserError, first_line
from focus_exp.fitting.focus import BATCH
from focus_exp.jobs.compose import command_overrides, compose_adapter, compose_overrides, compose_variants, needs_base
from focus_exp.jobs.cost import count_scored
from focus_exp.jobs.prepare import check_length
from focus_exp.jobs.train import compose_fit_variants, make_trial
from focus_exp.models.attach import attach
from focus_exp.models.lora import Linear, add_lora, count_router_parameters
from focus_exp.models.methods import is_causal, is_trainable
from focus_exp.models.random import architecture_config
from focus_exp.speed.model import model_shape
from focus_exp.speed.workload import Shape
from focus_exp.training.checkpoints import checkpoint_bytes
from focus_exp.training.phases import tokens_per_step

GIB = 2**30
USABLE = 0.9  # fraction of the GPU's memory for tensors; CUDA context, workspaces and fragmentation take the rest
MOST_GPUS = 1024
BYTES = ("weights", "gradients", "optimizer", "activations", "logits", "warm_start", "held")
# bytes of a 16-bit weight after quantization; nf4 adds a float32 scale for 64 weights
QUANTIZED = {"none": 2.0, "int8": 1.0, "nf4": (4 + 32 / 64) / 8}
# GPU -> memory [GiB], dense bfloat16 and float32 [FLOP/s], from NVIDIA's data sheets (SXM where there is a choice)
GPUS = {
    "l4": (22.5, 121e12, 30.3e12), "a10": (22.5, 125e12, 31.2e12), "rtx_4090": (24.0, 165.2e12, 82.6e12),
    "l40s": (45.0, 362e12, 91.6e12), "a100_40": (40.0, 312e12, 19.5e12), "a100": (80.0, 312e12, 19.5e12),
    "h100": (79.6, 989e12, 67e12), "h200": (140.4, 989e12, 67e12), "b200": (179.0, 2250e12, 75e12),
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model: parameters, and the fields of its config that the formulas use."""

    parameters: int
    trainable: int
    linear: int  # weights of linear layers within the decoder layers
    layer: int  # parameters of one decoder layer, on average
    layers: int
    shape: Shape
    intermediate: int
    vocab: int
    causal: bool


@dataclass(kw_only=True)
class Plan:
    """One run: bytes on each GPU at the worst moment, bytes of a checkpoint, work and time.

    tokens, flops: of the phases. hours: of each stage. per_million: hours of evaluation for a million held-out tokens.
    without: what the hours leave out.
    """

    run: str
    strategy: str
    gpus: int
    parameters: int
    trainable: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    warm_start: float
    checkpoint: float
    tokens: int
    flops: float
    hours: dict[str, float]
    per_million: float
    without: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def held(self) -> float:
        step = self.gradients + self.optimizer + self.activations + self.logits
        return self.weights + max(step, self.warm_start)


def plan(config: Config) -> None:
    """Estimate memory, FLOPs, GPUs and hours of a run from formulas, before anything is downloaded.

    What the run would refuse is refused here. Hours are of learning-rate trials, warm start, fits, phases and
    evaluation; the last line says what they leave out.
    """
    if config.plan.gpu not in GPUS:
        raise UserError(f"plan.gpu must be one of {', '.join(GPUS)} (got {config.plan.gpu}).")
    plans, errors = list[Plan](), list[str]()
    for name, planned in planned_configs(config).items():
        try:
            plans.append(plan_run(name, planned))
        except UserError as error:
            errors.append(f"{name}: {first_line(error)}")
    if plans:
        show(plans, config)
    if errors := errors + [f"{item.run}: {item.error}" for item in plans if item.error]:
        raise UserError("\n  ".join(errors))


def plan_run(name: str, config: Config) -> Plan:
    """Plan one run on the fewest GPUs whose memory it fits; `error` says that no number is enough.

    Raises:
        UserError: if the run is refused, or on every number of GPUs that it fits.
    """
    compose_fit_variants(config)
    sizes, trainer, settings = measure(config), config.trainer, config.plan
    check_kernel(config, sizes)
    usable = USABLE * GPUS[settings.gpu][0] * GIB
    most, configured = settings.gpus or MOST_GPUS, trainer.devices * trainer.num_nodes
    refused = ""
    for gpus in [configured] if configured > 1 else [2**i for i in range(most.bit_length()) if 2**i <= most]:
        automatic = ("single",) if gpus == 1 else ("ddp", "fsdp")
        for strategy in automatic if trainer.strategy == "auto" else (trainer.strategy,):
            item = plan_on(name, config, sizes, strategy, gpus)
            if item.held > usable:
                continue
            layout = replace(trainer, devices=gpus, num_nodes=1, strategy=strategy)
            reason = next(check_processes(replace(config, job="train", trainer=layout)), None)
            if reason is None:
                return item
            refused = refused or f"it fits {gpus} GPUs with trainer.strategy={strategy}, which are refused: {reason}"
    if refused:
        raise UserError(refused)
    item.error = (
        f"{item.held / GIB:,.1f} GiB exceed the {usable / GIB:,.1f} GiB usable on each of {gpus} GPUs. Use "
        "trainer.gradient_checkpointing=true, a smaller trainer.batch_size with more trainer.accumulate, "
        "model.quantization=nf4 (frozen base), another plan.gpu or more plan.gpus."
    )
    return item


def check_kernel(config: Config, sizes: Sizes) -> None:
    """Raise UserError for a kernel that no GPU supports; whether this machine has it does not matter."""
    backend = config.attention.backend
    if backend in KERNELS and KERNELS[backend].device != "cuda":
        raise UserError(
            f"attention.backend must be supported on a GPU (got {backend}, which runs on {KERNELS[backend].place}). "
            "Type auto."
        )
    if backend in KERNELS and sizes.shape.head_dim > MAX_HEAD_DIM:
        raise UserError(
            f"attention.backend must be supported (got {backend}, which takes head sizes up to {MAX_HEAD_DIM}, not "
            f"{sizes.shape.head_dim}). Type auto."
        )


def plan_on(name: str, config: Config, sizes: Sizes, strategy: str, gpus: int) -> Plan:
    """Estimate memory, FLOPs and hours under one strategy.

    Weights take 2 bytes (frozen base), 4 (trained base, or precision=float32), or those of the quantization; gradients
    4 bytes and AdamW's two moments 8 bytes of a trainable parameter. FSDP shards the base, and what is kept of its
    training, evenly, and gathers embeddings, head and two layers at a time; the router is on every GPU.
    """
    trainer, trains_base = config.trainer, config.recipe.trains("all")
    stored = 4.0 if trains_base or trainer.precision == "float32" else 2.0
    linear = QUANTIZED[config.model.quantization] if stored == 2 else stored
    weights = sizes.linear * linear + (sizes.parameters - sizes.linear) * stored
    gradients, optimizer = 4.0 * sizes.trainable, 8.0 * sizes.trainable
    if strategy == "ddp":
        gradients *= 2  # buckets that are exchanged
    if strategy == "fsdp":
        root = sizes.parameters - sizes.layer * sizes.layers
        weights = weights / gpus + stored * (root + (4 if trains_base else 2) * sizes.layer)
        if trains_base:
            gradients, optimizer = gradients / gpus, optimizer / gpus
    phases, per_step = [phase for _, phase in config.phases], tokens_per_step(config)
    micro = trainer.batch_size if phases else config.eval.batch_size
    length = config.data.seq_len if phases else config.eval.seq_len
    saving = trainer.gradient_checkpointing
    soft = config.has_router and any(phase.trainable != "lora" for phase in phases)
    activations = activation_bytes(sizes, length, trains_base, soft, saving) if phases else 0.0
    casts = 2.0 * sizes.linear if trains_base and trainer.precision != "float32" else 0.0  # bfloat16, by autocast
    return Plan(
        run=name, strategy=strategy, gpus=gpus, parameters=sizes.parameters, trainable=sizes.trainable,
        weights=weights, gradients=gradients, optimizer=optimizer, activations=micro * activations + casts,
        logits=micro * length * sizes.vocab * (12.0 if phases else 6.0),  # bfloat16, float32 and their gradients
        warm_start=warm_start_bytes(config, sizes), checkpoint=checkpoint_bytes(sizes.trainable),
        tokens=sum(phase.steps for phase in phases) * per_step, flops=training_flops(config, sizes),
        hours=stage_hours(config, sizes, gpus), without=left_out(config),
        per_million=1e6 * scoring_flops(config, sizes) / hourly_flops(config),
    )  # fmt: skip


def stage_hours(config: Config, sizes: Sizes, gpus: int) -> dict[str, float]:
    """Return the hours of each stage: phases on all GPUs, the rest in process 0 alone, to which others lend shards."""
    alone = hourly_flops(config)
    is_tuned = any(phase.steps for _, phase in config.phases[-1:])
    trials = (make_trial(config, factor) for factor in (config.recipe.tune.factors if is_tuned else ()))
    return {
        "trials": sum(sum(stage_hours(trial, sizes, gpus).values()) for trial in trials),
        "fits": fit_flops(config, sizes) / alone,
        "phases": training_flops(config, sizes) / (gpus * alone),
        "evaluation": evaluation_flops(config, sizes) / alone,
    }


def hourly_flops(config: Config) -> float:
    """Return the FLOPs of one GPU in an hour."""
    peak = GPUS[config.plan.gpu][2 if config.trainer.precision == "float32" else 1]
    return 3600 * peak * config.plan.utilization


def training_flops(config: Config, sizes: Sizes) -> float:
    """Return the FLOPs of all phases."""
    per_step, saving = tokens_per_step(config), config.trainer.gradient_checkpointing
    length = config.data.seq_len
    return sum(phase.steps * per_step * flops_per_token(sizes, length, phase, saving) for _, phase in config.phases)


def fit_flops(config: Config, sizes: Sizes) -> float:
    """Return the FLOPs of warm start, calibration of the balance, and the passes that layer-wise fits record."""
    length = config.data.seq_len
    matrices, pairs = forward_flops(sizes, length)
    flops = 0.0
    if config.has_router and config.phases:
        focus = config.focus
        flops += (focus.warm_start_sequences + focus.balance_sequences) * length * (matrices + pairs)
        # forward and backward of projections and of the attention inside groups, of each layer
        step = 3 * 2.0 * BATCH * length * (sizes.shape.width * focus.routing_dim + length * focus.groups)
        flops += sizes.layers * focus.warm_start_steps * step * (focus.warm_start_sequences > 0)
    fitted = [config.fitting, *(variant.fitting for variant in compose_fit_variants(config).values())]
    for options in filter(None, fitted):  # a backward pass to the inputs for importance
        tokens = options.calibration_sequences * length
        flops += tokens * (2 * matrices + 3.5 * pairs if isinstance(options, DualConfig) else matrices + pairs)
    return flops


def evaluation_flops(config: Config, sizes: Sizes) -> float:
    """Return the FLOPs of perplexity on eval.max_sequences sequences, as if no pair were pruned."""
    return (config.eval.max_sequences or 0) * config.eval.seq_len * scoring_flops(config, sizes)


def scoring_flops(config: Config, sizes: Sizes) -> float:
    """Return the FLOPs of a held-out token under every row of the table."""
    rows = sum(count_scored(config, len(config.eval.fit_variants), sizes.causal))
    return rows * sum(forward_flops(sizes, config.eval.seq_len))


def left_out(config: Config) -> list[str]:
    """Return what the hours leave out, next to loading, tokenization and checkpoints."""
    parts = []
    if config.eval.max_sequences is None:
        parts.append(
            "evaluation on all held-out text, eval.max_sequences=null (per_million: hours for a million tokens)"
        )
    if config.eval.tasks:
        parts.append(f"eval.tasks ({', '.join(config.eval.tasks)})")
    if config.fitting or config.eval.fit_variants:
        parts.append("fits of single layers")
    if needs_base(config):
        parts.append(f"training of model={config.model.name}")
    return parts


def warm_start_bytes(config: Config, sizes: Sizes) -> float:
    """Bytes of hidden states `(T, E)` and attention `(T, T)` in bfloat16 that the warm start keeps of each layer."""
    if not (config.has_router and config.phases):
        return 0.0
    length = config.data.seq_len
    return 2.0 * config.focus.warm_start_sequences * sizes.layers * length * (sizes.shape.width + length)


def forward_flops(sizes: Sizes, length: int) -> tuple[float, float]:
    """Return a forward pass's FLOPs of one token: of linear layers and head, and of causal attention."""
    pairs = 2.0 * sizes.layers * sizes.shape.heads * sizes.shape.head_dim * (length + 1) / 2
    return 2.0 * (sizes.linear + sizes.vocab * sizes.shape.width), 2 * pairs


def flops_per_token(sizes: Sizes, length: int, phase: PhaseConfig, checkpointing: bool) -> float:
    """Training FLOPs of one token: 2 N for each pass over the N weights of linear layers and head.

    A trained base takes 3 passes (forward, gradients of inputs, of weights), a frozen one 2; causal attention 7
    products of 2 H D (T + 1) / 2 FLOPs a layer (2 forward, 5 backward; Dao 2023, arXiv:2307.08691). Distillation and
    checkpointing each add a forward pass.
    """
    matrices, pairs = forward_flops(sizes, length)
    extra = (phase.objective == "distill") + checkpointing
    return ((3 if phase.trainable == "all" else 2) + extra) * matrices + (3.5 + extra) * pairs


def activation_bytes(sizes: Sizes, length: int, trains_base: bool, soft: bool, checkpointing: bool) -> float:
    """Bytes that the backward pass of one sequence keeps.

    A layer keeps `4 F + (2 H + 2 G) D + 4.5 E` elements of 2 bytes a token (MLP, attention, norms), with a trained base
    under autocast 13 E in place of 4.5 E. Soft routing keeps 4.5 bytes of each of the H T^2 pairs. Checkpointing keeps
    the layers' inputs, 2 E bytes a token, and all of one layer. Constants fit traces of GPT-2, Llama and Mistral.
    """
    shape, e = sizes.shape, sizes.shape.width
    elements = 4 * sizes.intermediate + 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    layer = 2.0 * length * (elements + (13 if trains_base else 4.5) * e)
    if soft:
        layer += 4.5 * shape.heads * length**2
    inputs = 2.0 * length * e * (2 if trains_base else 1)
    return inputs * sizes.layers + layer if checkpointing else layer * sizes.layers


def measure(config: Config) -> Sizes:
    """Build the model with its router or LoRA on the meta device and count its parameters."""
    architecture = load_architecture(config)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32)
    for key, length in (("data.seq_len", config.data.seq_len), ("eval.seq_len", config.eval.seq_len)):
        check_length(model, key, length, config.model.name)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    linear = sum(m.weight.numel() for layer in layers for m in layer.modules() if isinstance(m, Linear))
    size = sum(p.numel() for layer in layers for p in layer.parameters())
    if config.attention.method != "full":
        attach(model, config.attention.method, **get_method_options(config.attention))
    if config.recipe.trains("lora"):
        lora = config.recipe.lora
        add_lora(model, lora, count_router_parameters(model, lora.router_groups, FocusOptions.routing_dim))
    trained = {phase.trainable for _, phase in config.phases}
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for name, p in model.named_parameters() if any(is_trainable(name, t) for t in trained)),
        linear=linear, layer=size // len(layers), layers=len(layers), shape=model_shape(model),
        intermediate=getattr(architecture, "intermediate_size", None) or 4 * architecture.hidden_size,
        vocab=architecture.vocab_size, causal=is_causal(model),
    )  # fmt: skip


def load_architecture(config: Config) -> PreTrainedConfig:
    """Read the model's config from model.architecture or the folder model.path; nothing is downloaded."""
    model = config.model
    if model.architecture:
        return architecture_config(model).get_text_config()
    if not model.path:
        raise UserError("model.path must be set with job=plan, which downloads nothing. Type model.path=<folder>.")
    try:
        return AutoConfig.from_pretrained(Path(model.path).expanduser(), local_files_only=True).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path must have a readable config.json (got {model.path}: {first_line(error)})."
        ) from error


def planned_configs(config: Config) -> dict[str, Config]:
    """Return the configurations to plan by row name: plan.models as in the paper, the variants, or the run itself."""
    if not config.plan.models:
        if config.variants:
            return compose_variants(config)
        return {config.model.name: compose_adapter(config) if config.adapter else config}
    command_line = [part for part in command_overrides() if not part.startswith("model=")]
    configs = {}
    for name in config.plan.models:
        paper = compose("config", [f"model={name}"]).model.paper
        configs[name] = compose_overrides([f"model={name}", *paper, *command_line])
    return configs


def show(plans: list[Plan], config: Config) -> None:
    """Print the memory, and the work and time of plans: GiB, PFLOP and hours."""
    memory, bf16, _ = GPUS[config.plan.gpu]
    print(
        f"{config.plan.gpu}: {memory:g} GiB, {100 * USABLE:.0f} % usable. GiB on each GPU, at the worst moment (held):"
    )
    bytes_held = [{name: getattr(item, name) / GIB for name in BYTES} for item in plans]
    heads = [{name: getattr(item, name) for name in ("run", "strategy", "gpus")} for item in plans]
    counts = [{name: getattr(item, name) for name in ("parameters", "trainable")} for item in plans]
    print_table([head | count | held for head, count, held in zip(heads, counts, bytes_held, strict=True)])
    print(
        f"\nHours at {100 * config.plan.utilization:.0f} % of {bf16 / 1e12:g} TFLOP/s. 1e15 FLOPs of the phases. GiB "
        "of a checkpoint, of which a phase keeps two and writes a third."
    )
    rows = []
    for head, item in zip(heads, plans, strict=True):
        work = {"tokens": item.tokens, "flops": item.flops / 1e15, "checkpoint": item.checkpoint / GIB}
        total = sum(item.hours.values())
        totals = {"hours": total, "gpu_hours": total * item.gpus, "per_million": item.per_million}
        rows.append(head | work | item.hours | totals)
    if len(rows) > 1:
        summed = ("hours", "gpu_hours")
        rows.append({"run": "sum"} | {name: sum(row[name] for row in rows) for name in summed})
    print_table(rows)
    without: dict[str, list[str]] = {}
    for item in plans:
        for part in item.without:
            without.setdefault(part, []).append(item.run)
    parts = [part if len(runs) == len(plans) else f"{part} of {', '.join(runs)}" for part, runs in without.items()]
    print(f"\nHours are a lower bound, without: {'; '.join(['loading, tokenization and checkpoints', *parts])}.")


def print_table(rows: list[dict[str, Any]]) -> None:
    frame = pd.DataFrame(rows)
    frame = frame.astype({name: object for name in frame}).where(frame.notna(), "")
    print(frame.to_string(index=False, max_colwidth=40, float_format="{:,.3g}".format))
