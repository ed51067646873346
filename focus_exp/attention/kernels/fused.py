"""Hard Focus attention by two Triton kernels: window and sinks first, then the groups."""

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

from focus_exp.attention.kernels.contract import Backend, BackendUnsupported, KernelRequirements
from focus_exp.attention.kernels.layout import GroupLists, Plan, query_ranges
from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, for_each_head

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SINK_CHUNK = 2048  # queries per program of the sinks' gradients
MAX_HEAD_DIM = 256
LONG_FROM = 2**13  # tokens of a batch above which block sizes are tuned again


class Triton(Backend):
    """Support every selection of hard routing at head sizes up to 256, with gradients, the router's included."""

    name = "triton"

    def unsupported_reason(self, requirements: KernelRequirements) -> str | None:
        if requirements.device != "cuda":
            return f"runs on CUDA, the tensors are on {requirements.device}"
        if requirements.dtype not in DTYPES:
            return f"does not take {str(requirements.dtype).removeprefix('torch.')}"
        if requirements.head_dim > MAX_HEAD_DIM:
            return f"takes head sizes up to {MAX_HEAD_DIM}, not {requirements.head_dim}"
        missing = import_error("triton")
        return capability_reason((8, 0)) or (missing and f"needs the package triton: {missing}")

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        return for_each_head(self.attend_rows)(q, k, v, selection, sequence, args)

    def attend_rows(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        """Compute `attention` with one grouping per row."""
        with torch.no_grad():
            plan = Plan.of(selection, sequence, args.window, args.sinks)
        gates = None
        if args.ste_slope and selection.assignment is not None:
            gates = (selection.assignment, selection.effective_key_assignment)
        return self.run_kernels(q, k, v, plan, args, gates)

    def run_kernels(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Plan,
        args: AttentionArgs,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run the kernels on a plan.

        Args:
            gates: assignments of queries and keys `(B, T, K)` that get a straight-through gradient.

        Raises:
            BackendUnsupported: values have another head size than queries.
        """
        if v.shape[-1] != q.shape[-1]:
            raise BackendUnsupported(
                f"backend={self.name} must have values of head size {q.shape[-1]} (got {v.shape[-1]}). "
                "Use backend=masked."
            )
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        flat = [x if x.stride(-1) == 1 else x.contiguous() for x in flat]
        logits = None if args.sink_logits is None else args.sink_logits.float().expand(plan.batch, q.shape[1])
        g, g_keys = (None, None) if gates is None else (x.flatten(0, 1) for x in gates)
        out: Tensor = FusedAttention.apply(*flat, g, g_keys, logits, self, plan, replace(args, sink_logits=None))
        return out.unflatten(0, (plan.batch, plan.length)).transpose(1, 2)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, logits: Tensor | None, plan: Plan, args: AttentionArgs
    ) -> tuple[Tensor, Tensor]:
        """Return output `(n, H, D)` and natural logsumexp `(H, n)` of q, k, v `(n, H or G, D)`."""
        lists, ranks = plan.lists, len(plan.lists.queries)
        out = torch.empty(q.shape, dtype=q.dtype if ranks == 1 else torch.float32, device=q.device)
        lse = torch.empty(q.shape[1], len(q), device=q.device)
        window_forward(q, k, v, out, lse, logits, plan, args)
        for rank in range(ranks):
            kernels().groups_forward[tiles(len(q), "BM", q.shape[1])](
                q, k, v, out, lse, lists.queries[rank], lists.first[rank], lists.stop[rank], lists.keys,
                *overlap_bits(lists, rank), len(q), lists.keys.numel() // len(q), **common(q, k, v, args),
                SHARED=lists.bits is not None,
            )  # fmt: skip
        return out.to(q.dtype), lse


class FusedAttention(torch.autograd.Function):
    """Backward from out and lse of complete rows, so that the gradients of window and groups add up."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_keys: Tensor | None, logits: Tensor | None,
        kernel: Triton, plan: Plan, args: AttentionArgs,
    ) -> Tensor:  # fmt: skip
        logits = None if logits is None else logits.contiguous()
        out, lse = kernel.forward(q, k, v, logits, plan, args)
        ctx.save_for_backward(q, k, v, g, g_keys, logits, out, lse)
        ctx.plan, ctx.args = plan, args
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, g_keys, logits, out, lse = ctx.saved_tensors
        plan: Plan = ctx.plan
        dout = grads[0].contiguous()
        delta = (dout.float() * out.float()).sum(-1).T.contiguous()  # (H, n)
        saved = (q, k, v, dout, lse, delta)
        slots = plan.lists.keys.numel() // len(q)
        dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        dk, dv = (torch.zeros(len(k), slots, *k.shape[1:], device=k.device) for _ in range(2))
        window_backward(saved, dq, dk, dv, plan, ctx.args)
        gates = (g, g_keys) if any(ctx.needs_input_grad[3:5]) else None
        dgates = groups_backward(saved, dq, dk, dv, gates, plan, ctx.args)
        dlogits = None
        if logits is not None:  # p * (dP - delta) with dP = 0: the sink has no value
            split = (len(lse), plan.batch, plan.length)
            weights = torch.exp(logits.T[..., None] - lse.view(split))
            dlogits = -(weights * delta.view(split)).sum(-1).T
        return dq.to(q.dtype), dk.sum(1).to(k.dtype), dv.sum(1).to(v.dtype), *dgates, dlogits, None, None, None


def window_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, logits: Tensor | None, plan: Plan, args: AttentionArgs,
    others: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Write out and lse of window and sinks, starting from the state of `others` if given.

    Args:
        others: out `(m, H, D)` and lse `(H, m)` over the keys of a query's own group, which are then left out here, and
            each query's index `(n,)` int32 in them, -1 for none.
    """
    place, other_out, other_lse = (plan.begins, out, lse) if others is None else (others[2], *others[:2])
    tags = plan.tags if others is not None and plan.tags is not None else (plan.begins, plan.begins)
    kernels().window_forward[tiles(plan.length, "BM", q.shape[1], plan.batch)](
        q, k, v, out, lse, plan.begins, valid_or_placeholder(plan), *tags, place, other_out, other_lse,
        lse if logits is None else logits,
        len(q), plan.length, plan.window, plan.sinks, **common(q, k, v, args),
        BS=sink_block(plan.sinks), VALID=plan.valid is not None, OTHERS=others is not None, LOGITS=logits is not None,
    )  # fmt: skip


def window_backward(
    saved: tuple[Tensor, ...], dq: Tensor, dk: Tensor, dv: Tensor, plan: Plan, args: AttentionArgs
) -> None:
    """Write dq and the first slots of dk and dv `(n, S, G, D)`."""
    q, k, v = saved[:3]
    (length, batch), (heads, groups), slots = (plan.length, plan.batch), (q.shape[1], k.shape[1]), dk.shape[1]
    settings = common(q, k, v, args) | {"unit": args.scaling, "VALID": plan.valid is not None}
    block = sink_block(plan.sinks)
    kernels().window_backward_queries[tiles(length, "BM", heads, batch)](
        *saved, dq, plan.begins, valid_or_placeholder(plan),
        len(q), length, plan.window, plan.sinks, BS=block, **settings,
    )  # fmt: skip
    kernels().window_backward_keys[tiles(length, "BN", groups, batch)](
        *saved, dk, dv, valid_or_placeholder(plan), len(q), length, plan.window, slots=slots, **settings
    )
    if plan.sinks and length > plan.window + 1:
        chunks = -(-length // SINK_CHUNK)
        dk_sinks, dv_sinks = (torch.empty(batch, chunks, groups, block, q.shape[2], device=q.device) for _ in range(2))
        kernels().sinks_backward[(chunks, groups, batch)](
            *saved, dk_sinks, dv_sinks, plan.begins, valid_or_placeholder(plan),
            len(q), length, plan.window, plan.sinks, SINK_CHUNK, BS=block, **settings,
        )  # fmt: skip
        positions = plan.begins[:, None] + torch.arange(plan.sinks, device=q.device)
        row = (positions.clamp(max=length - 1) + length * torch.arange(batch, device=q.device)[:, None]).flatten()
        for total, part in ((dk, dk_sinks), (dv, dv_sinks)):
            total[:, 0].index_add_(0, row, part.sum(1)[:, :, : plan.sinks].transpose(1, 2).flatten(0, 1))


def groups_backward(
    saved: tuple[Tensor, ...],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    gates: tuple[Tensor, Tensor] | None,
    plan: Plan,
    args: AttentionArgs,
) -> tuple[Tensor | None, Tensor | None]:
    """Add to dq, dk and dv; return the gradients of the gates `(n, K)`, g of queries and h of keys.

    The straight-through gradient is that of slope * g_i . h_j added to the scores of distant pairs. Those are the pairs
    of kernel B, which sums sum_j dS_ij h_j and sum_i dS_ij g_i along with dQ and dK.
    """
    (q, k, v), lists = saved[:3], plan.lists
    (ranks, n), slots, groups = lists.queries.shape, dk.shape[1], k.shape[1]
    g, h = (x.float().contiguous() for x in gates or [dq.new_zeros(1, 1)] * 2)
    width = g.shape[1]
    dg, dh = (g.new_zeros(len(g) * times, groups, width) for times in (1, slots))
    settings = common(q, k, v, args) | {
        "unit": args.scaling, "slope": args.ste_slope or 0.0,
        "SHARED": lists.bits is not None, "GATED": gates is not None, "K": width, "BK": max(16, power_of_two(width)),
    }  # fmt: skip
    for rank in range(ranks):
        kernels().groups_backward_queries[tiles(n, "BM", groups)](
            *saved, dq, dg, h, lists.queries[rank], lists.first[rank], lists.stop[rank], lists.keys,
            *overlap_bits(lists, rank), n, slots, **settings,
        )  # fmt: skip
    first, stop = query_ranges(lists, plan.groups, plan.length, plan.window)
    kernels().groups_backward_keys[tiles(n * slots, "BN", groups)](
        *saved, dk, dv, dh, g, lists.queries, first, stop, lists.keys, *overlap_bits(lists, slice(None)),
        n, slots, ranks, **settings,
    )  # fmt: skip
    if gates is None:
        return None, None
    return dg.sum(1).to(gates[0].dtype), dh.view(n, -1, width).sum(1).to(gates[1].dtype)


def common(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> dict[str, Any]:
    """Return the arguments of every kernel: strides, head sizes, score units, precision of products."""
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


def overlap_bits(lists: GroupLists, rank: int | slice) -> tuple[Tensor, Tensor]:
    """Return `lower` and `bits`, or placeholders where the kernel does not read them."""
    if lists.lower is None or lists.bits is None:
        return lists.keys, lists.keys
    return lists.lower[rank], lists.bits


def valid_or_placeholder(plan: Plan) -> Tensor:
    return plan.begins if plan.valid is None else plan.valid


def tiles(length: int, block: str, *others: int) -> Any:
    return lambda meta: (-(-length // meta[block]), *others)


def power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()


def sink_block(sinks: int) -> int:
    return max(16, power_of_two(max(sinks, 1)))


@cache
def kernels() -> Any:
    """Import the Triton kernels on first use."""
    groups = importlib.import_module("focus_exp.attention.kernels.groups")
    window = importlib.import_module("focus_exp.attention.kernels.window")
    return SimpleNamespace(**{**vars(groups), **vars(window)})


@cache
def import_error(package: str) -> str | None:
    """Return why a package cannot be imported; cached, since a failed search costs as much as a layer."""
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        return str(error)
    return None


@cache
def capability_reason(needed: tuple[int, int]) -> str | None:
    """Return why the device's compute capability is too low."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= needed:
        return None
    has = ".".join(map(str, torch.cuda.get_device_capability()))
    return f"needs compute capability {'.'.join(map(str, needed))}, {torch.cuda.get_device_name()} has {has}"
