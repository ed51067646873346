"""Reference kernel in plain tensor operations."""

from __future__ import annotations

import torch
from torch import Tensor

from focus_exp.attention.kernels.contract import Gradients, Kernel, KernelRequirements, RowResult
from focus_exp.attention.selection import AttentionArgs


class Math(Kernel):
    """Support every device, dtype and softcap; a partition's scores are in memory."""

    name = "math"

    def unsupported_reason(self, requirements: KernelRequirements) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, drop: Tensor | None, args: AttentionArgs
    ) -> tuple[Tensor, Tensor]:
        s, _ = self.scores(q, k, drop, args)
        lse = s.logsumexp(-1)  # (blocks, G, H/G, t)
        p = torch.exp(s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
        o = p.to(v.dtype) @ v.transpose(1, 2)[:, :, None]
        return o.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2).transpose(1, 2)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: RowResult, drop: Tensor | None, args: AttentionArgs
    ) -> Gradients:
        s, slope = self.scores(q, k, drop, args)
        split = (k.shape[2], -1)
        g, o, queries = (x.transpose(1, 2).unflatten(1, split).to(s.dtype) for x in (rows.grad, rows.out, q))
        keys, values = (x.transpose(1, 2)[:, :, None].to(s.dtype) for x in (k, v))
        p = torch.exp(s - rows.lse.transpose(1, 2).unflatten(1, split)[..., None])
        delta = (g * o).sum(-1, keepdim=True)
        ds = p * (g @ values.transpose(-1, -2) - delta) * slope * args.scaling
        dq = (ds @ keys).flatten(1, 2)
        dk, dv = (ds.transpose(-1, -2) @ queries).sum(2), (p.transpose(-1, -2) @ g).sum(2)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def scores(self, q: Tensor, k: Tensor, drop: Tensor | None, args: AttentionArgs) -> tuple[Tensor, Tensor | float]:
        """Return scores `(blocks, G, H/G, t, s)`, -inf where masked, and the slope of the softcap there."""
        precision = torch.promote_types(q.dtype, torch.float32)
        a = q.transpose(1, 2).unflatten(1, (k.shape[2], -1)).to(precision)
        s = (a @ k.transpose(1, 2)[:, :, None].transpose(-1, -2).to(precision)) * args.scaling
        slope: Tensor | float = 1.0
        if args.softcap is not None:
            squashed = torch.tanh(s / args.softcap)
            s, slope = args.softcap * squashed, 1 - squashed**2
        return s if drop is None else s.masked_fill(drop[:, None, None], float("-inf")), slope
