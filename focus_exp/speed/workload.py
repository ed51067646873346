"""Inputs of the speed benchmark: a layer's tensors and groups, and full attention by the fastest kernel."""

from __future__ import annotations

import importlib
import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from focus_exp.attention.dense import repeat_kv
from focus_exp.attention.kernels import cpu_sparse
from focus_exp.attention.kernels.gpu_sparse import import_error
from focus_exp.attention.selection import AttentionArgs, Selection, select
from focus_exp.speed.timing import Work, time_once


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention layer: model width E, query heads H, key/value heads G, head size D."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads} query and {self.kv_heads} key/value heads of {self.head_dim}"


@dataclass(frozen=True)
class Tensors:
    """q (1, H, T, D), k and v (1, G, T, D) in the layout of a model's projections, hidden states (1, T, E)."""

    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor

    @staticmethod
    def random(shape: Shape, length: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensors:
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*size: int) -> Tensor:
            return torch.randn(1, length, *size, dtype=dtype, device=device, generator=generator)

        q, k, v = (draw(heads, shape.head_dim).transpose(1, 2) for heads in (shape.heads, *[shape.kv_heads] * 2))
        return Tensors(q, k, v, draw(shape.width))

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def with_grad(self) -> Tensors:
        """Return leaves that require gradients, in the same layout."""
        return Tensors(*(x.detach().requires_grad_() for x in (self.q, self.k, self.v, self.hidden)))


@dataclass(frozen=True)
class Groups:
    """Groups of a layer's tokens.

    assignment: "balanced", groups of equal size in random order, or "trained", a router's.
    scores: (1, n, K), which rank the groups for each token.
    """

    assignment: str
    scores: Tensor
    top_k: int = 1
    pair_rule: str = "query_topk"

    @property
    def count(self) -> int:
        return self.scores.shape[-1]

    def select(self, length: int, device: torch.device) -> Selection:
        """Return the selection of `length` tokens, repeating those of `scores`."""
        repeats = math.ceil(length / self.scores.shape[1])
        scores = self.scores.repeat(1, repeats, 1)[:, :length].to(device)
        return select(scores, self.top_k, self.pair_rule)


def balanced(groups: int, length: int, top_k: int = 1, pair_rule: str = "query_topk", seed: int = 0) -> Groups:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randperm(length, generator=generator) % groups
    others = torch.rand(1, length, groups, generator=generator)
    return Groups("balanced", others + F.one_hot(first, groups), top_k, pair_rule)


def rank_full_attention(tensors: Tensors, device: torch.device) -> list[str]:
    """Return the kernels of causal full attention that take these tensors, the fastest first.

    Raises:
        RuntimeError: there is none.
    """
    seconds = {}
    for name in full_attention_kernels(tensors):
        work = full_work(name, tensors)
        with suppress(RuntimeError), torch.set_grad_enabled(tensors.q.requires_grad):  # it does not take these tensors
            seconds[name] = min(time_once(work, device) for _ in range(2))  # the first call loads it
    if not seconds:
        raise RuntimeError(f"no full attention for {tensors.q.dtype} on {device}")
    return sorted(seconds, key=lambda name: seconds[name])


def full_work(kernel: str, tensors: Tensors) -> Work:
    """Return full attention by a kernel, forward and backward where q requires gradients."""
    work = full_attention_kernels(tensors)[kernel]
    return partial(run_full_step, work, tensors) if tensors.q.requires_grad else work


def run_full_step(forward: Work, tensors: Tensors) -> None:
    """Run forward and backward to q, k and v."""
    out = forward()
    assert isinstance(out, Tensor)
    torch.autograd.grad(out, (tensors.q, tensors.k, tensors.v), torch.ones_like(out))


def full_attention_kernels(tensors: Tensors) -> dict[str, Work]:
    """Return the kernels of the device by name."""
    q, k, v = tensors.q, tensors.k, tensors.v
    grouped = q.shape[1] != k.shape[1]

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def fused(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa()

    def efficient() -> Tensor:  # which has no grouped heads
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, *repeat_kv(q, k, v), is_causal=True)

    def flash_attn() -> Tensor:
        package = importlib.import_module("flash_attn")  # of the extra "flash"
        out: Tensor = package.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        return out.transpose(1, 2)

    def flash_attn_3() -> Tensor:  # of Hopper; some versions also return the logsumexp
        package = importlib.import_module("flash_attn_interface")
        out = package.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first.transpose(1, 2)

    if q.is_cuda:
        works: dict[str, Work] = {
            "sdpa-flash": partial(fused, SDPBackend.FLASH_ATTENTION),
            "sdpa-cudnn": partial(fused, SDPBackend.CUDNN_ATTENTION),
            "sdpa-efficient": efficient,
        }
        packages = {"flash-attn": ("flash_attn", flash_attn), "flash-attn-3": ("flash_attn_interface", flash_attn_3)}
        return works | {name: work for name, (package, work) in packages.items() if not import_error(package)}
    args = AttentionArgs(q.shape[-1] ** -0.5)
    own = {"cpu": partial(cpu_sparse.attend_fully, q, k, v, args)} if cpu_sparse.serves_full(q, v) else {}
    return {"sdpa": sdpa, **own}
