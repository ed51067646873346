"""KV cache by group: a query reads the sinks, the window and the keys of its own groups, and no others.

Shapes: R rows (one per sequence, or per sequence and key/value head where heads have their own groups), n tokens,
G key/value heads, D head size, K groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.kernels import KERNELS, Kernel, KernelRequirements
from focus_exp.attention.one_token import by_kernel, by_products
from focus_exp.attention.selection import (
    AttentionArgs,
    Selection,
    Sequence,
    fold_heads,
    for_each_head,
    groups_overlap,
    is_local_or_sink,
    reorder,
    row_blocks,
    stable_order,
)
from focus_exp.attention.sparse import merge

BLOCK = 256  # queries at a time
SPARE = 64  # tokens that a bucket can grow by before it moves
GROWTH = 4  # plus a quarter of those it holds

GroupSet = tuple[int, ...]  # groups of a key, ascending


class GroupedCache:
    """Keep the keys and values of one layer by sequence and group.

    Attributes:
        length: tokens appended, padding included.
        start: `(B,)` int, where the sequence of each row's last token begins.
        visible: `(B, length)` bool, tokens that are not padding, in the model's order; None where `start` says it.
        changes: counter of changes other than appending.
        pairs_read: by the last `attend`, per key/value head.
    """

    def __init__(self, window: int, sinks: int) -> None:
        self.window = window
        self.sinks = sinks
        self.local: LocalKVBuffer | None = None
        self.pool: GroupedKVPool | None = None
        self.heads = 1  # key/value heads with groups of their own
        self.length = 0
        self.start: Tensor | None = None
        self.placed = -1  # position of the last token that `step` wrote to the local buffer already
        self.changes = 0
        self.visible: Tensor | None = None
        self.pairs_read = 0

    @property
    def batch(self) -> int:
        return 0 if self.start is None else len(self.start)

    @property
    def bytes(self) -> int:
        """Allocated memory, spare room included."""
        tensors = [] if self.local is None or self.pool is None else self.local.tensors + self.pool.tensors
        return sum(x.numel() * x.element_size() for x in tensors)

    def append(self, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence) -> None:
        """Append the tokens of k and v `(B, G, n, D)` without padding and without gradient.

        `sequence` describes the new tokens, counted from the end of the cache.
        """
        visible, start, order, valid = self.visible, sequence.start[:, -1] + self.length, sequence.order, sequence.valid
        if order is not None:
            valid = sequence.valid_or_all()
            visible = torch.cat([self.visible_tokens(k), valid.gather(1, order.argsort(1))], 1)
        selection, sequence, self.heads = fold_heads(selection, sequence)
        if self.heads > 1:
            k, v = (x.unflatten(1, (self.heads, -1)).flatten(0, 1) for x in (k, v))
        k, v = (x.detach().transpose(1, 2) for x in (k, v))
        tokens = [k, v, key_members(selection, k)]
        if order is None:
            self.append_rows(tokens, sequence)
            self.start = start
            if visible is not None:
                self.visible = torch.cat([visible, torch.ones_like(visible[:, :1]).expand(-1, k.shape[1])], 1)
            return
        assert valid is not None and visible is not None
        valid, starts = valid.repeat_interleave(self.heads, 0), sequence.start + self.length
        if self.length:
            *before, kept = self.collect_tokens()
            tokens = [torch.cat(pair, 1) for pair in zip(before, tokens, strict=True)]
            valid, starts = torch.cat([kept, valid], 1), torch.cat([self.token_starts(), starts], 1)
        self.rebuild(tokens, valid, starts, visible)

    def append_rows(self, tokens: list[Tensor], sequence: Sequence) -> None:
        """Append k, v `(R, n, G, D)` and members `(R, n, K)`, one grouping per row."""
        (k, v, members), count = tokens, tokens[0].shape[1]
        if self.local is None or self.pool is None:
            self.local, self.pool = LocalKVBuffer(k, members, self.window, self.sinks), GroupedKVPool(k)
        index = torch.arange(self.length, self.length + count, device=k.device).expand(k.shape[0], count)
        tokens = [k, v, index, members]
        pooled = None
        if sequence.valid is not None or self.placed != self.length or count > 1:
            pooled = self.write_sinks(tokens, sequence)
            recent = slice(max(count - self.window - 1, 0), count)
            local = [x[:, recent] for x in tokens]
            if pooled is not None:
                local[2] = local[2].where(pooled[:, recent], -1)
                self.local.complete = False
            self.local.write(self.length + recent.start, local)
        self.pool.append(split_by_bucket(tokens, pooled), self.window)
        self.length += count

    def rebuild(self, tokens: list[Tensor], kept: Tensor, starts: Tensor, visible: Tensor) -> None:
        """Store the `kept` tokens again, each row's last one at the end.

        Args:
            tokens: k, v `(R, n, G, D)` and members `(R, n, K)`.
            kept: `(R, n)` bool.
            starts: `(R, n)` int, where the sequence of each token begins, or less than 0.
            visible: `(B, length)` bool, positions that hold a token, in the model's order.
        """
        length = visible.shape[1]
        order = stable_order(kept)[:, kept.shape[1] - length :]
        valid = kept.gather(1, order)
        self.local = self.pool = self.start = self.visible = None
        self.length, self.placed = 0, -1
        if not length:
            return
        earlier = F.pad(kept.cumsum(1), (1, 0)).gather(1, starts.clamp(min=0))  # kept tokens of earlier sequences
        starts = (length - kept.sum(1, keepdim=True) + earlier).where(starts >= 0, starts)
        start = starts.gather(1, order)
        self.append_rows([reorder(x, order, 1) for x in tokens], Sequence(start, valid))
        self.start, self.visible = start[:: self.heads, -1].clamp(min=0), visible

    def token_starts(self) -> Tensor:
        """Return `(R, length)` int, where each token's sequence begins; negative for sequences that ended."""
        assert self.start is not None
        start = self.start.repeat_interleave(self.heads)[:, None]
        position = torch.arange(self.length, device=start.device)
        return start.where(position >= start, -self.sinks - 1 - self.length).expand(-1, self.length)

    def start_after(self, visible: Tensor) -> Tensor:
        """Return `(B,)`, where the last sequences will begin after `keep_only(visible)`."""
        assert self.start is not None
        kept = visible.gather(1, stable_order(self.visible_tokens(visible)))
        position = torch.arange(self.length, device=visible.device)
        return self.length - (kept & (position >= self.start[:, None])).sum(1)

    def collect_tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return k, v `(R, length, G, D)`, members `(R, length, K)` and `stored_mask()`, by position."""
        assert self.local is not None and self.pool is not None
        keys, values, _, members = self.local.tensors
        k, v, m = (x.new_zeros(len(x), self.length, *x.shape[2:]) for x in (keys, values, members))
        rows, positions, columns = self.stored_sinks()
        for to, x in zip((k, v, m), (keys, values, members), strict=True):
            to[rows, positions] = x[rows, columns]
        for row, group_set, stored in self.pool.iter_buckets():
            positions = self.pool.tensors[2][stored]
            one = members.new_zeros(members.shape[-1])
            one[list(group_set)] = True
            k[row, positions], v[row, positions] = (x[stored] for x in self.pool.tensors[:2])
            m[row, positions] = one
        return k, v, m, self.stored_mask()

    def stored_mask(self) -> Tensor:
        """Return `(R, length)` bool, positions that hold a token and not padding."""
        assert self.local is not None and self.pool is not None
        mask = self.local.index.new_zeros(len(self.local.index), self.length, dtype=torch.bool)
        rows, positions, _ = self.stored_sinks()
        mask[rows, positions] = True
        for row, _, stored in self.pool.iter_buckets():
            mask[row, self.pool.tensors[2][stored]] = True
        return mask

    def stored_sinks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows of the stored sinks, their positions, and their columns in the local buffer."""
        assert self.local is not None
        rows, columns = (self.local.index[:, : self.sinks] >= 0).nonzero(as_tuple=True)
        return rows, self.local.index[rows, columns], columns

    def visible_tokens(self, like: Tensor) -> Tensor:
        """Return `(B, length)` bool, tokens that are not padding in the model's order; `like` has B rows."""
        if self.visible is not None:
            return self.visible
        if not self.length:
            return torch.ones(len(like), 0, dtype=torch.bool, device=like.device)
        return self.stored_mask()[:: self.heads]

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Return k, v `(B, G, length, D)` in the order of the model's tokens, zeros at padding."""
        k, v, *_ = self.collect_tokens()
        if self.visible is not None:  # stored with padding first
            back = stable_order(self.visible).argsort(1).repeat_interleave(self.heads, 0)
            k, v = reorder(k, back, 1), reorder(v, back, 1)
        k, v = (x.transpose(1, 2).unflatten(0, (-1, self.heads)).flatten(1, 2) for x in (k, v))
        return k, v

    def keep_only(self, visible: Tensor) -> None:
        """Drop the tokens outside `visible` `(B, length)`, which a later mask hides."""
        order = stable_order(self.visible_tokens(visible))  # position -> column of the mask
        *tokens, kept = self.collect_tokens()
        self.changes += 1
        kept = kept & visible.gather(1, order).repeat_interleave(self.heads, 0)
        self.rebuild(tokens, kept, self.token_starts(), visible)

    def write_sinks(self, tokens: list[Tensor], sequence: Sequence) -> Tensor | None:
        """Store the sinks among new tokens; return `(R, n)` bool, the tokens to pool, or None for all."""
        assert self.local is not None
        count, valid = tokens[2].shape[1], sequence.valid
        if valid is not None and bool(valid.all()):
            valid = None
        if sequence.last_start + self.sinks <= 0:  # all sequences began before these tokens
            return valid
        place = torch.arange(count, device=sequence.start.device) - sequence.start
        is_sink = (place >= 0) & (place < self.sinks)
        rows, columns = (is_sink if valid is None else is_sink & valid).nonzero(as_tuple=True)
        self.local.scatter_(rows, place[rows, columns], [x[rows, columns] for x in tokens])
        return ~is_sink if valid is None else valid & ~is_sink

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        """Attend from new queries `(B, H, n, D)` to the cached keys and the new k, v `(B, G, n, D)`.

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
        if kernel.unsupported_reason(KernelRequirements(q.device.type, q.dtype, q.shape[-1], args.softcap is not None)):
            kernel = KERNELS["math"]
        out = for_each_head(self.attend_rows)(q, k, v, selection, sequence, args, kernel)
        self.pairs_read //= self.heads
        return out

    def attend_rows(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs,
        kernel: Kernel,
    ) -> Tensor:  # fmt: skip
        """Attend with one grouping per row."""
        assert self.local is not None and self.pool is not None
        if q.shape[2] == 1 and sequence.allowed is None and self.local.is_complete():
            return self.attend_one(q, k, v, selection, args, kernel)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        local, offset = self.local_and_new(k, v, key_members(selection, k))
        precision = torch.promote_types(q.dtype, torch.float32)
        outputs = []
        for rows in row_blocks(q.shape[1], BLOCK):
            queries = q[:, rows]
            size = queries.shape[1]
            keys, values, index, members = (x[:, : offset + rows.stop] for x in local)
            keep = self.local_keep_mask(index, members, rows, selection, sequence)
            o, part_lse = kernel.forward(queries, keys, values, ~keep, args)
            out, lse = o.flatten(0, 1).to(precision), part_lse.flatten(0, 1).to(precision)
            read = int(keep.any(1).sum())
            for row, group_set, stored in self.distant_slices(rows, selection):
                assert selection.query_groups is not None
                readers = selection.query_groups[row, rows][:, list(group_set)].any(1).nonzero()[:, 0]
                keys, values, index = (x[stored] for x in self.pool.tensors)
                drop = None
                if sequence.allowed is not None:
                    allowed = sequence.allowed[row if len(sequence.allowed) > 1 else 0, 0, rows]
                    drop = ~allowed[readers][None, :, index]
                o, part_lse = kernel.forward(queries[row, readers][None], keys[None], values[None], drop, args)
                merge(out, lse, row * size + readers, o[0].to(precision), part_lse[0].to(precision))
                read += len(index)
            self.pairs_read += read * size
            if args.sink_logits is not None:
                logits = args.sink_logits.expand(len(queries), -1).repeat_interleave(size, 0)
                out = out * torch.sigmoid(lse - logits)[..., None]
            outputs.append(out.unflatten(0, queries.shape[:2]).to(q.dtype))
        return torch.cat(outputs, 1).transpose(1, 2)

    def attend_one(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, args: AttentionArgs, kernel: Kernel
    ) -> Tensor:
        """Attend from one token that sees the whole local buffer, so that nothing is masked."""
        assert self.local is not None and self.pool is not None
        queries = q[:, :, 0].unflatten(1, (k.shape[1], -1)).transpose(1, 2)  # heads of one key as so many queries
        members = None if selection.key_groups is None else selection.key_groups[:, 0]
        self.local.write_token(self.length, k[:, :, 0], v[:, :, 0], members)
        self.placed = self.length
        (local_keys, local_values), (keys, values) = self.local.tensors[:2], self.pool.tensors[:2]
        slices = [[pair] for pair in zip(local_keys, local_values, strict=True)]
        for row, _, stored in self.distant_slices(slice(0, 1), selection):
            slices[row].append((keys[stored], values[stored]))
        self.pairs_read += sum(keys.shape[0] for row in slices for keys, _ in row)
        logits = [None] * len(slices) if args.sink_logits is None else args.sink_logits.expand(len(slices), -1)
        attend = by_products if q.dtype.itemsize >= 4 else partial(by_kernel, kernel)
        rows = [attend(queries[row], pairs, args, logits[row]) for row, pairs in enumerate(slices)]
        return torch.stack(rows)[:, :, None]

    def local_and_new(self, k: Tensor, v: Tensor, members: Tensor) -> tuple[list[Tensor], int]:
        """Return k, v, index and members of the local buffer followed by the new tokens, and the buffer's size."""
        assert self.local is not None
        index = torch.arange(self.length, self.length + k.shape[1], device=k.device).expand(len(k), -1)
        size = self.local.index.shape[1]
        pairs = zip(self.local.tensors, (k.detach(), v.detach(), index, members), strict=True)
        tensors = [torch.cat(pair, 1) for pair in pairs]
        if self.length >= self.local.ring:  # the first new token does not see it
            tensors[2][:, self.sinks + self.length % self.local.ring] = -1
        return tensors, size

    def local_keep_mask(
        self, index: Tensor, members: Tensor, rows: slice, selection: Selection, sequence: Sequence
    ) -> Tensor:
        """Return `(R, t, s)` bool, which of the local tokens at positions `index` `(R, s)` the queries keep."""
        allowed = sequence.allowed
        start = sequence.start[:, rows, None] + self.length
        i = torch.arange(rows.start, rows.stop, device=start.device)[:, None] + self.length
        j = index[:, None]
        keep = is_local_or_sink(i, j, start, self.window, self.sinks)
        if selection.query_groups is not None:
            keep = keep | groups_overlap(selection.query_groups[:, rows], members)
        if allowed is not None:
            mask = allowed[:, 0, rows].expand(len(index), -1, -1)
            keep = keep & mask.gather(2, j.clamp(min=0).expand(-1, mask.shape[1], -1))
        else:
            keep = keep & (j <= i)
            if sequence.valid is not None:
                valid = sequence.valid.gather(1, (index - self.length).clamp(min=0))
                keep = keep & ((index < self.length) | valid)[:, None]
        return (keep & (j >= 0)) | (i == j)

    def distant_slices(self, rows: slice, selection: Selection) -> Iterator[tuple[int, GroupSet, slice]]:
        """Yield row, groups and pool slice of the keys beyond the first new token's window that the queries read."""
        if selection.query_groups is None:
            return
        assert self.pool is not None
        groups = selection.query_groups[:, rows]
        read_by_row: list[set[int]] = [set() for _ in range(groups.shape[0])]
        for row, _, group in groups.nonzero().tolist():
            read_by_row[row].add(group)
        for row, read in enumerate(read_by_row):
            for group_set, bucket in self.pool.overlapping_buckets(row, read):
                stored = bucket.slice_before(self.length - self.window)
                if stored.start < stored.stop:
                    yield row, group_set, stored

    def reorder_rows(self, rows: Tensor) -> None:
        """Keep the sequences `rows` in this order, as beam search does; one may be repeated."""
        self.changes += 1
        if self.local is None or self.pool is None or self.start is None:
            return
        rows, self.placed = rows.to(self.start.device), -1
        self.start = self.start[rows]
        self.visible = None if self.visible is None else self.visible[rows]
        rows = (rows[:, None] * self.heads + torch.arange(self.heads, device=rows.device)).flatten()
        self.local.reorder_rows(rows)
        self.pool.reorder_rows(rows.tolist())

    def crop(self, length: int) -> None:
        """Drop the tokens from position `length` on; the window is then refilled from the pool."""
        length = max(0, min(self.length, length))
        if self.visible is not None and length < self.length:
            visible = self.visible[:, :length]
            *tokens, kept = self.collect_tokens()
            left = visible.sum(1).repeat_interleave(self.heads)[:, None]
            self.changes += 1
            self.rebuild(tokens, kept & (kept.cumsum(1) <= left), self.token_starts(), visible)
            return
        self.length, self.placed, self.changes = length, -1, self.changes + 1
        if self.local is None or self.pool is None or self.start is None:
            return
        self.start = self.start.clamp(max=length)
        self.local.truncate(length)
        self.pool.crop(length, self.window)
        for row, group_set, stored in self.pool.iter_buckets():
            last = slice(max(stored.start, stored.stop - self.local.ring), stored.stop)
            keys, values, index = (x[last] for x in self.pool.tensors)
            recent = index >= self.length - self.local.ring
            keys, values, index = (x[recent] for x in (keys, values, index))
            members = self.local.tensors[3].new_zeros(len(index), self.local.tensors[3].shape[-1])
            members[:, list(group_set)] = True
            columns = self.sinks + index % self.local.ring
            self.local.scatter_(torch.full_like(index, row), columns, [keys, values, index, members])


class LocalKVBuffer:
    """Hold the sinks of R sequences and a ring buffer of their last window + 1 tokens.

    Attributes:
        tensors: keys, values `(R, sinks + n, G, D)`, a token at column sinks + position % (window + 1); index
            `(R, sinks + n)` int, positions, -1 where empty; members `(R, sinks + n, K)` bool, groups as keys.
    """

    def __init__(self, k: Tensor, members: Tensor, window: int, sinks: int) -> None:
        self.ring, self.sinks = window + 1, sinks
        keys = k.new_zeros(len(k), sinks, *k.shape[2:])
        index = torch.full(keys.shape[:2], -1, device=k.device)
        self.tensors = [keys, keys.clone(), index, members.new_zeros(*index.shape, members.shape[-1])]
        self.complete = False

    @property
    def index(self) -> Tensor:
        return self.tensors[2]

    def write(self, position: int, tokens: list[Tensor]) -> None:
        """Write up to window + 1 following tokens, the first at `position`: k, v `(R, n, G, D)`, index, members."""
        count = tokens[2].shape[1]
        self.grow(min(position + count, self.ring))
        first = position % self.ring
        fit = min(count, self.ring - first)
        for stored, new in zip(self.tensors, tokens, strict=True):
            stored[:, self.sinks + first : self.sinks + first + fit] = new[:, :fit]
            if fit < count:
                stored[:, self.sinks : self.sinks + count - fit] = new[:, fit:]

    def write_token(self, position: int, k: Tensor, v: Tensor, members: Tensor | None) -> None:
        """Write one token `(R, G, D)` over the one that leaves its window; the buffer is complete."""
        column = self.sinks + position % self.ring
        keys, values, index, stored_members = self.tensors
        keys[:, column], values[:, column], index[:, column] = k.detach(), v.detach(), position
        if members is not None:
            stored_members[:, column] = members

    def scatter_(self, rows: Tensor, columns: Tensor, tokens: list[Tensor]) -> None:
        """Write tokens `(m, ...)` of the sequences `rows` at `columns`."""
        for stored, new in zip(self.tensors, tokens, strict=True):
            stored[rows, columns] = new

    def grow(self, columns: int) -> None:
        """Grow the ring buffer to at least so many columns."""
        size = self.index.shape[1] - self.sinks
        if columns > size:
            more = min(max(columns, 2 * size), self.ring) - size
            empty = [x.new_full((len(x), more, *x.shape[2:]), -1 if x.ndim == 2 else 0) for x in self.tensors]
            self.tensors = [torch.cat(pair, 1) for pair in zip(self.tensors, empty, strict=True)]

    def is_complete(self) -> bool:
        """Tell whether no column is empty."""
        if not self.complete and self.index.shape[1] == self.sinks + self.ring:
            self.complete = bool((self.index >= 0).all())
        return self.complete

    def reorder_rows(self, rows: Tensor) -> None:
        self.tensors = [x.index_select(0, rows) for x in self.tensors]
        self.complete = False

    def truncate(self, length: int) -> None:
        """Drop all but the sinks before position `length`."""
        self.index[:, self.sinks :] = -1
        self.index.masked_fill_(self.index >= length, -1)
        self.complete = False


@dataclass
class Bucket:
    """Locate the tokens of one sequence and group set in the pool.

    Attributes:
        begin, room, count: first row, rows reserved, rows used.
        recent: positions of its last tokens, at least of those in the window.
    """

    begin: int = 0
    room: int = 0
    count: int = 0
    recent: deque[int] = field(default_factory=deque)

    @property
    def end(self) -> int:
        return self.begin + self.count

    def slice_before(self, position: int) -> slice:
        """Return the pool rows of its tokens before `position`, which only grows between calls."""
        while self.recent and self.recent[0] < position:
            self.recent.popleft()
        return slice(self.begin, self.end - len(self.recent))


class GroupedKVPool:
    """Hold all tokens of R sequences but their sinks, contiguous per sequence and set of groups.

    Attributes:
        tensors: keys, values `(room, G, D)`; index `(room,)` int, positions, ascending within a bucket.
        buckets: by row and group set.
    """

    def __init__(self, k: Tensor) -> None:
        keys = k.new_empty(0, *k.shape[2:])
        self.tensors = [keys, keys.clone(), torch.empty(0, dtype=torch.long, device=k.device)]
        self.buckets: list[dict[GroupSet, Bucket]] = [{} for _ in k]

    def iter_buckets(self) -> Iterator[tuple[int, GroupSet, slice]]:
        """Yield row, groups and pool slice of every bucket."""
        for row, buckets in enumerate(self.buckets):
            for group_set, bucket in buckets.items():
                yield row, group_set, slice(bucket.begin, bucket.end)

    def overlapping_buckets(self, row: int, groups: Iterable[int]) -> list[tuple[GroupSet, Bucket]]:
        """Return the buckets of a sequence whose keys are in one of the groups."""
        read = set(groups)
        return [(key, bucket) for key, bucket in self.buckets[row].items() if not read.isdisjoint(key)]

    def append(self, tokens: dict[tuple[int, GroupSet], list[Tensor]], window: int) -> None:
        """Append k, v `(m, G, D)` and index `(m,)` in order, by sequence and group set."""
        for row, group_set in tokens:
            self.buckets[row].setdefault(group_set, Bucket())
        counts = {key: new[2].shape[0] for key, new in tokens.items()}  # len() of a tensor is ten times slower
        if any(self.buckets[r][s].count + n > self.buckets[r][s].room for (r, s), n in counts.items()):
            self.reallocate(counts)
        for (row, group_set), new in tokens.items():
            bucket, count = self.buckets[row][group_set], counts[row, group_set]
            added = slice(bucket.end, bucket.end + count)
            for stored, x in zip(self.tensors, new, strict=True):
                stored[added] = x
            bucket.count += count
            if window:
                bucket.recent.extend(new[2][-window:].tolist() if count > 1 else [int(new[2])])

    def reallocate(self, counts: dict[tuple[int, GroupSet], int]) -> None:
        """Move all buckets to a larger pool with room for so many more tokens."""
        moves, total = [], 0
        for row, buckets in enumerate(self.buckets):
            for group_set, bucket in buckets.items():
                needed = bucket.count + counts.get((row, group_set), 0)
                moves.append((bucket, total, needed + needed // GROWTH + SPARE))
                total += moves[-1][2]
        old, (keys, values, index) = self.tensors, self.tensors
        # head by head in memory, as they are read
        keys, values = (x.new_empty(x.shape[1], total, x.shape[2]).transpose(0, 1) for x in (keys, values))
        self.tensors = [keys, values, index.new_empty(total)]
        for bucket, begin, room in moves:
            for new, x in zip(self.tensors, old, strict=True):
                new[begin : begin + bucket.count] = x[bucket.begin : bucket.end]
            bucket.begin, bucket.room = begin, room

    def reorder_rows(self, rows: list[int]) -> None:
        self.buckets = [
            {key: Bucket(b.begin, b.room, b.count, b.recent.copy()) for key, b in self.buckets[row].items()}
            for row in rows
        ]
        self.reallocate({})

    def crop(self, length: int, window: int) -> None:
        """Drop the tokens from position `length` on."""
        for buckets in self.buckets:
            for bucket in buckets.values():
                index = self.tensors[2][bucket.begin : bucket.end]
                bucket.count = int(torch.searchsorted(index, length))
                bucket.recent = deque(self.tensors[2][max(bucket.begin, bucket.end - window) : bucket.end].tolist())


def key_members(selection: Selection, k: Tensor) -> Tensor:
    """Return `(R, n, K)` bool for k `(R, n, G, D)`; without groups one that no query reads."""
    if selection.key_groups is not None:
        return selection.key_groups
    return torch.zeros(*k.shape[:2], 1, dtype=torch.bool, device=k.device)


def split_by_bucket(tokens: list[Tensor], pooled: Tensor | None) -> dict[tuple[int, GroupSet], list[Tensor]]:
    """Split the `pooled` ones of tokens `(R, n, ...)` by sequence and group set, the last of the tensors."""
    *tokens, members = tokens
    rows = len(members)
    if members.shape[1] == 1:
        groups: list[list[int]] = [[] for _ in range(rows)]
        for row, _, group in members.nonzero().tolist():
            groups[row].append(group)
        kept = [True] * rows if pooled is None else pooled[:, 0].tolist()
        return {(row, tuple(groups[row])): [x[row] for x in tokens] for row in range(rows) if kept[row]}
    split: dict[tuple[int, GroupSet], list[Tensor]] = {}
    distinct, inverse = members.flatten(0, 1).unique(dim=0, return_inverse=True)
    inverse = inverse.view(members.shape[:2])
    group_sets = [tuple(x.nonzero()[:, 0].tolist()) for x in distinct]
    for row in range(rows):
        for number, group_set in enumerate(group_sets):
            mask = inverse[row] == number
            index = (mask if pooled is None else mask & pooled[row]).nonzero()[:, 0]
            if len(index):
                split[row, group_set] = [x[row, index] for x in tokens]
    return split
