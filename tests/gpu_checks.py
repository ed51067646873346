"""Kernels on a GPU against the reference implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from problems import random_assignment, random_sequence
from torch import Tensor

from focus_exp.attention.dense import reference_attention
from focus_exp.attention.kernels import KERNELS, gpu_sparse
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, select

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of a tensor's norm
HEADS, KV_HEADS, GROUPS = 6, 2, 8


@dataclass(frozen=True)
class Case:
    """A rule of pairs, what the tokens are like, and sizes.

    Attributes:
        per_head: key/value heads have groups of their own, and queries read more groups than keys are in.
        spans: partial results have room for the least number of tokens.
        kernel: by name; flash has no gradients of gates and of the base model's sinks.
    """

    top_k: int = 1
    rule: str = "query_topk"
    kind: str = "spread"
    padding: str = "plain"
    size: int = 64
    dtype: torch.dtype = torch.bfloat16
    softcap: float | None = None
    length: int = 333
    per_head: bool = False
    spans: bool = False
    kernel: str = "triton"

    def errors(self, device: str = "cuda") -> dict[str, float]:
        """Return relative errors of the output and of gradients that are above the tolerance."""
        torch.manual_seed(self.length)
        leaves = [torch.randn(2, n, self.length, self.size, dtype=self.dtype) for n in (HEADS, KV_HEADS, KV_HEADS)]
        shape = (2, KV_HEADS) if self.per_head else (2,)
        gates = random_assignment(self.kind, 2 * KV_HEADS, self.length, GROUPS).float()[: 2 * len(shape)]
        leaves += [gates.view(*shape, self.length, GROUPS), torch.randn(HEADS)]
        more = torch.rand(gates.shape).view_as(leaves[3]) < 0.1
        sequence = random_sequence(self.padding, 2, self.length)
        ours, truth = (self.results(leaves, more, sequence, device, exact) for exact in (False, True))
        ours, truth = ({name: x.detach() for name, x in found.items()} for found in (ours, truth))
        scale = max(x.norm() for x in truth.values()) * 1e-3  # a gradient can be all cancellation
        errors = {name: float((ours[name] - x).norm() / x.norm().clamp(min=scale)) for name, x in truth.items()}
        return {name: error for name, error in errors.items() if not error <= TOLERANCE[self.dtype]}

    def results(
        self, leaves: list[Tensor], more: Tensor, sequence: Sequence, device: str, exact: bool
    ) -> dict[str, Tensor]:
        """Return the output on real tokens, and gradients, in float64."""
        leaves = [(x.double() if exact else x).to(device).requires_grad_() for x in leaves]
        moved = {name: x.to(device) for name, x in vars(sequence).items() if isinstance(x, Tensor)}
        selection, sequence = select(leaves[3], self.top_k, self.rule), replace(sequence, **moved)
        if self.per_head and self.kernel == "triton":
            assert selection.query_groups is not None
            per_key = 1 if selection.max_groups is None else selection.max_groups[1]
            selection = Selection(
                leaves[3], selection.query_groups | more.to(device), selection.key_groups, max_groups=(GROUPS, per_key)
            )
        args = AttentionArgs(self.size**-0.5, self.softcap, window=37, sinks=3)
        if KERNELS[self.kernel].trains_router:
            args = replace(args, sink_logits=leaves[4], ste_slope=5.0)
        else:
            leaves = leaves[:3]
        room, gpu_sparse.PARTIAL_BYTES = gpu_sparse.PARTIAL_BYTES, 1 if self.spans else gpu_sparse.PARTIAL_BYTES
        try:
            attention = reference_attention if exact else KERNELS[self.kernel].attention
            out = attention(*leaves[:3], selection, sequence, args)
            if sequence.valid is not None:
                out = out * sequence.valid[:, None, :, None]
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(device, out.dtype)
            gradients = torch.autograd.grad((out * weights).sum(), leaves)
        finally:
            gpu_sparse.PARTIAL_BYTES = room
        names = ("out", "q", "k", "v", "gate", "sinks")[: 1 + len(leaves)]
        return {name: x.double() for name, x in zip(names, (out, *gradients), strict=True)}


RULES = ((1, "query_topk"), (2, "query_topk"), (2, "share"))
CASES = [
    *(Case(*rule, kind, padding) for rule, kind, padding in
      product(RULES, ("spread", "giant", "empty", "tied"), ("plain", "left", "right"))),
    *(Case(size=size, softcap=softcap) for size, softcap in product((80, 128, 256), (None, 30.0))),
    *(Case(2, "share", dtype=dtype, size=size) for dtype, size in
      product((torch.float16, torch.float32), (64, 256))),
    *(Case(*rule, padding=padding, per_head=True, spans=True) for rule, padding in product(RULES, ("plain", "left"))),
    *(Case(*rule, kind, padding, per_head=kind == "spread", kernel="flash") for rule, kind, padding in
      product(RULES[:2], ("spread", "giant", "empty", "tied"), ("plain", "left", "right"))),
    *(Case(size=size, dtype=dtype, kernel="flash") for size, dtype in
      product((20, 80, 128, 240), (torch.bfloat16, torch.float16))),
]  # fmt: skip
