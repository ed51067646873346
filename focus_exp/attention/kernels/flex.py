"""torch's FlexAttention: one compiled call for any rule, blocks of the scores without a kept pair are skipped."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from focus_exp.attention.kernels.contract import Demand, Gradients, Kernel, Meeting, Whole

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Flex(Kernel):
    """The general fallback on CUDA: every pair rule, softcap, float32."""

    name = "flex"
    takes = "predicate"

    def refuses(self, demand: Demand) -> str | None:
        if demand.device != "cuda":
            return f"has a backward on CUDA alone, the tensors are on {demand.device}"
        if demand.dtype not in DTYPES:
            return f"does not take {str(demand.dtype).removeprefix('torch.')}"
        return f"takes head sizes from 16 to 256, not {demand.head_dim}" if not 16 <= demand.head_dim <= 256 else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, meeting: Meeting, scaling: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        keep = meeting.keep
        assert keep is not None

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return keep(i, j)

        def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            assert softcap is not None
            return softcap * torch.tanh(score / softcap)

        on_gpu = q.is_cuda
        blocks = create_block_mask(mask, 1, 1, q.shape[1], k.shape[1], device=str(q.device), _compile=on_gpu)
        function = compiled() if on_gpu else flex_attention
        out, lse = function(
            *(x.transpose(1, 2) for x in (q, k, v)), block_mask=blocks, scale=scaling, enable_gqa=True,
            score_mod=None if softcap is None else capped, return_lse=True,
        )  # fmt: skip
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: Whole, meeting: Meeting, scaling: float, softcap: float | None
    ) -> Gradients:
        """By autograd through the part: its share of the row is e^(part_lse - lse), which both gradients carry."""
        leaves = a, b, c = tuple(x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            part_out, part_lse = self.forward(a, b, c, meeting, scaling, softcap)
        share = (part_lse.detach() - whole.lse).exp()[..., None]
        of_out = share * whole.grad.to(share.dtype)
        of_lse = (of_out * (part_out.detach() - whole.out).to(share.dtype)).sum(-1)
        dq, dk, dv = torch.autograd.grad((part_out, part_lse), leaves, (of_out.to(part_out.dtype), of_lse))
        return dq, dk, dv


@cache
def compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
