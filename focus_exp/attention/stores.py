"""What a cache keeps of its sequences: the sinks and the last tokens in fixed places, all others apart by group."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

LEAST = 64  # tokens that a bucket has room for beyond those that it holds
GROWTH = 4  # and a quarter of those

# the groups of a key, ascending
Kind = tuple[int, ...]


class Near:
    """The sinks of R sequences and their last tokens, as many as a window and the token that sees it.

    keys, values `[R, sinks + n, G, D]`: after the sinks a token stands where its place modulo window + 1 says.
    index `[R, sinks + n]` int: the place of each token in its sequence, -1 where none is.
    members `[R, sinks + n, K]` bool: their groups as keys.
    """

    def __init__(self, k: Tensor, members: Tensor, window: int, sinks: int) -> None:
        """For tokens like those of k `[R, n, G, D]` and members `[R, n, K]`."""
        self.ring, self.sinks = window + 1, sinks
        keys = k.new_zeros(len(k), sinks, *k.shape[2:])
        index = torch.full(keys.shape[:2], -1, device=k.device)
        self.tensors = [keys, keys.clone(), index, members.new_zeros(*index.shape, members.shape[-1])]
        self.complete = False

    @property
    def index(self) -> Tensor:
        return self.tensors[2]

    def put(self, place: int, tokens: list[Tensor]) -> None:
        """The tokens that follow, at most window + 1: k, v `[R, n, G, D]`, index, members, the first at `place`."""
        count = tokens[2].shape[1]
        self.make_room(min(place + count, self.ring))
        first = place % self.ring
        fit = min(count, self.ring - first)
        for held, new in zip(self.tensors, tokens, strict=True):
            held[:, self.sinks + first : self.sinks + first + fit] = new[:, :fit]
            if fit < count:
                held[:, self.sinks : self.sinks + count - fit] = new[:, fit:]

    def put_one(self, place: int, k: Tensor, v: Tensor, members: Tensor | None) -> None:
        """A token `[R, G, D]` of each sequence in the place of one that it does not see; there is room."""
        where = self.sinks + place % self.ring
        keys, values, index, held = self.tensors
        keys[:, where], values[:, where], index[:, where] = k.detach(), v.detach(), place
        if members is not None:
            held[:, where] = members

    def put_apart(self, rows: Tensor, places: Tensor, tokens: list[Tensor]) -> None:
        """Tokens `[m, ...]` of the sequences `rows` at `places` of the tensors."""
        for held, new in zip(self.tensors, tokens, strict=True):
            held[rows, places] = new

    def make_room(self, places: int) -> None:
        held = self.index.shape[1] - self.sinks
        if places > held:
            more = min(max(places, 2 * held), self.ring) - held
            empty = [x.new_full((len(x), more, *x.shape[2:]), -1 if x.ndim == 2 else 0) for x in self.tensors]
            self.tensors = [torch.cat(pair, 1) for pair in zip(self.tensors, empty, strict=True)]

    def is_complete(self) -> bool:
        """Whether no place is empty."""
        if not self.complete and self.index.shape[1] == self.sinks + self.ring:
            self.complete = bool((self.index >= 0).all())
        return self.complete

    def choose(self, rows: Tensor) -> None:
        self.tensors = [x.index_select(0, rows) for x in self.tensors]
        self.complete = False

    def forget(self, length: int) -> None:
        """All but the sinks before place `length`."""
        self.index[:, self.sinks :] = -1
        self.index.masked_fill_(self.index >= length, -1)
        self.complete = False


@dataclass
class Bucket:
    """Where it lies in the pool. recent: the places of its last tokens, at least of those in the window."""

    begin: int = 0
    room: int = 0
    count: int = 0
    recent: deque[int] = field(default_factory=deque)

    @property
    def end(self) -> int:
        return self.begin + self.count

    def before(self, place: int) -> slice:
        """Its tokens before `place`, as rows of the pool; from one call to the next `place` only grows."""
        while self.recent and self.recent[0] < place:
            self.recent.popleft()
        return slice(self.begin, self.end - len(self.recent))


class Pool:
    """All tokens of R sequences but their sinks, a bucket for each sequence and each set of groups that keys have.

    keys, values `[room, G, D]`, index `[room]` int: the place of each token, ascending within a bucket.
    """

    def __init__(self, k: Tensor) -> None:
        """For tokens like those of k `[R, n, G, D]`."""
        keys = k.new_empty(0, *k.shape[2:])
        self.tensors = [keys, keys.clone(), torch.empty(0, dtype=torch.long, device=k.device)]
        self.buckets: list[dict[Kind, Bucket]] = [{} for _ in k]

    def meeting(self, row: int, groups: Iterable[int]) -> list[tuple[Kind, Bucket]]:
        """The buckets of a sequence whose keys are in one of the groups."""
        asked = set(groups)
        return [(kind, bucket) for kind, bucket in self.buckets[row].items() if not asked.isdisjoint(kind)]

    def append(self, tokens: dict[tuple[int, Kind], list[Tensor]], window: int) -> None:
        """k, v `[m, G, D]` and index `[m]`, in order, by sequence and groups."""
        for row, kind in tokens:
            self.buckets[row].setdefault(kind, Bucket())
        counts = {key: new[2].shape[0] for key, new in tokens.items()}  # len() of a tensor takes ten times as long
        if any(self.buckets[r][kind].count + n > self.buckets[r][kind].room for (r, kind), n in counts.items()):
            self.make_room(counts)
        for (row, kind), new in tokens.items():
            bucket, count = self.buckets[row][kind], counts[row, kind]
            added = slice(bucket.end, bucket.end + count)
            for held, x in zip(self.tensors, new, strict=True):
                held[added] = x
            bucket.count += count
            if window:
                bucket.recent.extend(new[2][-window:].tolist() if count > 1 else [int(new[2])])

    def make_room(self, counts: dict[tuple[int, Kind], int]) -> None:
        """Move all buckets to a larger pool, where so many more tokens have room in some."""
        moves, total = [], 0
        for row, buckets in enumerate(self.buckets):
            for kind, bucket in buckets.items():
                needed = bucket.count + counts.get((row, kind), 0)
                moves.append((bucket, total, needed + needed // GROWTH + LEAST))
                total += moves[-1][2]
        old, (keys, values, index) = self.tensors, self.tensors
        # head by head in memory, as they are read
        keys, values = (x.new_empty(x.shape[1], total, x.shape[2]).transpose(0, 1) for x in (keys, values))
        self.tensors = [keys, values, index.new_empty(total)]
        for bucket, begin, room in moves:
            for new, x in zip(self.tensors, old, strict=True):
                new[begin : begin + bucket.count] = x[bucket.begin : bucket.end]
            bucket.begin, bucket.room = begin, room

    def choose(self, rows: list[int]) -> None:
        self.buckets = [
            {kind: Bucket(b.begin, b.room, b.count, b.recent.copy()) for kind, b in self.buckets[row].items()}
            for row in rows
        ]
        self.make_room({})

    def crop(self, length: int, window: int) -> None:
        """Forget the tokens from place `length` on."""
        for buckets in self.buckets:
            for bucket in buckets.values():
                index = self.tensors[2][bucket.begin : bucket.end]
                bucket.count = int(torch.searchsorted(index, length))
                bucket.recent = deque(self.tensors[2][max(bucket.begin, bucket.end - window) : bucket.end].tolist())


def by_bucket(tokens: list[Tensor], real: Tensor | None) -> dict[tuple[int, Kind], list[Tensor]]:
    """The `real` ones of tokens `[R, n, ...]` by sequence and groups, their groups being the last of the tensors."""
    *tokens, members = tokens
    found: dict[tuple[int, Kind], list[Tensor]] = {}
    if members.shape[1] == 1:
        count = members.shape[0]
        groups: list[list[int]] = [[] for _ in range(count)]
        for row, _, group in members.nonzero().tolist():
            groups[row].append(group)
        kept = [True] * count if real is None else real[:, 0].tolist()
        return {(row, tuple(groups[row])): [x[row] for x in tokens] for row in range(count) if kept[row]}
    kinds, kind = members.flatten(0, 1).unique(dim=0, return_inverse=True)
    kind = kind.view(members.shape[:2])
    names = [tuple(x.nonzero()[:, 0].tolist()) for x in kinds]
    for row in range(len(members)):
        for number, name in enumerate(names):
            mine = kind[row] == number
            some = (mine if real is None else mine & real[row]).nonzero()[:, 0]
            if len(some):
                found[row, name] = [x[row, some] for x in tokens]
    return found
