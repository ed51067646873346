"""One training step on tensors without data: what it allocates, when, and how much arithmetic it does.

The very code that trains runs under FakeTensorMode, so no formula has to know what a layer keeps for its backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers import PreTrainedModel, masking_utils

from focus_exp.config import PhaseConfig
from focus_exp.models.attached import routers_of, swapped
from focus_exp.models.modules import attention_modules
from focus_exp.training.module import LanguageModelTask
from focus_exp.training.regimes import set_training_mode
from focus_exp.training.warm_start import AttentionProbe

KINDS = ("weights", "gradients", "optimizer", "logits", "activations")

# what CUDA's autocast computes in float32 and a CPU's does not (docs of torch.amp), of what models here call
FLOAT32_UNDER_CUDA = {
    *(F.layer_norm, F.softmax, F.log_softmax, F.cross_entropy, F.normalize, F.softplus, torch.softmax),
    *(torch.log_softmax, torch.pow, torch.rsqrt, torch.exp, torch.log, torch.sum, torch.norm, torch.cumsum),
    *(Tensor.softmax, Tensor.log_softmax, Tensor.pow, Tensor.__pow__, Tensor.rsqrt, Tensor.exp, Tensor.log),
    *(Tensor.sum, Tensor.norm, Tensor.cumsum),
}

Bytes = dict[str, float]


def attention_flop(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> float:
    """Of two products, on the pairs that a causal kernel does not leave out."""
    return seen(query, is_causal) * sdpa_flop_count(query.shape, key.shape, value.shape)


def attention_backward_flop(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, dropout_p: float,
    is_causal: bool, **_: Any,
) -> float:  # fmt: skip
    """Of five, likewise."""
    return seen(query, is_causal) * sdpa_backward_flop_count(grad_out.shape, query.shape, key.shape, value.shape)


def seen(query: Tensor, is_causal: bool) -> float:
    """Share of all pairs of the tokens of `query` `[B, H, T, D]`."""
    length = query.shape[-2]
    return (length + 1) / (2 * length) if is_causal else 1.0


# torch counts all pairs, of the GPU's kernels; a trace takes the CPU's
FLOPS = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flop,
}


@dataclass(frozen=True)
class Trace:
    """peaks: the bytes of every kind when most is held, in each window of time; flops: of all matrix products, and of
    those on pairs of tokens."""

    peaks: dict[str, Bytes]
    flops: float
    pair_flops: float

    def plus(self, other: Trace, factor: float) -> Trace:
        """self + factor * (other - self), number by number."""
        peaks = {
            window: {kind: at[kind] + factor * (other.peaks[window][kind] - at[kind]) for kind in KINDS}
            for window, at in self.peaks.items()
        }
        flops = self.flops + factor * (other.flops - self.flops)
        return Trace(peaks, flops, self.pair_flops + factor * (other.pair_flops - self.pair_flops))


class Allocations(TorchDispatchMode):
    """Follows every storage from the operation that makes it until nobody holds it."""

    def __init__(self, logits: set[int], vocabulary: int) -> None:
        super().__init__()
        self.logits, self.vocabulary = logits, vocabulary
        self.kinds: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()
        self.held: Bytes = dict.fromkeys(KINDS, 0)
        self.peaks: dict[str, Bytes] = {}
        self.window = ""
        self.flops = self.pair_flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:
            return out
        if count := FLOPS.get(func._overloadpacket):
            done = count(*args, **(kwargs or {}), out_val=out)
            self.flops += done
            # linear layers fold batch and tokens into the rows of one matrix; what has a batch is attention
            self.pair_flops += 0 if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm) else done
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf, "logits" if self.is_logits(leaf) else "activations")
        return out

    def is_logits(self, tensor: Tensor) -> bool:
        return tensor.numel() in self.logits and tensor.shape[-1] == self.vocabulary

    def add(self, tensor: Tensor, kind: str) -> None:
        """Count the tensor's storage as `kind`, also if it was counted as another one."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if (known := self.kinds.get(storage)) is None:
            # a list, because what a storage is may become known later than when it goes
            self.kinds[storage] = known = [kind]
            self.held[kind] += size
            weakref.finalize(storage, self.remove, known, size)
        elif kind not in ("logits", "activations"):
            self.held[known[0]] -= size
            self.held[kind] += size
            known[0] = kind
        if self.window and sum(self.held.values()) > sum(self.peaks[self.window].values()):
            self.peaks[self.window] = dict(self.held)

    def remove(self, kind: list[str], size: int) -> None:
        self.held[kind[0]] -= size

    def trace(self) -> Trace:
        return Trace(self.peaks, self.flops, self.pair_flops)

    def enter(self, window: str, *_: Any) -> None:
        """From now on peaks belong to `window`."""
        if window != self.window:
            self.window = window
            self.peaks[window] = dict(self.held)


class AsOnCuda(TorchFunctionMode):
    """Autocast, where it is on, in the formats of CUDA's; attention with dropout in one kernel, which a CPU has not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FLOAT32_UNDER_CUDA and torch.is_autocast_enabled("cpu"):
            args = [x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x for x in args]
        if func is F.scaled_dot_product_attention:
            kwargs = {**(kwargs or {}), "dropout_p": 0.0}
        return func(*args, **(kwargs or {}))


@contextmanager
def followed(model: PreTrainedModel, tokens: tuple[int, int], gpu: bool = True) -> Iterator[tuple[Allocations, Tensor]]:
    """Within the block the model, which was built on the meta device, has tensors without data; torch takes them for a
    CPU's, since a build without CUDA cannot have others."""
    batch, length = tokens
    vocabulary = model.config.get_text_config().vocab_size
    allocations = Allocations({batch * length * vocabulary, batch * (length - 1) * vocabulary}, vocabulary)
    with FakeTensorMode(allow_non_fake_inputs=True), unpacked():
        model.to_empty(device="cpu")
        model.tie_weights()
        for tensor in (*model.parameters(), *model.buffers()):
            allocations.add(tensor, "weights")
        ids = torch.zeros(tokens, dtype=torch.long)
        with allocations, AsOnCuda() if gpu else nullcontext():
            yield allocations, ids


@contextmanager
def unpacked() -> Iterator[None]:
    """Within the block transformers does not look into position ids, of which there are none, for packed sequences."""
    looks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looks


def trace_training(
    model: PreTrainedModel,
    phase: PhaseConfig,
    tokens: tuple[int, int],
    *,
    autocast: bool = False,
    checkpointing: bool = False,
    accumulating: bool = False,
    gpu: bool = True,
) -> Trace:
    """An optimiser step of `phase` after the first one, on `tokens` (batch, length), in the order of Lightning.

    Gradients of the step before are there until the loss is known, and with `accumulating` all the time. `gpu`: AdamW
    updates all parameters at once, and autocast is that of CUDA.
    """
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    with followed(model, tokens, gpu) as (allocations, ids):
        task = LanguageModelTask(model, phase, "plan")
        set_training_mode(model, phase)
        optimizer: torch.optim.Optimizer = task.configure_optimizers()["optimizer"]
        for group in optimizer.param_groups:
            group["foreach"] = gpu
        for parameter in task.trainable_parameters():
            parameter.grad = torch.empty_like(parameter)
            allocations.add(parameter.grad, "gradients")
            parameter.register_post_accumulate_grad_hook(lambda p: allocations.add(p.grad, "gradients"))
        optimizer.step()
        for state in optimizer.state.values():
            for tensor in state.values():
                allocations.add(tensor, "optimizer")
        mark_last_layer(model, partial(allocations.enter, "layers backward"))

        allocations.enter("forward")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = task.loss(ids)
        if not accumulating:
            optimizer.zero_grad()
        allocations.enter("head backward")
        # loss.backward() would go through AsOnCuda, which is off within itself, also while layers are checkpointed
        _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)
        allocations.enter("update")
        optimizer.step()
    return allocations.trace()


def mark_last_layer(model: PreTrainedModel, reached: Callable[..., None]) -> None:
    """Call `reached` when the backward has come through the last layer's attention."""

    def mark(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        h = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if h.requires_grad:
            h.register_hook(reached)

    *_, last = attention_modules(model).values()
    last.register_forward_pre_hook(mark, with_kwargs=True)


def trace_inference(model: PreTrainedModel, tokens: tuple[int, int], autocast: bool = False) -> Trace:
    """A forward pass on `tokens` (batch, length), nothing kept for later."""
    with followed(model.eval(), tokens) as (allocations, ids), torch.no_grad():
        allocations.enter("forward")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=ids, use_cache=False).logits
            F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    return allocations.trace()


def trace_warm_start(model: PreTrainedModel, length: int, blocks: int, autocast: bool = False) -> Trace:
    """Reading the attention in `blocks` blocks of text, all of which is held until the routers are fitted to it."""
    probes = {i: AttentionProbe(m.shape, m.window, m.sinks) for i, m in routers_of(model).items()}
    with followed(model.eval(), (1, length)) as (allocations, ids), torch.no_grad(), swapped(model, dict(probes)):
        allocations.enter("warm start")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
    kept = sum(t.nbytes for probe in probes.values() for t in (*probe.hidden, *probe.mass))
    allocations.peaks["warm start"]["activations"] += (blocks - 1) * kept
    return allocations.trace()
