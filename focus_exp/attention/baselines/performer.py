"""Performer: attention by positive orthogonal random features (Choromanski et al. 2021, arXiv 2009.14794)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.baselines.blocks import BLOCK, group_heads, require_no_sink_logits
from focus_exp.attention.options import Count, Options, Seed
from focus_exp.attention.selection import (
    AttentionArgs,
    PairCounts,
    Selection,
    Sequence,
    base_mask_or_self,
    count_pairs,
    row_blocks,
)


@dataclass
class PerformerOptions(Options):
    features: Count = 256
    seed: Seed = 0


class Performer(AttentionMethod, name="performer", options=PerformerOptions):
    """Approximate attention by causal FAVOR+.

    exp(q . k) is the mean over random w of phi(q) phi(k), phi(x) = exp(w . x - |x|^2 / 2) (lemma 1).

    out_i = phi(q_i) . sum_{j <= i} phi(k_j) v_j^T / phi(q_i) . sum_{j <= i} phi(k_j)    (prefix sums, appendix B.1)

    The `features` vectors w are orthogonal in blocks of D, with the lengths of Gaussian vectors. Time is
    O(T * features * D) where the mask is causality and padding; sliding layers and packed sequences weigh the same
    features pair by pair. Differences from the original:
    - Features are drawn once, from `seed` and the layer; the original may redraw them while training.
    - Exponents are shifted by the keys that a query sees, never by a maximum over the sequence, which is not causal;
      and the denominator has a floor in place of the constant that the original adds to every feature.
    - Prefix sums run by blocks, pair by pair within a block.
    - There is no attention dropout, since there are no probabilities.
    A softcap has no such features: ValueError.
    """

    def __init__(self, shape: LayerShape, options: PerformerOptions) -> None:
        super().__init__(shape)
        generator = torch.Generator().manual_seed(options.seed * 1_000 + shape.index)
        self.directions: Tensor
        self.register_buffer("directions", orthogonal_directions(options.features, shape.head_dim, generator))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        require_no_sink_logits(self.name, args)
        if args.softcap is not None:
            raise ValueError(f"performer does not support a softcap (got softcap={args.softcap}). Use another method.")
        is_pairwise = sequence.allowed is not None
        self.path = "masked" if is_pairwise else "prefix sums"
        precision = torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            directions = self.directions.to(precision)
            q, k = group_heads(q, k.shape[1]).to(precision), k.unsqueeze(2).to(precision)
            out = favor(
                (q * args.scaling**0.5) @ directions.T,
                (k * args.scaling**0.5) @ directions.T - k.square().sum(-1, keepdim=True) * args.scaling / 2,
                v.unsqueeze(2).to(precision),
                sequence,
                is_pairwise,
            )
        return out.flatten(1, 2).to(v.dtype)

    @torch.no_grad()
    def count_pairs(self, selection: Selection, sequence: Sequence) -> PairCounts:
        """Count every pair: all are weighed, approximately."""
        return count_pairs(None, sequence, self.window, self.sinks)


def orthogonal_directions(features: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draw `(features, D)`: every row a standard Gaussian vector, rows of a block of D orthogonal."""
    blocks = -(-features // dim)
    gaussian = torch.randn(blocks, dim, dim, generator=generator, dtype=torch.float64, device="cpu")
    basis, triangle = torch.linalg.qr(gaussian)
    # uniform over rotations only once the signs of the decomposition are undone (Mezzadri 2007)
    basis = basis * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    lengths = torch.randn(blocks, dim, dim, generator=generator, dtype=torch.float64, device="cpu").norm(dim=-1)
    return (basis.transpose(-1, -2) * lengths[..., None]).flatten(0, 1)[:features].float()


def favor(a: Tensor, b: Tensor, v: Tensor, sequence: Sequence, is_pairwise: bool) -> Tensor:
    """Return the output `(B, G, H/G, T, D)` for log features of queries and keys.

    A state `(B, G, 1, M, D + 1)` carries sum_j phi(k_j) (v_j, 1) from block to block. Shifts cancel in the quotient,
    hence no gradient; each depends on no later token.

    Args:
        a: `(B, G, H/G, T, M)`, log features of queries.
        b: `(B, G, 1, T, M)`, log features of keys.
        is_pairwise: weigh pair by pair, under any mask.
    """
    phi_q = (a - a.detach().amax(-1, keepdim=True)).exp()
    size = b.detach().amax(-1, keepdim=True)  # [B, G, 1, T, 1]
    phi_k = (b - size).exp()
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    state = v.new_zeros(*v.shape[:3], b.shape[-1], v.shape[-1])
    peak = torch.full_like(size[..., :1, :], torch.finfo(v.dtype).min)  # log scale of the state
    floor = torch.finfo(v.dtype).eps ** 2
    outputs = []
    for rows in row_blocks(v.shape[3], BLOCK):
        first = 0 if is_pairwise else rows.start
        keys = slice(first, rows.stop)
        keep = base_mask_or_self(sequence, rows, rows.stop)[:, None, None, :, first:]
        scale = size[..., keys, :].transpose(-1, -2).masked_fill(~keep, float("-inf"))  # [B, G, 1, t, S]
        top = torch.maximum(scale.amax(-1, keepdim=True), peak)
        query = phi_q[..., rows, :]
        weights = (query @ phi_k[..., keys, :].transpose(-1, -2)) * (scale - top).exp()
        sums = weights @ v[..., keys, :]
        if not is_pairwise:
            sums = sums + (peak - top).exp() * (query @ state)
            inside = size[..., rows, :]
            if sequence.valid is not None:
                inside = inside.masked_fill(~sequence.valid[:, None, None, rows, None], float("-inf"))
            after = torch.maximum(inside.amax(-2, keepdim=True), peak)
            added = (phi_k[..., rows, :] * (inside - after).exp()).transpose(-1, -2) @ v[..., rows, :]
            state, peak = state * (peak - after).exp() + added, after
        outputs.append(sums[..., :-1] / (sums[..., -1:] + floor))
    return torch.cat(outputs, dim=3)
