"""torch's flash kernel for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from focus_exp.attention.kernels.contract import Demand, Gradients, Kernel, Meeting, Whole, segments


class CpuFlash(Kernel):
    """Takes grouped heads, gives the logsumexp, adds a bias."""

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
        outputs = []
        for rows in [slice(None)] if bias is not None else segments(meeting):
            o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(x[:, rows].transpose(1, 2) for x in (q, k, v)),
                0.0, bias is None, attn_mask=None if bias is None else bias[:, None], scale=scaling,
            )  # fmt: skip
            outputs.append((o.transpose(1, 2), lse.transpose(1, 2)))
        o, lse = outputs[0] if len(outputs) == 1 else (torch.cat(x, 1) for x in zip(*outputs, strict=True))
        if meeting.drop is not None:  # the kernel says (0, 0) of a row without keys
            lse = lse.masked_fill(meeting.drop.all(-1)[..., None], float("-inf"))
        return o, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: Whole, meeting: Meeting, scaling: float, softcap: float | None
    ) -> Gradients:
        bias = meeting.bias(q.dtype)
        gradients = []
        for rows in [slice(None)] if bias is not None else segments(meeting):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(x[:, rows].transpose(1, 2) for x in (whole.grad, q, k, v, whole.out)),
                whole.lse[:, rows].transpose(1, 2),
                0.0, bias is None, attn_mask=None if bias is None else bias[:, None], scale=scaling,
            )  # fmt: skip
            gradients.append([part.transpose(1, 2) for part in parts])
        dq, dk, dv = (parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in zip(*gradients, strict=True))
        return dq, dk, dv
