"""Student's t on independent units, seeds as a second level; per-unit losses; how often intervals hold the truth."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from focus_exp.data import SequenceDataset, TokenStream
from focus_exp.errors import UserError
from focus_exp.results.intervals import Estimate, assign_units, combine_seeds, estimate, required_size, student
from focus_exp.results.losses import Losses, read_losses, write_losses

RUNS = 1500
SEEDS = st.integers(0, 10_000)
# three standard errors of a share of RUNS
NOISE = 3 * math.sqrt(0.05 * 0.95 / RUNS)
DOCUMENTS = (28, 40, 22, 26, 20, 14)  # sequences of documents of different lengths


def normal(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.standard_normal(count)


def skewed(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.gamma(2.0, 1.0, count) - 2.0


def coverage(draw: Callable, sequences: tuple[int, ...], shared: float = 0, seeds: int = 1, deviation: float = 0):
    """Return the fraction of intervals that contain 0, the truth.

    Args:
        sequences: of each document, which share a part `shared` of their variance.
        seeds: how many, whose means vary by `deviation` standard errors of the text.
    """
    rng, covered = np.random.default_rng(0), 0
    documents = np.repeat(np.arange(len(sequences)), sequences)
    for _ in range(RUNS):
        own, common = draw(rng, len(documents)), draw(rng, len(sequences))[documents]
        text = np.sqrt(1 - shared) * own + np.sqrt(shared) * common
        moved = rng.standard_normal(seeds) * deviation * text.std() / np.sqrt(len(text))
        low, high = combine_seeds([estimate(text + x, None, documents.tolist()) for x in moved]).bounds
        covered += low <= 0 <= high
    return covered / RUNS


@pytest.mark.parametrize("draw", [normal, skewed])
@pytest.mark.parametrize(("sequences", "shared"), [((1,) * 6, 0), ((1,) * 20, 0), ((6,) * 6, 0.3), (DOCUMENTS, 0.3)])
def test_estimate_intervals_cover_the_truth(draw, sequences, shared):
    # a t of few skewed units is known to hold it less often
    assert (0.91 if draw is skewed else 0.935) - NOISE < coverage(draw, sequences, shared) < 0.98


@pytest.mark.parametrize(("documents", "seeds"), [(12, 3), (6, 2)])
@pytest.mark.parametrize("deviation", [0.5, 6.0])
def test_over_seeds_intervals_cover_the_truth(documents, seeds, deviation):
    # one that weighs the t of few seeds holds it more often
    assert 0.935 - NOISE < coverage(normal, (1,) * documents, 0, seeds, deviation) < 0.99


@given(count=st.integers(3, 12), seed=SEEDS)
def test_estimate_weighted_freedom_is_satterthwaites(count, seed):
    rng = np.random.default_rng(seed)
    x, weights = rng.standard_normal(count), rng.uniform(0.5, 5, count)
    w = weights / weights.sum()
    residual = np.eye(count) - w
    matrix = residual.T @ np.diag(w**2 / (1 - 2 * w + w @ w)) @ residual
    found = estimate(x, weights)
    assert found.value == pytest.approx(np.average(x, weights=weights))
    assert found.stderr == pytest.approx(math.sqrt(x @ matrix @ x))
    assert found.freedom == pytest.approx(np.trace(matrix) ** 2 / np.trace(matrix @ matrix))
    assert found.freedom <= count - 1 + 1e-9


@given(sizes=st.lists(st.integers(1, 5), min_size=3, max_size=8), seed=SEEDS)
def test_estimate_sequences_of_a_document_are_one_unit(sizes, seed):
    rng = np.random.default_rng(seed)
    documents = [str(number) for number, size in enumerate(sizes) for _ in range(size)]
    x, tokens = rng.standard_normal(len(documents)), rng.integers(1, 50, len(documents))
    means, weights = [], []
    for document in dict.fromkeys(documents):
        own = np.array(documents) == document
        means.append(np.average(x[own], weights=tokens[own]))
        weights.append(tokens[own].sum())
    clustered, whole = estimate(x, tokens, documents), estimate(means, weights)
    assert vars(clustered) == pytest.approx(vars(whole))
    order = rng.permutation(len(documents))
    assert vars(estimate(x[order], tokens[order], [documents[i] for i in order])) == pytest.approx(vars(whole))


def test_units_of_few_documents_are_sequences():
    assert assign_units(["a", "b", "a"]).tolist() == [0, 1, 2] and assign_units(["a", "b", "a", "c"]).tolist() == [
        0,
        1,
        0,
        2,
    ]
    assert estimate([1.0, 2.0, 4.0], None, ["a", "a", "b"]) == estimate([1.0, 2.0, 4.0])
    assert estimate([1.0]).bounds == (None, None)


@given(values=st.lists(st.floats(-1, 1), min_size=2, max_size=6), stderr=st.floats(0.001, 1), n=st.integers(3, 60))
def test_over_seeds_keeps_the_error_of_the_text(values, stderr, n):
    found = combine_seeds([Estimate(value, stderr, n - 1) for value in values])
    between = np.var(values, ddof=1) / len(values)
    assert found.value == pytest.approx(np.mean(values)) and found.stderr == pytest.approx(
        math.sqrt(stderr**2 + between)
    )
    assert min(n, len(values)) - 1 - 1e-6 <= found.freedom <= n + len(values)
    same = combine_seeds([Estimate(values[0], stderr, n - 1)] * len(values))
    assert same.bounds == pytest.approx(Estimate(values[0], stderr, n - 1).bounds, abs=1e-9)


def test_over_seeds_without_text_error_is_t_over_seeds():
    found = combine_seeds([Estimate(value) for value in (0.3, 0.4, 0.8)])
    low, high = stats.t.interval(0.95, 2, 0.5, stats.sem([0.3, 0.4, 0.8]))
    assert found.bounds == pytest.approx((low, high))
    assert combine_seeds([Estimate(1.0, 0.1, 5)]) == Estimate(1.0, 0.1, 5)
    assert combine_seeds([Estimate(1.0, 0.1, 5), Estimate(1.0)]).bounds == (None, None)


@pytest.mark.parametrize("several", [1, 4])
def test_needed_units_have_80_percent_power(several):
    count, rng = required_size(2.0, 1.0, several), np.random.default_rng(0)
    x = rng.normal(1.0, 2.0, (4000, count))
    t = x.mean(1) / (x.std(1, ddof=1) / math.sqrt(count))
    assert np.mean(abs(t) > student(count - 1, several)) == pytest.approx(0.8, abs=0.03)


def test_losses_difference_weighs_documents_by_tokens():
    losses = Losses(
        [("a", 0, 10), ("b", 0, 30), ("c", 0, 60)], {"base": np.ones(3), "Focus": np.array([1.1, 1.2, 1.3])}
    )
    assert losses.difference("Focus", losses, "base").value == pytest.approx(0.01 + 0.06 + 0.18)
    assert losses.estimate("Focus").value == pytest.approx(1.25)


@given(seed=SEEDS)
def test_losses_round_trip_through_disk(seed, tmp_path_factory):
    rng, path = np.random.default_rng(seed), tmp_path_factory.mktemp("losses") / "losses.csv"
    units = [('Much Ado, "about"', 0, 9), ("b", 1024, 10), ("c", 3, 10)]
    text = Losses(units, {"base": rng.gamma(2, 2, 3), "Focus": rng.gamma(2, 2, 3)})
    task = Losses([("piqa/1", 0, 1)], {"Focus": np.array([1.0])})
    write_losses(path, {"text": text, "piqa acc": task})
    found = read_losses(path)
    assert list(found) == ["text", "piqa acc"] and found["text"].units == units
    assert list(found["piqa acc"].nll) == ["Focus"]
    for name, nll in text.nll.items():
        np.testing.assert_allclose(found["text"].nll[name], nll, rtol=1e-8)
    with pytest.raises(ValueError, match="same sequences"):
        text.difference("Focus", task, "Focus")
    path.write_text("of,document\ntext,a\n")
    with pytest.raises(UserError, match="losses"):
        read_losses(path)
    assert read_losses(path.with_name("none.csv")) == {}


@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any), count=st.integers(1, 40))
def test_select_evenly_takes_as_many_from_each_document(sizes, count):
    starts = np.cumsum([0, *(4 * size for size in sizes)])
    stream = TokenStream("text", np.zeros(starts[-1], np.int32), starts, [str(i) for i in range(len(sizes))])
    blocks = SequenceDataset(stream, 4, cross_documents=False)
    chosen = blocks.select_evenly(count)
    assert len(chosen) == len(set(chosen)) == min(count, len(blocks)) and chosen == sorted(chosen)
    taken = {name: 0 for name, size in zip(stream.documents, sizes, strict=True) if size}
    for document, offset in blocks.locate(chosen):
        assert offset % 4 == 0
        taken[document] += 1
    most = max(taken.values())
    assert all(n >= min(most - 1, sizes[int(name)]) for name, n in taken.items())
    assert blocks.select_evenly(None) == list(range(len(blocks)))
