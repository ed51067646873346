"""Many small computations on a CPU: a few threads for each, rather than all threads for one after the other.

A part of the sparse path is too small for all threads, and what lies between its kernel's calls has one thread anyway.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier, Lock
from typing import Any, TypeVar

import torch

GAIN = 0.8  # so many threads to this power are what a computation gains from them
Item = TypeVar("Item")
Found = TypeVar("Found")
Held = deque[tuple[Any, ...]]


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


class Stages:
    """What several compute is put where it belongs stage by stage, at once where its stage has come; within a stage in
    any order, for there nothing is put where anything else is."""

    def __init__(self, put: Callable[..., None], stages: Iterable[int]) -> None:
        """`stages`: of all that will be given."""
        self.put, self.lock = put, Lock()
        self.left = Counter(stages)
        self.now, self.waiting = 0, dict[int, list[Held]]()

    def give(self, stage: int, found: Iterable[tuple[Any, ...]]) -> None:
        """`put(*each)` of what is found: at once, or when all of the stages before is there."""
        held: Held = deque()
        for each in found:
            held.append(each)
            if self.now == stage:  # and remains so until this is done
                self.put_all(held)
        with self.lock:
            if self.now != stage:
                self.waiting.setdefault(stage, []).append(held)
                return
        ready = [held]
        while ready:
            for waiting in ready:
                self.put_all(waiting)
            with self.lock:
                self.left[self.now] -= len(ready)
                ready = []
                while self.now <= max(self.left) and not self.left[self.now] and not ready:
                    self.now += 1
                    ready = self.waiting.pop(self.now, [])

    def put_all(self, held: Held) -> None:
        while held:
            self.put(*held.popleft())


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
