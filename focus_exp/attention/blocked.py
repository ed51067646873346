"""The same function as the oracle by blocks of queries: memory O(block * T) per head, never n x n at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.heads import for_each_head
from focus_exp.attention.reference import straight_through, weights
from focus_exp.attention.selection import (
    Selection,
    Sequence,
    always_visible,
    causal,
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
    *,
    window: int,
    sinks: int,
    scaling: float,
    softcap: float | None = None,
    gate_kind: str = "log",
    gate_steepness: float = 10.0,
    gate_threshold: float = 0.5,
    surrogate: float | None = None,
    dropout: float = 0.0,
    sink_logits: Tensor | None = None,
    block: int = 256,
) -> Tensor:
    """Focus attention `[B, H, T, D]` of q `[B, H, T, D]` and k, v `[B, G, T, D]`; see `reference_attention`."""
    soft = selection.assignment is not None and selection.query_groups is None
    hard_gate = not soft and surrogate is not None
    g = selection.assignment if soft or hard_gate else None
    g_keys = None if g is None else selection.assignment_of_keys
    outputs = []
    for rows in row_blocks(q.shape[2], block):
        length = rows.stop
        visible = always_visible(sequence, rows, length, window, sinks)
        keep = permitted_or_self(sequence, rows, length)
        affinity = None if g is None or g_keys is None else g[:, rows] @ g_keys[:, :length].transpose(-1, -2)
        log_gate = None
        if soft and affinity is not None:
            log_gate = torch.where(visible, 0.0, F.logsigmoid(gate_steepness * (affinity - gate_threshold)))
        elif selection.query_groups is None:
            keep = keep & visible
        else:
            keep = keep & (visible | same_group(selection, rows, length))
            if affinity is not None and surrogate is not None:
                log_gate = straight_through(affinity, visible, surrogate)
        outputs.append(
            masked_attention(
                q[:, :, rows],
                k[:, :, :length],
                v[:, :, :length],
                keep[:, None],
                None if log_gate is None else log_gate[:, None],
                scaling=scaling,
                softcap=softcap,
                gate_kind="straight-through" if hard_gate else gate_kind,
                dropout=dropout,
                sink_logits=sink_logits,
            )
        )
    return torch.cat(outputs, dim=2)


def full_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool = True,
    *,
    scaling: float,
    softcap: float | None = None,
    dropout: float = 0.0,
    sink_logits: Tensor | None = None,
    block: int = 256,
) -> Tensor:
    """The base model's own attention `[B, H, t, D]` of q `[B, H, t, D]` to k and v `[B, G, S, D]`.

    mask: `[B or 1, 1, t, S]` bool, what a query sees; or `[B, 1, 1, S]`, which keys are not padding, or None, where a
    query sees all of those, or with `is_causal` those that are not after it: queries are the last of the keys.
    """
    length, new = k.shape[2], q.shape[2]
    causally = is_causal and new > 1 and (mask is None or mask.shape[2] < new)
    if mask is None and softcap is None and sink_logits is None and not (causally and new < length):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causally, dropout_p=dropout, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
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
        outputs.append(
            masked_attention(
                q[:, :, rows], k, v, keep, None,
                scaling=scaling, softcap=softcap, gate_kind="log", dropout=dropout, sink_logits=sink_logits,
            )
        )  # fmt: skip
    return torch.cat(outputs, dim=2)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    log_gate: Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
    gate_kind: str,
    dropout: float,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """One block of queries under a mask `[B, 1, t, S]` and an optional gate; torch's kernels where they can.

    sink_logits: `[H]` or `[B, H]`, the score of one more key that all queries see and that has no value.
    """
    multiplicative = log_gate is not None and gate_kind == "multiplicative"
    gate_needs_grad = log_gate is not None and log_gate.requires_grad
    if softcap is None and sink_logits is None and not multiplicative and not gate_needs_grad:
        mask = keep if log_gate is None else log_gate.to(q.dtype).masked_fill(~keep, float("-inf"))
        if q.is_cuda and q.shape[1] != k.shape[1]:  # with a mask these go to the kernel that builds every score
            k, v = of_every_head(q, k, v)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )

    heads, groups = q.shape[1], k.shape[1]
    q = q.unflatten(1, (groups, heads // groups))  # [B, G, H/G, t, D]
    s = (q * scaling) @ k.unsqueeze(2).transpose(-1, -2)
    if log_gate is not None and gate_kind == "straight-through":
        s, log_gate = s + log_gate.unsqueeze(2).to(s.dtype), None
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if multiplicative:
        assert log_gate is not None
        s = s * log_gate.unsqueeze(2).exp().to(s.dtype)
        bias = torch.zeros_like(log_gate)
    else:
        bias = torch.zeros(keep.shape, device=q.device) if log_gate is None else log_gate
    # one mask for all heads, added in place: the scores are the largest tensor of the layer
    s = s.add_(bias.masked_fill(~keep, float("-inf")).unsqueeze(2).to(s.dtype))
    p = weights(s.flatten(1, 2), sink_logits).to(v.dtype).unflatten(1, (groups, -1))
    return (F.dropout(p, dropout) @ v.unsqueeze(2)).flatten(1, 2)


def of_every_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, H, S, D]` of the heads of q, from those `[B, G, S, D]` that heads share."""
    share = q.shape[1] // k.shape[1]
    return k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
