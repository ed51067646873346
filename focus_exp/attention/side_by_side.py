"""Many small computations on a CPU: one thread for each, rather than all threads for one after the other.

A part of the sparse path is too small for all threads, and what lies between its kernel's calls has one thread anyway.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier
from typing import TypeVar

import torch

Item = TypeVar("Item")
Found = TypeVar("Found")


def side_by_side(compute: Callable[[Item], Found], items: Iterable[Item], device: torch.device) -> Iterator[Found]:
    """`compute(item)` without gradients, in the order of `items`: so what is summed of them does not depend on threads.

    To be exhausted: until then this thread has one thread of torch's as well.
    """
    threads = torch.get_num_threads()

    @torch.no_grad()
    def alone(item: Item) -> Found:
        return compute(item)

    if device.type != "cpu" or threads == 1:
        yield from map(alone, items)
        return
    pool, pending = pool_of(threads), deque[Future[Found]]()
    torch.set_num_threads(1)  # those that wait for more work would spin
    try:
        for item in items:
            pending.append(pool.submit(alone, item))
            if len(pending) > 2 * threads:  # what is found waits in memory
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        torch.set_num_threads(threads)


@lru_cache
def pool_of(threads: int) -> ThreadPoolExecutor:
    """So many threads, each with one of torch's. They are all there when it returns: what they set is global in part,
    and set again by who asked."""
    there = Barrier(threads)
    pool = ThreadPoolExecutor(threads, "focus", initializer=torch.set_num_threads, initargs=(1,))
    for waiting in [pool.submit(there.wait) for _ in range(threads)]:
        waiting.result()
    return pool


os.register_at_fork(after_in_child=pool_of.cache_clear)  # a fork has none of these threads
