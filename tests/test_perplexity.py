"""Perplexity: exact losses per token, rows and their references, density-matched controls, rounds, resume."""

import io
import shutil
from collections.abc import Callable
from functools import partial
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from builders import eval_config, scored
from conftest import build
from hypothesis import given, settings
from hypothesis import strategies as st
from running import DUAL, attention_of, fitting, only_run, record_of, router_steps, run, succeed, tiny

from focus_exp import attach, set_routing
from focus_exp import config as schema
from focus_exp.attention.selection import Selection, Sequence, count_pairs
from focus_exp.data import SequenceDataset, TokenStream
from focus_exp.evaluation import perplexity
from focus_exp.evaluation.perplexity import (
    PairCounter,
    PerplexityEvaluator,
    Scores,
    density_matched_window,
    score,
    split_rounds,
    token_losses,
)
from focus_exp.evaluation.variants import BASE, RANDOM_GROUPS, WINDOW_ONLY
from focus_exp.jobs.train import attach_method
from focus_exp.models.head import ROWS, Head
from focus_exp.models.methods import attached_methods, observe_selections
from focus_exp.training.precision import choose_precision

BOS = 256
FLOAT32 = choose_precision("float32", "cpu", trains_base=False)
SEEDS = st.integers(0, 10_000)
T, WINDOW, SINKS, GROUPS = 48, 6, 2, 3
SOFT, HARD, WIDE = "focus_soft", "focus_hard", "window_density_matched"


def random_stream(lengths: list[int], seed: int = 0) -> TokenStream:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.random.default_rng(seed).integers(0, 256, starts[-1], dtype=np.int32)
    return TokenStream("stream", tokens, starts, [str(i) for i in range(len(lengths))])


@pytest.fixture(scope="module")
def tiny_llama():
    torch.manual_seed(0)
    return build("tiny_llama")


def score_all(model, blocks, batch_size=4) -> Scores:
    return score(model, blocks, list(range(len(blocks))), batch_size, FLOAT32, "row")


@given(prefix=st.sampled_from([[], [BOS], [BOS, 7], [9, BOS, 7]]), batch_size=st.integers(1, 5), seed=SEEDS)
@settings(max_examples=8)
def test_score_every_token_given_its_sequence_so_far(tiny_llama, prefix, batch_size, seed):
    stream, length = random_stream([300, 5, 150], seed), ROWS + 8  # float32 logits in two steps
    blocks = SequenceDataset(stream, length, prefix=prefix, cross_documents=False)
    nll = score_all(tiny_llama, blocks, batch_size).nll
    expected = np.full(nll.shape, np.nan)
    for index, start in enumerate(blocks.starts):
        tokens = torch.tensor(prefix + stream.tokens[start : start + length - len(prefix)].tolist())
        with torch.no_grad():
            logits = tiny_llama(tokens[None]).logits[0].double()
        first = max(len(prefix), 1)  # what a tokenizer puts first is not scored
        expected[index, 1:] = F.cross_entropy(logits[first - 1 : -1], tokens[first:], reduction="none")
    nll[:, 0] = np.nan
    assert nll.shape[1] == length - max(len(prefix), 1) + 1
    np.testing.assert_allclose(nll, expected, rtol=0, atol=1e-5)
    assert nll.dtype == np.float32


@pytest.mark.parametrize("batch_size", [3, 100])
def test_score_batch_size_changes_neither_losses_nor_pairs(tiny_model, batch_size):
    model = set_routing(attach(tiny_model("llama"), "focus", window=4, sinks=2), hard=True)
    blocks = SequenceDataset(random_stream([400]), 32, cross_documents=True)
    single, many = score_all(model, blocks, 1), score_all(model, blocks, batch_size)
    np.testing.assert_allclose(many.nll, single.nll, rtol=0, atol=1e-5)
    assert single.pairs.totals[:2] == many.pairs.totals[:2]
    assert single.pairs.distant_density == pytest.approx(many.pairs.distant_density, abs=1e-3)


def test_token_losses_bf16_model_computes_in_float32(tiny_model):
    model = tiny_model("llama", dtype=torch.bfloat16)
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, losses = model(tokens).logits[:, :-1], token_losses(Head(model), tokens)[:, 1:]
    assert logits.dtype == torch.bfloat16 and losses.dtype == torch.float32
    exact = F.cross_entropy(logits.double().transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(losses.double(), exact, rtol=0, atol=1e-5)


def test_score_non_finite_loss_raises(tiny_model):
    model, stream = tiny_model("llama"), random_stream([64])
    with torch.no_grad():
        model.get_input_embeddings().weight[stream.tokens[40]] = float("nan")
    with pytest.raises(RuntimeError, match="not finite"):
        score_all(model, SequenceDataset(stream, 32, cross_documents=True))


def make_config(method: str = "focus", train: str | None = None, sequences: int = 4, **attention) -> schema.Config:
    options = {"groups": GROUPS, "window": WINDOW, "sinks": SINKS} | attention
    phases = {train: schema.PhaseConfig(trainable=train, steps=1, learning_rate=1e-3)} if train else {}
    evaluation = {"seq_len": T, "max_sequences": sequences, "batch_size": 2}
    return eval_config(attention_of(method, **options), phases, **evaluation)


@pytest.fixture
def measure(tiny_model, tmp_path) -> Callable[..., PerplexityEvaluator]:
    """measure(family, config): score a tiny model's base and attached rows in `tmp_path`."""

    def run(
        family: str = "llama",
        config: schema.Config | None = None,
        prepare=lambda model: None,
        folder: str = "evaluation",
        on_round=None,
    ) -> PerplexityEvaluator:
        config, model = config or make_config(), tiny_model(family)
        blocks = SequenceDataset(random_stream([7 * T, 3 * T, 5 * T]), T, cross_documents=True)
        evaluator = PerplexityEvaluator(model, blocks, config, FLOAT32, tmp_path / folder)
        evaluator.measure_base()
        attach_method(model, config)
        prepare(model)
        evaluator.measure_attached(on_round and partial(on_round, evaluator))
        return evaluator

    return run


@pytest.fixture
def labels(monkeypatch) -> list[str]:
    """Names of the rows that are scored, in order."""
    real, names = score, []
    monkeypatch.setattr(perplexity, "score", lambda *args: names.append(args[-1]) or real(*args))
    return names


def rows_of(evaluator: PerplexityEvaluator) -> list:
    return scored(evaluator.measurements())


def by_name(evaluator: PerplexityEvaluator) -> dict:
    assert len({variant.name for variant in evaluator.variants}) == len(evaluator.variants)
    return {row.name: row for row in rows_of(evaluator)}


def test_rows_are_scored_in_the_order_of_a_table(measure, labels):
    config = make_config(top_k=2, pair_rule="share")
    rows = [row.name for row in measure(config=config).variants]
    hard = [f"focus_hard_k{k}_share" for k in (2, 3)]
    assert rows == [BASE, SOFT, HARD, *hard, WINDOW_ONLY, WIDE, RANDOM_GROUPS]
    assert labels == rows


def test_rows_are_paired_with_base_and_configured_hard_row(measure):
    evaluator = measure()
    rows = by_name(evaluator)
    base = rows[BASE]
    assert next(iter(rows)) == BASE and (base.kind, base.changes) == ("base", {})
    assert (base.distant_density, base.sparsity) == (1, 0)
    references = {"control": [BASE, HARD], "hard": [BASE, SOFT], "soft": [BASE], "base": []}
    for row in rows.values():
        assert row.error is None and row.eval_tokens == 4 * (T - 1)
        assert list(row.changes) == references[row.kind]
        for reference, change in row.changes.items():
            assert change.value == pytest.approx(row.nll - rows[reference].nll, abs=1e-5)
            assert change.low <= change.value <= change.high
        low, high = row.interval
        assert row.perplexity == pytest.approx(np.exp(row.nll)) and low <= high


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
@pytest.mark.parametrize("rule", ["query_topk", "share"])
def test_rows_hard_routing_to_all_groups_equals_base(measure, family, rule):
    rows = by_name(measure(family, make_config(pair_rule=rule)))
    hard = [rows[name] for name in (HARD, f"focus_hard_k2_{rule}", f"focus_hard_k{GROUPS}_{rule}")]
    dense_from = 1 if rule == "share" else 2  # two sets of 2 of 3 groups always meet
    for row in hard[dense_from:]:
        assert abs(row.changes[BASE].value) < 1e-4
        assert (row.distant_density, row.sparsity) == (1, 0)
    for row in hard[:dense_from]:
        assert 0 < row.distant_density < 1
        assert abs(row.changes[BASE].value) > 1e-4


def test_pair_counter_equals_counting_every_pair(measure):
    evaluator = measure("qwen2")  # its second layer slides over 8 tokens
    model = set_routing(evaluator.model, hard=True, top_k=1)
    tokens, seen = torch.stack([evaluator.blocks[i]["input_ids"] for i in evaluator.indices]), []
    with (
        torch.no_grad(),
        observe_selections(model, lambda _, __, selection, sequence: seen.append((selection, sequence))),
    ):
        model(tokens)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    total = distant = kept = 0
    sizes = []
    for selection, sequence in seen:
        groups = selection.key_groups.int().argmax(-1)
        sizes.append(np.bincount(groups.flatten(), minlength=GROUPS) / groups.numel())
        visible = (i >= j).expand(len(tokens), T, T) if sequence.allowed is None else sequence.allowed[:, 0]
        far = visible & (i - j > WINDOW) & (j >= SINKS)
        total += int(visible.sum()) * len(tokens) // len(visible)
        distant += int(far.sum()) * len(tokens) // len(far)
        kept += int((far & (groups[:, :, None] == groups[:, None])).sum())
    row = by_name(evaluator)[HARD]
    assert row.distant_density == pytest.approx(kept / distant)
    assert row.sparsity == pytest.approx((distant - kept) / total)
    np.testing.assert_allclose(evaluator.scores[HARD].pairs.group_fractions, sizes, atol=1e-6)
    assert row.largest_group_fraction == pytest.approx(np.max(sizes))


@pytest.mark.parametrize("family", ["gemma2", "qwen2"])
def test_controls_match_density_and_sizes(measure, family):
    def prefer_a_group(model):
        for method in attached_methods(model).values():
            method.router.potential[1] = 5.0

    evaluator = measure(family, prepare=prefer_a_group)
    rows = by_name(evaluator)
    hard, window = rows[HARD], rows[WINDOW_ONLY]
    assert hard.largest_group_fraction > 0.5
    assert window.distant_density == 0 and window.sparsity > 0.5
    expected = np.mean(
        np.square(evaluator.scores[HARD].pairs.group_fractions).sum(axis=1)
    )  # of a pair of independent tokens
    assert rows[RANDOM_GROUPS].distant_density == pytest.approx(expected, abs=0.1) and expected > 1 / GROUPS + 0.08
    wide = rows[WIDE]
    assert wide.window > WINDOW and wide.sparsity <= hard.sparsity
    assert wide.sparsity == pytest.approx(hard.sparsity, abs=0.03)
    # relative to the configured window, as in the hard row
    assert wide.distant_density == pytest.approx(1 - wide.sparsity / window.sparsity)
    assert wide.distant_density >= hard.distant_density


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("sliding", [None, 9])
def test_density_matched_window_is_the_smallest(sliding, sinks):
    length, plain = 24, Sequence.plain(1, 24)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    layers = [plain, plain]
    if sliding:
        layers.append(Sequence(plain.start, allowed=((i >= j) & (i - j < sliding))[None, None]))

    def kept(width: int) -> int:
        seen = [(i >= j) if layer.allowed is None else layer.allowed[0, 0] for layer in layers]
        return sum(int((mask & ((i - j <= width) | (j < sinks))).sum()) for mask in seen)

    distant = sum(count_pairs(Selection(), layer, 2, sinks).distant for layer in layers)
    for more in [*range(0, distant, 7), distant]:
        pairs = PairCounter({0: np.array([kept(length), distant, more])})
        enough = [width for width in range(length) if kept(width) >= kept(2) + more]
        assert density_matched_window(pairs, sinks, layers) == enough[0]


def comparable(evaluator: PerplexityEvaluator) -> list:
    return [m for m in evaluator.measurements() if m.metric != "eval_seconds"]


@pytest.mark.parametrize(("batch_size", "first"), [(1, 4), (3, 5)])
def test_rounds_end_in_the_numbers_of_a_single_round(measure, labels, batch_size, first):
    config, tables = make_config(sequences=14), []
    config.eval.batch_size = batch_size
    single = measure(config=config, folder="single")

    def on_round(evaluator, *count):
        tables.append((count, rows_of(evaluator)))

    result = measure(config=config, on_round=on_round)
    assert comparable(result) == comparable(single)
    assert len(result.losses.units) == 14
    for name, nll in single.losses.nll.items():
        assert np.array_equal(result.losses.nll[name], nll)
    ((count, rows),) = tables
    assert count == (first, 14) and [row.name for row in rows] == [row.name for row in rows_of(single)]
    assert all(row.eval_tokens == first * (T - 1) for row in rows)
    del labels[:]
    assert comparable(measure(config=config, on_round=on_round)) == comparable(single)
    assert not labels and tables[1] == tables[0]


@given(total=st.integers(1, 200), batch_size=st.integers(1, 9))
def test_split_rounds_keeps_batches_and_grows_by_four(total, batch_size):
    def batches(indices):
        return [indices[begin : begin + batch_size] for begin in range(0, len(indices), batch_size)]

    rounds = split_rounds([*range(total)], batch_size)
    assert sorted(batch for added in rounds for batch in batches(added)) == batches([*range(total)])
    counts = np.cumsum([len(added) for added in rounds])
    assert all(count < total / 3 + batch_size for count in counts[:-1])
    if batch_size == 1:
        assert counts.tolist() == [*(4**n for n in range(1, 5) if 3 * 4**n <= total), total]


@pytest.mark.parametrize("stop_at", [2, 5, 9, 13])
def test_evaluation_stopped_anywhere_resumes_to_the_same_numbers(measure, monkeypatch, stop_at):
    config, measure = make_config(sequences=14), partial(measure, on_round=lambda *_: None)
    config.eval.top_k = [1]
    whole = measure(config=config, folder="whole")
    stopping = Mock(wraps=score, side_effect=[*[DEFAULT] * (stop_at - 1), KeyboardInterrupt])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(perplexity, "score", stopping)
        measure(config=config)
    assert comparable(measure(config=config)) == comparable(whole)


def test_scores_on_disk_are_read_and_damaged_ones_scored_again(measure, labels, tmp_path):
    first = measure()
    del labels[:]
    assert comparable(measure()) == comparable(first) and not labels
    (path,) = (tmp_path / "evaluation").rglob("focus_soft.npz")
    whole = path.read_bytes()
    middle = bytearray(whole)
    middle[whole.index(b"nll.npy") + 200] ^= 255
    elsewhere = io.BytesIO()
    with np.load(io.BytesIO(whole)) as arrays:
        np.savez(elsewhere, **{**arrays, "key": np.array("bf16-mixed")})
    for damaged in (b"", b"not an archive", whole[: len(whole) // 2], whole[:-1], bytes(middle), elsewhere.getvalue()):
        path.write_bytes(damaged)
        assert comparable(measure()) == comparable(first)
        assert labels == [SOFT]
        del labels[:]


def test_scores_of_another_router_are_not_read(measure, labels):
    def change_a_tensor(model):
        with torch.no_grad():
            next(attached_methods(model)[0].parameters())[0].neg_()

    rows = measure().variants
    del labels[:]
    measure(prepare=change_a_tensor)
    assert BASE not in labels and {SOFT, HARD} <= {*labels} <= {row.name for row in rows}


def test_row_that_fails_keeps_its_error_and_the_others_are_scored(measure, monkeypatch):
    def failing(*args):
        if args[-1] == SOFT:
            raise RuntimeError("out of memory\nby 3 GiB")
        return score(*args)

    monkeypatch.setattr(perplexity, "score", failing)
    rows = by_name(measure())
    failed = rows.pop(SOFT)
    assert failed.error == "RuntimeError: out of memory"
    assert failed.nll is None and not failed.changes
    assert len(rows) == 7 and all(row.nll for row in rows.values())


@pytest.mark.parametrize(
    ("method", "train", "kinds"),
    [
        ("full", None, ["base"]),
        ("random_groups", None, ["base", "control"]),
        ("window", "all", ["base", "trained", "control"]),
        ("focus", "router", ["base", "soft", *["hard"] * GROUPS, *["control"] * 3]),
        ("focus", "all", ["base", "trained", "soft", *["hard"] * GROUPS, *["control"] * 3]),
    ],
)
def test_rows_follow_method_and_training(measure, method, train, kinds):
    evaluator = measure(config=make_config(method, train))
    rows = rows_of(evaluator)
    assert [row.kind for row in rows] == kinds
    if method == "window":
        assert rows[-1].distant_density == 0
    for row in rows:
        if row.kind == "trained":  # nothing was trained here, and the method is off
            assert row.nll == pytest.approx(rows[0].nll, abs=1e-5) and row.sparsity == 0


def test_adapters_of_other_runs_are_rows_of_the_same_table(tmp_path):
    succeed(*fitting(*tiny(tmp_path, "other"), *DUAL))
    other = record_of(tmp_path / "other")
    (adapter,) = (tmp_path / "other").rglob("adapter")
    second = shutil.copytree(adapter, tmp_path / "second")
    adapters = f"eval.adapters=['{adapter}','{second}']"
    retrofit = [*tiny(tmp_path), router_steps(2), "eval.top_k=[1]", adapters]
    succeed(*retrofit)
    rows, expected = ({row.name: row for row in scored(r.measurements)} for r in (record_of(tmp_path / "runs"), other))
    dual = expected["focus_dual"]
    for name in (f"focus_dual, {adapter.parent.name}", "focus_dual, second"):
        assert (rows[name].kind, rows[name].nll, rows[name].sparsity) == ("control", dual.nll, dual.sparsity)
        assert rows[name].changes[HARD].value
    assert rows[BASE].nll == expected[BASE].nll
    # what was attached before is attached again
    assert list(rows)[1:3] == [SOFT, HARD]

    # next to any attached method
    window = fitting(*tiny(tmp_path, "window"), "attention=window", "recipe=none", f"eval.adapters=['{adapter}']")
    succeed(*window)
    row = {row.name: row for row in scored(record_of(tmp_path / "window").measurements)}["focus_dual"]
    assert (row.nll, row.sparsity) == (dual.nll, dual.sparsity)

    # the place of an adapter is not part of a run's name, its content is
    moved = tmp_path / "moved"
    shutil.copytree(adapter, moved)
    succeed(*retrofit[:-1], f"eval.adapters=['{moved}','{adapter.parent}']")
    assert only_run(tmp_path / "runs")


def test_adapter_of_another_base_is_refused_before_training(tmp_path):
    succeed(*tiny(tmp_path, "other"), router_steps(1), "seed=1")
    (adapter,) = (tmp_path / "other").rglob("adapter")
    refused = run(*tiny(tmp_path), f"eval.adapters=['{adapter}']")
    assert refused.code == 2 and "belongs to" in refused.err and "steps" not in refused.out.split("run folder")[1]
