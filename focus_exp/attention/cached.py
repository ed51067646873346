"""Token by token: a query reads the keys and values of its own groups, the window and the sinks, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from focus_exp.attention.selection import Selection, Sequence, near_or_sink, row_blocks
from focus_exp.attention.stores import CachedSequence, Store, joined

BLOCK = 256  # queries at a time


class GroupedCache:
    """Keys and values of one layer, by sequence and group."""

    def __init__(self, window: int, sinks: int) -> None:
        self.window = window
        self.sinks = sinks
        self.sequences: list[CachedSequence] = []
        self.length = 0
        self.start: Tensor | None = None  # `[B]`, where the sequence of each row's last token begins
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
        members = members_of(selection, k)
        if not self.sequences:
            self.sequences = [CachedSequence.empty(k[row], members[row], self.window) for row in range(batch)]
        local = torch.arange(count, device=k.device)
        place = local - sequence.start  # [B, n]
        sink = (place >= 0) & (place < self.sinks)
        sinks = bool(sink.any())
        padded = sequence.valid is not None and not bool(sequence.valid.all())
        for row, cached in enumerate(self.sequences):
            tokens = Store(k[row], v[row], local + self.length, members[row])
            real = sequence.valid[row] if padded and sequence.valid is not None else None
            if sinks:
                cached.sinks.append(*tokens.taken(sink[row] if real is None else sink[row] & real).tokens)
                real = ~sink[row] if real is None else real & ~sink[row]
            if real is not None:
                tokens = tokens.taken(real)
            if tokens.count:
                cached.append(tokens)
        self.start = sequence.start[:, -1] + self.length
        self.length += count

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
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Output `[B, H, n, D]` of new queries q `[B, H, n, D]` over what is cached and the new k, v `[B, G, n, D]`.

        Hard groups alone. `sequence` describes the new tokens, its places counted from the first of them (so that
        `start` may be negative); `allowed` is `[B or 1, 1, n, length + n]`. For `sink_logits` see `AttentionMethod`.
        """
        self.pairs_read = 0
        members = members_of(selection, k)
        out = torch.empty_like(q)
        for row, cached in enumerate(self.sequences):
            new = Store(
                k[row], v[row], torch.arange(self.length, self.length + k.shape[2], device=k.device), members[row]
            )
            near = joined([cached.sinks, cached.recent.after(self.length - self.window), new])
            for rows in row_blocks(q.shape[2], BLOCK):
                seen = near.taken(slice(0, near.count - new.count + rows.stop))
                groups = None if selection.query_groups is None else selection.query_groups[row, rows]
                allowed = None
                if sequence.allowed is not None:
                    allowed = sequence.allowed[row if len(sequence.allowed) > 1 else 0, 0, rows]  # [t, length + n]
                merged = Merged(q[row, :, rows], scaling, softcap)
                merged.add(seen.keys, seen.values, self.keep(seen, row, rows, groups, sequence, allowed), slice(None))
                for far, reading in read(cached.buckets, groups, self.length - self.window):
                    merged.add(
                        far.keys, far.values, None if allowed is None else allowed[reading][:, far.index], reading
                    )
                out[row, :, rows] = merged.result(sink_logits)
                self.pairs_read += merged.pairs
        return out

    def keep(
        self, near: Store, row: int, rows: slice, groups: Tensor | None, sequence: Sequence, allowed: Tensor | None
    ) -> Tensor | None:
        """`[t, s]` bool: which of the near tokens a query keeps; None if all. Near are the sinks, the tokens that are
        in the first query's window, and the new ones."""
        if rows.stop == 1 and allowed is None:
            return None
        start = sequence.start[row, rows, None] + self.length
        i = torch.arange(rows.start, rows.stop, device=start.device)[:, None] + self.length
        j = near.index
        keep = near_or_sink(i, j, start, self.window, self.sinks)
        if groups is not None:
            keep = keep | (groups.float() @ near.members.float().T > 0)
        if allowed is not None:
            keep = keep & allowed[:, j]
        else:
            keep = keep & (j <= i)
            if sequence.valid is not None:
                real = sequence.valid[row]
                keep = keep & ((j < self.length) | real[(j - self.length).clamp(min=0)])
        return keep | (i == j)

    def choose(self, rows: Tensor) -> None:
        """Keep the sequences `rows`, in that order, a sequence as often as it is named."""
        seen: set[int] = set()
        chosen = []
        for row in rows.tolist():
            chosen.append(self.sequences[row].copy() if row in seen else self.sequences[row])
            seen.add(row)
        self.sequences = chosen
        if self.start is not None:
            self.start = self.start[rows.to(self.start.device)]

    def crop(self, length: int) -> None:
        for sequence in self.sequences:
            sequence.crop(length)
        self.length = min(self.length, length)
        if self.start is not None:
            self.start = self.start.clamp(max=self.length)


def members_of(selection: Selection, k: Tensor) -> Tensor:
    """`[B, n, K]` bool; of a method without groups one that no query has."""
    if selection.key_groups is not None:
        return selection.key_groups
    return torch.zeros(k.shape[0], k.shape[2], 1, dtype=torch.bool, device=k.device)


def read(
    buckets: dict[tuple[bool, ...], Store], groups: Tensor | None, end: int
) -> Iterator[tuple[Store, Tensor | slice]]:
    """What lies before place `end` in the buckets that meet the groups `[t, K]` of any query, and which queries."""
    if groups is None:
        return
    mine = groups[0].tolist() if len(groups) == 1 else None
    for members, bucket in buckets.items():
        if mine is not None and not any(a and b for a, b in zip(mine, members, strict=True)):
            continue
        far = bucket.before(end)
        if not far.count:
            continue
        if mine is not None:
            yield far, slice(None)
            continue
        assert groups is not None
        reading = (groups & bucket.members[0]).any(-1).nonzero()[:, 0]
        if len(reading):
            yield far, reading


class Merged:
    """Attention of queries `[H, t, D]` over sets of keys, one after the other, by the logsumexp of each."""

    def __init__(self, q: Tensor, scaling: float, softcap: float | None) -> None:
        self.q = q
        self.scaling = scaling
        self.softcap = softcap
        self.out: Tensor | None = None
        self.lse: Tensor | None = None  # [H, t]
        self.pairs = 0

    def result(self, sink_logits: Tensor | None) -> Tensor:
        assert self.out is not None and self.lse is not None
        if sink_logits is None:
            return self.out
        return self.out * torch.sigmoid(self.lse - sink_logits[:, None])[..., None].to(self.out.dtype)

    def add(self, keys: Tensor, values: Tensor, keep: Tensor | None, rows: Tensor | slice) -> None:
        """Keys and values `[G, s, D]` for the queries `rows`, of which `keep` `[rows, s]` keeps some.

        The first set is for all queries, and each keeps something of it.
        """
        q = self.q[:, rows]
        self.pairs += q.shape[1] * keys.shape[1]
        o, lse = attention(q, keys, values, keep, self.scaling, self.softcap)
        if self.out is None or self.lse is None:
            self.out, self.lse = o, lse
            return
        # the share of this set: 1 / (1 + e^(old - new))
        share = torch.sigmoid(lse - self.lse[:, rows])[..., None].to(o.dtype)
        self.out[:, rows] = torch.lerp(self.out[:, rows], o, share)
        self.lse[:, rows] = torch.logaddexp(self.lse[:, rows], lse)


def attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Output `[H, t, D]` and logsumexp `[H, t]` of q `[H, t, D]` over k and v `[G, s, D]`, kept where `[t, s]` says."""
    heads = q.shape[0]
    q = q.reshape(k.shape[0], -1, q.shape[-1])  # [G, H/G * t, D]: the heads of a key share it, and it is read once
    if q.device.type == "cpu" and softcap is None and keep is None:
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], k[None], v[None], 0.0, False, attn_mask=None, scale=scaling
        )
        return o[0].reshape(heads, -1, v.shape[-1]), lse[0].reshape(heads, -1)
    s = (q @ k.transpose(-1, -2)).unflatten(1, (heads // len(k), -1)) * scaling  # [G, H/G, t, s]
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if keep is not None:
        s = s.masked_fill(~keep, float("-inf"))
    lse = s.logsumexp(-1)
    # a set of which nothing is kept has weight 0
    p = torch.exp(s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).to(v.dtype)
    return (p.flatten(1, 2) @ v).reshape(heads, -1, v.shape[-1]), lse.flatten(0, 1)
