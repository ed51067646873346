"""The same function as the oracle by blocks of queries: memory O(block * T) per head, never n x n at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.reference import straight_through, weights
from focus_exp.attention.selection import (
    AttentionArgs,
    Selection,
    Sequence,
    always_visible,
    causal,
    for_each_head,
    itself,
    permitted_or_self,
    row_blocks,
    same_group,
)


@for_each_head
def blocked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    sequence: Sequence,
    args: AttentionArgs,
    block: int = 256,
) -> Tensor:
    """Compute Focus attention by blocks of queries, in memory O(block * T) per head.

    Args:
        q: `(B, H, T, D)`.
        k, v: `(B, G, T, D)`.
        selection: soft routing without memberships, hard routing with them; of neither, window and sinks alone.
        block: queries at a time.
    """
    soft = selection.assignment is not None and selection.query_groups is None
    g = selection.assignment if soft or args.ste_slope is not None else None
    g_keys = None if g is None else selection.assignment_of_keys
    outputs = []
    for rows in row_blocks(q.shape[2], block):
        length = rows.stop
        visible = always_visible(sequence, rows, length, args.window, args.sinks)
        keep = permitted_or_self(sequence, rows, length)
        affinity = None if g is None or g_keys is None else g[:, rows] @ g_keys[:, :length].transpose(-1, -2)
        log_gate = ste = None
        if soft and affinity is not None:
            gate = F.logsigmoid(args.gate_steepness * (affinity - args.gate_threshold))
            log_gate = torch.where(visible, 0.0, gate)[:, None]
        elif selection.query_groups is None:
            keep = keep & visible
        else:
            keep = keep & (visible | same_group(selection, rows, length))
            if affinity is not None and args.ste_slope is not None:
                ste = straight_through(affinity, visible, args.ste_slope)[:, None]
        keys, values = k[:, :, :length], v[:, :, :length]
        outputs.append(masked_attention(q[:, :, rows], keys, values, keep[:, None], args, log_gate, ste))
    return torch.cat(outputs, dim=2)


def full_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    args: AttentionArgs,
    is_causal: bool = True,
    block: int = 256,
) -> Tensor:
    """Compute the base model's own attention `(B, H, t, D)`.

    Args:
        q: `(B, H, t, D)`, the last t of the keys' tokens.
        k, v: `(B, G, S, D)`.
        mask: `(B or 1, 1, t, S)` bool, the pairs a query sees; or `(B, 1, 1, S)` bool, the keys that are not padding;
            or None, where nothing is masked. The last two are combined with causality if `is_causal`.
    """
    length, new = k.shape[2], q.shape[2]
    causally = is_causal and new > 1 and (mask is None or mask.shape[2] < new)
    if mask is None and args.softcap is None and args.sink_logits is None and not (causally and new < length):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causally, dropout_p=args.dropout, scale=args.scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
    outputs = []
    for rows in row_blocks(new, block):
        places = slice(length - new + rows.start, length - new + rows.stop)
        keep = torch.ones(1, 1, 1, length, dtype=torch.bool, device=q.device) if mask is None else mask
        keep = keep[:, :, rows] if keep.shape[2] == new else keep
        if causally:
            keep = keep & causal(places, length, q.device)
        if is_causal:  # so that no row of a softmax is empty
            keep = keep | (itself(places, length, q.device) & ~keep.any(-1, keepdim=True))
        outputs.append(masked_attention(q[:, :, rows], k, v, keep, args))
    return torch.cat(outputs, dim=2)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    args: AttentionArgs,
    log_gate: Tensor | None = None,
    ste: Tensor | None = None,
) -> Tensor:
    """Attend from one block of queries, by torch's kernels where they serve.

    Args:
        keep: `(B, 1 or H, t, S)` bool, the pairs that are not masked.
        log_gate: `(B, 1, t, S)`, log of the soft gate.
        ste: `(B, 1, t, S)`, zeros with the straight-through gradient, see `straight_through`.
    """
    multiplicative = log_gate is not None and args.gate == "multiplicative"
    gate_needs_grad = any(x is not None and x.requires_grad for x in (log_gate, ste))
    if args.softcap is None and args.sink_logits is None and not multiplicative and not gate_needs_grad:
        mask = keep if log_gate is None else log_gate.to(q.dtype).masked_fill(~keep, float("-inf"))
        if q.is_cuda and q.shape[1] != k.shape[1]:  # with a mask these go to the kernel that builds every score
            k, v = of_every_head(q, k, v)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=args.dropout, scale=args.scaling, enable_gqa=q.shape[1] != k.shape[1]
        )

    heads, groups = q.shape[1], k.shape[1]
    q = q.unflatten(1, (groups, heads // groups))  # [B, G, H/G, t, D]
    s = (q * args.scaling) @ k.unsqueeze(2).transpose(-1, -2)
    if ste is not None:
        s = s + ste.unsqueeze(2).to(s.dtype)
    if args.softcap is not None:
        s = args.softcap * torch.tanh(s / args.softcap)
    if multiplicative:
        assert log_gate is not None
        s = s * log_gate.unsqueeze(2).exp().to(s.dtype)
        bias = torch.zeros_like(log_gate)
    else:
        bias = torch.zeros(keep.shape, device=q.device) if log_gate is None else log_gate
    # one mask for all heads, added in place: the scores are the largest tensor of the layer
    s = s.add_(bias.masked_fill(~keep, float("-inf")).unsqueeze(2).to(s.dtype))
    p = weights(s.flatten(1, 2), args.sink_logits).to(v.dtype).unflatten(1, (groups, -1))
    return (F.dropout(p, args.dropout) @ v.unsqueeze(2)).flatten(1, 2)


def of_every_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, H, S, D]` of the heads of q, from those `[B, G, S, D]` that heads share."""
    share = q.shape[1] // k.shape[1]
    return k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
