"""Which keys a query meets in its groups, as lists for kernel B: memberships, a counting sort, offsets.

Nothing waits for the device: sizes follow from the batch's shape and the number of groups a token may have, and what is
in no group stands in a last segment that nobody reads. So a layer can be captured in a CUDA graph, once a first call
outside the capture has tuned the kernels' blocks; on CUDA the layout is compiled as one graph.
The counting sort is torch's stable sort of 16-bit keys, which on CUDA is a radix sort.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from focus_exp.attention.kernels.contract import CannotServe
from focus_exp.attention.selection import Selection, Sequence

MOST_BITS = 63
LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Lists:
    """Tokens of a batch `[n = B * T]` by sequence and group, in the order of time within.

    queries: `[R, n]` int32 tokens; the r-th list has every token once, by the r-th of its groups.
    first, stop: `[R, n]` int32; the query at a place of its list sees `keys[first:stop]`: those of its group that lie
        before its window.
    keys: `[n * S]` int32 slots: token * S + s for the s-th group of a token.
    segments: `[R, n]`, `[n * S]` int, by which the lists are sorted: (sequence, group) * T + time.
    lower: `[R, n]` int64, the query's groups below that of the list, as bits, and bits: `[n]` int64, those of the keys;
        None where two tokens share one group at most.
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
    """What does not depend on q, k and v; see `lists`. begins: `[B]` int32, where the sequences begin.

    tags: `[n]` int32 twice, the groups of queries and of keys, -1 for sinks; where a token is in one group.
    """

    batch: int
    length: int
    groups: int
    lists: Lists
    begins: Tensor
    valid: Tensor | None
    tags: tuple[Tensor, Tensor] | None
    window: int
    sinks: int

    @staticmethod
    def of(selection: Selection, sequence: Sequence, window: int, sinks: int) -> Plan:
        """CannotServe where tokens share several of more groups than there are bits."""
        members = selection.key_groups
        assert members is not None
        groups, several = members.shape[-1], selection.group is None
        if several and groups > MOST_BITS and min(selection.most or (groups, groups)) > 1:
            raise CannotServe(
                f"the Triton kernels take up to {MOST_BITS} groups where keys are in several, not {groups}; "
                "use backend=masked"
            )
        make = compiled() if members.is_cuda and not torch.compiler.is_compiling() else laid_out
        return make(selection, sequence, window, sinks)

    def pairs_in_tiles(self, block: int = 128) -> int:
        """Pairs that the kernels compute in tiles of `block` queries and keys, those that they drop with them."""
        pairs = self.batch * self.length * (self.window + block + 16)
        for first, stop in zip(self.lists.first, self.lists.stop, strict=True):
            ends = ((first.masked_fill(first == stop, LARGEST), LARGEST), (stop.masked_fill(first == stop, 0), 0))
            low, high = (F.pad(x, (0, -len(x) % block), value=value).view(-1, block) for x, value in ends)
            seen = (high.amax(1) - low.amin(1)).clamp(min=0)
            pairs += int(((seen + block - 1) // block).sum()) * block**2
        return pairs


@cache
def compiled() -> Callable[..., Plan]:
    """`laid_out` in about a quarter of the launches."""
    return torch.compile(laid_out, dynamic=True)


def laid_out(selection: Selection, sequence: Sequence, window: int, sinks: int) -> Plan:
    """The plan, of operations that wait for nothing."""
    members, asked, tags = selection.key_groups, selection.query_groups, None
    assert members is not None and asked is not None
    batch, length, groups = members.shape
    start, valid = sequence.start, sequence.valid
    begins = (start if valid is None else start.masked_fill(~valid, length)).amin(1, keepdim=True).int()
    time = torch.arange(length, device=start.device)
    sink = (time >= begins) & (time < begins + sinks)
    outside = (sink if valid is None else sink | ~valid)[..., None]
    if selection.group is not None:
        tags = (selection.group.flatten().int(), selection.group.masked_fill(sink, -1).flatten().int())
        key_ids = query_ids = selection.group[..., None].masked_fill(outside, groups)
    else:
        most = selection.most or (groups, groups)
        ids = (group_ids(asked, most[0]), group_ids(members, most[1]))
        query_ids, key_ids = (x.masked_fill(outside, groups) for x in ids)
    found = lists(query_ids, key_ids, groups, length, window)
    real_tokens = None if valid is None else valid.flatten().to(torch.uint8)
    return Plan(batch, length, groups, found, begins[:, 0], real_tokens, tags, window, sinks)


def group_ids(members: Tensor, most: int) -> Tensor:
    """`[B, T, most]` int, the groups of memberships `[B, T, K]`, ascending, then K for none."""
    groups = members.shape[-1]
    return groups - (members * torch.arange(groups, 0, -1, device=members.device)).topk(most).values


def lists(query_ids: Tensor, key_ids: Tensor, groups: int, length: int, window: int) -> Lists:
    """Of the groups `[B, T, R]` that queries ask and those `[B, T, S]` that keys are in; `groups` stands for none."""
    batch, _, slots = key_ids.shape
    sequence = torch.arange(batch, device=key_ids.device)[:, None, None] * (groups + 1)
    segments = batch * (groups + 1)
    narrow = torch.int16 if segments < 2**15 else torch.int32
    wide = torch.int32 if segments * length < 2**31 else torch.int64
    member, keys = (sequence + key_ids).flatten().to(narrow).sort(stable=True)
    by_key = member.to(wide) * length + (keys // slots % length).to(wide)
    asked, queries, by_query = member[None], keys[None], by_key[None]
    if query_ids is not key_ids or slots > 1:
        asked, queries = (sequence + query_ids).permute(2, 0, 1).flatten(1).to(narrow).contiguous().sort(stable=True)
        by_query = asked.to(wide) * length + (queries % length).to(wide)
    begin = by_query - by_query % length
    first = torch.searchsorted(by_key, begin, out_int32=True)
    stop = torch.searchsorted(by_key, torch.maximum(begin, by_query - window), out_int32=True)
    lower = bits = None
    if slots > 1 and len(queries) > 1:
        bits, below = bits_of(key_ids, groups), bits_of(query_ids, groups)
        lower = below[queries] & ((1 << (asked.long() % (groups + 1))) - 1)
    stop = torch.where(asked % (groups + 1) == groups, first, stop)
    return Lists(queries.int(), first, stop, keys.int(), (by_query, by_key), lower, bits)


def bits_of(ids: Tensor, groups: int) -> Tensor:
    """`[n]` int64 with a bit for every group of `ids` `[B, T, S]`."""
    return ((ids < groups).long() << ids).sum(-1).flatten()


def seen_by(found: Lists, groups: int, length: int, window: int) -> tuple[Tensor, Tensor]:
    """`[R, n * S]` int32 twice: the key at a place of its list is seen by `queries[r, first:stop]`."""
    by_query, by_key = found.segments
    begin = by_key - by_key % length
    end = begin + length
    values = (torch.minimum(by_key + window + 1, end), end)
    first, stop = (
        torch.searchsorted(by_query, x.expand(len(by_query), -1).contiguous(), out_int32=True) for x in values
    )
    return first, torch.where(by_key // length % (groups + 1) == groups, first, stop)
