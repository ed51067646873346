"""Attention that computes every pair and masks the pruned ones: in float64 as reference, and by blocks of queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.kernels import cpu_sparse
from focus_exp.attention.selection import (
    AttentionArgs,
    Selection,
    Sequence,
    band_reach,
    base_mask_or_self,
    causal_mask,
    diagonal_mask,
    for_each_head,
    group_mask,
    groups_overlap,
    has_gaps,
    local_mask,
    repeat_kv,
    row_blocks,
)

BLOCK = 256  # queries at a time
GPU_BLOCK_PAIRS = 2**24  # pairs of a sequence at a time on a GPU, where many small blocks cost their launches


def block_size(q: Tensor, keys: int) -> int:
    """Return how many of the queries q `(B, H, T, D)` to score at a time against this many keys."""
    return BLOCK if q.device.type == "cpu" else max(BLOCK, GPU_BLOCK_PAIRS // keys)


def scores(q: Tensor, k: Tensor, args: AttentionArgs, added: Tensor | float = 0.0) -> Tensor:
    """Score queries `(B, H, T, D)` against keys `(B, G, S, D)`: `(B, H, T, S)`, `added` before the softcap."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    s = (q @ k.transpose(-1, -2)) * args.scaling + added
    return s if args.softcap is None else args.softcap * torch.tanh(s / args.softcap)


def weights(s: Tensor, sink_logits: Tensor | None = None) -> Tensor:
    """Apply softmax to scores `(B, H, t, S)` in float32 at least, with the base model's sink logits if it has any."""
    length = s.shape[-1]
    if sink_logits is not None:
        s = torch.cat([s, sink_logits.to(s.dtype)[..., None, None].expand(*s.shape[:-1], 1)], dim=-1)
    return torch.softmax(s, dim=-1, dtype=torch.promote_types(s.dtype, torch.float32))[..., :length]


def straight_through_term(affinity: Tensor, local: Tensor, slope: float) -> Tensor:
    """Return zeros with the gradient of a gate of this slope on the distant pairs."""
    return torch.where(local, 0.0, slope * (affinity - affinity.detach()))


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
) -> Tensor:
    """Compute the paper's equations over full T x T matrices in float64, soft or hard; output `(B, H, T, D)`."""
    q, k, v = q.double(), k.double(), v.double()
    heads, length = q.shape[1:3]
    rows = slice(0, length)
    local = local_mask(sequence, rows, length, args.window, args.sinks)[:, None]
    keep = base_mask_or_self(sequence, rows, length)[:, None]
    affinity = None
    if selection.assignment is not None:
        g, g_keys = selection.assignment.double(), selection.effective_key_assignment.double()
        affinity = expand_heads(g, heads) @ expand_heads(g_keys, heads).transpose(-1, -2)
    added: Tensor | float = 0.0
    if affinity is not None and not selection.is_soft and args.ste_slope is not None:
        added = straight_through_term(affinity, local, args.ste_slope)
    s = scores(q, k, args, added)

    if affinity is not None and selection.is_soft:  # eq. 2
        gate = torch.sigmoid(args.gate_steepness * (affinity - args.gate_threshold)).masked_fill(local, 1.0)
        s = s * gate if args.gate == "multiplicative" else s + torch.log(gate)
    elif selection.query_groups is None or selection.key_groups is None:
        keep = keep & local
    else:
        query_groups, key_groups = (expand_heads(x, heads) for x in (selection.query_groups, selection.key_groups))
        keep = keep & (local | groups_overlap(query_groups, key_groups))
    p = weights(s.masked_fill(~keep, float("-inf")), args.sink_logits)
    return p @ v.repeat_interleave(heads // v.shape[1], dim=1)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """Expand `(B, T, K)` of all heads or `(B, G, T, K)` of each key/value head to `(B, 1 or H, T, K)`."""
    return x[:, None] if x.ndim == 3 else x.repeat_interleave(heads // x.shape[1], 1)


@for_each_head
def blocked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    sequence: Sequence,
    args: AttentionArgs,
    block: int | None = None,
) -> Tensor:
    """Compute `reference_attention` in the tensors' precision, in memory O(block * T) per head.

    Args:
        q: `(B, H, T, D)`.
        k, v: `(B, G, T, D)`.
        selection: soft routing without memberships, hard routing with them; of neither, window and sinks alone.
        block: queries at a time; None chooses by device.
    """
    g = selection.assignment if selection.is_soft or args.ste_slope is not None else None
    g_keys = None if g is None else selection.effective_key_assignment
    outputs = []
    for rows in row_blocks(q.shape[2], block or block_size(q, k.shape[2])):
        length = rows.stop
        local = local_mask(sequence, rows, length, args.window, args.sinks)
        keep = base_mask_or_self(sequence, rows, length)
        affinity = None if g is None or g_keys is None else g[:, rows] @ g_keys[:, :length].transpose(-1, -2)
        log_gate = ste = None
        if selection.is_soft and affinity is not None:
            log_gate = F.logsigmoid(args.gate_steepness * (affinity - args.gate_threshold))
            log_gate = torch.where(local, 0.0, log_gate)[:, None]
        elif selection.query_groups is None:
            keep = keep & local
        else:
            keep = keep & (local | group_mask(selection, rows, length))
            if affinity is not None and args.ste_slope is not None:
                ste = straight_through_term(affinity, local, args.ste_slope)[:, None]
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
) -> Tensor:
    """Compute the base model's own attention `(B, H, t, D)`.

    Args:
        q: `(B, H, t, D)`, the last t of the keys' tokens.
        k, v: `(B, G, S, D)`.
        mask: `(B or 1, 1, t, S)` bool, the pairs a query sees; or `(B, 1, 1, S)` bool, the keys that are not padding;
            or None, where nothing is masked. The last two are combined with causality if `is_causal`.
    """
    length, new = k.shape[2], q.shape[2]
    if is_causal and cpu_sparse.is_fastest_full_attention(q, k, v, args):
        reach = band_reach(mask)
        valid = None if mask is None or mask.shape[2] > 1 else mask[:, 0, 0].expand(len(q), -1)
        if mask is None or reach or (valid is not None and not may_have_gaps(valid)):
            return cpu_sparse.attend_fully(q, k, v, args, reach, valid)
    add_causal = is_causal and new > 1 and (mask is None or mask.shape[2] < new)
    if mask is None and args.softcap is None and args.sink_logits is None and not (add_causal and new < length):
        is_grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=add_causal, dropout_p=args.dropout, scale=args.scaling, enable_gqa=is_grouped
        )
    outputs = []
    for rows in row_blocks(new, block_size(q, length)):
        positions = slice(length - new + rows.start, length - new + rows.stop)
        keep = torch.ones(1, 1, 1, length, dtype=torch.bool, device=q.device) if mask is None else mask
        keep = keep[:, :, rows] if keep.shape[2] == new else keep
        if add_causal:
            keep = keep & causal_mask(positions, length, q.device)
        if is_causal:  # so that no row of a softmax is empty
            keep = keep | (diagonal_mask(positions, length, q.device) & ~keep.any(-1, keepdim=True))
        outputs.append(masked_attention(q[:, :, rows], k, v, keep, args))
    return torch.cat(outputs, dim=2)


def may_have_gaps(valid: Tensor) -> bool:
    """Tell whether a row of `valid` `(B, T)` has padding between tokens, or may have: under torch.compile."""
    return torch.compiler.is_compiling() or bool(has_gaps(valid))


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
        keep: `(B, 1 or G, t, S)` bool, the pairs that are not masked.
        log_gate: `(B, 1, t, S)`, log of the soft gate.
        ste: `(B, 1, t, S)`, see `straight_through_term`.
    """
    is_multiplicative = log_gate is not None and args.gate == "multiplicative"
    needs_grad = any(x is not None and x.requires_grad for x in (log_gate, ste))
    if args.softcap is None and args.sink_logits is None and not is_multiplicative and not needs_grad:
        mask = keep if log_gate is None else log_gate.to(q.dtype).masked_fill(~keep, float("-inf"))
        if mask.shape[1] > 1:
            mask = mask.repeat_interleave(q.shape[1] // mask.shape[1], 1)
        if q.is_cuda and q.shape[1] != k.shape[1]:  # with a mask and GQA, torch would build every score
            k, v = repeat_kv(q, k, v)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=args.dropout, scale=args.scaling, enable_gqa=q.shape[1] != k.shape[1]
        )

    kv_heads = k.shape[1]
    s = (q.unflatten(1, (kv_heads, -1)) * args.scaling) @ k.unsqueeze(2).transpose(-1, -2)  # (B, G, H/G, t, S)
    if ste is not None:
        s = s + ste.unsqueeze(2).to(s.dtype)
    if args.softcap is not None:
        s = args.softcap * torch.tanh(s / args.softcap)
    bias = torch.zeros(keep.shape, device=q.device) if log_gate is None else log_gate
    if is_multiplicative:
        s = s * bias.unsqueeze(2).exp().to(s.dtype)
        bias = torch.zeros_like(bias)
    # one mask for all heads, added in place: the scores are the largest tensor of the layer
    s = s.add_(bias.masked_fill(~keep, float("-inf")).unsqueeze(2).to(s.dtype))
    p = weights(s.flatten(1, 2), args.sink_logits).to(v.dtype).unflatten(1, (kv_heads, -1))
    return (F.dropout(p, args.dropout) @ v.unsqueeze(2)).flatten(1, 2)
