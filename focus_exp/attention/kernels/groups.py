"""Triton kernel B: every query with the distant keys of its groups, found by lists, see `layout`.

Rows are tokens of the flattened batch `[n = B * T]`, loaded through the lists, so nothing is gathered in memory. A
query sees one stretch of its group's list of keys: where that holds for all queries of a tile nothing is compared.
"""

from __future__ import annotations

import triton
import triton.language as tl

from focus_exp.attention.kernels.tiles import attend, derivatives, put, rows
from focus_exp.attention.kernels.tuning import tuned

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def stretches(first, stop, place, n, SHARED: tl.constexpr, BLOCK: tl.constexpr):
    """What the tokens at `place` see, and of all of them: the first, where whole blocks that all see end, the end."""
    inside = place < n
    a, b = tl.load(first + place, inside, 2147483647), tl.load(stop + place, inside, 0)
    low = tl.min(tl.where(a < b, a, 2147483647))
    high = tl.max(tl.where(a < b, b, 0))
    whole = tl.min(tl.where(inside, b, 2147483647)) - low
    alike = tl.max(tl.where(inside, a, 0)) <= low
    if SHARED:
        alike = False
    middle = tl.where(alike & (whole > 0), low + whole // BLOCK * BLOCK, low)
    return a, b, low, tl.minimum(middle, high), high


@tuned("forward", restore=("out", "lse"))
@triton.jit
def groups_forward(
    q, k, v, out, lse, queries, first, stop, keys, lower, bits,
    n, slots, scale, cap, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Goes on from the (out, lse) that stand there; grid (tiles of `queries`, heads)."""
    h = tl.program_id(1)
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    a, b, low, middle, high = stretches(first, stop, place, n, SHARED, BN)
    if low < high:
        inside = place < n
        row = tl.load(queries + place, inside, 0).to(tl.int64)
        x = rows(q, row, q_row, h * q_head, inside, D, BD)
        m = tl.load(lse + h * n + row, inside, float("-inf")) / LN2
        mass = tl.where(m == float("-inf"), 0.0, 1.0)
        acc = rows(out, row, heads * D, h * D, inside, D, BD).to(tl.float32)
        kh, vh = (h // HG) * k_head, (h // HG) * v_head
        earlier = row
        if SHARED:
            earlier = tl.load(lower + place, inside, 0)
        for begin in range(low, middle, BN):
            token = tl.load(keys + begin + tl.arange(0, BN)).to(tl.int64) // slots
            there = token >= 0
            y, w = rows(k, token, k_row, kh, there, D, BD), rows(v, token, v_row, vh, there, D, BD)
            m, mass, acc = attend(x, y, w, True, m, mass, acc, scale, cap, False, SOFTCAP, PRECISION)
        for begin in range(middle, high, BN):
            j = begin + tl.arange(0, BN)
            token = tl.load(keys + j, j < high, 0).to(tl.int64) // slots
            y, w = rows(k, token, k_row, kh, j < high, D, BD), rows(v, token, v_row, vh, j < high, D, BD)
            seen = (j[None] >= a[:, None]) & (j[None] < b[:, None])
            if SHARED:  # counted in the first of the groups that both are in
                seen &= (earlier[:, None] & tl.load(bits + token)[None]) == 0
            m, mass, acc = attend(x, y, w, seen, m, mass, acc, scale, cap, True, SOFTCAP, PRECISION)
        put(out, row, heads * D, h * D, inside, acc / tl.where(mass > 0, mass, 1.0)[:, None], D, BD)
        tl.store(lse + h * n + row, (m + tl.log2(tl.where(mass > 0, mass, 1.0))) * LN2, inside)


@tuned("backward", restore=("dq", "dgate"))
@triton.jit
def groups_backward_queries(
    q, k, v, dout, lse, delta, dq, dgate, gate, queries, first, stop, keys, lower, bits,
    n, slots, scale, cap, unit, slope, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Adds to dQ `[n, H, D]` and with GATED to `dgate` `[n, G, K]`: sum_j dS_ij h_j; grid (tiles of `queries`, G)."""
    g = tl.program_id(1)
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    a, b, low, _middle, high = stretches(first, stop, place, n, True, BN)
    if low < high:
        inside = place < n
        row = tl.load(queries + place, inside, 0).to(tl.int64)
        earlier = row
        if SHARED:
            earlier = tl.load(lower + place, inside, 0)
        of_gates = tl.zeros((BM, BK), tl.float32)
        for head in range(HG):
            h = g * HG + head
            x, u = rows(q, row, q_row, h * q_head, inside, D, BD), rows(dout, row, heads * D, h * D, inside, D, BD)
            whole = tl.load(lse + h * n + row, inside, float("inf"))[:, None] / LN2
            dots = tl.load(delta + h * n + row, inside, 0.0)[:, None]
            total = tl.zeros((BM, BD), tl.float32)
            for begin in range(low, high, BN):
                j = begin + tl.arange(0, BN)
                there = j < high
                token = tl.load(keys + j, there, 0).to(tl.int64) // slots
                y, w = rows(k, token, k_row, g * k_head, there, D, BD), rows(v, token, v_row, g * v_head, there, D, BD)
                seen = (j[None] >= a[:, None]) & (j[None] < b[:, None])
                if SHARED:
                    seen &= (earlier[:, None] & tl.load(bits + token)[None]) == 0
                _p, ds = derivatives(x, y, u, w, seen, whole, dots, scale, cap, True, SOFTCAP, PRECISION)
                total += tl.dot(ds.to(y.dtype), y, input_precision=PRECISION)
                if GATED:
                    of_gates += tl.dot(ds, rows(gate, token, K, 0, there, K, BK), input_precision=PRECISION)
            total = rows(dq, row, heads * D, h * D, inside, D, BD) + total * unit
            put(dq, row, heads * D, h * D, inside, total, D, BD)
        if GATED:
            groups = heads // HG
            of_gates = rows(dgate, row, groups * K, g * K, inside, K, BK) + of_gates * slope
            put(dgate, row, groups * K, g * K, inside, of_gates, K, BK)


@tuned("backward", restore=("dk", "dv"))
@triton.jit
def groups_backward_keys(
    q, k, v, dout, lse, delta, dk, dv, dgate, gate, queries, first, stop, keys, lower, bits,
    n, slots, ranks, scale, cap, unit, slope, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Adds to dK, dV `[n * slots, G, D]` and to `dgate` `[n * slots, G, K]`: sum_i dS_ij g_i; grid (key tiles, G).

    `first` and `stop` `[ranks, n * slots]` are stretches of `queries` `[ranks, n]` that see each key.
    """
    g, groups = tl.program_id(1), heads // HG
    place = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = place < n * slots
    slot = tl.load(keys + place, inside, 0).to(tl.int64)
    token = slot // slots
    y, w = rows(k, token, k_row, g * k_head, inside, D, BD), rows(v, token, v_row, g * v_head, inside, D, BD)
    own = token
    if SHARED:
        own = tl.load(bits + token, inside, 0)
    of_keys = tl.zeros((BN, BD), tl.float32)
    of_values = tl.zeros((BN, BD), tl.float32)
    of_gates = tl.zeros((BN, BK), tl.float32)
    for rank in range(ranks):
        a, b, low, _middle, high = stretches(
            first + rank * n * slots, stop + rank * n * slots, place, n * slots, True, BM
        )
        for head in range(HG):
            h = g * HG + head
            for begin in range(low, high, BM):
                i = begin + tl.arange(0, BM)
                there = i < high
                row = tl.load(queries + rank * n + i, there, 0).to(tl.int64)
                x, u = rows(q, row, q_row, h * q_head, there, D, BD), rows(dout, row, heads * D, h * D, there, D, BD)
                whole = tl.load(lse + h * n + row, there, float("inf"))[None] / LN2
                dots = tl.load(delta + h * n + row, there, 0.0)[None]
                seen = (i[None] >= a[:, None]) & (i[None] < b[:, None])
                if SHARED:
                    seen &= (own[:, None] & tl.load(lower + rank * n + i, there, 0)[None]) == 0
                p, ds = derivatives(y, x, w, u, seen, whole, dots, scale, cap, True, SOFTCAP, PRECISION)
                of_values += tl.dot(p.to(u.dtype), u, input_precision=PRECISION)
                of_keys += tl.dot(ds.to(x.dtype), x, input_precision=PRECISION)
                if GATED:
                    of_gates += tl.dot(ds, rows(gate, row, K, 0, there, K, BK), input_precision=PRECISION)
    of_keys = rows(dk, slot, groups * D, g * D, inside, D, BD) + of_keys * unit
    of_values += rows(dv, slot, groups * D, g * D, inside, D, BD)
    put(dk, slot, groups * D, g * D, inside, of_keys, D, BD)
    put(dv, slot, groups * D, g * D, inside, of_values, D, BD)
    if GATED:
        put(dgate, slot, groups * K, g * K, inside, of_gates * slope, K, BK)
