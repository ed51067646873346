"""Many small computations on a CPU: a few threads for each, rather than all threads for one after the other.

A part of the sparse path is too small for all threads, and what lies between its kernel's calls has one thread anyway.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier, Lock
from typing import Any, TypeVar

import torch

GAIN = 0.8  # so many threads to this power are what a computation gains from them
Item = TypeVar("Item")
Found = TypeVar("Found")


def side_by_side(compute: Callable[[Item], Found], items: Sequence[Item], device: torch.device) -> Iterator[Found]:
    """`compute(item)` without gradients, in the order of `items`: so what is summed of them does not depend on threads.

    To be exhausted: until then this thread has one thread of torch's alone.
    """
    threads = torch.get_num_threads()
    workers = workers_for(len(items), threads) if device.type == "cpu" else 1

    @torch.no_grad()
    def alone(item: Item) -> Found:
        return compute(item)

    if workers == 1:
        yield from map(alone, items)
        return
    pool, pending = pool_of(workers, threads // workers), deque[Future[Found]]()
    torch.set_num_threads(1)  # those that wait for more work would spin
    try:
        for item in items:
            pending.append(pool.submit(alone, item))
            if len(pending) > 2 * workers:  # what is found waits in memory
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        torch.set_num_threads(threads)


class InTurn:
    """What several compute is put where it belongs in the order of its numbers, from 0, by whoever has the next one."""

    def __init__(self, put: Callable[..., None]) -> None:
        self.put, self.lock = put, Lock()
        self.next, self.waiting = 0, dict[int, list[tuple[Any, ...]]]()

    def give(self, number: int, found: list[tuple[Any, ...]]) -> None:
        """`put(*each)` of what was found, at once or when all before it is there."""
        with self.lock:
            self.waiting[number] = found
            while self.next in self.waiting:
                for each in self.waiting.pop(self.next):
                    self.put(*each)
                self.next += 1


def workers_for(items: int, threads: int) -> int:
    """How many computations at a time: all threads are to be busy, each computation with as few as that allows, for
    what lies between its kernel's calls does not gain from more."""
    return min(range(1, max(1, min(items, threads)) + 1), key=lambda w: (-(-items // w) / (threads // w) ** GAIN, -w))


@lru_cache
def pool_of(workers: int, threads: int) -> ThreadPoolExecutor:
    """So many workers, each with so many of torch's threads. All are there when it returns: what they set is global
    in part, and set again by who asked."""
    there = Barrier(workers)

    def start() -> None:
        torch.get_num_threads()  # a thread's first use takes over what is set globally
        torch.set_num_threads(threads)

    pool = ThreadPoolExecutor(workers, "focus", initializer=start)
    for waiting in [pool.submit(there.wait) for _ in range(workers)]:
        waiting.result()
    return pool


os.register_at_fork(after_in_child=pool_of.cache_clear)  # a fork has none of these threads
