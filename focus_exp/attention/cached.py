"""Token by token: a query reads the keys and values of its own groups, the window and the sinks, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.kernels import KERNELS, Demand, Kernel
from focus_exp.attention.one_token import by_kernel, by_products
from focus_exp.attention.parts import share
from focus_exp.attention.selection import (
    AttentionArgs,
    Selection,
    Sequence,
    by_head,
    for_each_head,
    near_or_sink,
    order_by,
    row_blocks,
    take,
)
from focus_exp.attention.sparse import merge
from focus_exp.attention.stores import Kind, Near, Pool, by_bucket

BLOCK = 256  # queries at a time


class GroupedCache:
    """Keys and values of one layer, by sequence and group."""

    def __init__(self, window: int, sinks: int) -> None:
        self.window = window
        self.sinks = sinks
        self.near: Near | None = None
        self.pool: Pool | None = None
        self.heads = 1  # key/value heads with groups of their own, so many rows of the stores for each sequence
        self.length = 0
        self.start: Tensor | None = None  # `[B]`, where the sequence of each row's last token begins
        self.placed = -1  # the last token that stands among the near ones since it was attended from
        self.changes = 0  # of what is kept, other than by appending
        self.shown: Tensor | None = None  # `[B, length]` bool, tokens that are no padding; None where `start` says it
        self.pairs_read = 0  # by the last call of `attend`, in each key/value head

    @property
    def batch(self) -> int:
        return 0 if self.start is None else len(self.start)

    @property
    def bytes(self) -> int:
        """What it holds, the room for tokens to come included."""
        tensors = [] if self.near is None or self.pool is None else self.near.tensors + self.pool.tensors
        return sum(x.numel() * x.element_size() for x in tensors)

    def append(self, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence) -> None:
        """Add the tokens of k and v `[B, G, n, D]`; padding is not kept. `sequence` starts where the cache ends.

        No gradient flows into what is kept.
        """
        shown, start, order, valid = self.shown, sequence.start[:, -1] + self.length, sequence.order, sequence.valid
        if order is not None:
            valid = sequence.valid_or_all()
            shown = torch.cat([self.tokens_shown(k), valid.gather(1, order.argsort(1))], 1)
        selection, sequence, self.heads = by_head(selection, sequence)
        if self.heads > 1:
            k, v = (x.unflatten(1, (self.heads, -1)).flatten(0, 1) for x in (k, v))
        k, v = (x.detach().transpose(1, 2) for x in (k, v))
        tokens = [k, v, members_of(selection, k)]
        if order is None:
            self.append_rows(tokens, sequence)
            self.start = start
            if shown is not None:
                self.shown = torch.cat([shown, torch.ones_like(shown[:, :1]).expand(-1, tokens[0].shape[1])], 1)
            return
        assert valid is not None and shown is not None
        valid, begins = valid.repeat_interleave(self.heads, 0), sequence.start + self.length
        if self.length:
            *before, kept = self.tokens()
            tokens = [torch.cat(pair, 1) for pair in zip(before, tokens, strict=True)]
            valid, begins = torch.cat([kept, valid], 1), torch.cat([self.begins(), begins], 1)
        self.lay_out(tokens, valid, begins, shown)

    def append_rows(self, tokens: list[Tensor], sequence: Sequence) -> None:
        """Add tokens k, v `[R, n, G, D]` and members `[R, n, K]`, one grouping a row."""
        (k, v, members), count = tokens, tokens[0].shape[1]
        if self.near is None or self.pool is None:
            self.near, self.pool = Near(k, members, self.window, self.sinks), Pool(k)
        index = torch.arange(self.length, self.length + count, device=k.device).expand(k.shape[0], count)
        tokens = [k, v, index, members]
        real = None
        if sequence.valid is not None or self.placed != self.length or count > 1:
            real = self.put_sinks(tokens, sequence)
            recent = slice(max(count - self.window - 1, 0), count)
            near = [x[:, recent] for x in tokens]
            if real is not None:
                near[2] = near[2].where(real[:, recent], -1)
                self.near.complete = False
            self.near.put(self.length + recent.start, near)
        self.pool.append(by_bucket(tokens, real), self.window)
        self.length += count

    def lay_out(self, tokens: list[Tensor], kept: Tensor, begins: Tensor, shown: Tensor) -> None:
        """Store anew those of tokens k, v `[R, n, ...]`, members that are `kept` `[R, n]`, each row's last at the end.

        begins: `[R, n]` int, where the sequence of each token begins, or less than 0.
        shown: `[B, length]` bool, which places of the rows, as the model counts them, they are.
        """
        length = shown.shape[1]
        order = order_by(kept)[:, kept.shape[1] - length :]
        valid = kept.gather(1, order)
        self.near = self.pool = self.start = self.shown = None
        self.length, self.placed = 0, -1
        if not length:
            return
        earlier = F.pad(kept.cumsum(1), (1, 0)).gather(1, begins.clamp(min=0))  # kept tokens of earlier sequences
        begins = (length - kept.sum(1, keepdim=True) + earlier).where(begins >= 0, begins)
        start = begins.gather(1, order)
        self.append_rows([take(x, order, 1) for x in tokens], Sequence(start, valid))
        self.start, self.shown = start[:: self.heads, -1].clamp(min=0), shown

    def begins(self) -> Tensor:
        """Return `[R, length]` int, where the sequence of each token begins; of earlier ones only that it is over."""
        assert self.start is not None
        start = self.start.repeat_interleave(self.heads)[:, None]
        place = torch.arange(self.length, device=start.device)
        return start.where(place >= start, -self.sinks - 1 - self.length).expand(-1, self.length)

    def start_with(self, shown: Tensor) -> Tensor:
        """Return `[B]`, where the last sequences will begin after `keep_only(shown)`."""
        assert self.start is not None
        kept = shown.gather(1, order_by(self.tokens_shown(shown)))
        place = torch.arange(self.length, device=shown.device)
        return self.length - (kept & (place >= self.start[:, None])).sum(1)

    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return k, v `[R, length, G, D]`, members `[R, length, K]` and which are there `[R, length]`, by place."""
        assert self.near is not None and self.pool is not None
        keys, values, _, members = self.near.tensors
        found = [x.new_zeros(len(x), self.length, *x.shape[2:]) for x in (keys, values, members)]
        for rows, places, columns in self.sinks_held():
            for to, x in zip(found, (keys, values, members), strict=True):
                to[rows, places] = x[rows, columns]
        for row, kind, some in self.buckets():
            places = self.pool.tensors[2][some]
            of_kind = members.new_zeros(members.shape[-1])
            of_kind[list(kind)] = True
            for to, x in zip(found, (*(x[some] for x in self.pool.tensors[:2]), of_kind), strict=True):
                to[row, places] = x
        return found[0], found[1], found[2], self.held()

    def held(self) -> Tensor:
        """Return `[R, length]` bool, the places that hold a token and no padding."""
        assert self.near is not None and self.pool is not None
        held = self.near.index.new_zeros(len(self.near.index), self.length, dtype=torch.bool)
        for rows, places, _ in self.sinks_held():
            held[rows, places] = True
        for row, _, some in self.buckets():
            held[row, self.pool.tensors[2][some]] = True
        return held

    def sinks_held(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the sinks: rows, their places, and their columns among the near tokens."""
        assert self.near is not None
        rows, columns = (self.near.index[:, : self.sinks] >= 0).nonzero(as_tuple=True)
        yield rows, self.near.index[rows, columns], columns

    def buckets(self) -> Iterator[tuple[int, Kind, slice]]:
        """Yield row, groups and rows of the pool of every bucket."""
        assert self.pool is not None
        for row, buckets in enumerate(self.pool.buckets):
            for kind, bucket in buckets.items():
                yield row, kind, slice(bucket.begin, bucket.end)

    def tokens_shown(self, like: Tensor) -> Tensor:
        """Return `[B, length]` bool: the places, as the model counts them, that hold a token and no padding."""
        if self.shown is not None:
            return self.shown
        if not self.length:
            return torch.ones(len(like), 0, dtype=torch.bool, device=like.device)
        return self.held()[:: self.heads]

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Return k, v `[B, G, length, D]` in the order of the model's tokens, zeros at padding."""
        keys, values, *_ = self.tokens()
        if self.shown is not None:  # they lie padding first
            back = order_by(self.shown).argsort(1).repeat_interleave(self.heads, 0)
            keys, values = take(keys, back, 1), take(values, back, 1)
        keys, values = (x.transpose(1, 2).unflatten(0, (-1, self.heads)).flatten(1, 2) for x in (keys, values))
        return keys, values

    def keep_only(self, shown: Tensor) -> None:
        """Forget the tokens at places that are not `shown` `[B, length]`: a later mask hides them."""
        order = order_by(self.tokens_shown(shown))  # place -> column of the mask
        *tokens, kept = self.tokens()
        self.changes += 1
        kept = kept & shown.gather(1, order).repeat_interleave(self.heads, 0)
        self.lay_out(tokens, kept, self.begins(), shown)

    def put_sinks(self, tokens: list[Tensor], sequence: Sequence) -> Tensor | None:
        """Keep the sinks among the tokens; which of them are neither sinks nor padding, `[R, n]` bool, None if all."""
        assert self.near is not None
        count, real = tokens[2].shape[1], sequence.valid
        if real is not None and bool(real.all()):
            real = None
        if sequence.last_start + self.sinks <= 0:  # all began before these tokens
            return real
        place = torch.arange(count, device=sequence.start.device) - sequence.start
        sink = (place >= 0) & (place < self.sinks)
        rows, columns = (sink if real is None else sink & real).nonzero(as_tuple=True)
        self.near.put_apart(rows, place[rows, columns], [x[rows, columns] for x in tokens])
        return ~sink if real is None else real & ~sink

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Selection,
        sequence: Sequence,
        args: AttentionArgs,
    ) -> Tensor:
        """Attend from new queries `(B, H, n, D)` to the cached and the new keys k, v `(B, G, n, D)`.

        Args:
            selection: hard, of the new tokens.
            sequence: of the new tokens, counted from the first of them, so that `start` may be negative; `allowed` is
                `(B or 1, 1, n, length + n)`.
            args: as the model sets them; window and sinks are the cache's own.

        Returns:
            `(B, H, n, D)`.
        """
        self.pairs_read = 0
        kernel = KERNELS["cpu-flash"]
        if kernel.refuses(Demand(q.device.type, q.dtype, q.shape[-1], args.softcap is not None)):
            kernel = KERNELS["math"]
        out = for_each_head(self.attend_rows)(q, k, v, selection, sequence, args, kernel)
        self.pairs_read //= self.heads
        return out

    def attend_rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Selection,
        sequence: Sequence,
        args: AttentionArgs,
        kernel: Kernel,
    ) -> Tensor:
        """The same for one grouping a row."""
        assert self.near is not None and self.pool is not None
        if q.shape[2] == 1 and sequence.allowed is None and self.near.is_complete():
            return self.step(q, k, v, selection, args, kernel)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        near, new = self.near_and_new(k, v, members_of(selection, k))
        precision = torch.promote_types(q.dtype, torch.float32)
        outputs = []
        for rows in row_blocks(q.shape[1], BLOCK):
            queries = q[:, rows]
            size = queries.shape[1]
            keys, values, index, members = (x[:, : new + rows.stop] for x in near)
            keep = self.keep(index, members, rows, selection, sequence)
            o, part = kernel.forward(queries, keys, values, ~keep, args)
            out, lse = o.flatten(0, 1).to(precision), part.flatten(0, 1).to(precision)
            read = int(keep.any(1).sum())
            for row, kind, far in self.far(rows, selection):
                assert selection.query_groups is not None
                reading = selection.query_groups[row, rows][:, list(kind)].any(1).nonzero()[:, 0]
                keys, values, index = (x[far] for x in self.pool.tensors)
                drop = None
                if sequence.allowed is not None:
                    allowed = sequence.allowed[row if len(sequence.allowed) > 1 else 0, 0, rows]
                    drop = ~allowed[reading][None, :, index]
                asking = queries[row, reading][None]
                o, part = kernel.forward(asking, keys[None], values[None], drop, args)
                merge(out, lse, row * size + reading, o[0].to(precision), part[0].to(precision))
                read += len(index)
            self.pairs_read += read * size
            if args.sink_logits is not None:
                of_row = args.sink_logits.expand(len(queries), -1).repeat_interleave(size, 0)
                out = out * torch.sigmoid(lse - of_row)[..., None]
            outputs.append(out.unflatten(0, queries.shape[:2]).to(q.dtype))
        return torch.cat(outputs, 1).transpose(1, 2)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, args: AttentionArgs, kernel: Kernel
    ) -> Tensor:
        """The same for a single token that sees all that is near: nothing is masked."""
        assert self.near is not None and self.pool is not None
        share = q.shape[1] // k.shape[1]
        queries = q[:, :, 0].unflatten(1, (-1, share)).transpose(1, 2)  # the heads of a key as so many queries
        self.near.put_one(
            self.length, k[:, :, 0], v[:, :, 0], None if selection.key_groups is None else selection.key_groups[:, 0]
        )
        self.placed = self.length
        (near_keys, near_values), (keys, values) = self.near.tensors[:2], self.pool.tensors[:2]
        slices = [[pair] for pair in zip(near_keys, near_values, strict=True)]
        for row, _, some in self.far(slice(0, 1), selection):
            slices[row].append((keys[some], values[some]))
        self.pairs_read += sum(seen.shape[0] for of_row in slices for seen, _ in of_row)
        sinks = [None] * len(slices) if args.sink_logits is None else args.sink_logits.expand(len(slices), -1)
        attend = by_products if q.dtype.itemsize >= 4 else partial(by_kernel, kernel)
        rows = [attend(queries[row], each, args, sinks[row]) for row, each in enumerate(slices)]
        return torch.stack(rows)[:, :, None]

    def near_and_new(self, k: Tensor, v: Tensor, members: Tensor) -> tuple[list[Tensor], int]:
        """Keys, values, places and groups of the sinks, the window of the first new token, and then the new ones; and
        after how many those stand."""
        assert self.near is not None
        index = torch.arange(self.length, self.length + k.shape[1], device=k.device).expand(len(k), -1)
        held = self.near.index.shape[1]
        pairs = zip(self.near.tensors, (k.detach(), v.detach(), index, members), strict=True)
        tensors = [torch.cat(pair, 1) for pair in pairs]
        if self.length >= self.near.ring:  # the first new token does not see it
            tensors[2][:, self.sinks + self.length % self.near.ring] = -1
        return tensors, held

    def keep(self, index: Tensor, members: Tensor, rows: slice, selection: Selection, sequence: Sequence) -> Tensor:
        """`[R, t, s]` bool: which of the near tokens at places `index` `[R, s]` a query keeps."""
        allowed = sequence.allowed
        start = sequence.start[:, rows, None] + self.length
        i = torch.arange(rows.start, rows.stop, device=start.device)[:, None] + self.length
        j = index[:, None]
        keep = near_or_sink(i, j, start, self.window, self.sinks)
        if selection.query_groups is not None:
            keep = keep | share(selection.query_groups[:, rows], members)
        if allowed is not None:
            seen = allowed[:, 0, rows].expand(len(index), -1, -1)
            keep = keep & seen.gather(2, j.clamp(min=0).expand(-1, seen.shape[1], -1))
        else:
            keep = keep & (j <= i)
            if sequence.valid is not None:
                real = sequence.valid.gather(1, (index - self.length).clamp(min=0))
                keep = keep & ((index < self.length) | real)[:, None]
        return (keep & (j >= 0)) | (i == j)

    def far(self, rows: slice, selection: Selection) -> Iterator[tuple[int, Kind, slice]]:
        """Sequence, groups and rows of the pool that its queries read: beyond the window of the first new token."""
        if selection.query_groups is None:
            return
        assert self.pool is not None
        groups = selection.query_groups[:, rows]
        asked: list[set[int]] = [set() for _ in range(groups.shape[0])]
        for row, _, group in groups.nonzero().tolist():
            asked[row].add(group)
        for row, mine in enumerate(asked):
            for kind, bucket in self.pool.meeting(row, mine):
                far = bucket.before(self.length - self.window)
                if far.start < far.stop:
                    yield row, kind, far

    def choose(self, rows: Tensor) -> None:
        """Keep the sequences `rows`, in that order, a sequence as often as it is named."""
        self.changes += 1
        if self.near is None or self.pool is None or self.start is None:
            return
        rows, self.placed = rows.to(self.start.device), -1
        self.start = self.start[rows]
        self.shown = None if self.shown is None else self.shown[rows]
        rows = (rows[:, None] * self.heads + torch.arange(self.heads, device=rows.device)).flatten()
        self.near.choose(rows)
        self.pool.choose(rows.tolist())

    def crop(self, length: int) -> None:
        """Forget the tokens from place `length` on; the last ones are then found in the buckets again."""
        length = max(0, min(self.length, length))
        if self.shown is not None and length < self.length:
            shown = self.shown[:, :length]
            *tokens, kept = self.tokens()
            left = shown.sum(1).repeat_interleave(self.heads)[:, None]
            self.changes += 1
            self.lay_out(tokens, kept & (kept.cumsum(1) <= left), self.begins(), shown)
            return
        self.length, self.placed, self.changes = length, -1, self.changes + 1
        if self.near is None or self.pool is None or self.start is None:
            return
        self.start = self.start.clamp(max=length)
        self.near.forget(length)
        self.pool.crop(length, self.window)
        for row, buckets in enumerate(self.pool.buckets):
            for kind, bucket in buckets.items():
                last = slice(max(bucket.begin, bucket.end - self.near.ring), bucket.end)
                keys, values, index = (x[last] for x in self.pool.tensors)
                late = index >= self.length - self.near.ring
                keys, values, index = (x[late] for x in (keys, values, index))
                members = self.near.tensors[3].new_zeros(len(index), self.near.tensors[3].shape[-1])
                members[:, list(kind)] = True
                place = self.sinks + index % self.near.ring
                self.near.put_apart(torch.full_like(index, row), place, [keys, values, index, members])


def members_of(selection: Selection, k: Tensor) -> Tensor:
    """`[R, n, K]` bool for k `[R, n, G, D]`; of a method without groups one that no query has."""
    if selection.key_groups is not None:
        return selection.key_groups
    return torch.zeros(*k.shape[:2], 1, dtype=torch.bool, device=k.device)
