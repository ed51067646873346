"""Triton kernels of the distant pairs: queries of a group against the keys of the group, by the lists of `layout`.

A tile has BM rows: queries of one group times the HG query heads that share its keys, so that keys are read once for
all of them. Keys of a group are contiguous and in the order of time; what all rows see is computed without a mask.
Every membership of a query has a partial result of its own, (B, G, span, R, HG, ...), which the kernels of the window
merge; `span` is the number of tokens that the partial results have room for. Programs take tile after
tile, so their number does not depend on the data.
"""

from __future__ import annotations

import triton
import triton.language as tl

from focus_exp.attention.kernels.gpu_sparse import CHUNK
from focus_exp.attention.kernels.tiles import attend, load, score_grad, store
from focus_exp.attention.kernels.tuning import jit

LN2 = tl.constexpr(0.6931471805599453)
C = tl.constexpr(CHUNK)


@triton.jit
def pick(values, index, BK: tl.constexpr):
    """Return one of BK values."""
    return tl.sum(tl.where(tl.arange(0, BK) == index, values, 0), 0)


@triton.jit
def find_lists(ahead, chunks, lists, BK: tl.constexpr):
    """Return a program's key/value head, sequence, row of the lists and row of the sorted keys.

    Also the rows of `ahead` of queries and of keys (chunks + 1, BK).
    """
    g, b, groups = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(1)
    row = b * lists + g * lists // groups
    size = (chunks + 1) * BK
    return g, b, row, b * groups + g, ahead + row * size, ahead + (tl.num_programs(2) * lists + row) * size


@triton.jit
def count_tiles(members, rows, BLOCK: tl.constexpr):
    """Return the tiles of all groups together, and the first tile of each, for groups of `members` times `rows`."""
    tiles = (members * rows + BLOCK - 1) // BLOCK
    return tl.sum(tiles, 0), tl.cumsum(tiles, 0) - tiles


@triton.jit
def find_group(first_tiles, tile):
    """Return the group of a tile; a group without tiles begins where the next one does."""
    return tl.sum((first_tiles <= tile).to(tl.int32), 0) - 1


@triton.jit
def load_entries(entries, visible, index, live, per_query):
    """Load entries of a list: entry, token and number of visible keys."""
    entry = tl.load(entries + index, live, 0)
    return entry, entry // per_query, tl.load(visible + index, live, 0)


@triton.jit
def lower_bits(bits, group):
    """Keep the bits of the groups below `group`."""
    return bits & ((tl.full((), 1, tl.int64) << group.to(tl.int64)) - 1)


@jit
def groups_forward(
    q, sorted_k, sorted_v, partial, partial_lse, entries, visible, ahead, query_bits, key_bits,
    length, chunks, first, last, span, lists, per_query, per_key, scale, cap, q_row, q_head,
    BK: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write partial outputs and log2-sum-exps of queries in chunks [first, last); grid (programs, G, B)."""
    g, b, row, head, ahead_q, ahead_k = find_lists(ahead, chunks, lists, BK)
    column = tl.arange(0, BK)
    begins, ends = tl.load(ahead_q + first * BK + column), tl.load(ahead_q + last * BK + column)
    key_begins = tl.load(ahead_k + column)
    tiles, first_tiles = count_tiles(ends - begins, HG, BM)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        group = find_group(first_tiles, tile)
        r = (tile - pick(first_tiles, group, BK)) * BM + tl.arange(0, BM)
        index = pick(begins, group, BK) + r // HG
        live = index < pick(ends, group, BK)
        entry, i, sees = load_entries(entries, visible, row * length * per_query + index, live, per_query)
        x = load(q, b * length + i, q_row, (g * HG + r % HG)[:, None] * q_head, live, D, BD)
        lower = i.to(tl.int64)
        if SHARED:
            lower = lower_bits(tl.load(query_bits + row * length + i, live, 0), group)
        high = tl.max(sees, 0)
        whole = tl.minimum(tl.min(tl.where(live, sees, 2147483647), 0), high) // BN * BN
        if SHARED:
            whole = 0
        key_begin = pick(key_begins, group, BK)
        at = head * length * per_key + key_begin
        m = tl.full((BM,), float("-inf"), tl.float32)
        mass = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, BD), tl.float32)
        for begin in range(0, whole, BN):
            j = begin + tl.arange(0, BN)
            y, w = load(sorted_k, at + j, D, 0, j >= 0, D, BD), load(sorted_v, at + j, D, 0, j >= 0, D, BD)
            m, mass, acc = attend(x, y, w, True, m, mass, acc, scale, cap, False, SOFTCAP, PRECISION)
        for begin in range(whole, high, BN):
            j = begin + tl.arange(0, BN)
            y, w = load(sorted_k, at + j, D, 0, j < high, D, BD), load(sorted_v, at + j, D, 0, j < high, D, BD)
            keep = j[None] < sees[:, None]
            if SHARED:  # counted in the first group that both are in
                bits = tl.load(key_bits + row * length * per_key + key_begin + j, j < high, 0)
                keep &= (lower[:, None] & bits[None]) == 0
            m, mass, acc = attend(x, y, w, keep, m, mass, acc, scale, cap, True, SOFTCAP, PRECISION)
        to = (head * span * per_query + entry - first * C * per_query) * HG + r % HG
        some = tl.where(mass > 0, mass, 1.0)
        store(partial, to, D, 0, live, acc / some[:, None], D, BD)
        tl.store(partial_lse + to, m + tl.log2(some), live)


@jit
def groups_backward_queries(
    q, sorted_k, sorted_v, dout, lse, delta, partial, partial_gate, gate, entries, visible, ahead, query_bits,
    key_bits, keys, n, length, chunks, first, last, span, lists, per_query, per_key, gate_heads,
    scale, cap, q_row, q_head, heads,
    K: tl.constexpr, BK: tl.constexpr, HG: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, SHARED: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write partial dQ / scaling, and with GATED partial sum_j dS_ij h_j (..., K); grid of the forward.

    Args:
        gate: (B, gate_heads, T, K), h of keys; gate_heads is 1 or G.
    """
    g, b, row, head, ahead_q, ahead_k = find_lists(ahead, chunks, lists, BK)
    gate += (b * gate_heads + g * gate_heads // tl.num_programs(1)) * length * K
    column = tl.arange(0, BK)
    begins, ends = tl.load(ahead_q + first * BK + column), tl.load(ahead_q + last * BK + column)
    key_begins = tl.load(ahead_k + column)
    tiles, first_tiles = count_tiles(ends - begins, HG, BM)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        group = find_group(first_tiles, tile)
        r = (tile - pick(first_tiles, group, BK)) * BM + tl.arange(0, BM)
        index = pick(begins, group, BK) + r // HG
        live = index < pick(ends, group, BK)
        entry, i, sees = load_entries(entries, visible, row * length * per_query + index, live, per_query)
        h, token = g * HG + r % HG, b * length + i
        x = load(q, token, q_row, h[:, None] * q_head, live, D, BD)
        u = load(dout, token, heads * D, h[:, None] * D, live, D, BD)
        lse_q = tl.load(lse + h * n + token, live, float("inf"))[:, None] / LN2
        delta_q = tl.load(delta + h * n + token, live, 0.0)[:, None]
        lower = i.to(tl.int64)
        if SHARED:
            lower = lower_bits(tl.load(query_bits + row * length + i, live, 0), group)
        high, key_begin = tl.max(sees, 0), pick(key_begins, group, BK)
        at, listed = head * length * per_key + key_begin, row * length * per_key + key_begin
        dq_acc = tl.zeros((BM, BD), tl.float32)
        dg_acc = tl.zeros((BM, BK), tl.float32)
        for begin in range(0, high, BN):
            j = begin + tl.arange(0, BN)
            y, w = load(sorted_k, at + j, D, 0, j < high, D, BD), load(sorted_v, at + j, D, 0, j < high, D, BD)
            keep = j[None] < sees[:, None]
            if SHARED:
                keep &= (lower[:, None] & tl.load(key_bits + listed + j, j < high, 0)[None]) == 0
            _p, ds = score_grad(x, y, u, w, keep, lse_q, delta_q, scale, cap, True, SOFTCAP, PRECISION)
            dq_acc += tl.dot(ds.to(y.dtype), y, input_precision=PRECISION)
            if GATED:
                key = tl.load(keys + listed + j, j < high, 0)
                dg_acc += tl.dot(ds, load(gate, key, K, 0, j < high, K, BK), input_precision=PRECISION)
        to = (head * span * per_query + entry - first * C * per_query) * HG + r % HG
        store(partial, to, D, 0, live, dq_acc, D, BD)
        if GATED:
            store(partial_gate, to, K, 0, live, dg_acc, K, BK)


@jit
def groups_backward_keys(
    q, sorted_k, sorted_v, dout, lse, delta, sorted_dk, sorted_dv, sorted_gate, gate, entries, visible, ahead,
    query_bits, key_bits, keys, n, length, chunks, window, lists, per_query, per_key, gate_heads,
    scale, cap, q_row, q_head, heads,
    K: tl.constexpr, BK: tl.constexpr, HG: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, SHARED: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dK / scaling and dV in the order of the sorted keys, and with GATED sum_i dS_ij g_i; grid of the forward.

    Args:
        gate: (B, gate_heads, T, K), g of queries.
    """
    g, b, row, head, ahead_q, ahead_k = find_lists(ahead, chunks, lists, BK)
    gate += (b * gate_heads + g * gate_heads // tl.num_programs(1)) * length * K
    column = tl.arange(0, BK)
    key_begins, key_ends = tl.load(ahead_k + column), tl.load(ahead_k + chunks * BK + column)
    tiles, first_tiles = count_tiles(key_ends - key_begins, 1, BN)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        group = find_group(first_tiles, tile)
        j = (tile - pick(first_tiles, group, BK)) * BN + tl.arange(0, BN)
        slot = pick(key_begins, group, BK) + j
        inside = slot < pick(key_ends, group, BK)
        y = load(sorted_k, head * length * per_key + slot, D, 0, inside, D, BD)
        w = load(sorted_v, head * length * per_key + slot, D, 0, inside, D, BD)
        bits = slot.to(tl.int64)
        if SHARED:
            bits = tl.load(key_bits + row * length * per_key + slot, inside, 0)
        earliest = tl.min(tl.load(keys + row * length * per_key + slot, inside, 2147483647), 0)
        chunk = tl.minimum((earliest + window + 1) // C, chunks)
        from_query, to_query = tl.load(ahead_q + chunk * BK + group), tl.load(ahead_q + chunks * BK + group)
        dk_acc = tl.zeros((BN, BD), tl.float32)
        dv_acc = tl.zeros((BN, BD), tl.float32)
        dg_acc = tl.zeros((BN, BK), tl.float32)
        for begin in range(0, (to_query - from_query) * HG, BM):
            r = begin + tl.arange(0, BM)
            index = from_query + r // HG
            live = index < to_query
            _entry, i, sees = load_entries(entries, visible, row * length * per_query + index, live, per_query)
            h, token = g * HG + r % HG, b * length + i
            x = load(q, token, q_row, h[:, None] * q_head, live, D, BD)
            u = load(dout, token, heads * D, h[:, None] * D, live, D, BD)
            lse_q = tl.load(lse + h * n + token, live, float("inf"))[None] / LN2
            delta_q = tl.load(delta + h * n + token, live, 0.0)[None]
            keep = (j[:, None] < sees[None]) & inside[:, None]
            if SHARED:
                lower = lower_bits(tl.load(query_bits + row * length + i, live, 0), group)
                keep &= (bits[:, None] & lower[None]) == 0
            p, ds = score_grad(y, x, w, u, keep, lse_q, delta_q, scale, cap, True, SOFTCAP, PRECISION)
            dv_acc += tl.dot(p.to(u.dtype), u, input_precision=PRECISION)
            dk_acc += tl.dot(ds.to(x.dtype), x, input_precision=PRECISION)
            if GATED:
                dg_acc += tl.dot(ds, load(gate, i, K, 0, live, K, BK), input_precision=PRECISION)
        to = head * length * per_key + slot
        store(sorted_dk, to, D, 0, inside, dk_acc, D, BD)
        store(sorted_dv, to, D, 0, inside, dv_acc, D, BD)
        if GATED:
            store(sorted_gate, to, K, 0, inside, dg_acc, K, BK)
