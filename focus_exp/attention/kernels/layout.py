"""Lists of the keys in each query's groups, for kernel B: memberships, a counting sort, offsets.

Nothing waits for the device: sizes follow from the batch's shape and the maximum number of groups of a token, and
tokens without a group are in a last segment that is never read. So a layer can be captured in a CUDA graph, once a
first call has tuned the kernels' block sizes; on CUDA the layout is compiled as one graph.
The counting sort is torch's stable sort of 16-bit keys, a radix sort on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.kernels.contract import BackendUnsupported
from focus_exp.attention.selection import Selection, Sequence

MAX_SHARED_GROUPS = 63
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class GroupLists:
    """List the tokens of a batch `(n = B * T)` by sequence and group, in order of position.

    Attributes:
        queries: `(R, n)` int32 tokens; the r-th list has every token once, by the r-th of its groups.
        first, stop: `(R, n)` int32; the query at an index of its list reads `keys[first:stop]`, the keys of its group
            before its window.
        keys: `(n * S,)` int32 slots: token * S + s for the s-th group of a token.
        segments: `(R, n)`, `(n * S,)` int, the sort keys of the lists: (sequence, group) * T + position.
        lower: `(R, n)` int64, the query's groups below that of the list, as bits; None where two tokens have at most
            one group in common.
        bits: `(n,)` int64, the keys' groups as bits; None with `lower`.
    """

    queries: Tensor
    first: Tensor
    stop: Tensor
    keys: Tensor
    segments: tuple[Tensor, Tensor]
    lower: Tensor | None
    bits: Tensor | None


@dataclass(frozen=True)
class Plan:
    """Hold what does not depend on q, k and v.

    Attributes:
        begins: `(B,)` int32, where the sequences begin.
        tags: two `(n,)` int32, the groups of queries and of keys, -1 for sinks; where a token is in one group.
    """

    batch: int
    length: int
    groups: int
    lists: GroupLists
    begins: Tensor
    valid: Tensor | None
    tags: tuple[Tensor, Tensor] | None
    window: int
    sinks: int

    @staticmethod
    def of(selection: Selection, sequence: Sequence, window: int, sinks: int) -> Plan:
        """Lay out a selection; BackendUnsupported where tokens share several of more groups than there are bits."""
        members = selection.key_groups
        assert members is not None
        groups = members.shape[-1]
        max_shared = 1 if selection.group is not None else min(selection.max_groups or (groups, groups))
        if groups > MAX_SHARED_GROUPS and max_shared > 1:
            raise BackendUnsupported(
                f"attention.groups must be <= {MAX_SHARED_GROUPS} where keys are in several groups (got {groups}). "
                "Use backend=masked."
            )
        make = compiled() if members.is_cuda and not torch.compiler.is_compiling() else lay_out
        return make(selection, sequence, window, sinks)

    def pairs_in_tiles(self, block: int = 128) -> int:
        """Count the pairs that the kernels compute in tiles of `block` queries and keys, masked ones included."""
        pairs = self.batch * self.length * (self.window + block + 16)
        for first, stop in zip(self.lists.first, self.lists.stop, strict=True):
            ends = ((first.masked_fill(first == stop, INT32_MAX), INT32_MAX), (stop.masked_fill(first == stop, 0), 0))
            low, high = (F.pad(x, (0, -len(x) % block), value=value).view(-1, block) for x, value in ends)
            seen = (high.amax(1) - low.amin(1)).clamp(min=0)
            pairs += int(((seen + block - 1) // block).sum()) * block**2
        return pairs


@cache
def compiled() -> Callable[..., Plan]:
    """Compile `lay_out`, for about a quarter of the launches."""
    return torch.compile(lay_out, dynamic=True)


def lay_out(selection: Selection, sequence: Sequence, window: int, sinks: int) -> Plan:
    """Make the plan without waiting for the device."""
    key_groups, query_groups, tags = selection.key_groups, selection.query_groups, None
    assert key_groups is not None and query_groups is not None
    batch, length, groups = key_groups.shape
    start, valid = sequence.start, sequence.valid
    begins = (start if valid is None else start.masked_fill(~valid, length)).amin(1, keepdim=True).int()
    time = torch.arange(length, device=start.device)
    sink = (time >= begins) & (time < begins + sinks)
    outside = (sink if valid is None else sink | ~valid)[..., None]
    if selection.group is not None:
        tags = (selection.group.flatten().int(), selection.group.masked_fill(sink, -1).flatten().int())
        key_ids = query_ids = selection.group[..., None].masked_fill(outside, groups)
    else:
        max_groups = selection.max_groups or (groups, groups)
        ids = (group_ids(query_groups, max_groups[0]), group_ids(key_groups, max_groups[1]))
        query_ids, key_ids = (x.masked_fill(outside, groups) for x in ids)
    lists = list_groups(query_ids, key_ids, groups, length, window)
    valid = None if valid is None else valid.flatten().to(torch.uint8)
    return Plan(batch, length, groups, lists, begins[:, 0], valid, tags, window, sinks)


def group_ids(members: Tensor, count: int) -> Tensor:
    """Return `(B, T, count)` int, the groups of memberships `(B, T, K)` in ascending order, then K for none."""
    groups = members.shape[-1]
    return groups - (members * torch.arange(groups, 0, -1, device=members.device)).topk(count).values


def list_groups(query_ids: Tensor, key_ids: Tensor, groups: int, length: int, window: int) -> GroupLists:
    """List tokens by the groups `(B, T, R)` of queries and `(B, T, S)` of keys, where `groups` means none."""
    batch, _, slots = key_ids.shape
    sequence = torch.arange(batch, device=key_ids.device)[:, None, None] * (groups + 1)
    segments = batch * (groups + 1)
    narrow = torch.int16 if segments < 2**15 else torch.int32
    wide = torch.int32 if segments * length < 2**31 else torch.int64
    member, keys = (sequence + key_ids).flatten().to(narrow).sort(stable=True)
    by_key = member.to(wide) * length + (keys // slots % length).to(wide)
    read, queries, by_query = member[None], keys[None], by_key[None]
    if query_ids is not key_ids or slots > 1:
        read, queries = (sequence + query_ids).permute(2, 0, 1).flatten(1).to(narrow).contiguous().sort(stable=True)
        by_query = read.to(wide) * length + (queries % length).to(wide)
    begin = by_query - by_query % length
    first = torch.searchsorted(by_key, begin, out_int32=True)
    stop = torch.searchsorted(by_key, torch.maximum(begin, by_query - window), out_int32=True)
    lower = bits = None
    if slots > 1 and len(queries) > 1:
        bits, below = group_bits(key_ids, groups), group_bits(query_ids, groups)
        lower = below[queries] & ((1 << (read.long() % (groups + 1))) - 1)
    stop = torch.where(read % (groups + 1) == groups, first, stop)
    return GroupLists(queries.int(), first, stop, keys.int(), (by_query, by_key), lower, bits)


def group_bits(ids: Tensor, groups: int) -> Tensor:
    """Return `(n,)` int64 with a bit for every group of `ids` `(B, T, S)`."""
    return ((ids < groups).long() << ids).sum(-1).flatten()


def query_ranges(lists: GroupLists, groups: int, length: int, window: int) -> tuple[Tensor, Tensor]:
    """Return first and stop `(R, n * S)` int32: the key at an index of its list is read by `queries[r, first:stop]`."""
    by_query, by_key = lists.segments
    begin = by_key - by_key % length
    end = begin + length
    values = (torch.minimum(by_key + window + 1, end), end)
    first, stop = (
        torch.searchsorted(by_query, x.expand(len(by_query), -1).contiguous(), out_int32=True) for x in values
    )
    return first, torch.where(by_key // length % (groups + 1) == groups, first, stop)
