"""Perplexity is every token's float32 loss, each token the same weight; intervals and bins are what they say."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import build
from hypothesis import given, settings
from hypothesis import strategies as st

from focus_exp import attach, disable_method, set_routing
from focus_exp.data import Blocks, TokenStream
from focus_exp.evaluation import perplexity
from focus_exp.evaluation.perplexity import score, token_losses
from focus_exp.evaluation.statistics import BINS, by_position, mean, window_means, window_sums
from focus_exp.training.precision import choose_precision

BOS = 256
FLOAT32 = choose_precision("float32", "cpu", trains_base=False)
SEEDS = st.integers(0, 10_000)


def random_stream(lengths: list[int], seed: int = 0) -> TokenStream:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.random.default_rng(seed).integers(0, 256, starts[-1], dtype=np.int32)
    return TokenStream("stream", tokens, starts, [str(i) for i in range(len(lengths))])


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return build("tiny_llama")


def losses_of(model, blocks, batch_size=4):
    return score(model, blocks, list(range(len(blocks))), batch_size, FLOAT32, "row")


def random_losses(windows: int, length: int, seed: int) -> np.ndarray:
    """Losses of which about a third are not scored, but one in every window is."""
    rng = np.random.default_rng(seed)
    nll = rng.gamma(2.0, 2.0, (windows, length)).astype(np.float32)
    nll[rng.random(nll.shape) < 0.3] = np.nan
    nll[:, -1] = 1.0
    return nll


@given(stride=st.integers(1, 15), with_bos=st.booleans(), batch_size=st.integers(1, 5), seed=SEEDS)
@settings(max_examples=12)
def test_each_token_is_scored_once_by_the_cross_entropy_given_its_window_so_far(
    tiny, stride, with_bos, batch_size, seed
):
    stream = random_stream([40, 5, 23], seed)
    blocks = Blocks(stream, 16, stride=stride, bos=BOS if with_bos else None, cross_documents=False)
    nll = losses_of(tiny, blocks, batch_size).nll
    expected, scored = np.full(nll.shape, np.nan), []
    for index, start in enumerate(blocks.starts):
        window = torch.tensor([BOS] * with_bos + stream.tokens[start : start + 16 - with_bos].tolist())
        with torch.no_grad():
            logits = tiny(window[None]).logits[0].double()
        for position in range(1, 16):
            token = start + position - with_bos
            if token not in scored:  # a later window scores only what the windows before it did not
                scored.append(token)
                expected[index, position] = F.cross_entropy(logits[position - 1], window[position])
    np.testing.assert_allclose(nll, expected, rtol=0, atol=1e-5)
    assert nll.dtype == np.float32


@pytest.mark.parametrize("batch_size", [2, 3, 7, 100])
def test_the_batch_size_changes_neither_losses_nor_counts(tiny_model, batch_size):
    model = set_routing(attach(tiny_model("llama"), "focus", window=4, sinks=2), hard=True)
    blocks = Blocks(random_stream([400]), 32, stride=20, cross_documents=True)
    one, many = losses_of(model, blocks, 1), losses_of(model, blocks, batch_size)
    np.testing.assert_allclose(many.nll, one.nll, rtol=0, atol=1e-5)
    assert (one.pairs.total, one.pairs.distant) == (many.pairs.total, many.pairs.distant)
    assert one.pairs.kept == pytest.approx(many.pairs.kept, abs=1e-3)


def test_no_pairs_are_counted_without_a_method_or_with_it_off(tiny_model):
    model, blocks = tiny_model("llama"), Blocks(random_stream([64]), 32, cross_documents=True)
    base = losses_of(model, blocks)
    attach(model, "window", window=4, sinks=0)
    with disable_method(model):
        off = losses_of(model, blocks)
    assert base.pairs is None and off.pairs is None
    np.testing.assert_allclose(off.nll, base.nll, rtol=0, atol=1e-5)
    assert losses_of(model, blocks).pairs.kept == 0


@pytest.mark.parametrize("rows", [1, 3, 8, 22, 23, 24])
def test_logits_taken_in_chunks_give_the_same_losses(tiny, monkeypatch, rows):
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = token_losses(tiny, tokens)
        monkeypatch.setattr(perplexity, "LOGIT_ROWS", rows)
        torch.testing.assert_close(token_losses(tiny, tokens), whole, rtol=0, atol=1e-6)
    assert (whole[:, 1:] > 0).all()


def test_losses_of_a_bf16_model_are_computed_in_float32(tiny_model):
    model = tiny_model("llama", dtype=torch.bfloat16)
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, losses = model(tokens).logits[:, :-1], token_losses(model, tokens)[:, 1:]
    assert logits.dtype == torch.bfloat16 and losses.dtype == torch.float32
    exact = F.cross_entropy(logits.double().transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(losses.double(), exact, rtol=0, atol=1e-5)


def test_a_loss_that_is_not_finite_is_an_error_and_no_hole_in_the_scores(tiny_model):
    model, stream = tiny_model("llama"), random_stream([64])
    with torch.no_grad():
        model.get_input_embeddings().weight[stream.tokens[40]] = float("nan")
    with pytest.raises(RuntimeError, match="a loss is not finite"):
        losses_of(model, Blocks(stream, 32, cross_documents=True))


@given(windows=st.integers(1, 6), length=st.integers(1, 40), seed=SEEDS)
def test_the_mean_gives_every_scored_token_the_same_weight(windows, length, seed):
    nll = random_losses(windows, length, seed)
    sums, counts = window_sums(nll)
    assert mean(nll) == pytest.approx(np.nanmean(nll.astype(np.float64)))
    assert counts.sum() == np.isfinite(nll).sum()
    assert np.average(window_means(nll), weights=counts) == pytest.approx(mean(nll))
    assert sums.dtype == np.float64 and sums.sum() == pytest.approx(mean(nll) * counts.sum())


def test_the_mean_of_no_tokens_is_none():
    assert mean(np.full((2, 3), np.nan)) is None and mean(np.zeros((2, 0))) is None


@given(length=st.integers(2, 5000), window=st.integers(0, 6000), seed=SEEDS)
def test_position_bins_partition_the_scored_tokens(length, window, seed):
    nll = random_losses(2, length, seed)
    bins = by_position(nll, window)
    assert len(bins) <= BINS + 1
    # a bin without a scored token is left out
    covered = [position for part in bins for position in range(part["start"], part["end"])]
    assert covered == sorted(set(covered)) and set(np.flatnonzero(~np.isnan(nll).all(0))) <= set(covered)
    for part in bins:
        inside = nll[:, part["start"] : part["end"]]
        assert part["tokens"] == np.isfinite(inside).sum() and part["nll"] == pytest.approx(
            np.nanmean(inside), rel=1e-4
        )
    assert sum(part["nll"] * part["tokens"] for part in bins) == pytest.approx(mean(nll) * np.isfinite(nll).sum())


@pytest.mark.parametrize("length", [192, 256, 1024, 1500, 2048, 4096, 8192, 32768])
@pytest.mark.parametrize("window", [5, 64, 100, 128, 191])
def test_a_position_bin_begins_where_the_attention_window_ends(length, window):
    bins = by_position(np.ones((1, length)), window)
    assert window in [part["start"] for part in bins]
    assert 5 <= len(bins) <= BINS + 1 or length < 2 * window
