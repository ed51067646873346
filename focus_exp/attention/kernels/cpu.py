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
        bias, share = meeting.bias(q.dtype), q.shape[2] // k.shape[2]
        folded = share > 1 and len(q) == 1 and q.dtype.itemsize < 4
        if folded:  # the heads of a key as so many queries: in half precision the kernel prepares keys for each head
            q = q.unflatten(2, (-1, share)).transpose(2, 3).reshape(1, -1, k.shape[2], q.shape[-1])
            bias = None if bias is None else bias.repeat_interleave(share, 1)
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (q, k, v)),
            attn_mask=None if bias is None else bias[:, None], scale=scaling,
        )  # fmt: skip
        o, lse = o.transpose(1, 2), lse.transpose(1, 2)
        if folded:
            o, lse = (x.unflatten(1, (-1, share)).transpose(2, 3).flatten(2, 3) for x in (o, lse))
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
