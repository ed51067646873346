"""Losses of a causal language model with the logits of some tokens at a time, which are its largest tensor.

`F.linear_cross_entropy` of torch 2.13 takes four times as long on a CPU, and its sums in bfloat16 are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.random import fork_rng
from transformers import PreTrainedModel

from focus_exp.attention.selection import row_blocks
from focus_exp.models.methods import disable_method

ROWS = 128  # tokens whose logits are in memory: fastest on a CPU
GPU_ROWS = 2048  # on a GPU, where many small products cost their launches

# computes the summed loss of some tokens from what enters the head
ChunkLoss = Callable[[Tensor, slice], Tensor]


class Head:
    """The output layer of a model, apart from the model.

    Where the model changes its output (softcap, scale), or is sharded, `inputs` are whole logits and `module` returns
    them as they are.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.module = None if isinstance(model, FSDPModule) else find_head(model)

    def inputs(self, **tokens: Tensor) -> Tensor:
        """Return what enters the head for `input_ids` `(B, T)` or `inputs_embeds`: hidden states `(B, T, E)`."""
        if self.module is None:
            logits: Tensor = self.model(**tokens, use_cache=False).logits
            return logits
        return run_without_head(self.model, self.module, tokens)[0]

    def logits(self, inputs: Tensor) -> Tensor:
        """Return float32 logits `(N, V)` of inputs `(N, E)`."""
        return (inputs if self.module is None else self.module(inputs)).float()

    def sum_cross_entropy(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed cross-entropy [nats] of targets `(N,)` by inputs `(N, E)`."""

        def cross_entropy(x: Tensor, rows: slice) -> Tensor:
            return F.cross_entropy(self.logits(x), targets[rows], reduction="sum")

        return self.sum_losses(cross_entropy, inputs)

    def sum_losses(self, compute: ChunkLoss, inputs: Tensor) -> Tensor:
        """Return the sum of compute(inputs[rows], rows) over inputs `(N, E)`, some rows at a time.

        Gradients are computed with the values, so that the logits of no chunk are kept.
        """
        parameters = [] if self.module is None else [p for p in self.module.parameters() if p.requires_grad]
        total: Tensor = SumInChunks.apply(compute, inputs, *parameters)
        return total


def find_head(model: PreTrainedModel) -> nn.Module | None:
    """Return the layer whose output is the model's, as it is; None where there is none."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        return None
    outputs: list[tuple[Tensor, int]] = []

    def record(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        outputs.append((output, output._version))

    handle = head.register_forward_hook(record)
    base = nullcontext(model) if getattr(model, "focus_attachment", None) is None else disable_method(model)
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    try:
        with base, torch.no_grad(), fork_rng([x for x in [tokens.device] if x.type == "cuda"]):
            logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        handle.remove()
    if len(outputs) != 1:
        return None
    output, version = outputs[0]
    is_same = output.data_ptr() == logits.data_ptr() and (output.shape, output.dtype) == (logits.shape, logits.dtype)
    return head if is_same and output._version == version else None


def run_without_head(model: PreTrainedModel, head: nn.Module, tokens: dict[str, Tensor]) -> list[Tensor]:
    """Run a model, its head on the last token alone; returns what would have entered it."""
    inputs: list[Tensor] = []

    def keep_last(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs.append(args[0])
        return (args[0][:, -1:], *args[1:])

    handle = head.register_forward_pre_hook(keep_last)
    try:
        model(**tokens, use_cache=False)
    finally:
        handle.remove()
    return inputs


class SumInChunks(torch.autograd.Function):
    """Sum a loss over chunks of rows; the forward pass computes the gradients."""

    @staticmethod
    def forward(ctx: Any, compute: ChunkLoss, inputs: Tensor, *parameters: Tensor) -> Tensor:
        is_trained = any(ctx.needs_input_grad)
        gradients = [torch.zeros_like(x) for x in (inputs, *parameters)] if is_trained else []
        total = torch.zeros((), device=inputs.device)
        for rows in row_blocks(len(inputs), ROWS if inputs.device.type == "cpu" else GPU_ROWS):
            with torch.set_grad_enabled(is_trained):
                chunk = inputs[rows].detach().requires_grad_(is_trained)
                loss = compute(chunk, rows)
            total += loss.detach()
            if is_trained:
                of_chunk, *of_parameters = torch.autograd.grad(loss, (chunk, *parameters))
                gradients[0][rows] = of_chunk
                for gradient, added in zip(gradients[1:], of_parameters, strict=True):
                    gradient += added
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient * grads[0].to(gradient.dtype) for gradient in ctx.saved_tensors)
