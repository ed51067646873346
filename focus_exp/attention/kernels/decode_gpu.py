"""Attention to the keys of a KV cache in place, on a GPU: one Triton kernel split over keys, and one that merges.

A program takes a span of keys of one key/value head and one query with all its heads. Rows of keys and values that the
query does not read are not loaded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from focus_exp.attention.kernels.tiles import attend, load
from focus_exp.attention.kernels.tuning import jit

BLOCK = 64  # keys at a time
SPAN = 256  # keys of a program, at least
PROGRAMS = 512  # enough for the multiprocessors of a GPU
LOG2E = 1.4426950408889634


@jit
def decode_span(
    q, k, v, key_words, query_words, seen, far, near, sums, states,
    n, length, span, window, sinks, scale, cap, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    groups_batch, groups_head, query_batch, query_head, seen_batch, seen_row, bound_batch, heads,
    HG: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
    W: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from query t of n to `span` of `length` keys; store the state of its HG heads for `decode_merge`."""
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, head, b = index % n, index // n % heads, index // n // heads
    rows = tl.arange(0, BH)
    live = rows < HG
    queries = load(q + b * q_batch + t * q_row, rows, q_head, head * HG * q_head, live, D, BD)
    end = length - n + t + 1
    if MASKED:
        first, last = tl.load(far + b * bound_batch + t), tl.load(near + b * bound_batch + t)
    else:
        first, last = sinks, end - window - 1
    m, mass, acc = (
        tl.full((BH,), float("-inf"), tl.float32),
        tl.zeros((BH,), tl.float32),
        tl.zeros((BH, BDV), tl.float32),
    )
    for begin in range(part * span, tl.minimum(part * span + span, end), BN):
        j = begin + tl.arange(0, BN)
        inside = j < end
        keep = (j < first) | (j >= last)
        for w in tl.static_range(W):
            has = tl.load(key_words + b * groups_batch + head * groups_head + j * W + w, inside, 0)
            keep = keep | ((has & tl.load(query_words + b * query_batch + head * query_head + t * W + w)) != 0)
        keep = keep & inside
        if MASKED:
            keep = keep & (tl.load(seen + b * seen_batch + t * seen_row + j, inside, 0) != 0)
        keys = load(k + b * k_batch, j.to(tl.int64), k_row, head * k_head, keep, D, BD)
        values = load(v + b * v_batch, j.to(tl.int64), v_row, head * v_head, keep, DV, BDV)
        m, mass, acc = attend(queries, keys, values, keep[None, :], m, mass, acc, scale, cap, True, SOFTCAP, PRECISION)
    at = ((b * n + t) * heads + head) * HG + rows
    parts, d = tl.num_programs(1), tl.arange(0, BDV)
    tl.store(sums + (at * parts + part)[:, None] * DV + d, acc, live[:, None] & (d < DV))
    tl.store(states + (at * parts + part) * 2, m, live)
    tl.store(states + (at * parts + part) * 2 + 1, mass, live)


@jit
def decode_merge(
    sums, states, sink_logits, out, parts, heads, tokens, DV: tl.constexpr, BDV: tl.constexpr, SINKS: tl.constexpr
):
    """Merge the states of one row's spans; `sink_logits` is one more key without a value."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BDV)
    m, mass, acc = float("-inf"), 0.0, tl.zeros((BDV,), tl.float32)
    if SINKS:
        m, mass = tl.load(sink_logits + row // (tokens * heads) * heads + row % heads) * 1.4426950408889634, 1.0
    for part in range(parts):
        other = tl.load(states + (row * parts + part) * 2)
        top = tl.maximum(m, other)
        safe = tl.where(top == float("-inf"), 0.0, top)
        scale, scale_other = tl.exp2(m - safe), tl.exp2(other - safe)
        mass = mass * scale + tl.load(states + (row * parts + part) * 2 + 1) * scale_other
        acc = acc * scale + tl.load(sums + (row * parts + part) * DV + d, d < DV, 0.0) * scale_other
        m = top
    acc = acc / tl.where(mass == 0, 1.0, mass)
    tl.store(out + row * DV + d, acc.to(out.dtype.element_ty), d < DV)


def attend_cached(q: Tensor, k: Tensor, v: Tensor, key_groups: Tensor, query_groups: Tensor, *others: Any) -> Tensor:
    """Return `(B, T, H, Dv)` of q `(B, H, T, D)` and k, v `(B, G, S, D)`; see `CachedKeys` for the others."""
    visible, before, sink_logits, window, sinks, scaling, softcap = others
    (batch, heads, count, size), (_, kv_heads, length, value_size) = q.shape, v.shape
    k, v = k.to(q.dtype), v.to(q.dtype)  # the same unless rotary layers have left them in float32 under autocast
    rows, groups = batch * count * kv_heads, heads // kv_heads
    parts = max(1, min(-(-length // SPAN), -(-PROGRAMS // rows)))
    span = -(-length // (parts * BLOCK)) * BLOCK
    sums = q.new_empty(batch * count * heads, parts, value_size, dtype=torch.float32)
    states = q.new_empty(batch * count * heads, parts, 2, dtype=torch.float32)
    out = q.new_empty(batch, count, heads, value_size)
    far, near = find_bounds(visible, before, count, length, window, sinks) if visible is not None else (None, None)
    key_groups, query_groups = key_groups.contiguous(), query_groups.contiguous()
    seen = None if visible is None else visible.contiguous().view(torch.uint8)
    scale = scaling / softcap if softcap else scaling * LOG2E
    decode_span[(rows, parts)](
        q, k, v, key_groups, query_groups, seen, far, near, sums, states,
        count, length, span, window, sinks, scale, softcap * LOG2E,
        *(*strides(q), *strides(k), *strides(v)), *group_strides(key_groups), *group_strides(query_groups),
        *((0, 0) if seen is None else [seen.stride(i) if seen.shape[i] > 1 else 0 for i in (0, 1)]),
        0 if far is None or len(far) == 1 else count, kv_heads,
        HG=groups, BH=max(16, triton.next_power_of_2(groups)), D=size, BD=max(16, triton.next_power_of_2(size)),
        DV=value_size, BDV=max(16, triton.next_power_of_2(value_size)), W=key_groups.shape[3], BN=BLOCK,
        MASKED=seen is not None, SOFTCAP=bool(softcap), PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
    )  # fmt: skip
    sizes = {"DV": value_size, "BDV": triton.next_power_of_2(value_size), "SINKS": sink_logits is not None}
    decode_merge[(batch * count * heads,)](sums, states, sink_logits, out, parts, heads, count, **sizes, num_warps=1)
    return out


def strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def group_strides(x: Tensor) -> tuple[int, int]:
    """Return strides of sequences and of heads, which may share their groups."""
    return x.stride(0), x.stride(1) if x.shape[1] > 1 else 0


def find_bounds(
    visible: Tensor, before: Tensor | None, count: int, length: int, window: int, sinks: int
) -> tuple[Any, Any]:
    """Return `(B or 1, T)` int32: of its visible keys a query reads those before the first, and from the second on."""
    last = torch.arange(length - count, length, device=visible.device)
    seen = visible & (torch.arange(length, device=visible.device) <= last[:, None])
    number = seen.cumsum(-1, dtype=torch.int32)  # from 1
    limit = torch.full_like(number[..., :1], sinks) if before is None else (sinks - before)[..., None]
    far = (number <= limit).sum(-1, dtype=torch.int32)
    near = (number < number[..., -1:] - window).sum(-1, dtype=torch.int32)
    return far.contiguous(), near.contiguous()
