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
    has_gaps,
    is_local_or_sink,
    row_blocks,
)

BLOCK = 256  # queries at a time
SPARE = 8  # tokens that a bucket can grow by before all move
GROWTH = 8  # plus an eighth of those it holds

GroupSet = tuple[int, ...]  # groups of a key, ascending


class GroupedCache:
    """Keep the keys and values of one layer by sequence and group.

    Attributes:
        length: tokens appended, padding included.
        start: `(B,)` int, where the sequence of each row's last token begins.
        valid: `(B, length)` bool, False on padding; None without.
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
        self.valid: Tensor | None = None
        self.placed = -1  # position of a token that `attend_token` has stored, but not counted yet
        self.slots: Tensor | None = None  # its buckets `(R,)`, -1 where the pool has no place for it
        self.pairs_read = 0

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
        start = sequence.start[:, -1] + self.length
        if self.valid is not None or sequence.valid is not None:
            self.valid = torch.cat([self.valid_tokens(start), sequence.valid_or_all()], 1)
        selection, sequence, self.heads = fold_heads(selection, sequence)
        if self.heads > 1:
            k, v = (x.unflatten(1, (self.heads, -1)).flatten(0, 1) for x in (k, v))
        k, v = (x.detach().transpose(1, 2) for x in (k, v))
        self.append_rows([k, v, key_members(selection, k)], sequence)
        self.start = start

    def count_stored_token(self, count: int, sequence: Sequence) -> bool:
        """Count the token that `attend_token` has stored; False where it did not store this one."""
        if self.slots is None or self.pool is None or self.placed != self.length or count > 1:
            return False
        slots, self.slots = self.slots, None
        if int(slots.min()) < 0:
            return False
        if self.valid is not None:
            self.valid = F.pad(self.valid, (0, 1), value=True)
        self.pool.table.numpy()[slots.numpy(), 3] += 1  # a tenth of the time of torch's index_put_
        self.start = sequence.start[:, -1] + self.length
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
            self.local.write(self.length + recent.start, local)
        self.pool.append(tokens, pooled)
        self.length += count

    def valid_tokens(self, start: Tensor) -> Tensor:
        """Return `valid`, all True where there is no padding; `start` is `(B,)`."""
        return start.new_ones(len(start), self.length, dtype=torch.bool) if self.valid is None else self.valid

    def positions(self, count: int, mask: Tensor | None = None) -> Tensor | None:
        """Return the position of each token before `count` new ones and of these: see `Sequence`.

        mask: `(B or 1, 1, n, length + n)` bool, which may hide cached tokens.
        """
        if self.start is None or (self.valid is None and mask is None):
            return None
        past, new = self.valid_tokens(self.start), None
        if mask is not None:
            new = mask[:, 0].diagonal(self.length, 1, 2)
            row = new.byte().argmax(1)[:, None, None].expand(-1, 1, self.length)  # of the first token
            seen = mask[:, 0, :, : self.length].gather(1, row)[:, 0]
            past = past & (seen | (seen.cumsum(1) == 0))  # before what it sees, its mask may be of a sliding layer
        new = past.new_ones(len(past), count) if new is None else new
        valid = torch.cat([past, new.expand(len(past), -1)], 1)
        return valid.cumsum(1) - valid.long() if bool(has_gaps(valid)) else None

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Return k, v `(B, G, length, D)`, zeros at padding."""
        assert self.local is not None and self.pool is not None
        index = self.local.index[:, : self.sinks]
        rows, columns = (index >= 0).nonzero(as_tuple=True)
        outputs = []
        for local, pool in zip(self.local.tensors[:2], self.pool.tensors[:2], strict=True):
            x = local.new_zeros(len(local), self.length, *local.shape[2:])
            x[rows, index[rows, columns]] = local[rows, columns]
            for row, _, stored in self.pool.iter_buckets():
                x[row, self.pool.tensors[2][stored]] = pool[stored]
            outputs.append(x.transpose(1, 2).unflatten(0, (-1, self.heads)).flatten(1, 2))
        return outputs[0], outputs[1]

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
        if sequence.position is not None:
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
        if selection.query_groups is None and sequence.position is None:
            return
        members = self.pool.groups.to(sequence.start.device)
        readers = members.new_zeros(block.stop - block.start, len(members))  # (t, buckets)
        if selection.query_groups is not None:
            readers = groups_overlap(selection.query_groups[row, block], members)
        # of distances by position, any bucket may hold sinks and keys in the window
        is_read = (readers.any(0) | (sequence.position is not None)).tolist()
        for number, (owner, begin, _, count) in enumerate(self.pool.table.tolist()):
            if owner != row or not is_read[number]:
                continue
            keys, values, index = (x[begin : begin + count] for x in self.pool.tensors)
            keep = readers[:, number, None]
            if sequence.position is not None:
                keep = keep | self.local_by_position(index[None], block, sequence, slice(row, row + 1))[0]
            keep = keep & (index < self.length - self.window)
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
        if sequence.position is not None:
            keep = self.local_by_position(index, rows, sequence)
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

    def local_by_position(self, index: Tensor, block: slice, sequence: Sequence, rows: slice = slice(None)) -> Tensor:
        """Return `(R, t, s)` bool, whether keys at `index` `(R, s)` are local or sinks, counting valid tokens alone."""
        assert sequence.position is not None
        position, start = sequence.position[rows], sequence.start[rows, block] + self.length
        i = position[:, self.length :][:, block, None]
        j = position.gather(1, index.clamp(min=0))[:, None]
        return is_local_or_sink(i, j, position.gather(1, start)[..., None], self.window, self.sinks)

    def reorder_rows(self, rows: Tensor) -> None:
        """Keep the sequences `rows` in this order, as beam search does; one may be repeated."""
        if self.local is None or self.pool is None or self.start is None:
            return
        rows, self.placed, self.slots = rows.to(self.start.device), -1, None
        self.start = self.start[rows]
        self.valid = None if self.valid is None else self.valid[rows]
        rows = (rows[:, None] * self.heads + torch.arange(self.heads, device=rows.device)).flatten()
        self.local.reorder_rows(rows)
        self.pool.reorder_rows(rows.tolist())

    def crop(self, length: int) -> None:
        """Drop the tokens from position `length` on; the window is then refilled from the pool."""
        length = max(0, min(self.length, length))
        self.length, self.placed = length, -1
        self.valid = None if self.valid is None else self.valid[:, :length]
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
        tensors: keys, values `(R, n, G, D)` with n = sinks + window + 1, a token at column sinks + position %
            (window + 1); index `(R, n)` int, positions, -1 where empty; members `(R, n, K)` bool, groups as keys.
    """

    def __init__(self, k: Tensor, members: Tensor, window: int, sinks: int) -> None:
        self.ring, self.sinks = window + 1, sinks
        keys = k.new_zeros(len(k), sinks + self.ring, *k.shape[2:])
        index = torch.full(keys.shape[:2], -1, device=k.device)
        self.tensors = [keys, keys.clone(), index, members.new_zeros(*index.shape, members.shape[-1])]

    @property
    def index(self) -> Tensor:
        return self.tensors[2]

    def write(self, position: int, tokens: list[Tensor]) -> None:
        """Write up to window + 1 following tokens, the first at `position`: k, v `(R, n, G, D)`, index, members."""
        positions = torch.arange(position, position + tokens[2].shape[1], device=self.index.device)
        for stored, new in zip(self.tensors, tokens, strict=True):
            stored[:, self.sinks + positions % self.ring] = new

    def scatter_(self, rows: Tensor, columns: Tensor, tokens: list[Tensor]) -> None:
        """Write tokens `(m, ...)` of the sequences `rows` at `columns`."""
        for stored, new in zip(self.tensors, tokens, strict=True):
            stored[rows, columns] = new

    def is_complete(self) -> bool:
        """Tell whether no column is empty."""
        return bool((self.index >= 0).all())

    def reorder_rows(self, rows: Tensor) -> None:
        self.tensors = [x.index_select(0, rows) for x in self.tensors]

    def truncate(self, length: int) -> None:
        """Drop all but the sinks before position `length`."""
        self.index[:, self.sinks :] = -1
        self.index.masked_fill_(self.index >= length, -1)


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
