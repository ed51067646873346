"""Triton kernels of the window and the sinks, which also merge the partial results of the distant pairs (`groups`).

Rows are tokens of the flattened batch (n = B * T); q, k, v are (n, H or G, D).
"""

from __future__ import annotations

import triton
import triton.language as tl

from focus_exp.attention.kernels.tiles import attend, load, rescale, score_grad, store
from focus_exp.attention.kernels.tuning import jit

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def window_mask(i, j, window, length, valid, base, VALID: tl.constexpr):
    """Return (M, N): key j is not padding and in the window of i."""
    keep = (j <= i) & (i - j <= window) & (j >= 0) & (i < length)
    if VALID:
        keep &= tl.load(valid + base + i, i < length, 0).to(tl.int1)
        keep &= tl.load(valid + base + j, (j >= 0) & (j < length), 0).to(tl.int1)
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


@triton.jit
def partial_rows(i, first, span, h, b, per_query, groups, HG: tl.constexpr):
    """Return (M,) int64, the first partial result of each query; further ones follow HG after one another."""
    return (((b * groups + h // HG) * span + i - first) * per_query) * HG + h % HG


@jit
def window_forward(
    q, k, v, out, lse, begins, valid, partial, partial_lse, memberships, sink_logits,
    n, length, first, span, lists, per_query, window, sinks,
    scale, cap, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BS: tl.constexpr, SOFTCAP: tl.constexpr, VALID: tl.constexpr, LOGITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write out and lse of queries [first, first + span); grid (tiles of the span, H, B)."""
    h, b, groups = tl.program_id(1), tl.program_id(2).to(tl.int64), heads // HG
    base = b * length
    lowest = first + tl.program_id(0) * BM
    i = lowest + tl.arange(0, BM)
    inside = (i < length) & (i < first + span)
    queries = load(q, base + i, q_row, h * q_head, inside, D, BD)
    kh, vh = (h // HG) * k_head, (h // HG) * v_head
    m = tl.full((BM,), float("-inf"), tl.float32)
    mass = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    results = tl.load(memberships + (b * lists + h // HG * lists // groups) * length + i, inside, 0)
    row = partial_rows(i, first, span, h, b, per_query, groups, HG)
    for r in range(0, tl.max(results, 0), 2):  # two at a time, whose loads overlap
        one, other = inside & (r < results), inside & (r + 1 < results)
        lse_one = tl.load(partial_lse + row + r * HG, one, float("-inf"))
        lse_other = tl.load(partial_lse + row + (r + 1) * HG, other, float("-inf"))
        values_one = load(partial, row + r * HG, D, 0, one, D, BD)
        values_other = load(partial, row + (r + 1) * HG, D, 0, other, D, BD)
        m, mass, acc, top = rescale(m, mass, acc, tl.maximum(lse_one, lse_other))
        share_one, share_other = tl.exp2(lse_one - top), tl.exp2(lse_other - top)
        mass += share_one + share_other
        acc += values_one.to(tl.float32) * share_one[:, None] + values_other.to(tl.float32) * share_other[:, None]
    if LOGITS:
        logit = tl.load(sink_logits + b * heads + h) / LN2
        m, mass, acc, top = rescale(m, mass, acc, tl.zeros((BM,), tl.float32) + logit)
        mass += tl.exp2(logit - top)

    begin = tl.load(begins + b)
    if lowest + BM - 1 - window > begin:
        s = tl.arange(0, BS)
        live = (s < sinks) & (begin + s < length)
        keys = load(k, base + begin + s, k_row, kh, live, D, BD)
        values = load(v, base + begin + s, v_row, vh, live, D, BD)
        keep = sink_mask(i[:, None], s[None], begin, sinks, window, length, valid, base, VALID)
        m, mass, acc = attend(queries, keys, values, keep, m, mass, acc, scale, cap, True, SOFTCAP, PRECISION)
    for near in range(tl.maximum(lowest - window, 0), tl.minimum(lowest + BM, length), BN):
        j = near + tl.arange(0, BN)
        keys = load(k, base + j, k_row, kh, j < length, D, BD)
        values = load(v, base + j, v_row, vh, j < length, D, BD)
        keep = window_mask(i[:, None], j[None], window, length, valid, base, VALID)
        m, mass, acc = attend(queries, keys, values, keep, m, mass, acc, scale, cap, True, SOFTCAP, PRECISION)
    store(out, base + i, heads * D, h * D, inside, acc / tl.where(mass > 0, mass, 1.0)[:, None], D, BD)
    tl.store(lse + h * n + base + i, (m + tl.log2(tl.where(mass > 0, mass, 1.0))) * LN2, inside)


@jit
def window_backward_queries(
    q, k, v, dout, lse, delta, dq, dgate, begins, valid, partial, partial_gate, memberships,
    n, length, first, span, lists, per_query, window, sinks,
    scale, cap, unit, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    HG: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, SOFTCAP: tl.constexpr, VALID: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dQ (n, H, D) and with GATED `dgate` (n, H, K); the grid of the forward."""
    h, b, groups = tl.program_id(1), tl.program_id(2).to(tl.int64), heads // HG
    base = b * length
    lowest = first + tl.program_id(0) * BM
    i = lowest + tl.arange(0, BM)
    inside = (i < length) & (i < first + span)
    queries = load(q, base + i, q_row, h * q_head, inside, D, BD)
    grads = load(dout, base + i, heads * D, h * D, inside, D, BD)
    kh, vh = (h // HG) * k_head, (h // HG) * v_head
    lse_q = tl.load(lse + h * n + base + i, inside, float("inf"))[:, None] / LN2
    delta_q = tl.load(delta + h * n + base + i, inside, 0.0)[:, None]
    dq_acc = tl.zeros((BM, BD), tl.float32)
    dg_acc = tl.zeros((BM, BK), tl.float32)
    results = tl.load(memberships + (b * lists + h // HG * lists // groups) * length + i, inside, 0)
    row = partial_rows(i, first, span, h, b, per_query, groups, HG)
    for r in range(0, tl.max(results, 0)):
        live = inside & (r < results)
        dq_acc += load(partial, row + r * HG, D, 0, live, D, BD).to(tl.float32)
        if GATED:
            dg_acc += load(partial_gate, row + r * HG, K, 0, live, K, BK)
    begin = tl.load(begins + b)
    if lowest + BM - 1 - window > begin:
        s = tl.arange(0, BS)
        live = (s < sinks) & (begin + s < length)
        keys = load(k, base + begin + s, k_row, kh, live, D, BD)
        values = load(v, base + begin + s, v_row, vh, live, D, BD)
        keep = sink_mask(i[:, None], s[None], begin, sinks, window, length, valid, base, VALID)
        _p, ds = score_grad(queries, keys, grads, values, keep, lse_q, delta_q, scale, cap, True, SOFTCAP, PRECISION)
        dq_acc += tl.dot(ds.to(keys.dtype), keys, input_precision=PRECISION)
    for near in range(tl.maximum(lowest - window, 0), tl.minimum(lowest + BM, length), BN):
        j = near + tl.arange(0, BN)
        keys = load(k, base + j, k_row, kh, j < length, D, BD)
        values = load(v, base + j, v_row, vh, j < length, D, BD)
        keep = window_mask(i[:, None], j[None], window, length, valid, base, VALID)
        _p, ds = score_grad(queries, keys, grads, values, keep, lse_q, delta_q, scale, cap, True, SOFTCAP, PRECISION)
        dq_acc += tl.dot(ds.to(keys.dtype), keys, input_precision=PRECISION)
    store(dq, base + i, heads * D, h * D, inside, dq_acc * unit, D, BD)
    if GATED:
        store(dgate, base + i, heads * K, h * K, inside, dg_acc, K, BK)


@jit
def window_backward_keys(
    q, k, v, dout, lse, delta, dk, dv, valid, sorted_dk, sorted_dv, slots,
    n, length, lists, per_key, window, scale, cap, unit, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, VALID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dK, dV (n, G, D) of the window and of the groups; grid (tiles of a sequence, G, B)."""
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    base = b * length
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = j < length
    keys = load(k, base + j, k_row, g * k_head, inside, D, BD)
    values = load(v, base + j, v_row, g * v_head, inside, D, BD)
    dk_acc = tl.zeros((BN, BD), tl.float32)
    dv_acc = tl.zeros((BN, BD), tl.float32)
    groups = heads // HG
    for s in range(per_key):
        slot = tl.load(slots + ((b * lists + g * lists // groups) * length + j) * per_key + s, inside, -1)
        row = (b * groups + g) * length * per_key + slot
        dk_acc += load(sorted_dk, row, D, 0, slot >= 0, D, BD)
        dv_acc += load(sorted_dv, row, D, 0, slot >= 0, D, BD)
    highest = tl.minimum(tl.program_id(0) * BN + BN + window, length)
    for head in range(HG):
        h = g * HG + head
        for begin in range(tl.program_id(0) * BN, highest, BM):
            i = begin + tl.arange(0, BM)
            queries = load(q, base + i, q_row, h * q_head, i < length, D, BD)
            grads = load(dout, base + i, heads * D, h * D, i < length, D, BD)
            lse_q = tl.load(lse + h * n + base + i, i < length, float("inf"))[None] / LN2
            delta_q = tl.load(delta + h * n + base + i, i < length, 0.0)[None]
            keep = window_mask(i[None], j[:, None], window, length, valid, base, VALID)
            p, ds = score_grad(keys, queries, values, grads, keep, lse_q, delta_q, scale, cap, True, SOFTCAP, PRECISION)
            dv_acc += tl.dot(p.to(grads.dtype), grads, input_precision=PRECISION)
            dk_acc += tl.dot(ds.to(queries.dtype), queries, input_precision=PRECISION)
    store(dk, base + j, groups * D, g * D, inside, dk_acc * unit, D, BD)
    store(dv, base + j, groups * D, g * D, inside, dv_acc, D, BD)


@jit
def sinks_backward(
    q, k, v, dout, lse, delta, dk, dv, begins, valid,
    n, length, window, sinks, chunk, scale, cap, unit, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
    SOFTCAP: tl.constexpr, VALID: tl.constexpr, PRECISION: tl.constexpr,
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
