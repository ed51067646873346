"""What a cache keeps of a sequence: growing stores of keys and values, apart by group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST = 64  # tokens that a store makes room for at first
GROWTH = 4  # then by a quarter of what it holds


class Store:
    """Tokens in order of arrival, appended in amortised constant time.

    keys, values `[G, n, D]`; index `[n]`, each token's place in its sequence; members `[n, K]` bool, its groups as key.
    """

    def __init__(self, keys: Tensor, values: Tensor, index: Tensor, members: Tensor) -> None:
        self.count = index.shape[0]
        self.parts = [keys, values, index, members]

    @property
    def keys(self) -> Tensor:
        return self.parts[0][:, : self.count]

    @property
    def values(self) -> Tensor:
        return self.parts[1][:, : self.count]

    @property
    def index(self) -> Tensor:
        return self.parts[2][: self.count]

    @property
    def members(self) -> Tensor:
        return self.parts[3][: self.count]

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.keys, self.values, self.index, self.members

    @property
    def bytes(self) -> int:
        """What it holds, the room for tokens to come included."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    def append(self, *tokens: Tensor) -> None:
        count = self.count + tokens[2].shape[0]
        room = self.parts[2].shape[0]
        if count > room:
            self.make_room(max(count, room + max(LEAST, room // GROWTH)))
        for part, new in zip(self.parts, tokens, strict=True):
            (part[:, self.count : count] if part.ndim == 3 else part[self.count : count]).copy_(new)
        self.count = count

    def make_room(self, room: int) -> None:
        for number, held in enumerate(self.tokens):
            dimension = 1 if held.ndim == 3 else 0
            size = list(held.shape)
            size[dimension] = room
            grown = held.new_empty(size)
            grown.narrow(dimension, 0, self.count).copy_(held)
            self.parts[number] = grown

    def last(self, count: int) -> Store:
        """A view of the last `count` tokens."""
        return self.taken(slice(max(0, self.count - count), self.count))

    def before(self, place: int) -> Store:
        """A view of the tokens before `place`."""
        return self.taken(slice(0, int(torch.searchsorted(self.index, place))))

    def after(self, place: int) -> Store:
        """A view of the tokens from `place` on."""
        return self.taken(slice(int(torch.searchsorted(self.index, place)), self.count))

    def taken(self, rows: Tensor | slice) -> Store:
        keys, values, index, members = self.tokens
        return Store(keys[:, rows], values[:, rows], index[rows], members[rows])

    def copy(self) -> Store:
        return Store(*(part.clone() for part in self.tokens))

    def crop(self, length: int) -> None:
        """Forget the tokens from place `length` on."""
        self.count = int(torch.searchsorted(self.index, length))


class Recent(Store):
    """The last `window` tokens, together in memory; what is older is dropped now and then."""

    def __init__(self, window: int, *tokens: Tensor) -> None:
        super().__init__(*tokens)
        self.window = window
        self.shorten()

    def append(self, *tokens: Tensor) -> None:
        if self.count + tokens[2].shape[0] > self.parts[2].shape[0] and self.count > self.window:
            self.shorten()
            self.make_room(2 * self.window + LEAST)
        super().append(*tokens)

    def shorten(self) -> None:
        kept = self.last(self.window)
        self.parts, self.count = [part.clone() for part in kept.tokens], kept.count

    def copy(self) -> Recent:
        return Recent(self.window, *self.tokens)


def joined(stores: list[Store]) -> Store:
    """All their tokens, one store after the other."""
    keys, values, index, members = (list(parts) for parts in zip(*(store.tokens for store in stores), strict=True))
    return Store(torch.cat(keys, 1), torch.cat(values, 1), torch.cat(index), torch.cat(members))


@dataclass
class CachedSequence:
    """One sequence of a batch: its sinks, its last tokens, and all tokens but the sinks by their groups as keys.

    A token lies in one bucket, that of exactly its groups; a query reads the buckets that meet its own groups.
    """

    sinks: Store
    recent: Recent
    buckets: dict[tuple[bool, ...], Store]

    @staticmethod
    def empty(keys: Tensor, members: Tensor, window: int) -> CachedSequence:
        """For tokens like those of `keys` `[G, n, D]` and `members` `[n, K]`."""
        none = slice(0, 0)
        index = torch.empty(0, dtype=torch.long, device=keys.device)
        nothing = (keys[:, none], keys[:, none], index, members[none])
        return CachedSequence(Store(*(x.clone() for x in nothing)), Recent(window, *nothing), {})

    @property
    def stores(self) -> list[Store]:
        return [self.sinks, self.recent, *self.buckets.values()]

    def append(self, tokens: Store) -> None:
        """Add tokens in order, none of them a sink."""
        self.recent.append(*tokens.last(self.recent.window).tokens)
        if tokens.count == 1:
            self.put(tokens)
            return
        kinds, kind = tokens.members.unique(dim=0, return_inverse=True)
        for number in range(len(kinds)):
            self.put(tokens.taken((kind == number).nonzero()[:, 0]))

    def put(self, tokens: Store) -> None:
        """Add tokens of the same groups."""
        key = tuple(tokens.members[0].tolist())
        if key in self.buckets:
            self.buckets[key].append(*tokens.tokens)
        else:
            self.buckets[key] = tokens.copy()

    def crop(self, length: int) -> None:
        """Forget the tokens from place `length` on; the recent ones are then found in the buckets again."""
        for store in [self.sinks, *self.buckets.values()]:
            store.crop(length)
        window = self.recent.window
        if self.buckets:
            tails = joined([bucket.last(window) for bucket in self.buckets.values()])
            order = tails.index.argsort()
            self.recent = Recent(window, *tails.taken(order[len(order) - min(window, len(order)) :]).tokens)

    def copy(self) -> CachedSequence:
        buckets = {key: bucket.copy() for key, bucket in self.buckets.items()}
        return CachedSequence(self.sinks.copy(), self.recent.copy(), buckets)
