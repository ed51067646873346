"""What a configuration trains, holds and computes on one GPU, from traces of a few of its layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from focus_exp.config import Config, phases_of
from focus_exp.errors import UserError
from focus_exp.models.attach import layer_shape
from focus_exp.models.attached import is_trainable
from focus_exp.models.load import local_config
from focus_exp.models.lora import Linear
from focus_exp.models.modules import attention_modules
from focus_exp.models.random import architecture_config
from focus_exp.planning.trace import Trace, trace_inference, trace_training, trace_warm_start

Prepare = Callable[[PreTrainedModel], object]


@dataclass(frozen=True)
class Weights:
    """Of the model with all that is attached, in numbers (parameters, trainable) and bytes.

    base: all that is not added; added: routers and LoRA; layer: the largest decoder layer; linear: matrices within the
    layers, of which `matrix` is the largest.
    """

    parameters: int
    trainable: int
    base: float
    added: float
    layer: float
    root: float
    linear: float
    matrix: float


class Estimate:
    """Traces are made when they are asked for, and kept. `prepare` attaches what the run attaches.

    A frozen base is held in bfloat16 and one that is trained in float32 under autocast, as `choose_precision` has it on
    a GPU, unless trainer.precision is float32.
    """

    def __init__(self, config: Config, prepare: Prepare, *, gpu: bool = True) -> None:
        self.config = config
        self.prepare = prepare
        self.gpu = gpu
        self.trains_base = config.regime.trains("all")
        self.bf16 = config.trainer.precision != "float32"
        self.dtype = torch.bfloat16 if self.bf16 and not self.trains_base else torch.float32
        self.autocast = self.bf16 and self.trains_base
        self.phases = phases_of(config)
        self.architecture = configured(config)
        self.weights = weigh(self.build(), {phase.train for _, phase in self.phases})
        self.kept: dict[tuple[int, bool, bool], list[Trace]] = {}

    def build(self, layers: int | None = None) -> PreTrainedModel:
        """The prepared model on the meta device, of all its layers or of the first ones."""
        architecture = copy.deepcopy(self.architecture)
        if layers is not None:
            if getattr(architecture, "layer_types", None) is not None:
                architecture.layer_types = architecture.layer_types[:layers]
            architecture.num_hidden_layers = layers
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        self.prepare(model)
        return model

    def traces(self, batch: int, checkpointing: bool = False, accumulating: bool = False) -> list[Trace]:
        """Of a step of every phase on `batch` blocks; without phases, of a forward pass over eval.window tokens."""
        key = (batch, checkpointing, accumulating and self.trains_base)  # a router's gradients are nothing to keep
        if key not in self.kept:
            config, length = self.config, self.config.data.block_size
            if not self.phases:
                tokens = (config.eval.batch_size, config.eval.window)
                self.kept[key] = [self.whole(lambda model: trace_inference(model, tokens, self.autocast))]
                return self.kept[key]
            self.kept[key] = [
                self.whole(
                    lambda model, phase=phase: trace_training(  # type: ignore[misc]
                        model,
                        phase,
                        (batch, length),
                        autocast=self.autocast,
                        checkpointing=checkpointing,
                        accumulating=accumulating,
                        gpu=self.gpu,
                    )
                )
                for _, phase in self.phases
            ]
        return self.kept[key]

    @cached_property
    def warm_start(self) -> Trace | None:
        """Of reading the attention that routers are fitted to first, if they are."""
        if not (self.phases and self.config.has_router and self.config.focus.warm_start_blocks):
            return None
        blocks, length = self.config.focus.warm_start_blocks, self.config.data.block_size
        return self.whole(lambda model: trace_warm_start(model, length, blocks, self.autocast))

    def whole(self, trace: Callable[[PreTrainedModel], Trace]) -> Trace:
        """`trace` of all layers. Every number in it is linear in the number of layers from the second one on."""
        layers = self.architecture.num_hidden_layers
        few, more = sample(layers, getattr(self.architecture, "layer_types", None))
        try:
            if more >= layers:
                return trace(self.build())
            return trace(self.build(few)).plus(trace(self.build(more)), (layers - few) / (more - few))
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise UserError(
                f"attention={self.config.attention.name} decides by what it reads how much it computes, which no plan "
                "knows; plan it with attention=full, which computes all pairs"
            ) from None

    @property
    def cache_bytes(self) -> float:
        """Keys and values of eval.batch_size sequences of eval.window tokens."""
        model = self.build(1)
        (module,) = attention_modules(model).values()
        heads = getattr(self.architecture, "num_key_value_heads", None) or self.architecture.num_attention_heads
        each = 2 * heads * layer_shape(model, module, 0).head_dim * self.dtype.itemsize
        return self.architecture.num_hidden_layers * each * self.config.eval.window * self.config.eval.batch_size


def configured(config: Config) -> PreTrainedConfig:
    """The architecture, from the configuration or a local folder; UserError where it would have to be downloaded."""
    model = config.model
    if model.architecture:
        architecture = architecture_config(model)
    elif model.path:
        architecture = local_config(model.path)
    else:
        raise UserError(
            f"model {model.name}: job=plan downloads nothing and does not know its architecture; give the folder of "
            "its config.json as model.path"
        )
    return architecture.get_text_config()


def sample(layers: int, kinds: list[str] | None) -> tuple[int, int]:
    """Two numbers of layers, apart by one round of the kinds of layers, that end in the same kind as all of them."""
    kinds = kinds or ["full"] * layers
    period = next(p for p in range(1, layers + 1) if kinds[p:] == kinds[: layers - p])
    few = 2 + (layers - 2) % period
    return few, few + period


def weigh(model: PreTrainedModel, trained: set[str]) -> Weights:
    def size(module: nn.Module, added: bool) -> int:
        named = module.named_parameters()
        return sum(p.nbytes for name, p in named if (".focus." in f".{name}" or ".lora_" in name) == added)

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    matrices = [module.weight.nbytes for layer in layers for module in layer.modules() if isinstance(module, Linear)]
    base = size(model, added=False)
    return Weights(
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(
            p.numel() for name, p in model.named_parameters() if any(is_trainable(name, part) for part in trained)
        ),
        base=base,
        added=size(model, added=True),
        layer=max(size(layer, added=False) for layer in layers),
        root=base - sum(size(layer, added=False) for layer in layers),
        linear=sum(matrices),
        matrix=max(matrices),
    )
