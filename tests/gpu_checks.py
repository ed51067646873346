"""Kernels on a GPU against the reference implementation; needs torch and triton alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from problems import random_assignment, random_sequence
from torch import Tensor

from focus_exp.attention.dense import reference_attention
from focus_exp.attention.kernels import KERNELS, KernelRequirements
from focus_exp.attention.selection import AttentionArgs, Sequence, select

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of a tensor's norm


@dataclass(frozen=True)
class Case:
    """A kernel, a rule of pairs, and what the tokens are like."""

    kernel: str
    top_k: int = 1
    rule: str = "query_topk"
    kind: str = "spread"
    padding: str = "plain"
    size: int = 64
    dtype: torch.dtype = torch.bfloat16
    softcap: float | None = None
    length: int = 333

    def refused(self, device: str = "cuda") -> str | None:
        demand = KernelRequirements(device, self.dtype, self.size, self.softcap is not None, self.top_k == 1)
        return KERNELS[self.kernel].unsupported_reason(demand)

    def errors(self, device: str = "cuda") -> dict[str, float]:
        """Relative errors of the output and of gradients that are above the tolerance."""
        torch.manual_seed(self.length)
        leaves = [torch.randn(2, n, self.length, self.size, dtype=self.dtype) for n in (6, 2, 2)]
        leaves += [random_assignment(self.kind, 2, self.length, 8).float(), torch.randn(6)]
        sequence = random_sequence(self.padding, 2, self.length)
        ours, truth = (self.results(leaves, sequence, device, exact) for exact in (False, True))
        scale = max(x.norm() for x in truth.values()) * 1e-3  # a gradient can be all cancellation
        found = {name: float((ours[name] - x).norm() / x.norm().clamp(min=scale)) for name, x in truth.items()}
        return {name: error for name, error in found.items() if not error <= TOLERANCE[self.dtype]}

    def results(self, leaves: list[Tensor], sequence: Sequence, device: str, exact: bool) -> dict[str, Tensor]:
        """Output on real tokens, and gradients, in float64."""
        leaves = [(x.double() if exact else x).to(device).requires_grad_() for x in leaves]
        moved = {name: x.to(device) for name, x in vars(sequence).items() if isinstance(x, Tensor)}
        selection, sequence = select(leaves[3], self.top_k, self.rule), replace(sequence, **moved)
        args = AttentionArgs(self.size**-0.5, self.softcap, sink_logits=leaves[4], window=37, sinks=3, ste_slope=5.0)
        if exact:
            out = reference_attention(*leaves[:3], selection, sequence, args)
        else:
            out = KERNELS[self.kernel].attention(*leaves[:3], selection, sequence, args)
        if sequence.valid is not None:
            out = out * sequence.valid[:, None, :, None]
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(device, out.dtype)
        gradients = torch.autograd.grad((out * weights).sum(), leaves)
        return {n: x.double() for n, x in zip(("out", "q", "k", "v", "gate", "sinks"), (out, *gradients), strict=True)}


FLASH = ("flash-attn", "torch-flash", "torch-fa3", "torch-fa4")
RULES = ((1, "query_topk"), (2, "query_topk"), (2, "share"))
CASES = [
    *(Case("triton", *rule, kind, padding) for rule, kind, padding in
      product(RULES, ("spread", "giant", "empty", "tied"), ("plain", "left", "right"))),
    *(Case("triton", size=size, softcap=softcap) for size, softcap in product((80, 128, 256), (None, 30.0))),
    *(Case("triton", 2, "share", dtype=dtype) for dtype in (torch.float16, torch.float32)),
    *(Case(name, size=size, padding=padding) for name, size, padding in product(FLASH, (64, 256), ("plain", "left"))),
]  # fmt: skip
