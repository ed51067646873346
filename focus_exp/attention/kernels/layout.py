"""Triton kernels that sort the tokens of a sequence by group: a counting sort over chunks of CHUNK tokens.

No size depends on the data and nothing waits for the device, so a layer can be captured in a CUDA graph. A row is a
sequence and, where key/value heads have groups of their own, a head: B * N rows. A token can be a member of several
groups; `R` and `S`, below `per_query` and `per_key`, bound its memberships as query and as key.

    counts      (2, rows, chunks, BK)       members of each group in a chunk, as queries and as keys
    ahead       (2, rows, chunks + 1, BK)   index in the sorted list at which a chunk's members of a group begin
    entries     (rows, T * R)               queries by group and time: token * R + rank of the group among the token's
    visible     (rows, T * R)               keys of the group before the window of the entry's query
    memberships (rows, T)                   groups of a query
    keys        (rows, T * S)               keys by group and time: token
    slots       (rows, T, S)                index in `keys` of each membership of a key, -1 for none
    query_bits  (rows, T), key_bits (rows, T * S)   groups as bits, where two tokens can share several
"""

from __future__ import annotations

import triton
import triton.language as tl

from focus_exp.attention.kernels.tiles import load, store
from focus_exp.attention.kernels.tuning import jit

UNSET = tl.constexpr(3.4028234663852886e38)  # the largest float: no limit


@triton.jit
def load_members(groups, row, t, begin, valid, length, sinks, K: tl.constexpr, BK: tl.constexpr, VALID: tl.constexpr):
    """Load memberships (len(t), BK) int32; sinks and padding have none."""
    k = tl.arange(0, BK)
    live = (t < length) & (t >= begin + sinks)
    if VALID:
        live &= tl.load(valid + t, t < length, 0).to(tl.int1)
    return tl.load(groups + (row * length + t)[:, None] * K + k, live[:, None] & (k < K), 0).to(tl.int32)


@jit
def count_members(
    query_groups, key_groups, begins, valid, counts, length, chunks, sinks, heads,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, VALID: tl.constexpr,
):  # fmt: skip
    """Write counts; grid (chunks, rows)."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b = row // heads
    begin, valid = tl.load(begins + b), valid + b * length
    t, k = chunk * C + tl.arange(0, C), tl.arange(0, BK)
    to = counts + (row * chunks + chunk) * BK + k
    asked = load_members(query_groups, row, t, begin, valid, length, sinks, K, BK, VALID)
    tl.store(to, tl.sum(asked, 0))
    members = load_members(key_groups, row, t, begin, valid, length, sinks, K, BK, VALID)
    tl.store(to + tl.num_programs(1) * chunks * BK, tl.sum(members, 0))


@jit
def scan_counts(counts, ahead, chunks, BK: tl.constexpr, BC: tl.constexpr):
    """Write ahead; grid (2 * rows,)."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    counts, ahead = counts + row * chunks * BK, ahead + row * (chunks + 1) * BK
    total = tl.zeros((BK,), tl.int32)
    for first in range(0, chunks, BC):
        c = first + tl.arange(0, BC)
        total += tl.sum(tl.load(counts + c[:, None] * BK + k, (c < chunks)[:, None], 0), 0)
    before = tl.cumsum(total, 0) - total
    for first in range(0, chunks, BC):
        c = first + tl.arange(0, BC)
        n = tl.load(counts + c[:, None] * BK + k, (c < chunks)[:, None], 0)
        tl.store(ahead + c[:, None] * BK + k, before + tl.cumsum(n, 0) - n, (c < chunks)[:, None])
        before += tl.sum(n, 0)
    tl.store(ahead + chunks * BK + k, before)


@jit
def place_tokens(
    k, v, sorted_k, sorted_v, query_groups, key_groups, begins, valid, ahead,
    entries, visible, memberships, keys, slots, query_bits, key_bits,
    length, chunks, per_query, per_key, window, sinks, heads, k_row, k_head, v_row, v_head,
    K: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    C: tl.constexpr, VALID: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Write the lists and copy k, v (n, G, D) to sorted (B, G, T * S, D); grid (chunks, G, B)."""
    chunk, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    groups = tl.num_programs(1)
    rows, row = tl.num_programs(2) * heads, b * heads + g * heads // groups
    is_first = g * heads % groups == 0  # of the key/value heads that share the row's lists
    begin, valid = tl.load(begins + b), valid + b * length
    t, column = chunk * C + tl.arange(0, C), tl.arange(0, BK)
    ahead_q, ahead_k = ahead + row * (chunks + 1) * BK + column, ahead + (rows + row) * (chunks + 1) * BK + column

    members = load_members(key_groups, row, t, begin, valid, length, sinks, K, BK, VALID)
    place = tl.load(ahead_k + chunk * BK) + tl.cumsum(members, 0) - members
    nth = tl.cumsum(members, 1)
    for s in range(per_key):
        chosen = members * (nth == s + 1).to(tl.int32)
        has_slot = tl.sum(chosen, 1) > 0
        slot = tl.sum(chosen * place, 1)
        to = (b * groups + g) * length * per_key + slot
        token = b * length + t
        store(sorted_k, to, D, 0, has_slot, load(k, token, k_row, g * k_head, has_slot, D, BD), D, BD)
        store(sorted_v, to, D, 0, has_slot, load(v, token, v_row, g * v_head, has_slot, D, BD), D, BD)
        if is_first:
            tl.store(slots + (row * length + t) * per_key + s, tl.where(has_slot, slot, -1), t < length)
            tl.store(keys + row * length * per_key + slot, t, has_slot)
            if SHARED:
                bits = tl.sum(members.to(tl.int64) << column.to(tl.int64), 1)
                tl.store(key_bits + row * length * per_key + slot, bits, has_slot)
    if is_first:
        asked = load_members(query_groups, row, t, begin, valid, length, sinks, K, BK, VALID)
        place = tl.load(ahead_q + chunk * BK) + tl.cumsum(asked, 0) - asked
        rank = tl.cumsum(asked, 1) - asked
        # keys of each group before a query's window: those of whole chunks, and of the 2 C tokens after them
        chunk = tl.maximum(chunk * C - window, 0) // C
        j = chunk * C + tl.arange(0, 2 * C)
        around = load_members(key_groups, row, j, begin, valid, length, sinks, K, BK, VALID)
        is_before = (j[None] < t[:, None] - window).to(tl.float16)
        seen = tl.dot(is_before, around.to(tl.float16)).to(tl.int32)
        seen += tl.load(ahead_k + chunk * BK) - tl.load(ahead_k)
        index = row * length * per_query + place
        tl.store(entries + index, t[:, None] * per_query + rank, asked == 1)
        tl.store(visible + index, seen, asked == 1)
        tl.store(memberships + row * length + t, tl.sum(asked, 1), t < length)
        if SHARED:
            bits = tl.sum(asked.to(tl.int64) << column.to(tl.int64), 1)
            tl.store(query_bits + row * length + t, bits, t < length)


@jit
def select_groups(
    products, bias, worth_bias, limits, top_k, start, query_groups, key_groups, length, local, columns,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PAIR: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Write the groups of queries and keys (B, N, T, K) of two encoders; grid (chunks, N, B).

    Args:
        products: (B * T, columns), hidden states times the weights of queries and keys (N, 2, K) and of the importance
            (N,); with HALVES twice as many columns, two parts of each product.
        bias: (N, 2, K); worth_bias (N,).
        limits: (N,), which scores have to pass; at the largest float a query reads its top_k (N,) groups.
        local: tokens of window and sinks; PAIR divides a score by the number of keys beyond them.
    """
    n, b, heads = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(1)
    t, k = tl.program_id(0) * C + tl.arange(0, C), tl.arange(0, BK)
    inside = t < length
    live = inside[:, None] & (k < K)[None]
    row = products + (b * length + t) * (2 * columns if HALVES else columns)
    at = row[:, None] + n * 2 * K + k
    query_logits, key_logits = tl.load(at, live, 0.0), tl.load(at + K, live, 0.0)
    importance = tl.load(row + heads * 2 * K + n, inside, 0.0)
    if HALVES:
        query_logits += tl.load(at + columns, live, 0.0)
        key_logits += tl.load(at + columns + K, live, 0.0)
        importance += tl.load(row + columns + heads * 2 * K + n, inside, 0.0)
    query_logits += tl.load(bias + n * 2 * K + k, k < K, float("-inf"))[None]
    key_logits += tl.load(bias + (n * 2 + 1) * K + k, k < K, float("-inf"))[None]
    importance += tl.load(worth_bias + n)
    if PAIR:
        position = t - tl.load(start + b * length + t, inside, 0)
        importance -= tl.log(1.0 + tl.maximum(position - local, 0).to(tl.float32))
    largest = tl.max(query_logits, 1)
    mass = tl.sum(tl.exp(query_logits - largest[:, None]), 1)
    scores = query_logits + (importance - largest - tl.log(mass))[:, None]
    limit = tl.load(limits + n)
    selected = scores > limit
    if limit == UNSET:
        rank = tl.zeros((C, BK), tl.int32)
        for other in range(K):
            rival = tl.sum(tl.where(k[None] == other, query_logits, 0.0), 1)[:, None]
            rank += ((rival > query_logits) | ((rival == query_logits) & (other < k)[None])).to(tl.int32)
        selected = rank < tl.load(top_k + n)
    to = ((b * heads + n) * length + t)[:, None] * K + k
    tl.store(query_groups + to, selected.to(tl.uint8), live)
    is_group = k[None] == tl.argmax(key_logits, 1)[:, None]
    tl.store(key_groups + to, is_group.to(tl.uint8), live)
