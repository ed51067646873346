"""torch's flash kernel for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from focus_exp.attention.kernels.contract import Demand, Gradients, Kernel, Whole
from focus_exp.attention.selection import AttentionArgs

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class CpuFlash(Kernel):
    """Takes grouped heads, gives the logsumexp, adds a bias.

    Its own causal mode is not used: it computes whole blocks of 512 keys, half as much again for 1,024 tokens.
    """

    name = "cpu-flash"

    def refuses(self, demand: Demand) -> str | None:
        if demand.device != "cpu":
            return f"runs on the CPU, the tensors are on {demand.device}"
        return "has no softcap" if demand.softcap else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, drop: Tensor | None, args: AttentionArgs
    ) -> tuple[Tensor, Tensor]:
        share = heads_to_fold(q, k)
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (folded(q, share), k, v)), attn_mask=bias(drop, q, share), scale=args.scaling
        )
        o, lse = (unfolded(x.transpose(1, 2), share) for x in (o, lse))
        if drop is not None:
            rows = (lse == 0).any(-1).nonzero(as_tuple=True)
            if len(rows[0]):  # the kernel says (0, 0) of a row without keys
                lse[rows] = lse[rows].masked_fill(drop[rows].all(-1, keepdim=True), float("-inf"))
        return o, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, whole: Whole, drop: Tensor | None, args: AttentionArgs
    ) -> Gradients:
        share = heads_to_fold(q, k)
        grad, queries, out, lse = (folded(x, share) for x in (whole.grad, q, whole.out, whole.lse))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.transpose(1, 2) for x in (grad, queries, k, v, out, lse)), 0.0, False,
            attn_mask=bias(drop, q, share), scale=args.scaling,
        )  # fmt: skip
        return unfolded(dq.transpose(1, 2), share), dk.transpose(1, 2), dv.transpose(1, 2)


def heads_to_fold(q: Tensor, k: Tensor) -> int:
    """How many heads of q become as many queries: in half precision the kernel prepares the keys for each head."""
    return q.shape[2] // k.shape[2] if len(q) == 1 and q.dtype.itemsize < 4 else 1


def folded(x: Tensor, share: int) -> Tensor:
    """`[1, t, G * share, ...]` -> `[1, t * share, G, ...]`."""
    return x if share == 1 else x.unflatten(2, (-1, share)).transpose(2, 3).flatten(1, 2)


def unfolded(x: Tensor, share: int) -> Tensor:
    """`[1, t * share, G, ...]` -> `[1, t, G * share, ...]`."""
    return x if share == 1 else x.unflatten(1, (-1, share)).transpose(2, 3).flatten(2, 3)


def bias(drop: Tensor | None, q: Tensor, share: int) -> Tensor | None:
    """`drop` as something to add to the scores, `[blocks, 1, t * share, s]`."""
    if drop is None:
        return None
    # where() takes 20 times as long on a CPU as the product of bool with the bits of minus infinity
    integer = INTEGERS[q.dtype.itemsize]
    bits = torch.tensor(float("-inf"), dtype=q.dtype).view(integer).item()
    added = drop.to(integer).mul_(bits).view(q.dtype)
    return added.repeat_interleave(share, 1)[:, None] if share > 1 else added[:, None]
