"""The twin of every kernel, in plain tensor operations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from focus_exp.attention.kernels.contract import Demand, Gradients, Kernel, Meeting, Whole, segments


class Math(Kernel):
    """For every device, dtype and softcap; a part's scores stand in memory."""

    name = "math"
    takes = "blocks"

    def refuses(self, demand: Demand) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, meeting: Meeting, scaling: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        outputs, sums = [], []
        for s, _, rows in self.scores(q, k, meeting, scaling, softcap):
            lse = s.logsumexp(-1)  # [blocks, G, H/G, t]
            p = torch.exp(s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
            o = p.to(v.dtype) @ v[:, rows].transpose(1, 2)[:, :, None]
            outputs.append(o.flatten(1, 2).transpose(1, 2))
            sums.append(lse.flatten(1, 2).transpose(1, 2))
        return torch.cat(outputs, 1), torch.cat(sums, 1)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: Whole, meeting: Meeting, scaling: float, softcap: float | None
    ) -> Gradients:
        groups = k.shape[2]
        gradients: list[list[Tensor]] = [[], [], []]
        for s, slope, rows in self.scores(q, k, meeting, scaling, softcap):
            split = (groups, q.shape[2] // groups)
            g, o, queries = (
                x[:, rows].transpose(1, 2).unflatten(1, split).to(s.dtype) for x in (whole.grad, whole.out, q)
            )
            keys, values = (x[:, rows].transpose(1, 2)[:, :, None].to(s.dtype) for x in (k, v))
            p = torch.exp(s - whole.lse[:, rows].transpose(1, 2).unflatten(1, split)[..., None])
            delta = (g * o).sum(-1, keepdim=True)
            ds = p * (g @ values.transpose(-1, -2) - delta) * slope * scaling
            gradients[0].append((ds @ keys).flatten(1, 2))
            gradients[1].append((ds.transpose(-1, -2) @ queries).sum(2))
            gradients[2].append((p.transpose(-1, -2) @ g).sum(2))
        dq, dk, dv = (torch.cat([x.transpose(1, 2) for x in parts], 1) for parts in gradients)
        return dq, dk, dv

    def scores(
        self, q: Tensor, k: Tensor, meeting: Meeting, scaling: float, softcap: float | None
    ) -> Iterator[tuple[Tensor, Tensor | float, slice]]:
        """Scores `[blocks, G, H/G, t, s]` of some rows, -inf where masked, and their slope under the softcap."""
        for rows in [slice(None)] if meeting.drop is not None else segments(meeting):
            precision = torch.promote_types(q.dtype, torch.float32)
            a = q[:, rows].transpose(1, 2).unflatten(1, (k.shape[2], -1)).to(precision)
            s = (a @ k[:, rows].transpose(1, 2)[:, :, None].transpose(-1, -2).to(precision)) * scaling
            slope: Tensor | float = 1.0
            if softcap is not None:
                squashed = torch.tanh(s / softcap)
                s, slope = softcap * squashed, 1 - squashed**2
            if meeting.drop is not None:
                s = s.masked_fill(meeting.drop[:, None, None], float("-inf"))
            else:
                t = torch.arange(s.shape[-1], device=q.device)
                distance = t[:, None] - t
                seen = distance >= 0
                if meeting.window is not None:
                    seen = seen & (distance <= meeting.window)
                s = s.masked_fill(~seen, float("-inf"))
            yield s, slope, rows
