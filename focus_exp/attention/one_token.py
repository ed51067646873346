"""One token's attention over keys and values that lie in several places."""

from __future__ import annotations

import torch
from torch import Tensor

from focus_exp.attention.kernels import Kernel
from focus_exp.attention.selection import AttentionArgs
from focus_exp.attention.sparse import merge

COPIED = 1024  # keys that are put behind each other rather than attended to in calls of their own
Slices = list[tuple[Tensor, Tensor]]


def by_products(q: Tensor, slices: Slices, args: AttentionArgs, sink_logits: Tensor | None) -> Tensor:
    """Output `[H, D]` of q `[H / G, G, D]` over all keys and values `[n, G, D]`, read where they lie, or where they
    are few and in many places copied. sink_logits: `[H]`. Not in half precision, in which a product rounds the scores.
    """
    if len(slices) > 2:  # small products take longer to begin than a few keys to copy
        slices = [slices[0], *joined(slices[1:])]
    q = q.transpose(0, 1) * args.scaling
    scores = [torch.bmm(q, keys.permute(1, 2, 0)) for keys, _ in slices]
    if args.softcap is not None:
        scores = [args.softcap * torch.tanh(s / args.softcap) for s in scores]
    if sink_logits is not None:
        scores.append(sink_logits.to(q.dtype).view(len(q), -1, 1))
    p = torch.cat(scores, -1).softmax(-1).split([s.shape[-1] for s in scores], -1)
    out = torch.bmm(p[0], slices[0][1].transpose(0, 1))
    for weights, (_, values) in zip(p[1:], slices[1:], strict=False):
        out.baddbmm_(weights, values.transpose(0, 1))
    return out.flatten(0, 1)


def by_kernel(kernel: Kernel, q: Tensor, slices: Slices, args: AttentionArgs, sink_logits: Tensor | None) -> Tensor:
    """The same by one call where there are few keys beside those of the first slice, else by one for each."""
    slices = joined(slices, beside=slices[0][0].shape[0])
    found = [kernel.forward(q[None], keys[None], values[None], None, args) for keys, values in slices]
    out, lse = found[0][0][0].to(found[0][1].dtype), found[0][1][0]
    for o, part in found[1:]:
        merge(out, lse, slice(None), o[0].to(lse.dtype), part[0])
    if sink_logits is not None:
        out = out * torch.sigmoid(lse - sink_logits.view(q.shape[1], -1).T)[..., None]
    return out.to(q.dtype).transpose(0, 1).flatten(0, 1)


def joined(slices: Slices, beside: int = 0) -> Slices:
    """As one where they hold few keys, those of the first that are `beside` these not counted; else as they are."""
    if len(slices) < 2 or sum(keys.shape[0] for keys, _ in slices) - beside > COPIED:
        return slices
    keys, values = zip(*slices, strict=True)
    return [(torch.cat(keys), torch.cat(values))]
