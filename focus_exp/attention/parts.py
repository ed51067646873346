"""The kept pairs of hard Focus attention as disjoint parts, each some calls of an exact kernel.

They are the union of two sets: same group and causal | other group, within the window. A sink is a key of every group,
which puts its pairs into the first set and takes them out of the second. No call is n x n.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from focus_exp.attention.selection import Selection, Sequence, fold_heads

NEAR_BLOCK = 32  # at least so many queries share a stretch of keys
NEAR_CHUNK = 1024  # queries of one call: what it touches should fit into a cache
SEEN_BLOCK = 768  # queries that meet the keys before them all in one call without a mask
SEEN_LEAST = 128  # keys that such a call pays for
DIAGONAL_BLOCK = 192  # queries of a call with a mask, half of which is wasted
EVERY = slice(None)


@dataclass(frozen=True)
class Stretches:
    """`blocks` stretches of `size` neighbouring rows, each beginning `step` rows after the one before."""

    first: int
    blocks: int
    step: int
    size: int

    def view(self, x: Tensor) -> Tensor:
        """`[n, ...]` -> `[blocks, size, ...]`, overlapping, nothing gathered."""
        stop = self.first + (self.blocks - 1) * self.step + self.size
        return x[self.first : stop].unfold(0, self.size, self.step).movedim(-1, 1)

    def index(self, device: torch.device) -> Tensor:
        """`[blocks * size]`, the rows of the view."""
        begins = self.first + self.step * torch.arange(self.blocks, device=device)
        return (begins[:, None] + torch.arange(self.size, device=device)).flatten()


Rows = Tensor | slice | Stretches


class Call(NamedTuple):
    """Which of a block's queries meet which of a part's keys. drop: `[blocks, t, s]` bool, the pairs not seen."""

    queries: slice
    keys: slice
    drop: Tensor | None


class Block(NamedTuple):
    """Queries as rows of the flattened batch, `t` for each block of keys, and their calls; the first has them all."""

    queries: Tensor | slice
    calls: list[Call]


@dataclass(frozen=True)
class Part:
    """Keys, as rows of the flattened batch `[B * T]`, that are gathered once, and the queries that read them, which are
    laid out as they are asked for.

    stage: parts of a sequence that have queries in common have another one; those of stage 0 have every query.
    gated: it holds the pairs that share a group and are not always visible.
    """

    keys: Rows
    blocks: Iterable[Block]
    stage: int = 0
    gated: bool = False


@dataclass(frozen=True)
class Tokens:
    """A batch of hard selections, flattened.

    query_groups, key_groups: `[B * T, K]` bool, where a sink is a key of every group.
    group: `[B * T]` int where a token is in one group, as query and as key, else None.
    sink: `[B * T]` bool.
    sinks_end: no sink stands there in a row, or after it.
    """

    batch: int
    length: int
    query_groups: Tensor
    key_groups: Tensor
    group: Tensor | None
    valid: Tensor | None
    sink: Tensor
    sinks_end: int

    @staticmethod
    def of(selection: Selection, sequence: Sequence, sinks: int) -> Tokens:
        assert selection.query_groups is not None and selection.key_groups is not None
        batch, length = sequence.start.shape
        valid = None if sequence.valid is None else sequence.valid.flatten()
        sink = (torch.arange(length, device=sequence.start.device) - sequence.start < sinks).flatten()
        sink = sink if valid is None else sink & valid
        group = None if selection.group is None else selection.group.flatten()
        query_groups = selection.query_groups.flatten(0, 1)
        key_groups = selection.key_groups.flatten(0, 1) | sink[:, None]
        lone = ~query_groups.any(1, keepdim=True)
        if bool(lone.any()):  # they see the sinks all the same: these are a group of their own besides
            query_groups, key_groups = torch.cat([query_groups, lone], 1), torch.cat([key_groups, sink[:, None]], 1)
        end = sinks if valid is None else sequence.last_start + sinks
        return Tokens(batch, length, query_groups, key_groups, group, valid, sink, end)

    def members(self, groups: Tensor) -> Iterator[list[Tensor]]:
        """By sequence the rows of each group's members `[B * T, K]` in the order of time, padding left out."""
        groups = groups if self.valid is None else groups & self.valid[:, None]
        split = groups.unflatten(0, (self.batch, self.length)).transpose(1, 2).contiguous()  # [B, K, T]
        place = split.nonzero()
        count = groups.shape[1]
        members = (place[:, 0] * self.length + place[:, 2]).split(split.sum(-1).flatten().tolist())
        return (list(members[first : first + count]) for first in range(0, len(members), count))

    def meet(self, queries: Rows, keys: Rows) -> Tensor:
        """`[blocks, t, s]` bool: in the first set, if the key is not after the query."""
        if self.group is not None:
            same = rows_of(self.group, queries)[..., :, None] == rows_of(self.group, keys)[..., None, :]
            sinks_among = not isinstance(keys, Stretches) or keys.first % self.length < self.sinks_end
            return same | rows_of(self.sink, keys)[..., None, :] if sinks_among else same
        return share(rows_of(self.query_groups, queries), rows_of(self.key_groups, keys))


def share(queries: Tensor, keys: Tensor) -> Tensor:
    """`[..., t, s]` bool: whether memberships `[..., t, K]` and `[..., s, K]` have a group in common."""
    return queries.float() @ keys.float().transpose(-1, -2) > 0


def rows_of(x: Tensor, rows: Rows) -> Tensor:
    """`[n, ...]` -> `[blocks, t, ...]`; a slice and an index are one block."""
    if isinstance(rows, Stretches):
        return rows.view(x)
    return (x[rows] if isinstance(rows, slice) else x.index_select(0, rows))[None]


def parts(tokens: Tokens, window: int) -> Iterator[list[Part]]:
    """By sequence all parts of the kept pairs, each pair once. Those near come first, and have every query once."""
    for row, of_groups in enumerate(group_parts(tokens)):
        yield [*near_parts(tokens, window, row), *of_groups]


def near_parts(tokens: Tokens, window: int, row: int, met: bool = False) -> Iterator[Part]:
    """Pairs in the window that do not meet in a group, by blocks of queries with one stretch of keys each.

    With `met` those that do.
    """
    zero = row * tokens.length
    block = min(max(NEAR_BLOCK, window // 4), tokens.length)
    reach = min(-(-window // block) * block, tokens.length)  # from here on every block's stretch is whole
    blocks = (tokens.length - reach) // block
    chunk = max(NEAR_CHUNK // block, 1)
    for begin in (*range(0, reach, block), *range(reach + blocks * block, tokens.length, block)):
        queries = slice(zero + begin, zero + min(begin + block, tokens.length))
        first = max(queries.start - window, zero)
        yield near_part(tokens, window, queries, Stretches(first, 1, 1, queries.stop - first), met)
    for begin in range(0, blocks, chunk):
        count, start = min(chunk, blocks - begin), zero + reach + begin * block
        keys = Stretches(start - window, count, block, block + window)
        yield near_part(tokens, window, slice(start, start + count * block), keys, met)


def near_part(tokens: Tokens, window: int, queries: slice, keys: Stretches, met: bool) -> Part:
    """One call of `near_parts`: as many blocks of queries as there are stretches of keys."""

    def blocks() -> Iterator[Block]:
        device, size = tokens.query_groups.device, (queries.stop - queries.start) // keys.blocks
        i = queries.start + torch.arange(size, device=device)
        distance = i[:, None] - (keys.first + torch.arange(keys.size, device=device))
        drop = tokens.meet(Stretches(queries.start, keys.blocks, size, size), keys)
        drop = (~drop if met else drop).logical_or_((distance < 0) | (distance > window))  # the same in all blocks
        if tokens.valid is not None:
            drop = drop | ~keys.view(tokens.valid)[:, None, :]
        yield Block(queries, [Call(EVERY, EVERY, drop)])

    return Part(keys, blocks())


def pairs_computed(selection: Selection, sequence: Sequence, window: int, sinks: int) -> float:
    """The pairs of all calls, those that masks drop included, over the causal pairs: what the blocks leave to gain."""
    selection, sequence, _ = fold_heads(selection, sequence)
    tokens = Tokens.of(selection, sequence, sinks)
    rows = torch.arange(tokens.batch * tokens.length, device=tokens.sink.device)
    computed = 0
    for part in chain.from_iterable(parts(tokens, window)):
        keys = rows_of(rows, part.keys)
        for queries, calls in part.blocks:
            asking = rows_of(rows, queries).view(len(keys), -1)
            computed += sum(asking[:, some].numel() * keys[0, seen].numel() for some, seen, _ in calls)
    return computed / (tokens.batch * tokens.length * (tokens.length + 1) // 2)


def group_parts(tokens: Tokens) -> Iterator[list[Part]]:
    """By sequence: queries that reach a group meet the keys in it; a pair that shares several counts in the first.

    Sinks, which are in all groups, are keys of a query's only group, or where it has several a part of their own.
    """
    own = tokens.key_groups & ~tokens.sink[:, None]
    disjoint = tokens.group is not None or int(own.sum(1).max()) < 2
    apart = tokens.group is None and int(tokens.query_groups.sum(1).max()) > 1
    lists = zip(*map(tokens.members, (tokens.query_groups, own, tokens.sink[:, None])), strict=True)
    for row, (asking, asked, (sink,)) in enumerate(lists):
        found = []
        for number, (queries, keys) in enumerate(zip(asking, asked, strict=True)):
            seen = keys if apart else torch.cat([sink, keys])  # in the order of time
            earlier = slice(0, 0 if disjoint else number)
            found.append(Part(seen, staircase(tokens, queries, seen, earlier), 1 + number * apart, gated=True))
        every = slice(row * tokens.length, (row + 1) * tokens.length)
        if apart and len(sink):
            later = sink > torch.arange(every.start, every.stop, device=sink.device)[:, None]
            found.append(Part(sink, [Block(every, [Call(EVERY, EVERY, later[None])])], 1 + len(found), gated=True))
        yield found


def staircase(tokens: Tokens, queries: Tensor, keys: Tensor, earlier: slice) -> Iterator[Block]:
    """Queries and keys in the order of time: what all queries of a block see without a mask, the rest with one.

    Pairs that share one of the `earlier` groups are left out.
    """
    ends = torch.searchsorted(keys, queries, right=True)  # of the keys that a query sees
    stops = ends.tolist()

    def call(rows: slice, seen: slice, drop: Tensor | None, first: int) -> Call:
        if earlier.stop:
            counted = share(tokens.query_groups[queries[rows], earlier], tokens.key_groups[keys[seen], earlier])
            drop = counted if drop is None else drop | counted
        return Call(slice(rows.start - first, rows.stop - first), seen, None if drop is None else drop[None])

    scale = max(1, len(queries) // max(len(keys), 1))  # where keys are few, so that a call meets as many of them
    for first in range(0, len(stops), SEEN_BLOCK * scale):
        rows = slice(first, min(first + SEEN_BLOCK * scale, len(stops)))
        seen = stops[first] if stops[first] >= SEEN_LEAST else 0
        calls = [call(rows, slice(0, seen), None, first)] if seen else []
        for start in range(first, rows.stop, DIAGONAL_BLOCK * scale):
            few = slice(start, min(start + DIAGONAL_BLOCK * scale, rows.stop))
            if (stop := stops[few.stop - 1]) > seen:
                later = torch.arange(seen, stop, device=keys.device) >= ends[few, None]
                if calls:
                    calls.append(call(few, slice(seen, stop), later, first))
                else:
                    yield Block(queries[few], [call(few, slice(seen, stop), later, start)])
        if calls:
            yield Block(queries[rows], calls)
