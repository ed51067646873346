"""torch's flash kernel for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from focus_exp.attention.kernels.contract import Gradients, Kernel, KernelRequirements, RowResult
from focus_exp.attention.selection import AttentionArgs

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class CpuFlash(Kernel):
    """Call torch's flash kernel, which takes GQA and a bias and returns the logsumexp.

    Its own causal mode is not used: it computes full blocks of 512 keys, half as much again for 1,024 tokens.
    """

    name = "cpu-flash"

    def unsupported_reason(self, requirements: KernelRequirements) -> str | None:
        if requirements.device != "cpu":
            return f"runs on the CPU, the tensors are on {requirements.device}"
        return "has no softcap" if requirements.softcap else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, drop: Tensor | None, args: AttentionArgs
    ) -> tuple[Tensor, Tensor]:
        n_rep = heads_to_fold(q, k)
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (fold(q, n_rep), k, v)), attn_mask=bias(drop, q, n_rep), scale=args.scaling
        )
        o, lse = (unfold(x.transpose(1, 2), n_rep) for x in (o, lse))
        if drop is not None:
            rows = (lse == 0).any(-1).nonzero(as_tuple=True)
            if len(rows[0]):  # the kernel returns (0, 0) for a row without keys
                lse[rows] = lse[rows].masked_fill(drop[rows].all(-1, keepdim=True), float("-inf"))
        return o, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: RowResult, drop: Tensor | None, args: AttentionArgs
    ) -> Gradients:
        n_rep = heads_to_fold(q, k)
        grad, queries, out, lse = (fold(x, n_rep) for x in (rows.grad, q, rows.out, rows.lse))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.transpose(1, 2) for x in (grad, queries, k, v, out, lse)), 0.0, False,
            attn_mask=bias(drop, q, n_rep), scale=args.scaling,
        )  # fmt: skip
        return unfold(dq.transpose(1, 2), n_rep), dk.transpose(1, 2), dv.transpose(1, 2)


def heads_to_fold(q: Tensor, k: Tensor) -> int:
    """Return how many heads of q to fold into queries: in half precision the kernel repacks the keys per head."""
    return q.shape[2] // k.shape[2] if len(q) == 1 and q.dtype.itemsize < 4 else 1


def fold(x: Tensor, n_rep: int) -> Tensor:
    """`(1, t, G * n_rep, ...)` -> `(1, t * n_rep, G, ...)`."""
    return x if n_rep == 1 else x.unflatten(2, (-1, n_rep)).transpose(2, 3).flatten(1, 2)


def unfold(x: Tensor, n_rep: int) -> Tensor:
    """`(1, t * n_rep, G, ...)` -> `(1, t, G * n_rep, ...)`."""
    return x if n_rep == 1 else x.unflatten(1, (-1, n_rep)).transpose(2, 3).flatten(2, 3)


def bias(drop: Tensor | None, q: Tensor, n_rep: int) -> Tensor | None:
    """Turn `drop` into a bias on the scores, `(blocks, 1, t * n_rep, s)`."""
    if drop is None:
        return None
    # on a CPU where() takes 20 times as long as multiplying bool with the bits of -inf
    integer = INTEGERS[q.dtype.itemsize]
    bits = torch.tensor(float("-inf"), dtype=q.dtype).view(integer).item()
    added = drop.to(integer).mul_(bits).view(q.dtype)
    return added.repeat_interleave(n_rep, 1)[:, None] if n_rep > 1 else added[:, None]
