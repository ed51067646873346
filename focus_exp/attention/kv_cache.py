"""KV cache by group: a query reads the sinks, the window and the keys of its own groups, and no others.

Shapes: R rows (one per sequence, or per sequence and key/value head where heads have their own groups), n tokens,
G key/value heads, D head size, K groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.dense import masked_attention
from focus_exp.attention.kernels.cpu_sparse import DTYPES, MAX_HEAD_DIM, load_operators, unavailable_reason
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
        self.placed = -1  # position of a token that `attend_token` has stored, but not counted yet
        self.slots: Tensor | None = None  # its buckets `(R,)`, -1 where the pool has no place for it
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
        if self.count_stored_token(k.shape[2], sequence):
            return
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

    def count_stored_token(self, count: int, sequence: Sequence) -> bool:
        """Count the token that `attend_token` has stored; False where it did not store this one."""
        if self.slots is None or self.pool is None or self.placed != self.length or count > 1:
            return False
        slots, self.slots = self.slots, None
        if int(slots.min()) < 0:
            return False
        self.pool.table.numpy()[slots.numpy(), 3] += 1  # a tenth of the time of torch's index_put_
        self.start = sequence.start[:, -1] + self.length
        if self.visible is not None:
            self.visible = F.pad(self.visible, (0, 1), value=True)
        self.length += 1
        return True

    def append_rows(self, tokens: list[Tensor], sequence: Sequence) -> None:
        """Append k, v `(R, n, G, D)` and members `(R, n, K)`, one grouping per row."""
        (k, v, members), count = tokens, tokens[0].shape[1]
        if self.local is None or self.pool is None:
            self.local = LocalKVBuffer(k, members, self.window, self.sinks)
            self.pool = GroupedKVPool(k, members.shape[-1])
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
        self.pool.append(tokens, pooled)
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
        if self.can_attend_token(q, k, v, sequence):
            return self.attend_token(q, k, v, selection, args)
        self.pairs_read, self.slots = 0, None
        out = for_each_head(self.attend_rows)(q, k, v, selection, sequence, args)
        self.pairs_read //= self.heads
        return out

    def can_attend_token(self, q: Tensor, k: Tensor, v: Tensor, sequence: Sequence) -> bool:
        """Tell whether the CPU kernel serves: one token a row, which sees the whole local buffer."""
        assert self.local is not None
        if q.shape[2] > 1 or q.device.type != "cpu" or q.dtype not in DTYPES or sequence.allowed is not None:
            return False
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            return False
        if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM or not k.dtype == q.dtype == self.local.tensors[0].dtype:
            return False
        if not self.local.is_complete() or (sequence.valid is not None and not bool(sequence.valid.all())):
            return False
        return unavailable_reason() is None

    def attend_token(self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, args: AttentionArgs) -> Tensor:
        """Store one token a row and attend to what it reads, in one kernel call; `append` has only to count it."""
        assert self.local is not None and self.pool is not None
        rows, kinds = self.local.index.shape[0], self.pool.groups.shape[1]
        reads, members = (
            None if x is None else x.reshape(rows, kinds) for x in (selection.query_groups, selection.key_groups)
        )
        logits = args.sink_logits
        if logits is not None:
            logits = logits.float().expand(len(q), -1).reshape(rows, -1).contiguous()
        out, self.slots, read = load_operators().decode(
            *(x.reshape(rows, -1, x.shape[-1]) for x in (q, k, v)), reads,
            torch.zeros(rows, kinds, dtype=torch.bool) if members is None else members,
            self.local.tensors, self.pool.tensors, self.pool.table, self.pool.groups, logits,
            self.length, self.window, self.sinks, args.scaling, args.softcap or 0.0,
        )  # fmt: skip
        self.placed = self.length
        self.pairs_read = read // self.heads
        result: Tensor = out.view(*q.shape[:3], out.shape[-1])
        return result

    def attend_rows(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        """Attend with one grouping per row."""
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        local, offset = self.local_and_new(k, v, key_members(selection, k))
        logits = None if args.sink_logits is None else args.sink_logits.expand(len(q), -1)
        outputs = []
        for block in row_blocks(q.shape[2], BLOCK):
            near = [x[:, : offset + block.stop] for x in local]
            keep = self.local_keep_mask(near[2], near[3], block, selection, sequence)
            rows = []
            for row in range(len(q)):
                pairs = [(near[0][row], near[1][row], keep[row])]
                pairs += self.distant_keys(row, block, selection, sequence)
                keys, values, masks = zip(*pairs, strict=True)
                mask = torch.cat(masks, 1)
                self.pairs_read += int(mask.any(0).sum()) * len(mask)
                k_row, v_row = (torch.cat(x).transpose(0, 1)[None] for x in (keys, values))
                row_args = replace(args, sink_logits=None if logits is None else logits[row])
                rows.append(masked_attention(q[row, None, :, block], k_row, v_row, mask[None, None], row_args))
            outputs.append(torch.cat(rows))
        return torch.cat(outputs, 2)

    def distant_keys(
        self, row: int, block: slice, selection: Selection, sequence: Sequence
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield keys and values `(s, G, D)` of the pool for a block of queries, and which pairs `(t, s)` are kept.

        Those within the window of the first new token are in the local buffer, and not kept here.
        """
        assert self.pool is not None
        if selection.query_groups is None:
            return
        reads = selection.query_groups[row, block]
        members = self.pool.groups.to(reads.device)
        readers = groups_overlap(reads, members)  # (t, buckets)
        is_read = readers.any(0).tolist()
        for number, (owner, begin, _, count) in enumerate(self.pool.table.tolist()):
            if owner != row or not is_read[number]:
                continue
            keys, values, index = (x[begin : begin + count] for x in self.pool.tensors)
            keep = readers[:, number, None] & (index < self.length - self.window)
            if sequence.allowed is not None:
                keep = keep & sequence.allowed[row if len(sequence.allowed) > 1 else 0, 0, block][:, index]
            yield keys, values, keep

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

    def reorder_rows(self, rows: Tensor) -> None:
        """Keep the sequences `rows` in this order, as beam search does; one may be repeated."""
        self.changes += 1
        if self.local is None or self.pool is None or self.start is None:
            return
        rows, self.placed, self.slots = rows.to(self.start.device), -1, None
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
        self.pool.crop(length)
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


class GroupedKVPool:
    """Hold all tokens of R sequences but their sinks, contiguous per bucket: a sequence and a set of groups.

    Attributes:
        tensors: keys, values `(room, G, D)`; index `(room,)` int, positions, ascending within a bucket.
        numbers: bucket by row and group set.
        table: `(buckets, 4)` int on the CPU: row, first place, places reserved, places used.
        groups: `(buckets, K)` bool on the CPU.
    """

    def __init__(self, k: Tensor, groups: int) -> None:
        keys = k.new_empty(0, *k.shape[2:])
        self.tensors = [keys, keys.clone(), torch.empty(0, dtype=torch.long, device=k.device)]
        self.numbers: dict[tuple[int, GroupSet], int] = {}
        self.table = torch.empty(0, 4, dtype=torch.long)
        self.groups = torch.empty(0, groups, dtype=torch.bool)

    def iter_buckets(self) -> Iterator[tuple[int, GroupSet, slice]]:
        """Yield row, groups and pool slice of every bucket."""
        for (row, group_set), (_, begin, _, count) in zip(self.numbers, self.table.tolist(), strict=True):
            yield row, group_set, slice(begin, begin + count)

    def append(self, tokens: list[Tensor], pooled: Tensor | None) -> None:
        """Append the `pooled` `(R, n)` ones, or all, of k, v `(R, n, G, D)`, index `(R, n)`, members `(R, n, K)`."""
        *tokens, members = tokens
        picks = split_by_bucket(members, pooled)
        self.add_buckets([key for key in picks if key not in self.numbers])
        more = torch.zeros(len(self.numbers), dtype=torch.long)
        for key, columns in picks.items():
            more[self.numbers[key]] = len(columns)
        if bool((self.table[:, 3] + more > self.table[:, 2]).any()):
            self.reallocate(more)
        ends = (self.table[:, 1] + self.table[:, 3]).tolist()
        for key, columns in picks.items():
            end = ends[self.numbers[key]]
            for stored, x in zip(self.tensors, tokens, strict=True):
                stored[end : end + len(columns)] = x[key[0], columns]
        self.table[:, 3] += more

    def add_buckets(self, keys: list[tuple[int, GroupSet]]) -> None:
        """Add empty buckets."""
        table, groups = (
            torch.zeros(len(keys), 4, dtype=torch.long),
            self.groups.new_zeros(len(keys), self.groups.shape[1]),
        )
        for number, (row, group_set) in enumerate(keys):
            self.numbers[row, group_set] = len(self.numbers)
            table[number, 0] = row
            groups[number, list(group_set)] = True
        self.table, self.groups = torch.cat([self.table, table]), torch.cat([self.groups, groups])

    def reallocate(self, more: Tensor | int = 0) -> None:
        """Move all buckets to a larger pool with room for so many `more` tokens of each."""
        before, counts = self.table.tolist(), self.table[:, 3]
        room = counts + more
        room = room + room // GROWTH + SPARE
        self.table = torch.stack([self.table[:, 0], room.cumsum(0) - room, room, counts], 1)
        old, (keys, values, index), total = self.tensors, self.tensors, int(room.sum())
        # head by head in memory, as they are read
        keys, values = (x.new_empty(x.shape[1], total, x.shape[2]).transpose(0, 1) for x in (keys, values))
        self.tensors = [keys, values, index.new_empty(total)]
        for (_, begin, _, count), to in zip(before, self.table[:, 1].tolist(), strict=True):
            for new, x in zip(self.tensors, old, strict=True):
                new[to : to + count] = x[begin : begin + count]

    def reorder_rows(self, rows: list[int]) -> None:
        picks = [(new, *key) for new, old in enumerate(rows) for key in self.numbers.items() if key[0][0] == old]
        numbers = [number for _, _, number in picks]
        self.table, self.groups = self.table[numbers], self.groups[numbers]
        self.table[:, 0] = torch.tensor([row for row, _, _ in picks])
        self.numbers = {(row, group_set): i for i, (row, (_, group_set), _) in enumerate(picks)}
        self.reallocate()

    def crop(self, length: int) -> None:
        """Drop the tokens from position `length` on."""
        counts = [int(torch.searchsorted(self.tensors[2][stored], length)) for _, _, stored in self.iter_buckets()]
        self.table[:, 3] = torch.tensor(counts)


def key_members(selection: Selection, k: Tensor) -> Tensor:
    """Return `(R, n, K)` bool for k `(R, n, G, D)`; without groups one that no query reads."""
    if selection.key_groups is not None:
        return selection.key_groups
    return torch.zeros(*k.shape[:2], 1, dtype=torch.bool, device=k.device)


def split_by_bucket(members: Tensor, pooled: Tensor | None) -> dict[tuple[int, GroupSet], Tensor]:
    """Return by sequence and group set the columns of the `pooled` tokens with members `(R, n, K)`."""
    if members.shape[1] == 1:
        groups: list[list[int]] = [[] for _ in members]
        for row, _, group in members.nonzero().tolist():
            groups[row].append(group)
        kept = [True] * len(members) if pooled is None else pooled[:, 0].tolist()
        column = torch.zeros(1, dtype=torch.long, device=members.device)
        return {(row, tuple(groups[row])): column for row in range(len(members)) if kept[row]}
    distinct, number = members.flatten(0, 1).unique(dim=0, return_inverse=True)
    group_sets = [tuple(x.nonzero()[:, 0].tolist()) for x in distinct]
    number = number.view(members.shape[:2]) + len(distinct) * torch.arange(len(members), device=number.device)[:, None]
    total = len(distinct) * len(members)
    number = (number if pooled is None else number.where(pooled, total)).flatten()
    order, sizes = number.argsort(stable=True) % members.shape[1], number.bincount(minlength=total + 1).tolist()
    return {
        (bucket // len(distinct), group_sets[bucket % len(distinct)]): columns
        for bucket, columns in enumerate(order.split(sizes)[:total])
        if len(columns)
    }
