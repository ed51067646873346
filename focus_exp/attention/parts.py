"""The kept pairs of hard Focus attention as disjoint parts, each one call of an exact kernel on gathered tokens.

They are the union of three disjoint sets: same group and causal | other group, within the window | other group, a sink
beyond the window. No part is n x n.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from focus_exp.attention.kernels import Kernel, Math, Meeting
from focus_exp.attention.selection import Selection, Sequence

NEAR_BLOCK = 64  # queries that share one gathered stretch of window and sinks
NEAR_CHUNK = 64  # such blocks in one call
STAIRCASE_BLOCK = 256
SINK_CHUNK = 65_536
FORBIDDEN = 1e4  # what a score of two marked tokens loses: exp(-1e4) is 0 in every float


@dataclass(frozen=True)
class Part:
    """One kernel call: which tokens of the flattened batch `[B * T]` are queries and keys, and how they meet.

    queries: their indices, or a slice where they lie together, which needs no gathering.
    fresh: no earlier part had these queries, so there is nothing to merge with.
    marks: coordinates `[n, M]`, `[m, M]` appended to q and k, whose product takes a pair out of a standard kernel.
    """

    queries: Tensor | slice
    keys: Tensor
    meeting: Meeting
    kernel: Kernel
    fresh: bool = False
    marks: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Tokens:
    """A batch of hard selections, flattened. group: `[B * T]` int where every token is in one group, else None."""

    batch: int
    length: int
    sequence: Sequence
    query_groups: Tensor  # [B * T, K] bool
    key_groups: Tensor
    group: Tensor | None

    @staticmethod
    def of(selection: Selection, sequence: Sequence) -> Tokens:
        assert selection.query_groups is not None and selection.key_groups is not None
        batch, length = sequence.start.shape
        query_groups, key_groups = selection.query_groups.flatten(0, 1), selection.key_groups.flatten(0, 1)
        single = bool((query_groups.sum(-1) == 1).all() & (query_groups == key_groups).all())
        group = key_groups.to(torch.int16).argmax(-1) if single else None
        return Tokens(batch, length, sequence, query_groups, key_groups, group)

    @property
    def valid(self) -> Tensor | None:
        return None if self.sequence.valid is None else self.sequence.valid.flatten()

    def meet(self, queries: Tensor, keys: Tensor) -> Tensor:
        """`[..., t, s]` bool: queries `[..., t]` and keys `[..., s]` share a group, hence belong to the first set."""
        if self.group is not None:
            return self.group[queries][..., :, None] == self.group[keys][..., None, :]
        a, b = self.query_groups[queries].float(), self.key_groups[keys].float()
        return a @ b.transpose(-1, -2) > 0


def parts(
    tokens: Tokens, kernel: Kernel, window: int, sinks: int, scaling: float, softcap: float | None = None
) -> Iterator[Part]:
    """All parts of the kept pairs, each pair once."""
    with_bias = kernel if kernel.takes_bias else Math()
    if tokens.group is not None:
        yield from same_group_parts(tokens, kernel)
    else:
        yield from staircase_parts(tokens, with_bias)
    if kernel.takes_bias or softcap is not None:  # a softcap would lift the marked pairs back up
        yield from near_parts(tokens, with_bias, window, sinks)
    else:
        yield window_part(tokens, kernel, window, scaling)
        yield from sink_parts(tokens, window, sinks)


def same_group_parts(tokens: Tokens, kernel: Kernel) -> Iterator[Part]:
    """Groups as causal segments: tokens sorted by sequence and group keep their order in time."""
    assert tokens.group is not None
    groups = tokens.query_groups.shape[-1]
    row = torch.arange(tokens.batch, device=tokens.group.device).repeat_interleave(tokens.length)
    segment = row * groups + tokens.group
    segments = tokens.batch * groups
    if tokens.valid is not None:
        segment = torch.where(tokens.valid, segment, segments)
    order = segment.argsort(stable=True)
    lengths = torch.bincount(segment, minlength=segments)[:segments]
    if tokens.valid is not None:
        order = order[: int(lengths.sum())]
    if not kernel.takes_bias:
        yield Part(order, order, Meeting(lengths=lengths), kernel, fresh=True)
        return
    for index in order.split(lengths.tolist()):
        if len(index):  # one at a time: less memory, and the CPU has no variable-length call
            yield Part(index, index, Meeting(lengths=torch.tensor([len(index)])), kernel, fresh=True)


def staircase_parts(tokens: Tokens, kernel: Kernel) -> Iterator[Part]:
    """Queries that reach a group meet the keys that are in it; a pair that shares several groups counts in the first.

    Causal order is that of the original positions: the keys of a block of queries end where its last query stands.
    """
    row = torch.arange(tokens.batch * tokens.length, device=tokens.query_groups.device) // tokens.length
    for b in range(tokens.batch):
        here = row == b if tokens.valid is None else (row == b) & tokens.valid
        for g in range(tokens.query_groups.shape[-1]):
            queries = (here & tokens.query_groups[:, g]).nonzero()[:, 0]
            keys = (here & tokens.key_groups[:, g]).nonzero()[:, 0]
            for block in queries.split(STAIRCASE_BLOCK):
                seen = keys[: int(torch.searchsorted(keys, block[-1], right=True))] if len(block) else keys[:0]
                if len(seen):
                    counted = tokens.query_groups[block, :g].float() @ tokens.key_groups[seen, :g].float().T > 0
                    keep = (seen <= block[:, None]) & ~counted
                    yield Part(block, seen, Meeting(bias=keep[None]), kernel)


def near_parts(tokens: Tokens, kernel: Kernel, window: int, sinks: int) -> Iterator[Part]:
    """Other groups' tokens in the window and among the sinks, by blocks of queries with one stretch of keys each."""
    device, length = tokens.query_groups.device, tokens.length
    whole = length // NEAR_BLOCK * NEAR_BLOCK
    starts = torch.arange(0, whole, NEAR_BLOCK, device=device)
    calls = [(chunk, NEAR_BLOCK) for chunk in starts.split(NEAR_CHUNK)]
    if length > whole:
        calls.append((torch.tensor([whole], device=device), length - whole))
    for b in range(tokens.batch):
        first = first_token(tokens, b)
        sink = first + torch.arange(sinks, device=device)
        for begins, size in calls:
            if len(begins) == 0:
                continue
            i = begins[:, None] + torch.arange(size, device=device)
            j = begins[:, None] + torch.arange(-window, size, device=device)
            j = torch.cat([sink.expand(len(begins), sinks), j], dim=1)
            # far from the first tokens and without padding, all blocks look alike
            alike = tokens.valid is None and int(begins[0]) > first + sinks + window
            a, c = (i[:1], j[:1]) if alike else (i, j)
            distance = a[:, :, None] - c[:, None, :]
            near = distance <= window
            near[..., :sinks] = distance[..., :sinks] > window
            keep = near & (distance >= 0) & (c >= first)[:, None, :]
            i, j = i + b * length, j.clamp(0, length - 1) + b * length
            if tokens.valid is not None:
                keep = keep & tokens.valid[j][:, None, :]
            keep = keep & ~tokens.meet(i, j)
            yield Part(slice(int(i[0, 0]), int(i[-1, -1]) + 1), j.flatten(), Meeting(bias=keep), kernel)


def window_part(tokens: Tokens, kernel: Kernel, window: int, scaling: float) -> Part:
    """The window by a standard windowed call: group coordinates with a large negative product mark same-group pairs."""
    device = tokens.query_groups.device
    index = torch.arange(tokens.batch * tokens.length, device=device)
    lengths = torch.full((tokens.batch,), tokens.length, device=device)
    if tokens.valid is not None:
        lengths = tokens.valid.view(tokens.batch, -1).sum(-1)
        index = index[tokens.valid]
    size = (FORBIDDEN / scaling) ** 0.5
    marks = (tokens.query_groups[index] * size, tokens.key_groups[index] * -size)
    return Part(index, index, Meeting(lengths=lengths, window=window), kernel, marks=marks)


def sink_parts(tokens: Tokens, window: int, sinks: int) -> Iterator[Part]:
    """Sinks beyond the window: so few keys that plain arithmetic serves every device."""
    device = tokens.query_groups.device
    if not sinks:
        return
    for b in range(tokens.batch):
        first = first_token(tokens, b)
        keys = first + torch.arange(min(sinks, tokens.length - first), device=device)
        for queries in torch.arange(tokens.length, device=device).split(SINK_CHUNK):
            keep = queries[:, None] - keys > window
            if tokens.valid is not None:
                keep = keep & tokens.valid[keys + b * tokens.length]
            i, j = queries + b * tokens.length, keys + b * tokens.length
            yield Part(i, j, Meeting(bias=(keep & ~tokens.meet(i, j))[None]), Math())


def first_token(tokens: Tokens, b: int) -> int:
    """Where the sequence of row `b` begins."""
    valid = tokens.sequence.valid
    if valid is None:
        return int(tokens.sequence.start[b, 0])
    return int(valid[b].long().argmax())
