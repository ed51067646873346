"""MagicPIG: attention estimated from tokens sampled by hashing (Chen et al. 2024, arXiv 2410.16179)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.baselines.blocks import group_heads, query_blocks, require_no_sink_logits
from focus_exp.attention.options import Count, Options, Seed, Size
from focus_exp.attention.selection import AttentionArgs, PairCounts, Selection, Sequence, local_mask, unpadded_mask


@dataclass(frozen=True)
class Sampled(Selection):
    """Collect the counts of the pairs that `attend` samples, which only queries and keys decide."""

    counts: list[PairCounts] = field(default_factory=list)


@dataclass
class MagicPIGOptions(Options):
    hash_bits: Annotated[int, Field(ge=1, le=15)] = 10  # codes are int16
    hash_tables: Annotated[int, Field(ge=2)] = 150
    recent_tokens: Count = 64
    sinks: Size = 4
    seed: Seed = 0


class MagicPIG(AttentionMethod, name="magicpig", options=MagicPIGOptions):
    """Sample tokens at inference; nothing is trained.

    A key is sampled for a query if their codes, `hash_bits` (K) signs of random projections, agree in at least two of
    `hash_tables` (L) tables (algorithm 1). With p = 1 - angle(q, k) / pi that has probability
    u = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L - 1), and over the sampled keys
    o = sum_j (e^{s_j} / u_j) v_j / sum_j (e^{s_j} / u_j) estimates full attention: numerator and denominator are
    unbiased, their quotient asymptotically.
    The first `sinks` and the last `recent_tokens` tokens are always kept, with u = 1 (4 and 64 in the original).
    u carries no gradient: full attention is what is estimated, and so is its gradient.
    Differences from the original:
    - Keys are centered before hashing by the mean of the prompt there; here by the mean of the first `recent_tokens`
      keys after the sinks, which precede every query that samples. Any center is unbiased.
    - Every query samples, prompt included; hash functions differ by layer but not by head; no layer is dense (there
      the first and the middle one: use `layers` of attach); and all codes are compared pair by pair, which samples as
      tables would and saves nothing.
    """

    def __init__(self, shape: LayerShape, options: MagicPIGOptions) -> None:
        super().__init__(shape, window=options.recent_tokens - 1, sinks=options.sinks)
        self.hash_bits = options.hash_bits
        self.hash_tables = options.hash_tables
        generator = torch.Generator().manual_seed(options.seed * 1_000 + shape.index)
        self.directions: Tensor
        codes = (self.hash_tables, shape.head_dim, self.hash_bits)
        self.register_buffer("directions", torch.randn(codes, generator=generator, device="cpu"))

    def route(self, h: Tensor, sequence: Sequence) -> Selection:
        return Sampled()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        require_no_sink_logits(self.name, args)
        self.path = "masked"
        total = distant = kept = 0
        outputs = []
        with torch.autocast(q.device.type, enabled=False):
            with torch.no_grad():
                precision = torch.promote_types(q.dtype, torch.float32)
                centered = self.center(k.to(precision), sequence).unsqueeze(2)  # (B, G, 1, T, D)
                query_codes = self.codes(group_heads(q, k.shape[1]).to(precision))
                key_codes = self.codes(centered)
            for block in query_blocks(q, k, v, sequence, args):
                rows = block.rows
                with torch.no_grad():
                    local = local_mask(sequence, rows, rows.stop, self.window, self.sinks)[:, None, None]
                    sampled = agree_twice(query_codes[..., rows], key_codes[..., : rows.stop]) & ~local & block.mask
                    rarity = self.rarity(block.q, centered[..., : rows.stop, :], sampled)
                    pairs = unpadded_mask(sequence, rows)[:, None, None]
                    total += int(pairs.count_nonzero()) * self.shape.heads
                    distant += int((pairs & ~local).count_nonzero()) * self.shape.heads
                    kept += int((pairs & sampled).count_nonzero())
                s = (block.scores(block.q) + rarity).masked_fill(~(local | sampled), float("-inf"))
                outputs.append(block.weigh(s))
        if isinstance(selection, Sampled):
            selection.counts.append(PairCounts(total, distant, kept))
        return torch.cat(outputs, dim=3).flatten(1, 2).to(v.dtype)

    def center(self, k: Tensor, sequence: Sequence) -> Tensor:
        """Subtract from keys `(B, G, T, D)` the mean of the first keys after the sinks of their own sequence.

        Where a query samples, all of them precede it, and none is padding.
        """
        start = sequence.start
        place = torch.arange(k.shape[2], device=k.device) - start
        first = (place >= self.sinks) & (place <= self.sinks + self.window)
        index = start[:, None, :, None].expand_as(k)
        total = torch.zeros_like(k).scatter_add(2, index, k.masked_fill(~first[:, None, :, None], 0)).gather(2, index)
        count = torch.zeros_like(start).scatter_add(1, start, first.long()).gather(1, start)
        return k - total / count.clamp(min=1)[:, None, :, None]

    def codes(self, x: Tensor) -> Tensor:
        """Hash vectors `(B, G, *, T, D)` to codes `(L, B, G, *, T)`, in bytes where they fit."""
        powers = 2.0 ** torch.arange(self.hash_bits, device=x.device, dtype=x.dtype)
        fits_byte = self.hash_bits <= 8 and self.hash_tables < 256  # `agree_twice` counts tables in the codes' dtype
        dtype = torch.uint8 if fits_byte else torch.int16
        return torch.stack([((x @ table > 0).to(x.dtype) @ powers).to(dtype) for table in self.directions.to(x.dtype)])

    def rarity(self, q: Tensor, k: Tensor, sampled: Tensor) -> Tensor:
        """Return -log u `(B, G, H/G, t, S)` of the `sampled` pairs, 0 of others.

        q is `(B, G, H/G, t, D)`, the centered k `(B, G, 1, S, D)`.
        """
        cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2)
        u = sampling_probability(cosine[sampled], self.hash_bits, self.hash_tables)
        return torch.zeros_like(cosine).masked_scatter_(sampled, -u.log())

    @torch.no_grad()
    def count_pairs(self, selection: Selection, sequence: Sequence) -> PairCounts:
        """Sum over heads, each of which samples by itself; RuntimeError before `attend` has sampled."""
        if not isinstance(selection, Sampled) or not selection.counts:
            raise RuntimeError("magicpig samples its pairs in attend. Count them after that.")
        return selection.counts[-1]


def agree_twice(queries: Tensor, keys: Tensor) -> Tensor:
    """Return `(B, G, H/G, t, S)` bool: codes `(L, B, G, H/G, t)` and `(L, B, G, 1, S)` agree in at least two tables."""
    # this loop is most of the method's time: in place, and in the codes' own dtype, which a CPU vectorizes
    equal = torch.empty(*queries.shape[1:], keys.shape[-1], dtype=queries.dtype, device=queries.device)
    times = torch.zeros_like(equal)
    for query, key in zip(queries, keys, strict=True):
        torch.eq(query[..., :, None], key[..., None, :], out=equal)
        times += equal
    return times >= 2


def sampling_probability(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """Return u, the probability that at least two of `tables` codes agree, for vectors of this cosine."""
    agree = (1 - cosine.clamp(-1, 1).arccos() / math.pi) ** bits
    # 1 - (1 - x)^(L-1) (1 + (L-1) x), whose terms cancel where x is small
    missed = (tables - 1) * torch.log1p(-agree) + torch.log1p((tables - 1) * agree)
    return (-torch.expm1(missed)).clamp(min=torch.finfo(cosine.dtype).tiny)
