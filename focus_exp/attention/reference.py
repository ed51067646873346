"""The oracle: the paper's equations over full n x n matrices, in float64, for tests and for reading."""

from __future__ import annotations

import torch
from torch import Tensor

from focus_exp.attention.selection import AttentionArgs, Selection, Sequence, always_visible, permitted


def scores(q: Tensor, k: Tensor, args: AttentionArgs, added: Tensor | float = 0.0) -> Tensor:
    """Score queries `(B, H, T, D)` against keys `(B, G, S, D)`: `(B, H, T, S)`, `added` before the softcap."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    s = (q @ k.transpose(-1, -2)) * args.scaling + added
    return s if args.softcap is None else args.softcap * torch.tanh(s / args.softcap)


def weights(s: Tensor, sink_logits: Tensor | None = None) -> Tensor:
    """softmax over the last dimension of scores s `[B, H, t, S]`, in float32 at least; the base model's learned
    attention sinks `[H]` or `[B, H]` are one more score, whose weight falls away."""
    length = s.shape[-1]
    if sink_logits is not None:
        s = torch.cat([s, sink_logits.to(s.dtype)[..., None, None].expand(*s.shape[:-1], 1)], dim=-1)
    return torch.softmax(s, dim=-1, dtype=torch.promote_types(s.dtype, torch.float32))[..., :length]


def straight_through(affinity: Tensor, visible: Tensor, slope: float) -> Tensor:
    """0 in value; the gradient of a gate of this slope on the pairs that are not always visible."""
    return torch.where(visible, 0.0, slope * (affinity - affinity.detach()))


def gate(affinity: Tensor, visible: Tensor, steepness: float, threshold: float) -> Tensor:
    """1 where always visible, sigmoid(lambda * (g_i . g_j - threshold)) elsewhere (eq. 2 has threshold 0)."""
    return torch.where(visible, 1.0, torch.sigmoid(steepness * (affinity - threshold)))


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
) -> Tensor:
    """Compute Focus attention `(B, H, T, D)` in float64: soft without memberships in `selection`, else hard."""
    q, k, v = q.double(), k.double(), v.double()
    heads, length = q.shape[1:3]
    rows = slice(0, length)
    visible = always_visible(sequence, rows, length, args.window, args.sinks)[:, None]
    keep = (permitted(sequence, rows, length) | torch.eye(length, dtype=torch.bool, device=q.device))[:, None]
    affinity = None
    if selection.assignment is not None:
        of_queries, of_keys = selection.assignment.double(), selection.assignment_of_keys.double()
        affinity = of_head(of_queries, heads) @ of_head(of_keys, heads).transpose(-1, -2)
    added: Tensor | float = 0.0
    if affinity is not None and selection.query_groups is not None and args.ste_slope is not None:
        added = straight_through(affinity, visible, args.ste_slope)
    s = scores(q, k, args, added)

    if affinity is not None and selection.query_groups is None:
        gates = gate(affinity, visible, args.gate_steepness, args.gate_threshold)
        s = s * gates if args.gate == "multiplicative" else s + torch.log(gates)
    elif selection.query_groups is None or selection.key_groups is None:
        keep = keep & visible
    else:
        asking, asked = (of_head(x, heads).double() for x in (selection.query_groups, selection.key_groups))
        keep = keep & (visible | (asking @ asked.transpose(-1, -2) > 0))

    p = weights(s.masked_fill(~keep, float("-inf")), args.sink_logits)
    return p @ v.repeat_interleave(heads // v.shape[1], dim=1)


def of_head(x: Tensor, heads: int) -> Tensor:
    """`[B, T, K]` for all heads or `[B, G, T, K]` for those of each key -> `[B, 1 or H, T, K]`."""
    return x[:, None] if x.ndim == 3 else x.repeat_interleave(heads // x.shape[1], 1)
