"""Token by token: a query reads the keys and values of its own groups, the window and the sinks, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from focus_exp.attention.selection import Selection, Sequence, row_blocks
from focus_exp.attention.stores import CachedSequence, Store, joined

BLOCK = 256  # queries at a time


class GroupedCache:
    """Keys and values of one layer, by sequence and group."""

    def __init__(self, window: int, sinks: int) -> None:
        self.window = window
        self.sinks = sinks
        self.sequences: list[CachedSequence] = []
        self.length = 0
        self.pairs_read = 0  # by the last call of `attend`, in each key/value head

    @property
    def bytes(self) -> int:
        return sum(store.bytes for sequence in self.sequences for store in sequence.stores)

    def append(self, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence) -> None:
        """Add the tokens of k and v `[B, G, n, D]`; padding is not kept. `sequence` starts where the cache ends.

        No gradient flows into what is kept.
        """
        k, v = k.detach(), v.detach()
        batch, _, count, _ = k.shape
        members = selection.key_groups
        if members is None:
            members = torch.zeros(batch, count, 1, dtype=torch.bool, device=k.device)
        if not self.sequences:
            self.sequences = [CachedSequence.empty(k[row], members[row], self.window) for row in range(batch)]
        local = torch.arange(count, device=k.device)
        sink = self.is_sink(sequence, local)
        padded = sequence.valid is not None and not bool(sequence.valid.all())
        for row, cached in enumerate(self.sequences):
            tokens = [k[row], v[row], local + self.length, members[row], sink[row]]
            if padded:
                assert sequence.valid is not None
                real = sequence.valid[row]
                tokens = [x[:, real] if x.ndim == 3 else x[real] for x in tokens]
            if len(tokens[2]):
                cached.append(*tokens)
        self.length += count

    def is_sink(self, sequence: Sequence, local: Tensor) -> Tensor:
        """`[B, n]` bool."""
        place = local - sequence.start
        return (place >= 0) & (place < self.sinks)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Selection,
        sequence: Sequence,
        *,
        scaling: float,
        softcap: float | None = None,
    ) -> Tensor:
        """Output `[B, H, n, D]` of new queries q `[B, H, n, D]` over what is cached and the new k, v `[B, G, n, D]`.

        Hard groups alone. `sequence` describes the new tokens, its places counted from the first of them (so that
        `start` may be negative); `allowed` is `[B or 1, 1, n, length + n]`.
        """
        self.pairs_read = 0
        out = torch.empty_like(q)
        for row, cached in enumerate(self.sequences):
            for rows in row_blocks(q.shape[2], BLOCK):
                self.attend_block(out, q, k, v, cached, row, rows, selection, sequence, scaling, softcap)
        return out

    def attend_block(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cached: CachedSequence,
        row: int,
        rows: slice,
        selection: Selection,
        sequence: Sequence,
        scaling: float,
        softcap: float | None,
    ) -> None:
        """Fill `out` for the queries `rows` of the sequence `row`."""
        allowed = None
        if sequence.allowed is not None:
            allowed = sequence.allowed[row if len(sequence.allowed) > 1 else 0, 0, rows]  # [t, length + n]
        groups = None if selection.query_groups is None else selection.query_groups[row, rows]
        merged = Merged(q[row, :, rows], k.shape[1], scaling, softcap)
        for bucket, reading in read(cached.buckets, groups):
            keep = None if allowed is None else allowed[reading][:, bucket.index]
            merged.add(bucket.keys, bucket.values, keep, reading)
            self.pairs_read += bucket.count * merged.count(reading)
        near = self.near(cached, k[row], v[row], row, rows.stop, selection)
        keep = self.keep(near, row, rows, groups, sequence, allowed)
        self.pairs_read += near.count * (rows.stop - rows.start)
        merged.add(near.keys, near.values, keep, slice(None))
        out[row, :, rows] = merged.result(out.dtype)

    def near(self, cached: CachedSequence, k: Tensor, v: Tensor, row: int, end: int, selection: Selection) -> Store:
        """Sinks, the window before the new tokens, and the new tokens up to `end`."""
        index = torch.arange(self.length, self.length + end, device=k.device)
        members = cached.sinks.members.new_zeros(end, cached.sinks.members.shape[1])
        if selection.key_groups is not None:
            members = selection.key_groups[row, :end]
        return joined([cached.sinks, cached.recent.last(self.window), Store(k[:, :end], v[:, :end], index, members)])

    def keep(
        self, near: Store, row: int, rows: slice, groups: Tensor | None, sequence: Sequence, allowed: Tensor | None
    ) -> Tensor:
        """`[t, s]` bool: which of the near tokens a query keeps, those left out that it has read from its buckets."""
        start = sequence.start[row, rows, None] + self.length
        i = torch.arange(rows.start, rows.stop, device=start.device)[:, None] + self.length
        j, new = near.index, near.index >= self.length
        sink = (j >= start) & (j < start + self.sinks)
        keep = sink | (i - j <= self.window)
        if groups is not None:
            same = groups.float() @ near.members.float().T > 0
            keep = torch.where(new, keep | same, keep & (sink | ~same))
        if allowed is not None:
            keep = keep & allowed[:, j]
        else:
            keep = keep & (j <= i)
            if sequence.valid is not None:
                real = sequence.valid[row]
                keep = keep & (~new | real[(j - self.length).clamp(min=0)])
        return keep | (i == j)

    def choose(self, rows: Tensor) -> None:
        """Keep the sequences `rows`, in that order, a sequence as often as it is named."""
        wanted, seen = rows.tolist(), set()
        chosen = []
        for row in wanted:
            chosen.append(self.sequences[row].copy() if row in seen else self.sequences[row])
            seen.add(row)
        self.sequences = chosen

    def crop(self, length: int) -> None:
        for sequence in self.sequences:
            sequence.crop(length)
        self.length = min(self.length, length)


def read(buckets: dict[tuple[bool, ...], Store], groups: Tensor | None) -> Iterator[tuple[Store, Tensor | slice]]:
    """The buckets that meet the groups `[t, K]` of any query, and which queries read them."""
    if groups is None:
        return
    if len(groups) == 1:
        mine = groups[0].tolist()
        for members, bucket in buckets.items():
            if bucket.count and any(a and b for a, b in zip(mine, members, strict=True)):
                yield bucket, slice(None)
        return
    for bucket in buckets.values():
        if not bucket.count:
            continue
        reading = (groups & bucket.members[0]).any(-1).nonzero()[:, 0]
        if len(reading):
            yield bucket, reading


class Merged:
    """Attention of queries `[H, t, D]` over sets of keys, one after the other, by the logsumexp of each."""

    def __init__(self, q: Tensor, heads: int, scaling: float, softcap: float | None) -> None:
        self.q = q.unflatten(0, (heads, -1)) * scaling  # [G, H/G, t, D]
        self.softcap = softcap
        precision = torch.promote_types(q.dtype, torch.float32)
        self.out: Tensor | None = None
        self.lse = torch.full(self.q.shape[:3], float("-inf"), dtype=precision, device=q.device)

    def count(self, rows: Tensor | slice) -> int:
        return self.q.shape[2] if isinstance(rows, slice) else len(rows)

    def add(self, keys: Tensor, values: Tensor, keep: Tensor | None, rows: Tensor | slice) -> None:
        """Keys and values `[G, s, D]` for the queries `rows`, of which `keep` `[rows, s]` keeps some."""
        q = self.q[:, :, rows]
        # one product for all heads of a key: it is read once
        s = (q.flatten(1, 2) @ keys.transpose(-1, -2)).unflatten(1, q.shape[1:3]).to(self.lse.dtype)
        if self.softcap is not None:
            s = self.softcap * torch.tanh(s / self.softcap)
        if keep is not None:
            s = s.masked_fill(~keep, float("-inf"))
        lse = s.logsumexp(-1)
        # a set of which nothing is kept has weight 0
        p = torch.exp(s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
        o = (p.to(values.dtype).flatten(1, 2) @ values).unflatten(1, q.shape[1:3]).to(self.lse.dtype)
        if self.out is None:
            self.out = torch.zeros(*self.q.shape[:3], values.shape[-1], dtype=self.lse.dtype, device=o.device)
        old = self.lse[:, :, rows]
        new = torch.logaddexp(old, lse)
        share = torch.exp(lse - new).nan_to_num(0.0)[..., None]
        self.out[:, :, rows] = torch.lerp(self.out[:, :, rows], o, share)
        self.lse[:, :, rows] = new

    def result(self, dtype: torch.dtype) -> Tensor:
        """`[H, t, D]`."""
        assert self.out is not None
        return self.out.flatten(0, 1).to(dtype)
