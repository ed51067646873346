"""What the clocks run on: one layer's tensors, its groups, and full attention by the best kernel of the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.dense import repeat_kv
from focus_exp.attention.focus import Focus
from focus_exp.attention.kernels.cuda import PACKAGES, activate, flash_attn
from focus_exp.attention.kernels.fused import import_error
from focus_exp.attention.selection import Selection, Sequence, count_unpadded_pairs, select
from focus_exp.speed.timing import Work, alternate, clock

FUSED = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
SLOWEST = "sdpa-math"
LONG = 2.0  # seconds of a call that are not those of loading a kernel
Method = TypeVar("Method", bound=AttentionMethod)


@dataclass(frozen=True)
class Shape:
    """One attention layer: model width E, query heads H, key/value heads G, head size D."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads} query and {self.kv_heads} key/value heads of {self.head_dim}"


@dataclass(frozen=True)
class Tensors:
    """q `[1, H, T, D]`, k and v `[1, G, T, D]` as a model's projections lay them out, and hidden states `[1, T, E]`."""

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
        """Leaves that gradients flow to, in the layout that they have."""
        return Tensors(*(x.detach().requires_grad_() for x in (self.q, self.k, self.v, self.hidden)))


@dataclass(frozen=True)
class Groups:
    """How the tokens of a layer are grouped: `scores` `[1, n, K]` rank its groups for each token.

    assignment: "balanced", groups of equal size in random order, or "trained", a router's.
    """

    assignment: str
    scores: Tensor
    top_k: int = 1
    pair_rule: str = "query_topk"

    @property
    def count(self) -> int:
        return self.scores.shape[-1]

    def selection(self, length: int, device: torch.device) -> Selection:
        """Of `length` tokens, those that there are repeated as often as need be."""
        repeats = math.ceil(length / self.scores.shape[1])
        scores = self.scores.repeat(1, repeats, 1)[:, :length].to(device)
        return select(scores, self.top_k, self.pair_rule)


def balanced(groups: int, length: int, top_k: int = 1, pair_rule: str = "query_topk", seed: int = 0) -> Groups:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randperm(length, generator=generator) % groups
    others = torch.rand(1, length, groups, generator=generator)
    return Groups("balanced", others + F.one_hot(first, groups), top_k, pair_rule)


def layer_method(shape: Shape, groups: Groups, window: int, sinks: int, backend: str, device: torch.device) -> Focus:
    """A Focus layer with hard groups on the sparse path."""
    method = Focus.create(
        LayerShape(shape.width, shape.heads, shape.head_dim, 0), groups=groups.count, window=window, sinks=sinks,
        top_k=groups.top_k, pair_rule=groups.pair_rule, train_with="hard",
    )  # fmt: skip
    return on_sparse_path(method, backend, device)


def on_sparse_path(method: Method, backend: str, device: torch.device) -> Method:
    """The method in use, with hard groups and on the sparse path at every length, where it has them."""
    if isinstance(method, Focus):
        method.hard = True
    method.backend, method.sparse_from = backend, 0
    return method.to(device).eval()


def pairs_kept(selection: Selection, length: int, window: int, sinks: int) -> float:
    """Share of all causal pairs that hard Focus computes."""
    assert selection.query_groups is not None
    plain = Sequence.plain(1, length, selection.query_groups.device)
    return count_unpadded_pairs(selection, plain, window, sinks).density


def largest_group(selection: Selection) -> float:
    """Share of the tokens, as keys, in the group that has most of them, of any head with groups of its own."""
    assert selection.key_groups is not None
    return float(selection.key_groups.float().mean((0, -2)).max())


def full_attention(tensors: Tensors, device: torch.device) -> tuple[str, Work]:
    """Causal full attention by the fastest kernel there is, and its name; of those with a backward, where q wants one.

    RuntimeError where torch has none for these tensors.
    """
    works = full_attention_kernels(tensors)
    if len(works) == 1:
        return next(iter(works.items()))
    for candidates in ({name: work for name, work in works.items() if name != SLOWEST}, {SLOWEST: works[SLOWEST]}):
        if seconds := served(candidates, tensors, device):
            best = min(seconds, key=lambda name: seconds[name])
            return best, works[best]
    raise RuntimeError(f"torch has no full attention for {tensors.q.dtype} on {device}")


def served(works: dict[str, Work], tensors: Tensors, device: torch.device) -> dict[str, float]:
    """Seconds of the works that take these tensors; of one that takes long the first call tells enough."""
    seconds = {}
    for name, work in works.items():
        timed = partial(full_step, work, tensors) if tensors.q.requires_grad else work
        try:
            with torch.set_grad_enabled(tensors.q.requires_grad):
                taken = clock(timed, device)
                seconds[name] = taken if taken > LONG else alternate({name: timed}, 2, device)[name]
        except RuntimeError:
            continue
    return seconds


def full_step(forward: Work, tensors: Tensors) -> None:
    """Forward and backward, down to q, k and v."""
    out = forward()
    assert isinstance(out, Tensor)
    torch.autograd.grad(out, (tensors.q, tensors.k, tensors.v), torch.ones_like(out))


def full_attention_kernels(tensors: Tensors) -> dict[str, Work]:
    """On CUDA all that might serve; `SLOWEST` builds every score."""
    q, k, v = tensors.q, tensors.k, tensors.v
    grouped = q.shape[1] != k.shape[1]

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def fused(backend: SDPBackend, impl: str | None = None) -> Work:
        def work() -> Tensor:
            activate(impl)
            with sdpa_kernel(backend):
                return sdpa()

        return work

    def efficient() -> Tensor:  # which has no grouped heads
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, *repeat_kv(q, k, v), is_causal=True)

    if not q.is_cuda:
        return {"sdpa": sdpa}
    works = {name: fused(backend) for name, backend in FUSED.items()}
    works |= {
        f"sdpa-{impl}": fused(FUSED["sdpa-flash"], impl)
        for impl, package in PACKAGES.items()
        if not import_error(package)
    }
    works |= {"sdpa-efficient": efficient, SLOWEST: fused(SDPBackend.MATH)}
    package = flash_attn()
    if package is not None:
        works["flash-attn"] = lambda: package.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    return works
