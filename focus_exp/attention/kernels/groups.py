"""Triton kernel B: attend from every query to the distant keys of its groups, by the lists of `layout`.

Rows are tokens of the flattened batch (n = B * T), loaded through the lists, so nothing is gathered in memory. A query
reads one range of its group's list of keys; where a block is in the range of all queries of a tile, it needs no mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from focus_exp.attention.kernels.tiles import attend, load, score_grad, store
from focus_exp.attention.kernels.tuning import autotune

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def key_ranges(first, stop, index, n, SHARED: tl.constexpr, BLOCK: tl.constexpr):
    """Load the ranges [a, b) at `index`; return also the start, end of unmasked blocks and end of their union."""
    inside = index < n
    a, b = tl.load(first + index, inside, 2147483647), tl.load(stop + index, inside, 0)
    low = tl.min(tl.where(a < b, a, 2147483647))
    high = tl.max(tl.where(a < b, b, 0))
    unmasked = tl.min(tl.where(inside, b, 2147483647)) - low
    is_uniform = tl.max(tl.where(inside, a, 0)) <= low
    if SHARED:
        is_uniform = False
    middle = tl.where(is_uniform & (unmasked > 0), low + unmasked // BLOCK * BLOCK, low)
    return a, b, low, tl.minimum(middle, high), high


@autotune("forward", restore=("out", "lse"))
@triton.jit
def groups_forward(
    q, k, v, out, lse, queries, first, stop, keys, lower, bits,
    n, slots, scale, cap, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Update (out, lse) with the groups; grid (tiles of `queries`, heads)."""
    h = tl.program_id(1)
    index = tl.program_id(0) * BM + tl.arange(0, BM)
    a, b, low, middle, high = key_ranges(first, stop, index, n, SHARED, BN)
    if low < high:
        inside = index < n
        row = tl.load(queries + index, inside, 0).to(tl.int64)
        x = load(q, row, q_row, h * q_head, inside, D, BD)
        m = tl.load(lse + h * n + row, inside, float("-inf")) / LN2
        mass = tl.where(m == float("-inf"), 0.0, 1.0)
        acc = load(out, row, heads * D, h * D, inside, D, BD).to(tl.float32)
        kh, vh = (h // HG) * k_head, (h // HG) * v_head
        lower_bits = row
        if SHARED:
            lower_bits = tl.load(lower + index, inside, 0)
        for begin in range(low, middle, BN):
            token = tl.load(keys + begin + tl.arange(0, BN)).to(tl.int64) // slots
            live = token >= 0
            y, w = load(k, token, k_row, kh, live, D, BD), load(v, token, v_row, vh, live, D, BD)
            m, mass, acc = attend(x, y, w, True, m, mass, acc, scale, cap, False, SOFTCAP, PRECISION)
        for begin in range(middle, high, BN):
            j = begin + tl.arange(0, BN)
            token = tl.load(keys + j, j < high, 0).to(tl.int64) // slots
            y, w = load(k, token, k_row, kh, j < high, D, BD), load(v, token, v_row, vh, j < high, D, BD)
            keep = (j[None] >= a[:, None]) & (j[None] < b[:, None])
            if SHARED:  # counted in the first group that both are in
                keep &= (lower_bits[:, None] & tl.load(bits + token)[None]) == 0
            m, mass, acc = attend(x, y, w, keep, m, mass, acc, scale, cap, True, SOFTCAP, PRECISION)
        store(out, row, heads * D, h * D, inside, acc / tl.where(mass > 0, mass, 1.0)[:, None], D, BD)
        tl.store(lse + h * n + row, (m + tl.log2(tl.where(mass > 0, mass, 1.0))) * LN2, inside)


@autotune("backward", restore=("dq", "dgate"))
@triton.jit
def groups_backward_queries(
    q, k, v, dout, lse, delta, dq, dgate, gate, queries, first, stop, keys, lower, bits,
    n, slots, scale, cap, unit, slope, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Add to dQ (n, H, D) and with GATED to `dgate` (n, G, K): sum_j dS_ij h_j; grid (tiles of `queries`, G)."""
    g = tl.program_id(1)
    index = tl.program_id(0) * BM + tl.arange(0, BM)
    a, b, low, _middle, high = key_ranges(first, stop, index, n, True, BN)
    if low < high:
        inside = index < n
        row = tl.load(queries + index, inside, 0).to(tl.int64)
        lower_bits = row
        if SHARED:
            lower_bits = tl.load(lower + index, inside, 0)
        dg_acc = tl.zeros((BM, BK), tl.float32)
        for head in range(HG):
            h = g * HG + head
            x, u = load(q, row, q_row, h * q_head, inside, D, BD), load(dout, row, heads * D, h * D, inside, D, BD)
            lse_q = tl.load(lse + h * n + row, inside, float("inf"))[:, None] / LN2
            delta_q = tl.load(delta + h * n + row, inside, 0.0)[:, None]
            dq_acc = tl.zeros((BM, BD), tl.float32)
            for begin in range(low, high, BN):
                j = begin + tl.arange(0, BN)
                live = j < high
                token = tl.load(keys + j, live, 0).to(tl.int64) // slots
                y, w = load(k, token, k_row, g * k_head, live, D, BD), load(v, token, v_row, g * v_head, live, D, BD)
                keep = (j[None] >= a[:, None]) & (j[None] < b[:, None])
                if SHARED:
                    keep &= (lower_bits[:, None] & tl.load(bits + token)[None]) == 0
                _p, ds = score_grad(x, y, u, w, keep, lse_q, delta_q, scale, cap, True, SOFTCAP, PRECISION)
                dq_acc += tl.dot(ds.to(y.dtype), y, input_precision=PRECISION)
                if GATED:
                    dg_acc += tl.dot(ds, load(gate, token, K, 0, live, K, BK), input_precision=PRECISION)
            dq_acc = load(dq, row, heads * D, h * D, inside, D, BD) + dq_acc * unit
            store(dq, row, heads * D, h * D, inside, dq_acc, D, BD)
        if GATED:
            groups = heads // HG
            dg_acc = load(dgate, row, groups * K, g * K, inside, K, BK) + dg_acc * slope
            store(dgate, row, groups * K, g * K, inside, dg_acc, K, BK)


@autotune("backward", restore=("dk", "dv"))
@triton.jit
def groups_backward_keys(
    q, k, v, dout, lse, delta, dk, dv, dgate, gate, queries, first, stop, keys, lower, bits,
    n, slots, ranks, scale, cap, unit, slope, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Add to dK, dV (n * slots, G, D) and to `dgate` (n * slots, G, K): sum_i dS_ij g_i; grid (key tiles, G).

    `first` and `stop` (ranks, n * slots) are the ranges of `queries` (ranks, n) that read each key.
    """
    g, groups = tl.program_id(1), heads // HG
    index = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = index < n * slots
    slot = tl.load(keys + index, inside, 0).to(tl.int64)
    token = slot // slots
    y, w = load(k, token, k_row, g * k_head, inside, D, BD), load(v, token, v_row, g * v_head, inside, D, BD)
    key_bits = token
    if SHARED:
        key_bits = tl.load(bits + token, inside, 0)
    dk_acc = tl.zeros((BN, BD), tl.float32)
    dv_acc = tl.zeros((BN, BD), tl.float32)
    dg_acc = tl.zeros((BN, BK), tl.float32)
    for rank in range(ranks):
        a, b, low, _middle, high = key_ranges(
            first + rank * n * slots, stop + rank * n * slots, index, n * slots, True, BM
        )
        for head in range(HG):
            h = g * HG + head
            for begin in range(low, high, BM):
                i = begin + tl.arange(0, BM)
                live = i < high
                row = tl.load(queries + rank * n + i, live, 0).to(tl.int64)
                x, u = load(q, row, q_row, h * q_head, live, D, BD), load(dout, row, heads * D, h * D, live, D, BD)
                lse_q = tl.load(lse + h * n + row, live, float("inf"))[None] / LN2
                delta_q = tl.load(delta + h * n + row, live, 0.0)[None]
                keep = (i[None] >= a[:, None]) & (i[None] < b[:, None])
                if SHARED:
                    keep &= (key_bits[:, None] & tl.load(lower + rank * n + i, live, 0)[None]) == 0
                p, ds = score_grad(y, x, w, u, keep, lse_q, delta_q, scale, cap, True, SOFTCAP, PRECISION)
                dv_acc += tl.dot(p.to(u.dtype), u, input_precision=PRECISION)
                dk_acc += tl.dot(ds.to(x.dtype), x, input_precision=PRECISION)
                if GATED:
                    dg_acc += tl.dot(ds, load(gate, row, K, 0, live, K, BK), input_precision=PRECISION)
    dk_acc = load(dk, slot, groups * D, g * D, inside, D, BD) + dk_acc * unit
    dv_acc += load(dv, slot, groups * D, g * D, inside, D, BD)
    store(dk, slot, groups * D, g * D, inside, dk_acc, D, BD)
    store(dv, slot, groups * D, g * D, inside, dv_acc, D, BD)
    if GATED:
        store(dgate, slot, groups * K, g * K, inside, dg_acc * slope, K, BK)
