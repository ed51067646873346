"""The kept pairs of hard Focus attention as disjoint parts, each one call of an exact kernel.

They are the union of two sets: same group and causal | other group, within the window. A sink is a key of every group,
which puts its pairs into the first set and takes them out of the second. No part is n x n.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from focus_exp.attention.kernels import Kernel, Math, Meeting
from focus_exp.attention.selection import Selection, Sequence

NEAR_BLOCK = 32  # at least so many queries share a stretch of keys
NEAR_CHUNK = 1024  # queries of one call: what it touches should fit into a cache
STAIRCASE_BLOCK = 256
FORBIDDEN = 1e4  # what a score of two marked tokens loses: exp(-1e4) is 0 in every float


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


@dataclass(frozen=True)
class Part:
    """One kernel call on rows of the flattened batch `[B * T]`.

    queries, keys: whose q, and whose k and v.
    targets: where the results go if not to `queries`; row B * T takes those that nobody wants.
    fresh: no earlier part had these targets, so there is nothing to merge with.
    marks: coordinates `[blocks, t, M]`, `[blocks, s, M]` appended to q and k, whose product takes pairs out.
    gated: it holds the pairs that share a group and are not always visible.
    """

    queries: Tensor | slice
    keys: Rows
    meeting: Meeting
    kernel: Kernel
    targets: Tensor | None = None
    fresh: bool = False
    marks: tuple[Tensor, Tensor] | None = None
    gated: bool = False


@dataclass(frozen=True)
class Tokens:
    """A batch of hard selections, flattened.

    query_groups, key_groups: `[B * T, K]` bool, where a sink is a key of every group.
    group: `[B * T]` int where every token is in one group, else None.
    sink: `[B * T]` bool.
    sinks: how many of them a sequence has at most.
    sinks_end: no sink stands there in a row, or after it.
    """

    batch: int
    length: int
    query_groups: Tensor
    key_groups: Tensor
    group: Tensor | None
    valid: Tensor | None
    sink: Tensor
    sinks: int
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
        end = sinks if valid is None else int(sequence.start.max()) + sinks
        return Tokens(batch, length, query_groups, key_groups, group, valid, sink, sinks, end)

    @property
    def groups(self) -> int:
        return self.query_groups.shape[-1]

    @cached_property
    def segments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows sorted by sequence and group, where their results go, and the segments' lengths `[B * K]`.

        Within a segment tokens keep their order in time. A sink stands in all of them; elsewhere than in its own its
        results are nobody's.
        """
        assert self.group is not None
        device, rows, groups = self.group.device, self.batch * self.length, self.groups
        index = torch.arange(rows, device=device)
        if self.valid is None:
            split = index.view(self.batch, self.length)
            sinks, others = split[:, : self.sinks].flatten(), split[:, self.sinks :].flatten()
        else:
            sinks, others = index[self.sink], index[self.valid & ~self.sink]
        every = torch.arange(groups, device=device)
        # sinks come first, so that a stable sort leaves every segment in the order of time
        own = self.group[sinks][:, None] == every
        source = torch.cat([sinks.repeat_interleave(groups), others])
        target = torch.cat([torch.where(own, sinks[:, None], rows).flatten(), others])
        member = torch.cat([every.repeat(len(sinks)), self.group[others]])
        segment = (source // self.length * groups + member).to(torch.int32)
        order = segment.argsort(stable=True)
        return source[order], target[order], torch.bincount(segment, minlength=self.batch * groups)

    def meet(self, queries: Rows, keys: Rows) -> Tensor:
        """`[blocks, t, s]` bool: in the first set, if the key is not after the query."""
        if self.group is not None:
            same = rows_of(self.group, queries)[..., :, None] == rows_of(self.group, keys)[..., None, :]
            sinks_among = not isinstance(keys, Stretches) or keys.first % self.length < self.sinks_end
            return same | rows_of(self.sink, keys)[..., None, :] if sinks_among else same
        a, b = rows_of(self.query_groups, queries).float(), rows_of(self.key_groups, keys).float()
        return a @ b.transpose(-1, -2) > 0


def rows_of(x: Tensor, rows: Rows) -> Tensor:
    """`[n, ...]` -> `[blocks, t, ...]`; a slice and an index are one block."""
    if isinstance(rows, Stretches):
        return rows.view(x)
    return (x[rows] if isinstance(rows, slice) else x.index_select(0, rows))[None]


def parts(tokens: Tokens, kernel: Kernel, window: int, scaling: float, softcap: float | None = None) -> Iterator[Part]:
    """All parts of the kept pairs, each pair once; of the same targets the `fresh` one first."""
    if kernel.takes == "predicate":
        yield whole_part(tokens, kernel, window)
        return
    with_bias = kernel if kernel.takes == "blocks" else Math()
    if tokens.group is not None:
        yield from same_group_parts(tokens, kernel)
    else:
        yield from staircase_parts(tokens, with_bias)
    if kernel.takes == "blocks" or softcap is not None:  # a softcap would lift the marked pairs back up
        yield from near_parts(tokens, with_bias, window)
    else:
        yield window_part(tokens, kernel, window, scaling)


def same_group_parts(tokens: Tokens, kernel: Kernel) -> Iterator[Part]:
    """Groups as causal segments."""
    source, target, lengths = tokens.segments
    if kernel.takes == "segments":
        yield Part(source, source, Meeting(lengths=lengths), kernel, targets=target, fresh=True, gated=True)
        return
    sizes = lengths.tolist()
    for queries, targets in zip(source.split(sizes), target.split(sizes), strict=True):
        if len(queries):  # one at a time: less memory, and the CPU has no variable-length call
            meeting = Meeting(lengths=torch.tensor([len(queries)]))
            yield Part(queries, queries, meeting, kernel, targets=targets, fresh=True, gated=True)


def staircase_parts(tokens: Tokens, kernel: Kernel) -> Iterator[Part]:
    """Queries that reach a group meet the keys that are in it; a pair that shares several groups counts in the first.

    Causal order is that of the original positions: the keys of a block of queries end where its last query stands.
    """
    row = torch.arange(tokens.batch * tokens.length, device=tokens.query_groups.device) // tokens.length
    for b in range(tokens.batch):
        here = row == b if tokens.valid is None else (row == b) & tokens.valid
        for g in range(tokens.groups):
            queries = (here & tokens.query_groups[:, g]).nonzero()[:, 0]
            keys = (here & tokens.key_groups[:, g]).nonzero()[:, 0]
            for block in queries.split(STAIRCASE_BLOCK):
                seen = keys[: int(torch.searchsorted(keys, block[-1], right=True))] if len(block) else keys[:0]
                if len(seen):
                    counted = tokens.query_groups[block, :g].float() @ tokens.key_groups[seen, :g].float().T > 0
                    drop = (seen > block[:, None]) | counted
                    yield Part(run_of(block), seen, Meeting(drop=drop[None]), kernel, fresh=g == 0, gated=True)


def run_of(rows: Tensor) -> Tensor | slice:
    """Rows without a gap as a slice, which nothing has to be gathered for."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def near_parts(tokens: Tokens, kernel: Kernel, window: int, met: bool = False) -> Iterator[Part]:
    """Pairs in the window that do not meet in a group, by blocks of queries with one stretch of keys each.

    With `met` those that do.
    """
    block = min(max(NEAR_BLOCK, window // 4), tokens.length)
    reach = min(-(-window // block) * block, tokens.length)  # from here on every block's stretch is whole
    blocks = (tokens.length - reach) // block
    chunk = max(NEAR_CHUNK // block, 1)
    for row in range(0, tokens.batch * tokens.length, tokens.length):
        for begin in (*range(0, reach, block), *range(reach + blocks * block, tokens.length, block)):
            queries = slice(row + begin, row + min(begin + block, tokens.length))
            first = max(queries.start - window, row)
            yield near_part(tokens, kernel, window, queries, Stretches(first, 1, 1, queries.stop - first), met)
        for begin in range(0, blocks, chunk):
            count, start = min(chunk, blocks - begin), row + reach + begin * block
            keys = Stretches(start - window, count, block, block + window)
            yield near_part(tokens, kernel, window, slice(start, start + count * block), keys, met)


def near_part(tokens: Tokens, kernel: Kernel, window: int, queries: slice, keys: Stretches, met: bool) -> Part:
    """One call of `near_parts`: as many blocks of queries as there are stretches of keys."""
    device, size = tokens.query_groups.device, (queries.stop - queries.start) // keys.blocks
    i = queries.start + torch.arange(size, device=device)
    distance = i[:, None] - (keys.first + torch.arange(keys.size, device=device))
    outside = ((distance < 0) | (distance > window))[None]  # the same in all blocks
    meet = tokens.meet(Stretches(queries.start, keys.blocks, size, size), keys)
    drop = outside | (~meet if met else meet)
    if tokens.valid is not None:
        drop = drop | ~keys.view(tokens.valid)[:, None, :]
    return Part(queries, keys, Meeting(drop=drop), kernel)


def ungated_parts(tokens: Tokens, kernel: Kernel, window: int) -> Iterator[Part]:
    """What the gated parts hold beside the gated pairs: those in the window."""
    with_bias = kernel if kernel.takes == "blocks" else Math()
    yield from near_parts(tokens, with_bias, window, met=True)
    if kernel.takes == "predicate":
        yield from near_parts(tokens, with_bias, window)


def window_part(tokens: Tokens, kernel: Kernel, window: int, scaling: float) -> Part:
    """The window by a standard windowed call: group coordinates with a large negative product take pairs out."""
    index = torch.arange(tokens.batch * tokens.length, device=tokens.query_groups.device)
    lengths = torch.full((tokens.batch,), tokens.length, device=index.device)
    queries, keys = tokens.query_groups, tokens.key_groups
    if tokens.valid is not None:
        # padding stays where it is, for the window counts places; as a key it is in one more group, that all ask
        queries = torch.cat([queries, torch.ones_like(queries[:, :1])], 1)
        keys = torch.cat([keys, ~tokens.valid[:, None]], 1)
    size = (FORBIDDEN / scaling) ** 0.5
    marks = (queries[None] * size, keys[None] * -size)
    return Part(index, index, Meeting(lengths=lengths, window=window), kernel, marks=marks)


def whole_part(tokens: Tokens, kernel: Kernel, window: int) -> Part:
    """All kept pairs by one predicate, tokens sorted by group so that those of one group stand in few blocks."""
    index = torch.arange(tokens.batch * tokens.length, device=tokens.query_groups.device)
    if tokens.valid is not None:
        index = index[tokens.valid]
    first = tokens.query_groups[index].to(torch.int16).argmax(1)
    index = index[(index // tokens.length * tokens.groups + first).argsort(stable=True)]
    row, bits = index // tokens.length, 2 ** torch.arange(tokens.groups, device=index.device)
    reached, member = ((x[index] * bits).sum(1) for x in (tokens.query_groups, tokens.key_groups))

    def keep(i: Tensor, j: Tensor) -> Tensor:
        distance = index[i] - index[j]
        seen = (row[i] == row[j]) & (distance >= 0)
        return seen & ((distance <= window) | (reached[i] & member[j] != 0))

    return Part(index, index, Meeting(keep=keep), kernel, fresh=True, gated=True)
