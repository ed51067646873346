"""Triton kernel A: attend from every query to its window and to the sinks of its sequence.

Rows are tokens of the flattened batch (n = B * T); q, k, v are (n, H or G, D).
"""

from __future__ import annotations

import triton
import triton.language as tl

from focus_exp.attention.kernels.tiles import attend, load, rescale, score_grad, store
from focus_exp.attention.kernels.tuning import autotune

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def local_mask(i, j, window, length, valid, tags_q, tags_k, base, VALID: tl.constexpr, OTHERS: tl.constexpr):
    """Return (M, N): key j is not padding, in the window of i, and with OTHERS of another group than i."""
    keep = (j <= i) & (i - j <= window) & (j >= 0) & (i < length)
    if VALID:
        keep &= tl.load(valid + base + i, i < length, 0).to(tl.int1)
        keep &= tl.load(valid + base + j, (j >= 0) & (j < length), 0).to(tl.int1)
    if OTHERS:
        inside = (j >= 0) & (j < length)
        keep &= tl.load(tags_q + base + i, i < length, -1) != tl.load(tags_k + base + j, inside, -1)
    return keep


@triton.jit
def sink_mask(i, s, first, sinks, window, length, valid, base, VALID: tl.constexpr):
    """Return (M, S): the s-th token of the sequence that begins at `first` is a sink before i's window."""
    j = first + s
    keep = (s < sinks) & (i - j > window) & (i < length)
    if VALID:
        keep &= tl.load(valid + base + i, i < length, 0).to(tl.int1)
        keep &= tl.load(valid + base + j, j < length, 0).to(tl.int1)
    return keep


@autotune("forward")
@triton.jit
def window_forward(
    q, k, v, out, lse, begins, valid, tags_q, tags_k, place, other_out, other_lse, sink_logits,
    n, length, window, sinks, scale, cap, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
    SOFTCAP: tl.constexpr, VALID: tl.constexpr, OTHERS: tl.constexpr, LOGITS: tl.constexpr, PRECISION: tl.constexpr,
    LONG: tl.constexpr,
):  # fmt: skip
    """Write out and lse; grid (tiles of a sequence, H, B). OTHERS starts from the state at `place` of other_out."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    base = b * length
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = i < length
    queries = load(q, base + i, q_row, h * q_head, inside, D, BD)
    kh, vh = (h // HG) * k_head, (h // HG) * v_head
    m = tl.full((BM,), float("-inf"), tl.float32)
    mass = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    if OTHERS:
        where = tl.load(place + base + i, inside, -1).to(tl.int64)
        is_grouped = where >= 0
        m = tl.load(other_lse + h * n + where, is_grouped, float("-inf")) / LN2
        mass = tl.where(m == float("-inf"), 0.0, 1.0)
        acc = load(other_out, where, heads * D, h * D, is_grouped, D, BD).to(tl.float32)
    if LOGITS:
        logit = tl.load(sink_logits + b * heads + h) / LN2
        m, mass, acc, top = rescale(m, mass, acc, tl.zeros((BM,), tl.float32) + logit)
        mass += tl.exp2(logit - top)

    first = tl.load(begins + b)
    if tl.program_id(0) * BM + BM - 1 - window > first:
        s = tl.arange(0, BS)
        live = (s < sinks) & (first + s < length)
        keys = load(k, base + first + s, k_row, kh, live, D, BD)
        values = load(v, base + first + s, v_row, vh, live, D, BD)
        keep = sink_mask(i[:, None], s[None], first, sinks, window, length, valid, base, VALID)
        m, mass, acc = attend(queries, keys, values, keep, m, mass, acc, scale, cap, True, SOFTCAP, PRECISION)
    lowest = tl.maximum(tl.program_id(0) * BM - window, 0)
    for begin in range(lowest, tl.minimum(tl.program_id(0) * BM + BM, length), BN):
        j = begin + tl.arange(0, BN)
        keys = load(k, base + j, k_row, kh, j < length, D, BD)
        values = load(v, base + j, v_row, vh, j < length, D, BD)
        keep = local_mask(i[:, None], j[None], window, length, valid, tags_q, tags_k, base, VALID, OTHERS)
        m, mass, acc = attend(queries, keys, values, keep, m, mass, acc, scale, cap, True, SOFTCAP, PRECISION)
    store(out, base + i, heads * D, h * D, inside, acc / tl.where(mass > 0, mass, 1.0)[:, None], D, BD)
    tl.store(lse + h * n + base + i, (m + tl.log2(tl.where(mass > 0, mass, 1.0))) * LN2, inside)


@autotune("backward")
@triton.jit
def window_backward_queries(
    q, k, v, dout, lse, delta, dq, begins, valid,
    n, length, window, sinks, scale, cap, unit, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
    SOFTCAP: tl.constexpr, VALID: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Write dQ (n, H, D); the grid of the forward."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    base = b * length
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = i < length
    queries = load(q, base + i, q_row, h * q_head, inside, D, BD)
    grads = load(dout, base + i, heads * D, h * D, inside, D, BD)
    kh, vh = (h // HG) * k_head, (h // HG) * v_head
    lse_q = tl.load(lse + h * n + base + i, inside, float("inf"))[:, None] / LN2
    delta_q = tl.load(delta + h * n + base + i, inside, 0.0)[:, None]
    dq_acc = tl.zeros((BM, BD), tl.float32)
    first = tl.load(begins + b)
    if tl.program_id(0) * BM + BM - 1 - window > first:
        s = tl.arange(0, BS)
        live = (s < sinks) & (first + s < length)
        keys = load(k, base + first + s, k_row, kh, live, D, BD)
        values = load(v, base + first + s, v_row, vh, live, D, BD)
        keep = sink_mask(i[:, None], s[None], first, sinks, window, length, valid, base, VALID)
        _p, ds = score_grad(queries, keys, grads, values, keep, lse_q, delta_q, scale, cap, True, SOFTCAP, PRECISION)
        dq_acc += tl.dot(ds.to(keys.dtype), keys, input_precision=PRECISION)
    lowest = tl.maximum(tl.program_id(0) * BM - window, 0)
    for begin in range(lowest, tl.minimum(tl.program_id(0) * BM + BM, length), BN):
        j = begin + tl.arange(0, BN)
        keys = load(k, base + j, k_row, kh, j < length, D, BD)
        values = load(v, base + j, v_row, vh, j < length, D, BD)
        keep = local_mask(i[:, None], j[None], window, length, valid, valid, valid, base, VALID, False)
        _p, ds = score_grad(queries, keys, grads, values, keep, lse_q, delta_q, scale, cap, True, SOFTCAP, PRECISION)
        dq_acc += tl.dot(ds.to(keys.dtype), keys, input_precision=PRECISION)
    store(dq, base + i, heads * D, h * D, inside, dq_acc * unit, D, BD)


@autotune("backward")
@triton.jit
def window_backward_keys(
    q, k, v, dout, lse, delta, dk, dv, valid,
    n, length, window, scale, cap, unit, q_row, q_head, k_row, k_head, v_row, v_head, heads, slots,
    HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, VALID: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Write dK, dV of the window into the first slot of (n, slots, G, D); grid (tiles of a sequence, G, B)."""
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    base = b * length
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = j < length
    keys = load(k, base + j, k_row, g * k_head, inside, D, BD)
    values = load(v, base + j, v_row, g * v_head, inside, D, BD)
    dk_acc = tl.zeros((BN, BD), tl.float32)
    dv_acc = tl.zeros((BN, BD), tl.float32)
    highest = tl.minimum(tl.program_id(0) * BN + BN + window, length)
    for head in range(HG):
        h = g * HG + head
        for begin in range(tl.program_id(0) * BN, highest, BM):
            i = begin + tl.arange(0, BM)
            queries = load(q, base + i, q_row, h * q_head, i < length, D, BD)
            grads = load(dout, base + i, heads * D, h * D, i < length, D, BD)
            lse_q = tl.load(lse + h * n + base + i, i < length, float("inf"))[None] / LN2
            delta_q = tl.load(delta + h * n + base + i, i < length, 0.0)[None]
            keep = local_mask(i[None], j[:, None], window, length, valid, valid, valid, base, VALID, False)
            p, ds = score_grad(keys, queries, values, grads, keep, lse_q, delta_q, scale, cap, True, SOFTCAP, PRECISION)
            dv_acc += tl.dot(p.to(grads.dtype), grads, input_precision=PRECISION)
            dk_acc += tl.dot(ds.to(queries.dtype), queries, input_precision=PRECISION)
    groups = heads // HG
    store(dk, base + j, slots * groups * D, g * D, inside, dk_acc * unit, D, BD)
    store(dv, base + j, slots * groups * D, g * D, inside, dv_acc, D, BD)


@autotune("backward")
@triton.jit
def sinks_backward(
    q, k, v, dout, lse, delta, dk, dv, begins, valid,
    n, length, window, sinks, chunk, scale, cap, unit, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
    SOFTCAP: tl.constexpr, VALID: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Write dK, dV of the sinks by chunks of queries (B, chunks, G, BS, D); grid (chunks, G, B)."""
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    base, first, groups = b * length, tl.load(begins + b), heads // HG
    s = tl.arange(0, BS)
    live = (s < sinks) & (first + s < length)
    keys = load(k, base + first + s, k_row, g * k_head, live, D, BD)
    values = load(v, base + first + s, v_row, g * v_head, live, D, BD)
    dk_acc = tl.zeros((BS, BD), tl.float32)
    dv_acc = tl.zeros((BS, BD), tl.float32)
    lowest = tl.program_id(0) * chunk
    for head in range(HG):
        h = g * HG + head
        for begin in range(lowest, tl.minimum(lowest + chunk, length), BM):
            i = begin + tl.arange(0, BM)
            queries = load(q, base + i, q_row, h * q_head, i < length, D, BD)
            grads = load(dout, base + i, heads * D, h * D, i < length, D, BD)
            lse_q = tl.load(lse + h * n + base + i, i < length, float("inf"))[None] / LN2
            delta_q = tl.load(delta + h * n + base + i, i < length, 0.0)[None]
            keep = sink_mask(i[None], s[:, None], first, sinks, window, length, valid, base, VALID)
            p, ds = score_grad(keys, queries, values, grads, keep, lse_q, delta_q, scale, cap, True, SOFTCAP, PRECISION)
            dv_acc += tl.dot(p.to(grads.dtype), grads, input_precision=PRECISION)
            dk_acc += tl.dot(ds.to(queries.dtype), queries, input_precision=PRECISION)
    row = (b * tl.num_programs(0) + tl.program_id(0)) * groups * BS + g * BS + s
    everywhere = s >= 0
    store(dk, row, D, 0, everywhere, dk_acc * unit, D, BD)
    store(dv, row, D, 0, everywhere, dv_acc, D, BD)
