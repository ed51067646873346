"""Computations that share the threads of a CPU: the same numbers in the same order, and nothing left behind."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from focus_exp.attention.side_by_side import Stages, side_by_side, workers_for

CPU = torch.device("cpu")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


def test_what_is_found_comes_in_the_order_of_the_items():
    def slow_at_first(item: int) -> int:
        time.sleep(0.02 if item % 3 == 0 else 0)
        return item**2

    with threads(3):
        assert list(side_by_side(slow_at_first, range(20), CPU)) == [item**2 for item in range(20)]


def test_several_threads_of_one_each_without_gradients():
    weight = torch.ones(3, requires_grad=True)
    met = threading.Barrier(2)

    def seen(_: int) -> tuple[str, int, bool]:
        met.wait(timeout=10)  # only if two are there at once
        return threading.current_thread().name, torch.get_num_threads(), (2 * weight).requires_grad

    with threads(2):
        found = list(side_by_side(seen, range(4), CPU))
    assert len({name for name, _, _ in found}) == 2
    assert {(count, graded) for _, count, graded in found} == {(1, False)}


def test_one_thread_or_another_device_is_this_thread_alone():
    def here(_: int) -> str:
        return threading.current_thread().name

    with threads(1):
        assert set(side_by_side(here, range(3), CPU)) == {threading.current_thread().name}
    with threads(2):
        assert set(side_by_side(here, range(3), torch.device("meta"))) == {threading.current_thread().name}


def test_an_error_is_raised_where_its_turn_is_and_the_threads_are_as_before():
    def fails(item: int) -> int:
        if item == 2:
            raise ValueError("the third")
        return item

    found = []
    with threads(2):
        with pytest.raises(ValueError, match="the third"):
            for item in side_by_side(fails, range(10), CPU):
                found.append(item)
        assert found == [0, 1]
        assert list(side_by_side(abs, range(3), CPU)) == [0, 1, 2]


@given(st.integers(1, 200), st.integers(1, 64))
def test_more_workers_with_fewer_threads_each_but_never_threads_without_work(items, threads):
    workers = workers_for(items, threads)
    assert 1 <= workers <= max(1, min(items, threads))
    if items >= threads and items % threads == 0:
        assert workers == threads
    if threads % items == 0:
        assert workers == items


def test_where_there_are_fewer_items_than_threads_each_has_several():
    with threads(4):
        assert list(side_by_side(lambda _: torch.get_num_threads(), range(2), CPU)) == [2, 2]


def squares() -> None:
    torch.set_num_threads(2)
    assert list(side_by_side(lambda item: item**2, range(4), CPU)) == [0, 1, 4, 9]


def test_a_forked_process_has_threads_of_its_own():
    with threads(2):
        squares()
    child = multiprocessing.get_context("fork").Process(target=squares)
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 0


def test_an_item_more_does_not_give_all_threads_to_one_computation():
    assert [workers_for(items, 2) for items in (2, 3, 41, 123)] == [2, 1, 2, 2]


@given(st.permutations([0, 0, 1, 1, 1, 2, 4]))
def test_what_is_given_in_any_order_is_put_stage_by_stage(order):
    found = []
    stages = Stages(lambda stage, other: found.append((stage, other)), order)
    for stage in order:
        stages.give(stage, [(stage, 0), (stage, 1)])
    assert [stage for stage, _ in found] == sorted(2 * order)


def test_what_is_given_while_others_compute_is_put_once_and_in_stages():
    found: list[int] = []
    stages = Stages(found.append, [0] * 40 + [1] * 40 + [2] * 40)

    def given(stage: int) -> None:
        stages.give(stage, ((stage,) for _ in range(5) if not time.sleep(0.0001)))

    with threads(4):
        list(side_by_side(given, [0, 1, 2] * 40, CPU))
    assert found == [0] * 200 + [1] * 200 + [2] * 200
