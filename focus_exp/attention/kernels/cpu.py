"""torch's flash kernel for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from focus_exp.attention.kernels.contract import Demand, Gradients, Kernel, Meeting, calls, heads_first


class CpuFlash(Kernel):
    """Takes grouped heads, gives the logsumexp, adds a bias."""

    name = "cpu-flash"
    takes_bias = True

    def refuses(self, demand: Demand) -> str | None:
        if demand.device != "cpu":
            return f"runs on the CPU, the tensors are on {demand.device}"
        return "has no softcap" if demand.softcap else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, meeting: Meeting, scaling: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        outputs = []
        for queries, keys, bias in calls(meeting, len(q)):
            blocks = 1 if bias is None else len(bias)
            o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                heads_first(q[queries], blocks), heads_first(k[keys], blocks), heads_first(v[keys], blocks),
                0.0, bias is None, attn_mask=None if bias is None else bias[:, None], scale=scaling,
            )  # fmt: skip
            if bias is not None:  # the kernel says (0, 0) of a row without keys
                lse = lse.masked_fill((bias.amax(-1) == float("-inf"))[:, None], float("-inf"))
            outputs.append((o.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)))
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat([o for o, _ in outputs]), torch.cat([lse for _, lse in outputs])

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        meeting: Meeting,
        scaling: float,
        softcap: float | None,
    ) -> Gradients:
        gradients = []
        for queries, keys, bias in calls(meeting, len(q)):
            blocks = 1 if bias is None else len(bias)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                heads_first(grad[queries], blocks), heads_first(q[queries], blocks), heads_first(k[keys], blocks),
                heads_first(v[keys], blocks), heads_first(out[queries], blocks),
                lse[queries].unflatten(0, (blocks, -1)).transpose(1, 2).contiguous(),
                0.0, bias is None, attn_mask=None if bias is None else bias[:, None], scale=scaling,
            )  # fmt: skip
            gradients.append([part.transpose(1, 2).flatten(0, 1) for part in parts])
        dq, dk, dv = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*gradients, strict=True))
        return dq, dk, dv
