"""torch's flash kernel for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from focus_exp.attention.kernels.contract import Demand, Gradients, Kernel, Meeting, Whole


class CpuFlash(Kernel):
    """Takes grouped heads, gives the logsumexp, adds a bias.

    Its own causal mode is not used: it computes whole blocks of 512 keys, half of a call with 1,024 tokens for nothing.
    """

    name = "cpu-flash"
    takes = "blocks"

    def refuses(self, demand: Demand) -> str | None:
        if demand.device != "cpu":
            return f"runs on the CPU, the tensors are on {demand.device}"
        return "has no softcap" if demand.softcap else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, meeting: Meeting, scaling: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        bias = meeting.bias(q.dtype)
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (q, k, v)),
            attn_mask=None if bias is None else bias[:, None], scale=scaling,
        )  # fmt: skip
        o, lse = o.transpose(1, 2), lse.transpose(1, 2)
        if meeting.drop is not None and bool((lse == 0).any()):  # the kernel says (0, 0) of a row without keys
            lse = lse.masked_fill(meeting.drop.all(-1)[..., None], float("-inf"))
        return o, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: Whole, meeting: Meeting, scaling: float, softcap: float | None
    ) -> Gradients:
        bias = meeting.bias(q.dtype)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.transpose(1, 2) for x in (whole.grad, q, k, v, whole.out)), whole.lse.transpose(1, 2), 0.0, False,
            attn_mask=None if bias is None else bias[:, None], scale=scaling,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
