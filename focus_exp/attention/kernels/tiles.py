"""Operations of both Triton kernels on one tile of scores, forward and backward.

Scores are in units of ln 2, so that exp is exp2. The state (m, mass, acc) of a softmax is the largest score so far, the
sum of exp2(score - m) and the same sum of values; (lse, 1, out) of other pairs is such a state too, so results merge
without another pass.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def score_tile(x, y, scale, cap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Return scores (M, N) of x (M, D) and y (N, D), and the slope of the softcap at each."""
    s = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale
    slope = 1.0
    if SOFTCAP:
        squashed = tanh(s)
        s = squashed * cap
        slope = 1 - squashed * squashed
    return s, slope


@triton.jit
def attend(
    q, k, v, keep, m, mass, acc, scale, cap, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr
):
    """Update the state of queries (M, D) with keys and values (N, D) where `keep` (M, N)."""
    s, _slope = score_tile(q, k, scale, cap, SOFTCAP, PRECISION)
    if MASKED:
        s = tl.where(keep, s, float("-inf"))
    m, mass, acc, top = rescale(m, mass, acc, tl.max(s, 1))
    p = tl.exp2(s - top[:, None])
    acc += tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return m, mass + tl.sum(p, 1), acc


@triton.jit
def rescale(m, mass, acc, largest):
    """Rescale the state to a maximum that includes `largest`; return also that maximum, 0 where there is no key yet."""
    new = tl.maximum(m, largest)
    top = tl.where(new == float("-inf"), 0.0, new)
    keep = tl.exp2(m - top)
    return new, mass * keep, acc * keep[:, None], top


@triton.jit
def score_grad(
    x, y, u, w, keep, lse, delta, scale, cap, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr
):
    """Return probabilities and d loss / d score before the softcap, from a row's lse and delta = sum_d dO O.

    For rows of queries x, y, u, w are q, k, dO, v and lse and delta are columns; for rows of keys k, q, v, dO.
    """
    s, slope = score_tile(x, y, scale, cap, SOFTCAP, PRECISION)
    p = tl.exp2(s - lse)
    if MASKED:
        p = tl.where(keep, p, 0.0)
    return p, p * (tl.dot(u, tl.trans(w), input_precision=PRECISION) - delta) * slope


@triton.jit
def load(x, row, stride, head_offset, live, D: tl.constexpr, BD: tl.constexpr):
    """Load (N, BD), rows of x for one head, 0 beyond D and out of range."""
    d = tl.arange(0, BD)
    mask = live[:, None]
    if D != BD:
        mask = mask & (d < D)
    return tl.load(x + head_offset + row[:, None] * stride + d, mask, 0.0)


@triton.jit
def store(x, row, stride, head_offset, live, values, D: tl.constexpr, BD: tl.constexpr):
    """Store the rows that `load` reads."""
    d = tl.arange(0, BD)
    mask = live[:, None]
    if D != BD:
        mask = mask & (d < D)
    tl.store(x + head_offset + row[:, None] * stride + d, values.to(x.dtype.element_ty), mask)
