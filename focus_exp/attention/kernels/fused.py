"""Hard Focus attention by two Triton kernels: the window and the sinks, and from there on the groups."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from focus_exp.attention.kernels.contract import CannotServe, Demand, Fused
from focus_exp.attention.kernels.layout import Lists, Plan, seen_by
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SINK_CHUNK = 2048  # queries whose share of the sinks' gradients one program adds up
LARGEST_HEAD = 256
LONG_FROM = 2**13  # tokens of a batch; above, blocks are chosen anew


class Triton(Fused):
    """Every selection with hard groups, at every head size up to 256; with a backward, the router's included."""

    name = "triton"

    def refuses(self, demand: Demand) -> str | None:
        if demand.device != "cuda":
            return f"runs on CUDA, the tensors are on {demand.device}"
        if demand.dtype not in DTYPES:
            return f"does not take {str(demand.dtype).removeprefix('torch.')}"
        if demand.head_dim > LARGEST_HEAD:
            return f"takes head sizes up to {LARGEST_HEAD}, not {demand.head_dim}"
        missing = found("triton")
        return too_old((8, 0)) or (missing and f"needs the package triton: {missing}")

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        with torch.no_grad():
            plan = Plan.of(selection, sequence, args.window, args.sinks)
        gates = None
        if args.ste_slope and selection.assignment is not None:
            gates = (selection.assignment, selection.assignment_of_keys)
        return self.planned(q, k, v, plan, args, gates)

    def planned(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Plan,
        args: AttentionArgs,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`attention` where the plan is made: the kernels alone. CannotServe where values have a size of their own."""
        if v.shape[-1] != q.shape[-1]:
            raise CannotServe(f"backend={self.name} takes values of the queries' head size; use backend=masked")
        packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        packed = [x if x.stride(-1) == 1 else x.contiguous() for x in packed]
        logits = None if args.sink_logits is None else args.sink_logits.float().expand(plan.batch, q.shape[1])
        asks, answers = (None, None) if gates is None else (g.flatten(0, 1) for g in gates)
        out: Tensor = FusedAttention.apply(*packed, asks, answers, logits, self, plan, replace(args, sink_logits=None))
        return out.unflatten(0, (plan.batch, plan.length)).transpose(1, 2)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, logits: Tensor | None, plan: Plan, args: AttentionArgs
    ) -> tuple[Tensor, Tensor]:
        """Output `[n, H, D]` and natural logsumexp `[H, n]` of q, k, v `[n, H or G, D]`."""
        found, ranks = plan.lists, len(plan.lists.queries)
        out = torch.empty(q.shape, dtype=q.dtype if ranks == 1 else torch.float32, device=q.device)
        lse = torch.empty(q.shape[1], len(q), device=q.device)
        window_forward(q, k, v, out, lse, logits, plan, args)
        for rank in range(ranks):
            kernels().groups_forward[tiles(len(q), "BM", q.shape[1])](
                q, k, v, out, lse, found.queries[rank], found.first[rank], found.stop[rank], found.keys,
                *shared(found, rank), len(q), found.keys.numel() // len(q), **common(q, k, v, args),
                SHARED=found.bits is not None,
            )  # fmt: skip
        return out.to(q.dtype), lse


class FusedAttention(torch.autograd.Function):
    """The backward takes the whole rows' out and lse, so that the gradients of window and groups add up."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, asks: Tensor | None, answers: Tensor | None, logits: Tensor | None,
        kernel: Triton, plan: Plan, args: AttentionArgs,
    ) -> Tensor:  # fmt: skip
        logits = None if logits is None else logits.contiguous()
        out, lse = kernel.forward(q, k, v, logits, plan, args)
        ctx.save_for_backward(q, k, v, asks, answers, logits, out, lse)
        ctx.plan, ctx.args = plan, args
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, asks, answers, logits, out, lse = ctx.saved_tensors
        plan: Plan = ctx.plan
        dout = grads[0].contiguous()
        delta = (dout.float() * out.float()).sum(-1).T.contiguous()  # [H, n]
        whole = (q, k, v, dout, lse, delta)
        slots = plan.lists.keys.numel() // len(q)
        dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        dk, dv = (torch.zeros(len(k), slots, *k.shape[1:], device=k.device) for _ in range(2))
        window_backward(whole, dq, dk, dv, plan, ctx.args)
        gates = (asks, answers) if any(ctx.needs_input_grad[3:5]) else None
        dgates = groups_backward(whole, dq, dk, dv, gates, plan, ctx.args)
        dlogits = None
        if logits is not None:  # p * (dP - delta), where dP is 0: it has no value
            split = (len(lse), plan.batch, plan.length)
            weights = torch.exp(logits.T[..., None] - lse.view(split))
            dlogits = -(weights * delta.view(split)).sum(-1).T
        return dq.to(q.dtype), dk.sum(1).to(k.dtype), dv.sum(1).to(v.dtype), *dgates, dlogits, None, None, None


def window_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, logits: Tensor | None, plan: Plan, args: AttentionArgs,
    others: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Writes out and lse. `others`: (out, lse) `[m, H, D]`, `[H, m]` of keys in a query's own group, and each query's
    place `[n]` int32 there, -1 for none; then those keys are left out here."""
    place, other_out, other_lse = (plan.begins, out, lse) if others is None else (others[2], *others[:2])
    tags = plan.tags if others is not None and plan.tags is not None else (plan.begins, plan.begins)
    kernels().window_forward[tiles(plan.length, "BM", q.shape[1], plan.batch)](
        q, k, v, out, lse, plan.begins, real(plan), *tags, place, other_out, other_lse,
        lse if logits is None else logits,
        len(q), plan.length, plan.window, plan.sinks, **common(q, k, v, args),
        BS=sink_block(plan.sinks), VALID=plan.valid is not None, OTHERS=others is not None, LOGITS=logits is not None,
    )  # fmt: skip


def window_backward(
    whole: tuple[Tensor, ...], dq: Tensor, dk: Tensor, dv: Tensor, plan: Plan, args: AttentionArgs
) -> None:
    """Writes dq and the first slots of dk and dv `[n, S, G, D]`."""
    q, k, v = whole[:3]
    (length, batch), (heads, groups), slots = (plan.length, plan.batch), (q.shape[1], k.shape[1]), dk.shape[1]
    settings = common(q, k, v, args) | {"unit": args.scaling, "VALID": plan.valid is not None}
    block = sink_block(plan.sinks)
    kernels().window_backward_queries[tiles(length, "BM", heads, batch)](
        *whole, dq, plan.begins, real(plan), len(q), length, plan.window, plan.sinks, BS=block, **settings
    )
    kernels().window_backward_keys[tiles(length, "BN", groups, batch)](
        *whole, dk, dv, real(plan), len(q), length, plan.window, slots=slots, **settings
    )
    if plan.sinks and length > plan.window + 1:
        chunks = -(-length // SINK_CHUNK)
        of_keys, of_values = (torch.empty(batch, chunks, groups, block, q.shape[2], device=q.device) for _ in range(2))
        kernels().sinks_backward[(chunks, groups, batch)](
            *whole, of_keys, of_values, plan.begins, real(plan),
            len(q), length, plan.window, plan.sinks, SINK_CHUNK, BS=block, **settings,
        )  # fmt: skip
        places = plan.begins[:, None] + torch.arange(plan.sinks, device=q.device)
        row = (places.clamp(max=length - 1) + length * torch.arange(batch, device=q.device)[:, None]).flatten()
        for total, part in ((dk, of_keys), (dv, of_values)):
            total[:, 0].index_add_(0, row, part.sum(1)[:, :, : plan.sinks].transpose(1, 2).flatten(0, 1))


def groups_backward(
    whole: tuple[Tensor, ...],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    gates: tuple[Tensor, Tensor] | None,
    plan: Plan,
    args: AttentionArgs,
) -> tuple[Tensor | None, Tensor | None]:
    """Adds to dq, dk and dv, and returns the gradients of the gates `[n, K]`: g of queries and h of keys.

    Straight through: that of slope * g_i . h_j added to the scores of pairs that are not always visible. These are the
    pairs of kernel B, which adds up sum_j dS_ij h_j and sum_i dS_ij g_i beside dQ and dK.
    """
    (q, k, v), found = whole[:3], plan.lists
    (ranks, n), slots, groups = found.queries.shape, dk.shape[1], k.shape[1]
    asks, answers = (x.float().contiguous() for x in gates or [dq.new_zeros(1, 1)] * 2)
    width = asks.shape[1]
    of_queries, of_keys = (asks.new_zeros(len(asks) * times, groups, width) for times in (1, slots))
    settings = common(q, k, v, args) | {
        "unit": args.scaling, "slope": args.ste_slope or 0.0,
        "SHARED": found.bits is not None, "GATED": gates is not None, "K": width, "BK": max(16, power_of_two(width)),
    }  # fmt: skip
    for rank in range(ranks):
        kernels().groups_backward_queries[tiles(n, "BM", groups)](
            *whole, dq, of_queries, answers, found.queries[rank], found.first[rank], found.stop[rank], found.keys,
            *shared(found, rank), n, slots, **settings,
        )  # fmt: skip
    first, stop = seen_by(found, plan.groups, plan.length, plan.window)
    kernels().groups_backward_keys[tiles(n * slots, "BN", groups)](
        *whole, dk, dv, of_keys, asks, found.queries, first, stop, found.keys, *shared(found, slice(None)),
        n, slots, ranks, **settings,
    )  # fmt: skip
    if gates is None:
        return None, None
    return of_queries.sum(1).to(gates[0].dtype), of_keys.view(n, -1, width).sum(1).to(gates[1].dtype)


def common(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> dict[str, Any]:
    """Arguments of every kernel: strides, head sizes, how scores are made, and how float32 is multiplied."""
    heads, size = q.shape[1:]
    log2e = 1 / math.log(2)  # the kernels' scores are in units of ln 2
    units: dict[str, Any] = {"scale": args.scaling * log2e, "cap": 0.0, "SOFTCAP": False}
    if args.softcap is not None:
        units = {"scale": args.scaling / args.softcap, "cap": args.softcap * log2e, "SOFTCAP": True}
    return units | {
        "q_row": q.stride(0), "q_head": q.stride(1), "k_row": k.stride(0), "k_head": k.stride(1),
        "v_row": v.stride(0), "v_head": v.stride(1), "heads": heads, "HG": heads // k.shape[1],
        "D": size, "BD": max(16, power_of_two(size)), "LONG": len(q) > LONG_FROM,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip


def shared(found: Lists, rank: int | slice) -> tuple[Tensor, Tensor]:
    """`lower` and `bits`, or what stands for them where they are not read."""
    if found.lower is None or found.bits is None:
        return found.keys, found.keys
    return found.lower[rank], found.bits


def real(plan: Plan) -> Tensor:
    return plan.begins if plan.valid is None else plan.valid


def tiles(length: int, block: str, *others: int) -> Any:
    return lambda meta: (-(-length // meta[block]), *others)


def power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()


def sink_block(sinks: int) -> int:
    return max(16, power_of_two(max(sinks, 1)))


@cache
def kernels() -> Any:
    """The Triton kernels, imported where they are first needed."""
    groups = importlib.import_module("focus_exp.attention.kernels.groups")
    window = importlib.import_module("focus_exp.attention.kernels.window")
    return SimpleNamespace(**{**vars(groups), **vars(window)})


@cache
def found(package: str) -> str | None:
    """Why a package cannot be imported, None if it can; asked once: a search that fails costs as much as a layer."""
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        return str(error)
    return None


@cache
def too_old(needed: tuple[int, int]) -> str | None:
    """Why the device's compute capability is not enough."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= needed:
        return None
    has = ".".join(map(str, torch.cuda.get_device_capability()))
    return f"needs compute capability {'.'.join(map(str, needed))}, {torch.cuda.get_device_name()} has {has}"
