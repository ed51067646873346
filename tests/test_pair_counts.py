"""Counts of kept pairs: those of the masks, without waiting for a GPU again and again."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_assignment, random_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from focus_exp.attention.selection import (
    Selection,
    Sequence,
    always_visible,
    count_pairs,
    count_plain_pairs,
    real_pairs,
    same_group,
    select,
)

WAITS = ("_local_scalar_dense", "nonzero", "unique", "bincount")


class Waits(TorchDispatchMode):
    """How often a GPU would be waited for."""

    count = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        self.count += any(name in str(operation) for name in WAITS)
        return operation(*arguments, **(options or {}))


@st.composite
def selections(draw, batch, length):
    torch.manual_seed(draw(st.integers(0, 10_000)))
    groups = draw(st.integers(1, 6))
    g = random_assignment(draw(st.sampled_from(["spread", "giant", "empty", "tied"])), batch, length, groups)
    if draw(st.booleans()):
        return select(g, draw(st.integers(1, groups)), draw(st.sampled_from(["query_topk", "share"])))
    return Selection(g, *(torch.rand(2, batch, length, groups) < 0.4))


@given(st.integers(1, 2), st.integers(1, 40), st.integers(0, 50), st.integers(0, 5), st.data())
@settings(max_examples=100)
def test_pairs_are_those_of_the_masks(batch, length, window, sinks, data):
    selection = data.draw(selections(batch, length))
    sequence = random_sequence(data.draw(st.sampled_from(["plain", "left", "right", "packed"])), batch, length)
    rows = slice(0, length)
    seen = real_pairs(sequence, rows)
    far = seen & ~always_visible(sequence, rows, length, window, sinks)
    expected = [int(x.sum()) for x in (seen, far, far & same_group(selection, rows, length))]
    counts = count_pairs(selection, sequence, window, sinks, block=16)
    assert [counts.total, counts.distant, counts.distant_kept] == expected


def test_counting_waits_for_a_gpu_once():
    selection, sequence = select(torch.rand(1, 600, 4), 2, "query_topk"), Sequence.plain(1, 600)
    with Waits() as plain:
        count_plain_pairs(selection, sequence, 128, 4)
    with Waits() as padded:
        count_pairs(selection, Sequence(sequence.start, valid=torch.ones(1, 600, dtype=torch.bool)), 128, 4, block=64)
    assert plain.count <= 1 and padded.count <= 1
