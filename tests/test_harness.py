"""lm-eval on the live model: scores by hand, no trace of batch or padding, the ledger, controls, interruptions."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from running import attention_of
from tiny_architectures import tiny_model as architecture
from torch import nn
from transformers import ByT5Tokenizer

from focus_exp import attach, disable_method, set_routing
from focus_exp import config as schema
from focus_exp.assets import cache_root
from focus_exp.attention.focus import Focus
from focus_exp.attention.selection import Selection
from focus_exp.checks import validate_tasks
from focus_exp.data import Blocks, TokenStream
from focus_exp.data.benchmarks import MEMBERS, NAME, benchmark_folder, load_benchmark
from focus_exp.errors import Interrupted, UserError
from focus_exp.evaluation import benchmarks, live_model, tasks
from focus_exp.evaluation.benchmarks import Benchmarks
from focus_exp.evaluation.controls import BASE, RANDOM_GROUPS, WINDOW_ONLY
from focus_exp.evaluation.harness import evaluating, run_task
from focus_exp.evaluation.ledger import Ledger
from focus_exp.evaluation.live_model import LiveModel, prefix_token
from focus_exp.evaluation.outcomes import Metric, Outcome, paired_difference, read_outcome, write_outcome
from focus_exp.evaluation.perplexity import score
from focus_exp.evaluation.tasks import LoadedTask
from focus_exp.models.methods import attached_methods, observe_selections
from focus_exp.models.random import byte_tokenizer
from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.results.intervals import student
from focus_exp.training.precision import choose_precision

WINDOW, SINKS, GROUPS = 6, 2, 3
HARD = "Focus hard k=1"
PRECISION = choose_precision("float32", "cpu", trains_base=False)
TOKENS = np.random.default_rng(0).integers(0, 256, 320, dtype=np.int32)
BLOCKS = Blocks(TokenStream("random", TOKENS, np.array([0, 320]), ["text"]), 32, cross_documents=False)
CHOICE = [
    {
        "question": f"Which of {n} {'and so on ' * (n % 4)}is it?",
        "choices": ["a bee", "the long ant", "x", "fly"],
        "answer": n % 4,
    }
    for n in range(9)
]
WORDS = [{"context": f"{'left right ' * n}left", "target": " right", "id": n} for n in range(7)]
MULTIPLE = {
    "output_type": "multiple_choice",
    "doc_to_text": "question",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
}
LIKELY = {"output_type": "loglikelihood", "doc_to_text": "context", "doc_to_target": "target", "target_delimiter": ""}
MEAN = {"aggregation": "mean", "higher_is_better": True}
SCORED = [{"metric": "acc", **MEAN}, {"metric": "acc_norm", **MEAN}]
GREEDY = [{"metric": "acc", **MEAN}, {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]


def described(rows: list[dict], metrics: list[dict], **fields: Any) -> dict[str, Any]:
    """An lm-eval task over `rows`, and over as many to take examples from."""
    splits = {split: datasets.Dataset.from_list(rows) for split in ("train", "test")}
    common = {
        "custom_dataset": lambda **_: datasets.DatasetDict(splits),
        "test_split": "test",
        "metadata": {"version": 2.5},
    }
    return {**common, "metric_list": metrics, **fields}


OWN = {
    "choice": described(CHOICE, SCORED, training_split="train", **MULTIPLE),
    "words": described(WORDS, GREEDY, **LIKELY),
    "wrong_label": described([*CHOICE, CHOICE[0] | {"answer": 4}], SCORED, **MULTIPLE),
    "write": described(
        WORDS[:3], [{"metric": "exact_match", **MEAN}], output_type="generate_until", doc_to_text="context",
        doc_to_target="target", generation_kwargs={"until": ["\n\n"], "max_gen_toks": 6},
    ),
}  # fmt: skip


def load(name: str) -> Any:
    return TaskManager(include_defaults=False).load([OWN[name] | {"task": name}])


def make_config(names: list[str], method: str = "focus", **settings: Any) -> schema.Config:
    return schema.Config(
        assets="embedded",
        model=schema.ModelConfig(name="tiny"),
        attention=attention_of(method, groups=GROUPS, window=WINDOW, sinks=SINKS),
        recipe=schema.RecipeConfig(name="none"),
        data=schema.DataConfig(name="random", source="files"),
        eval=schema.EvalConfig(
            name="eval", **{"window": 32, "max_sequences": 4, "bootstrap_samples": 40, "tasks": names, **settings}
        ),
        trainer=schema.TrainerConfig(name="trainer"),
        logger=schema.LoggerConfig(name="logger"),
    )


def attached(model, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        attach(model, "focus", **{"groups": GROUPS, "window": WINDOW, "sinks": SINKS, **options})
    return set_routing(model.eval(), hard=True, top_k=1)


def all_rows(model, config: schema.Config, folder: Path) -> list[BenchmarkRow]:
    """What a run measures before and after it attaches, where nothing is trained in between."""
    measured = Benchmarks(model, byte_tokenizer(), BLOCKS, config, PRECISION, folder)
    measured.measure_base()
    measured.measure_attached()
    return measured.rows


def live(model, **options) -> LiveModel:
    return LiveModel(model, byte_tokenizer(), precision=PRECISION, **{"batch_size": 4, **options})


def likelihoods(lm: LiveModel, requests: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    return lm._loglikelihood_tokens([(None, *request) for request in requests], disable_tqdm=True)


def by_hand(model, context: list[int], continuation: list[int]) -> float:
    """One request, one forward pass, one token after the other."""
    with torch.no_grad():
        chances = model(torch.tensor([context + continuation[:-1]]), use_cache=False).logits[0].log_softmax(-1)
    return sum(chances[len(context) + i - 1, token].item() for i, token in enumerate(continuation))


@pytest.fixture
def measure(tiny_model, tmp_path, monkeypatch) -> Callable[..., Benchmarks]:
    """measure(names, prepare=..., **eval settings): rows of a tiny attached model, kept in `tmp_path`."""
    loaded = tasks.load_task

    def own(name, config, cache):
        return LoadedTask(name, load(name), "test") if name in OWN else loaded(name, config, cache)

    monkeypatch.setattr(tasks, "load_task", own)
    monkeypatch.setattr(tasks, "check_names", lambda names: None)

    def run(
        names, prepare=lambda model: None, folder="benchmarks", method="focus", options=None, **settings
    ) -> Benchmarks:
        config, model = make_config(names, method, **settings), tiny_model("llama")
        result = Benchmarks(model, byte_tokenizer(), BLOCKS, config, PRECISION, tmp_path / folder)
        result.measure_base()
        attached(model, **(options or {}))
        prepare(model)
        result.measure_attached()
        return result

    return run


def found(result: Benchmarks, attention: str, task: str, metric: str):
    (row,) = [r for r in result.rows if (r.attention, r.task, r.metric) == (attention, task, metric)]
    return row


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 255), min_size=1, max_size=30), st.lists(st.integers(0, 255), min_size=1, max_size=5)
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("assignment", ["balanced", "sinkhorn", None])
def test_likelihoods_do_not_depend_on_the_batch(tiny_model, family, assignment):
    model = tiny_model(family)
    if assignment:
        attached(model, assignment=assignment)
    draws = np.random.default_rng(0)
    requests = [
        (draws.integers(0, 256, n).tolist(), draws.integers(0, 256, 1 + n % 4).tolist()) for n in range(1, 60, 5)
    ]
    expected = [by_hand(model, *request) for request in requests]
    for batch_size in (1, 8, 3):
        answers = likelihoods(live(model, batch_size=batch_size), requests)
        np.testing.assert_allclose([total for total, _ in answers], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["roberta", "xlstm", "whisper"])
def test_likelihoods_of_models_that_count_from_elsewhere_or_keep_all_logits(name):
    model = architecture(name)
    requests = [([7, 8, 9, 10, 11, 12, 13, 14, 15], [16, 17]), ([18, 19, 20], [21]), ([22, 23, 24, 25], [26, 27, 28])]
    answers = likelihoods(live(model), requests)
    assert [total for total, _ in answers] == [pytest.approx(by_hand(model, *each), abs=1e-4) for each in requests]


def test_lm_eval_left_to_itself_pads_without_a_mask(tiny_model):
    """Why the model is called differently here: an assignment over the sequence counts the padding as tokens."""
    model = attached(tiny_model("llama"), assignment="sinkhorn")
    requests = [([7] * 40, [1]), ([9, 8, 7, 6, 5, 4, 3, 2, 1] * 2, [2])]
    stock = HFLM(pretrained=model, tokenizer=byte_tokenizer(), backend="causal", batch_size=2)
    answer = stock._loglikelihood_tokens([(None, *request) for request in requests], disable_tqdm=True)[1][0]
    expected = by_hand(model, *requests[1])
    assert answer != pytest.approx(expected, abs=1e-3)
    assert likelihoods(live(model), requests)[1][0] == pytest.approx(expected, abs=1e-5)


@given(REQUESTS)
@settings(max_examples=25)
def test_answers_are_those_of_every_request_by_itself(requests):
    model = MODEL()
    lm = live(model, batch_size=3)
    for (total, greedy), (context, continuation) in zip(likelihoods(lm, requests), requests, strict=True):
        assert total == pytest.approx(by_hand(model, context, continuation), abs=1e-5)
        with torch.no_grad():
            best = model(torch.tensor([context + continuation])).logits[0].argmax(-1).tolist()
        assert greedy == (best[len(context) - 1 : -1] == continuation)
    assert sorted(lm.ledger.lengths) == sorted(map(len, {tuple(c + t)[:-1] for c, t in requests}))


def test_an_input_that_is_asked_about_in_several_ways_runs_once(tiny_model):
    model = attached(tiny_model("llama"))
    requests = [([5, 6, 7], [8, 1]), ([5, 6], [7, 8, 2]), ([5, 6, 7, 8], [3])]
    lm = live(model)
    answers = [total for total, _ in likelihoods(lm, requests)]
    assert answers == [pytest.approx(by_hand(model, *request), abs=1e-5) for request in requests]
    assert lm.ledger.lengths == [4]


def MODEL():
    from conftest import build

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return attached(build("tiny_llama"))


def run(model, name: str, **settings: Any) -> Outcome:
    return run_task(
        live(model), name, load(name), label="", **{"shots": None, "limit": None, "bootstrap": 40, **settings}
    )


def test_scores_and_standard_errors_are_those_of_counting_by_hand(tiny_model):
    model, encode = attached(tiny_model("llama")), byte_tokenizer().encode
    outcome = run(model, "choice")
    hits, normed = [], []
    for row in CHOICE:
        totals = [by_hand(model, encode(row["question"]), encode(f" {choice}")) for choice in row["choices"]]
        hits.append(np.argmax(totals) == row["answer"])
        normed.append(np.argmax([t / len(c) for t, c in zip(totals, row["choices"], strict=True)]) == row["answer"])
    assert [(metric.key, metric.value) for metric in outcome.metrics] == [
        ("acc", pytest.approx(np.mean(hits))), ("acc_norm", pytest.approx(np.mean(normed))),
    ]  # fmt: skip
    for metric, scores in zip(outcome.metrics, (hits, normed), strict=True):
        assert metric.stderr == pytest.approx(np.std(scores, ddof=1) / math.sqrt(len(scores)))
        assert list(metric.parts(outcome.samples).values()) == scores
    assert (outcome.version, outcome.shots, outcome.seed) == ("2.5", 0, 1234)

    perplexity, greedy = sorted(run(model, "words").metrics, key=lambda metric: metric.key, reverse=True)
    totals = [by_hand(model, encode(row["context"]), encode(row["target"])) for row in WORDS]
    assert perplexity.value == pytest.approx(math.exp(-np.mean(totals))) and not perplexity.higher_is_better
    assert greedy.value == 0 and greedy.higher_is_better


@pytest.mark.parametrize("name", ["choice", "words"])
def test_everything_is_as_lm_eval_has_it_by_itself(tiny_model, name, monkeypatch):
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    model = attached(tiny_model("llama"))
    ours = run(model, name, shots=2)
    stock = HFLM(pretrained=model, tokenizer=byte_tokenizer(), backend="causal", batch_size=1)
    loaded = load(name)
    loaded["tasks"][name].set_config(key="num_fewshot", value=2)
    loaded["tasks"][name].set_fewshot_seed(1234)
    result = lm_eval.evaluate(stock, loaded, bootstrap_iters=40)
    theirs = result["results"][name]
    for metric in ours.metrics:
        assert metric.value == pytest.approx(theirs[f"{metric.key},none"], rel=1e-5)
        assert metric.stderr == pytest.approx(theirs[f"{metric.key}_stderr,none"], rel=1e-3)
    assert ours.shots == result["n-shot"][name] == 2
    assert [s["prompt_hash"] for s in ours.samples] == [s["prompt_hash"] for s in result["samples"][name]]


def selections(model, tokens: list[int]) -> list[tuple]:
    """(layer, selection, sequence) of every layer that runs."""
    seen = []
    with torch.no_grad(), observe_selections(model, lambda layer, _, *what: seen.append((layer, *what))):
        model(torch.tensor([tokens]))
    return seen


def test_the_ledger_counts_every_pair_of_every_request(tiny_model):
    model, encode = attached(tiny_model("qwen2")), byte_tokenizer().encode  # whose second layer slides over 8 tokens
    outcome = run(model, "choice", limit=3)
    inputs = {tuple(encode(row["question"]) + encode(f" {c}"))[:-1] for row in CHOICE[:3] for c in row["choices"]}
    total, distant, kept, removed = 0, 0, 0, {0: [0, 0], 1: [0, 0]}
    tokens_in = {0: np.zeros(GROUPS), 1: np.zeros(GROUPS)}
    for tokens in inputs:
        for layer, selection, sequence in selections(model, list(tokens)):
            group = selection.key_groups[0].int().argmax(-1).tolist()
            tokens_in[layer] += np.bincount(group, minlength=GROUPS)
            for i in range(len(tokens)):
                for j in range(i + 1):
                    if sequence.allowed is not None and not sequence.allowed[0, 0, i, j]:
                        continue
                    far = i - j > WINDOW and j >= SINKS
                    total, distant, kept = total + 1, distant + far, kept + (far and group[i] == group[j])
                    removed[layer][0] += far and group[i] != group[j]
                    removed[layer][1] += 1
    ledger = outcome.ledger
    assert ledger["requests"] == len(inputs) and ledger["truncated"] == 0
    lengths = sorted(map(len, inputs))
    assert ledger["request_tokens"][0] == lengths[0] and ledger["request_tokens"][-1] == lengths[-1]
    assert ledger["distant_share"] == pytest.approx(distant / total)
    assert ledger["distant_pairs_kept"] == pytest.approx(kept / distant)
    assert ledger["pairs_removed"] == pytest.approx((distant - kept) / total)
    assert ledger["removed_by_layer"] == [pytest.approx(removed[layer][0] / removed[layer][1]) for layer in (0, 1)]
    shares = [tokens_in[layer] / tokens_in[layer].sum() for layer in (0, 1)]
    np.testing.assert_allclose(outcome.groups, shares, atol=1e-6)  # padding is in no group
    assert ledger["largest_group"] == pytest.approx(np.max(shares))


def test_rows_of_a_router_and_its_controls(measure):
    result = measure(["choice", "words", "perplexity@32"])
    assert list(dict.fromkeys(row.attention for row in result.rows)) == [BASE, HARD, WINDOW_ONLY, RANDOM_GROUPS]
    assert all(row.scored and row.n and row.seconds is not None for row in result.rows)
    for task, metric in (
        ("choice", "acc"),
        ("choice", "acc_norm"),
        ("words", "perplexity"),
        ("perplexity@32", "perplexity"),
    ):
        base, hard, window, randoms = (
            found(result, name, task, metric) for name in (BASE, HARD, WINDOW_ONLY, RANDOM_GROUPS)
        )
        assert (base.pairs_removed, base.difference, base.engaged) == (0, None, None)
        assert window.distant_pairs_kept == 0 and window.pairs_removed == pytest.approx(window.distant_share)
        # random groups of the same sizes, on these very requests
        assert randoms.pairs_removed == pytest.approx(hard.pairs_removed, abs=0.04) and hard.engaged
        assert hard.request_tokens == window.request_tokens == base.request_tokens
        for row in (hard, window, randoms):
            change = math.log(row.value / base.value) if metric == "perplexity" else row.value - base.value
            assert row.difference == pytest.approx(change, abs=1e-6)
            assert row.difference_low < row.difference < row.difference_high


def test_full_attention_of_an_attached_model_is_the_base(tiny_model, tmp_path):
    config, model = make_config(["perplexity@32"]), tiny_model("llama")
    before = Benchmarks(model, byte_tokenizer(), BLOCKS, config, PRECISION, tmp_path / "before")
    before.measure_base()
    rows = all_rows(attached(model), config, tmp_path / "after")
    assert rows[0].value == pytest.approx(before.rows[0].value, rel=1e-6) and rows[0].pairs_removed == 0
    assert rows[1].value != pytest.approx(rows[0].value, rel=1e-4)


@pytest.mark.parametrize(
    ("method", "train", "kinds"),
    [
        ("full", None, ["base"]),
        ("full", "all", ["base", "trained"]),
        ("window", None, ["base", "control"]),
        ("focus", "all", ["base", "trained", "hard", "control", "control"]),
    ],
)
def test_rows_follow_from_the_method_and_from_what_is_trained(tiny_model, tmp_path, method, train, kinds):
    config, model = make_config(["perplexity@32"], method), tiny_model("llama")
    if train:
        config.recipe.phases["all"] = schema.PhaseConfig(train=train, steps=1, learning_rate=1e-3)
    result = Benchmarks(model, byte_tokenizer(), BLOCKS, config, PRECISION, tmp_path)
    result.measure_base()
    if method != "full":
        attach(model, method, window=WINDOW, sinks=SINKS, **({"groups": GROUPS} if method == "focus" else {}))
    result.measure_attached()
    assert [row.kind for row in result.rows] == kinds and all(row.scored for row in result.rows)
    for row in result.rows[1:]:
        # nothing was trained here, and the method is off
        assert (row.kind == "trained") == (row.difference == 0) == (row.engaged is None)
        assert row.method == {"trained": "full", "hard": "focus"}.get(row.kind, row.method)


def test_perplexity_of_a_length_is_that_of_its_windows(measure):
    result = measure(["perplexity@32", "perplexity@64", "perplexity@999"])
    scores = score(result.model, BLOCKS, BLOCKS.spread(4), 2, PRECISION, "")
    hard = found(result, HARD, "perplexity@32", "perplexity")
    assert hard.n == 4 and hard.value == pytest.approx(np.exp(np.nanmean(scores.nll)), rel=1e-5)
    assert hard.pairs_removed == pytest.approx(scores.pairs.removed)
    losses = np.nanmean(scores.nll, axis=1)
    assert hard.stderr == pytest.approx(hard.value * losses.std(ddof=1) / 2, rel=1e-4)
    windows = Blocks(BLOCKS.stream, 64, bos=BLOCKS.bos, cross_documents=False)
    longer = score(result.model, windows, windows.spread(2), 1, PRECISION, "")
    long = found(result, HARD, "perplexity@64", "perplexity")
    # as many tokens, half as many windows; parts of a window are no units of their own
    assert long.n == long.requests == 2 and long.value == pytest.approx(np.exp(np.nanmean(longer.nll)), rel=1e-5)
    assert long.difference_low < long.difference < long.difference_high
    assert "exceed the 512 positions" in found(result, "", "perplexity@999", "").error


def test_a_model_whose_pairs_are_never_gated_is_not_engaged(measure):
    result = measure(["choice"], options={"window": 200})
    for metric in ("acc", "acc_norm"):
        hard = found(result, HARD, "choice", metric)
        assert (hard.engaged, hard.pairs_removed, hard.difference) == (False, 0, 0)


class DropsAll(Focus):
    """Queries look for a group that no key is in."""

    def route(self, h, sequence):
        groups = torch.ones_like(self.assign(h, sequence), dtype=torch.bool)
        return Selection(None, groups, ~groups)


def test_broken_routers_are_visible(measure):
    def into_one_group(model):
        for method in attached_methods(model).values():
            method.router.potential[1] = 1e4

    row = found(measure(["choice"], into_one_group, "one"), HARD, "choice", "acc")
    assert (row.distant_pairs_kept, row.largest_group, row.engaged) == (1, 1, False)

    def drop_all(model):
        for method in attached_methods(model).values():
            method.__class__ = DropsAll

    result = measure(["choice"], drop_all, "none", controls=False)
    row, window = found(result, HARD, "choice", "acc"), measure(["choice"], folder="window")
    window = found(window, WINDOW_ONLY, "choice", "acc")
    assert row.distant_pairs_kept == 0 and (row.value, row.pairs_removed) == (window.value, window.pairs_removed)


def test_an_interrupted_suite_goes_on_where_it_stopped(measure, monkeypatch, tmp_path):
    whole = measure(["choice", "words"], folder="whole").rows
    ran, run_on = [], benchmarks.Benchmarks.run

    def counted(self, row):
        if stop and len(ran) == 4:
            raise Interrupted(15, "in a test")
        ran.append((row.task, row.attention))
        return run_on(self, row)

    monkeypatch.setattr(benchmarks.Benchmarks, "run", counted)
    stop = True
    with pytest.raises(Interrupted):
        measure(["choice", "words"])
    stop = False
    rows = measure(["choice", "words"]).rows
    assert len(ran) == len(set(ran)) == 8
    without_times = [{**vars(row), "seconds": None} for row in rows]
    assert without_times == [{**vars(row), "seconds": None} for row in whole]

    samples = tmp_path / "benchmarks" / "focus_hard_k_1" / "words" / "samples.jsonl"
    logged = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    assert [line["doc"]["id"] for line in logged] == list(range(7)) and logged[0]["target"] == " right"
    samples.write_text("".join(samples.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")
    measure(["choice", "words"])
    assert ran[8:] == [("words", HARD)]


def test_truncation_is_an_error_unless_allowed(measure):
    OWN["long"] = described([{"context": "ab " * n, "target": "cd", "id": n} for n in (2, 300)], GREEDY, **LIKELY)
    failed = measure(["long", "choice"], folder="strict")
    row = found(failed, BASE, "long", "")
    assert "a request of 901 tokens exceeds the 512" in row.error and "eval.allow_truncation=true" in row.error
    assert found(failed, HARD, "choice", "acc").scored
    allowed = found(measure(["long"], allow_truncation=True), HARD, "long", "acc")
    assert (allowed.truncated, allowed.requests, allowed.request_tokens[-1]) == (1, 2, 512) and allowed.scored


def test_an_answer_that_cannot_be_scored_whole_is_an_error(tiny_model):
    lm = live(tiny_model("llama"), allow_truncation=True)
    with pytest.raises(UserError, match=f"exceeds the {lm.max_length} that the model takes"):
        likelihoods(lm, [([7], [8] * (lm.max_length + 1))])
    assert likelihoods(lm, [([7, 7, 7], [8] * lm.max_length)])


def test_a_document_that_can_only_be_wrong_is_an_error(measure):
    result = measure(["wrong_label", "words"])
    assert "label is not among its choices" in found(result, BASE, "wrong_label", "").error
    assert found(result, HARD, "words", "acc").scored


def test_examples_that_are_not_there_are_an_error(tiny_model):
    loaded = load("choice")
    loaded["tasks"]["choice"].sampler.df = []
    with pytest.raises(UserError, match="choice has no items to take 3 examples from; use assets=hub"):
        run_task(live(tiny_model("llama")), "choice", loaded, label="", shots=3, limit=None, bootstrap=0)


def test_examples_that_a_task_does_not_take_are_told_of(tiny_model, capsys):
    loaded = load("choice")
    loaded["tasks"]["choice"].set_config(key="num_fewshot", value=0)
    given = {"label": "", "limit": 1, "bootstrap": 0}
    assert run_task(live(tiny_model("llama")), "choice", loaded, shots=3, **given).shots == 0
    assert "choice: eval.num_fewshot=3 is not used" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generation_is_greedy_decoding_of_each_prompt_by_itself(tiny_model, family):
    model, tokenizer = attached(tiny_model(family)), byte_tokenizer()
    for context in (disable_method(model), evaluating(model)):
        with context:
            expected = []
            for row in WORDS[:3]:
                tokens = tokenizer.encode(row["context"])
                for _ in range(6):
                    with torch.no_grad():
                        tokens.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax().item())
                expected.append(tokenizer.decode(tokens[-6:]).split("\n\n")[0])
            outcome = run(model, "write")
            assert [sample["filtered_resps"][0] for sample in outcome.samples] == expected


@pytest.mark.parametrize("refused", [None, "a reason"], ids=["cached", "recomputed"])
def test_the_ledger_of_a_generation_is_that_of_what_was_read(tiny_model, monkeypatch, refused):
    model, tokenizer, expected = attached(tiny_model("llama")), byte_tokenizer(), Ledger()
    texts = [" ".join(["left"] * n) for n in (2, 9)]
    said = [" one", " two\n\n three"]  # one ends with a token, the other with a word before its batch does
    read = [tokenizer.encode(texts[0] + " one"), tokenizer.encode(texts[1] + " two\n")]
    expected.lengths = list(map(len, read))
    with torch.no_grad(), observe_selections(model, expected.observe):
        for tokens in read:
            model(torch.tensor([tokens]), use_cache=False)
    lm, generate = live(model), model.generate

    def saying(input_ids, use_cache, **options):
        assert use_cache is (refused is None)
        generate(input_ids=input_ids, use_cache=use_cache, **options)
        new = [tokenizer.encode(text) for text in said]
        width = max(map(len, new))
        new = torch.tensor([row + [lm.tokenizer.pad_token_id] * (width - len(row)) for row in new])
        return torch.cat([input_ids, new], 1)

    monkeypatch.setattr(model, "generate", saying)
    monkeypatch.setattr(live_model, "refusal", lambda methods: refused)
    ids, mask = lm.tok_batch_encode(texts)
    with observe_selections(model, lm.ledger.observe):
        lm._model_generate(ids, ids.shape[1] + 9, ["\n\n"], attention_mask=mask)
    assert lm.ledger.summary() == expected.summary()


def test_the_model_is_left_in_the_modes_it_was_in(tiny_model):
    model = attached(tiny_model("llama"))
    model.train()
    model.model.layers[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    lm_model = Benchmarks(model, byte_tokenizer(), BLOCKS, make_config([]), PRECISION, None)
    seen = []
    handle = nn.Module.register_forward_pre_hook(model, lambda module, _: seen.append(module.training))
    run_task(lm_model.lm, "words", load("words"), label="", shots=None, limit=2, bootstrap=0)
    handle.remove()
    assert seen and not any(seen)
    assert {name: module.training for name, module in model.named_modules()} == before


def test_what_precedes_a_text_without_context():
    tokenizer = byte_tokenizer()
    assert prefix_token(tokenizer) == tokenizer.eos_token_id == 256
    tokenizer.eos_token = "<|im_end|>"
    assert prefix_token(tokenizer) == 256 != tokenizer.eos_token_id
    begins = tokenizers_with_bos()
    assert prefix_token(begins) == begins.bos_token_id != begins.eos_token_id


@pytest.mark.parametrize(("template", "first"), [("$A <|endoftext|>", []), ("<s> $A <|endoftext|>", ["<s>"])])
def test_nothing_stands_between_a_prompt_and_its_answer(tiny_model, template, first):
    """Some tokenizers put a token behind every text: the answer's first token was cut off, and that one scored."""
    tokenizer = tokenizers_with_bos(template)
    lm = LiveModel(tiny_model("llama"), tokenizer, batch_size=4, precision=PRECISION)
    begin = tokenizer.convert_tokens_to_ids(first)
    assert lm._encode_pair("ab", " c") == ([*begin, *b"ab"], [*b" c"])
    assert lm.tok_batch_encode(["ab", "abcd"])[0].tolist()[1] == [*begin, *b"abcd"]
    assert tokenizer("ab")["input_ids"][-1] == tokenizer.eos_token_id


def test_live_model_tokenizer_written_in_python_is_scored(tiny_model):
    lm = LiveModel(tiny_model("llama"), ByT5Tokenizer(), batch_size=4, precision=PRECISION)
    context, answer = lm._encode_pair("ab", " c")
    assert (context, answer) == ([100, 101], [35, 102])
    assert lm.tok_batch_encode(["abcd"])[0].tolist() == [[100, 101, 102, 103]]
    assert ByT5Tokenizer()("ab")["input_ids"][-1] == 1


def test_benchmarks_without_any_score_are_an_error(measure):
    OWN["long"] = described([{"context": "ab " * n, "target": "cd", "id": n} for n in (2, 300)], GREEDY, **LIKELY)
    with pytest.raises(UserError, match="901 tokens"):
        measure(["long"], folder="failed").require_score()
    measure(["long", "choice"], folder="mixed").require_score()
    measure([], folder="none").require_score()


def tokenizers_with_bos(template="<s> $A"):
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    added = [("<s>", tokenizer.bos_token_id), ("<|endoftext|>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=added)
    return tokenizer


def items(scores):
    """Of documents that are one item each."""
    return {(name, 0, 1): score for name, score in scores.items()}


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=3, max_size=30))
def test_differences_of_hits_never_claim_certainty(pairs):
    ours, theirs = (items({str(i): float(pair[side]) for i, pair in enumerate(pairs)}) for side in (0, 1))
    mean, low, high, freedom = paired_difference(ours, theirs)
    assert freedom is None
    assert (
        mean == pytest.approx(np.mean([a - b for a, b in pairs]))
        and low <= mean <= high
        and high - low > 1 / len(pairs)
    )
    assert paired_difference(theirs, ours)[:3] == pytest.approx((-mean, -high, -low))
    # Bonett and Price's interval (2012), from the counts of documents won and lost
    n, won, lost = len(pairs), *(sum(a > b for a, b in side) for side in (pairs, [(b, a) for a, b in pairs]))
    p, q = (won + 1) / (n + 2), (lost + 1) / (n + 2)
    half = 1.959963984540054 * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    assert (low, high) == pytest.approx((p - q - half, p - q + half))


def test_differences_of_other_numbers():
    ours, theirs = items({"a": -3.0, "b": -1.0, "c": -2.5, "d": 9.0}), items({"c": -1.0, "b": -2.0, "a": -1.5})
    differences = np.array([-1.5, 1.0, -1.5])
    mean, low, high, freedom = paired_difference(ours, theirs, sign=-1)
    half = student(2) * differences.std(ddof=1) / math.sqrt(3)
    assert (mean, low, high, freedom) == pytest.approx((2 / 3, 2 / 3 - half, 2 / 3 + half, 2))
    assert paired_difference({}, {}) == (None, None, None, None)
    assert paired_difference(items({"a": 1.5}), items({"a": 2.0})) == (-0.5, None, None, None)


def test_the_windows_of_a_document_are_one_unit_of_its_difference():
    ours = {("a", 0, 10): 1.0, ("a", 10, 10): 3.0, ("b", 0, 20): 5.0, ("c", 0, 20): 9.0}
    theirs = dict.fromkeys(ours, 0.5)
    assert paired_difference(ours, theirs) == pytest.approx(
        paired_difference(items({"a": 2.0, "b": 5.0, "c": 9.0}), items(dict.fromkeys("abc", 0.5)))
    )


def test_hits_of_the_items_of_a_book_are_one_unit_of_their_difference():
    """Thirty items of each of six books, of which one loses all of them: no more than six units say so."""
    books = {(book, item, 1): 1.0 for book in "abcdef" for item in range(30)}
    lost = books | {unit: 0.0 for unit in books if unit[0] == "a"}
    mean, _, high, freedom = paired_difference(lost, books)
    alone = paired_difference(*(items({f"{b}{i}": hit for (b, i, _), hit in of.items()}) for of in (lost, books)))
    assert mean == pytest.approx(-1 / 6) and alone[2] < 0 < high and freedom < 8
    same = paired_difference(books, books)
    assert same[0] == 0 and same[1] < 0 < same[2]


@pytest.mark.parametrize("books", ["a", "ab"])
def test_hits_of_the_items_of_too_few_books_are_units_of_their_own(books):
    ours = {(book, item, 1): float(item % 3 > 0) for book in books for item in range(30)}
    theirs = {unit: float(unit[1] % 2) for unit in ours}
    alone = (items({f"{book}{item}": hit for (book, item, _), hit in of.items()}) for of in (ours, theirs))
    assert paired_difference(ours, theirs) == pytest.approx(paired_difference(*alone))


def test_there_is_no_difference_of_what_is_no_mean_of_its_items():
    """One task of ten items that loses one, one of two that gains one; the mean over tasks rises, that of items not."""
    hits = {"base": [*[1.0] * 10, 0.0, 0.0], "ours": [*[1.0] * 9, 0.0, 1.0, 0.0]}

    def outcome(name, value, key="acc"):
        samples = [
            {"document": f"{'big' if i < 10 else 'small'}/{i}", "filter": "none", "scores": {key: hit}}
            for i, hit in enumerate(hits[name])
        ]
        return Outcome([Metric(key, "none", value, None, True)], samples, {}, [])

    def difference(ours, base, **key):
        row = BenchmarkRow(attention="a", kind="hard", task="t")
        (found,) = outcome("ours", ours, **key).rows(row, outcome("base", base, **key))
        return found.difference

    assert difference(0.7, 0.5) is None and difference(10 / 12, 10 / 12) == 0
    assert difference(math.exp(-10 / 12), math.exp(-10 / 12), key="perplexity") == 0


def test_an_outcome_comes_back_from_disk(tmp_path):
    metrics = [Metric("acc", "none", 0.5, None, True), Metric("exact_match", "strict", 0.1, 0.2, True)]
    samples = [{"document": "t/0", "filter": "none", "scores": {"acc": 1.0}, "doc": {"text": "a\u2028b\nc"}}]
    outcome = Outcome(
        metrics, samples, {"requests": 3, "request_tokens": [1, 2, 3, 4, 5]}, [[0.5, 0.5]], "1", 2, 3, "here", 1.5
    )
    outcome.precision, outcome.weights = "bfloat16", "w"
    assert read_outcome(tmp_path, "bfloat16", "w") is None
    write_outcome(tmp_path, outcome)
    assert read_outcome(tmp_path, "bfloat16", "w") == outcome
    assert read_outcome(tmp_path, "float32", "w") is None
    assert read_outcome(tmp_path, "bfloat16", "other") is None
    rows = outcome.rows(BenchmarkRow(attention="a", kind="base", task="t"), None)
    assert [row.metric for row in rows] == ["acc", "exact_match (strict)"]


@pytest.fixture
def embedded(tmp_path):
    """A cache in which the package stands unpacked, with a few made-up rows of two data sets."""
    hellaswag = {
        "ind": 0, "activity_label": "Cooking", "ctx_a": "A man cooks.", "ctx_b": "he", "ctx": "A man cooks. he",
        "endings": ["stirs [title] it.", "is a stone.", "flies.", "stops."], "split": "val", "label": "0",
    }  # fmt: skip
    boolq = {"question": "is it", "passage": "It is.", "label": 1}
    for name, row in (("Rowan/hellaswag/default", hellaswag), ("aps/super_glue/boolq", boolq)):
        folder = tmp_path / "benchmarks" / NAME.replace(" ", "-") / name
        folder.mkdir(parents=True)
        (folder / "validation.jsonl").write_text((json.dumps(row) + "\n") * 3, encoding="utf-8")
    return tmp_path


@pytest.fixture
def few_official(monkeypatch):
    """Four folders of lm-eval's own tasks: reading them all takes seconds."""
    folders = [
        Path(lm_eval.__file__).parent / "tasks" / name for name in ("truthfulqa", "hellaswag", "super_glue", "gsm8k")
    ]
    manager = TaskManager(include_defaults=False, include_path=folders)
    monkeypatch.setattr(tasks, "official", lambda: manager)


def test_official_tasks_run_on_embedded_items_and_what_is_missing_is_one_line(
    tiny_model, few_official, embedded, tmp_path, capsys
):
    names = ["truthfulqa_mc1", "hellaswag", "boolq", "gsm8k_cot"]
    config = make_config(names, limit=2)
    config.cache_dir = str(embedded)
    model = attached(tiny_model("llama"))
    rows = all_rows(model, config, tmp_path / "run")
    missing = [row for row in rows if row.kind == "missing"]
    assert [row.task for row in missing] == ["truthfulqa_mc1", "gsm8k_cot"]
    assert (
        missing[0].error
        == f"truthfulqa/truthful_qa is not among the data sets that {NAME} carries; it needs the Hugging Face hub"
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NOT MEASURED: ")]
    assert lines[0] == f"NOT MEASURED: truthfulqa_mc1: {missing[0].error}; the other 3 of eval.tasks run"
    assert len(lines) == 2 and "openai/gsm8k is not among the data sets" in lines[1]
    hard = {(row.task, row.metric): row for row in rows if row.attention == HARD}
    assert set(hard) == {("hellaswag", "acc"), ("hellaswag", "acc_norm"), ("boolq", "acc")}
    assert all(row.scored and row.n == 2 for row in hard.values())
    assert hard["boolq", "acc"].source == f"aps/super_glue from {NAME}" and hard["hellaswag", "acc"].version == "1.0"
    with pytest.raises(UserError, match="eval.tasks holds helaswag, which lm-eval does not know"):
        Benchmarks(model, byte_tokenizer(), BLOCKS, make_config(["helaswag"]), PRECISION, tmp_path)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["perplexity"], "perplexity; give its length as a whole number, such as perplexity@1024"),
        (["passkey@4k"], "passkey@4k; give its length"),
        (["piqa", "passkey@64", "piqa"], "piqa more than once"),
    ],
)
def test_impossible_task_names_are_refused_before_any_work(names, said):
    with pytest.raises(UserError, match=f"eval.tasks holds {said}"):
        validate_tasks(names)
    validate_tasks(["piqa", "passkey", "passkey@64", "perplexity@64"])


@pytest.mark.parametrize("origin", ["hub", "hub_cache"])
def test_what_the_hub_has_is_read_from_there(monkeypatch, embedded, origin):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, **options: asked.append((path, name, options)))
    monkeypatch.setattr(tasks, "choose_source", lambda policy, name, cached: origin)
    before = datasets.load_dataset
    with tasks.reading("auto", embedded) as sources:
        datasets.load_dataset(path="cais/mmlu", name="anatomy", revision="x")
    assert (asked, sources) == ([("cais/mmlu", "anatomy", {"revision": "x"})], [f"cais/mmlu ({origin})"])
    assert datasets.load_dataset is before


@pytest.mark.real
def test_the_items_are_the_official_ones():
    cache = cache_root(None)
    folder = benchmark_folder(cache)
    sizes = {
        "Rowan/hellaswag/default": {"validation": 10042}, "baber/piqa/default": {"validation": 1838},
        "allenai/ai2_arc/ARC-Easy": {"validation": 570, "test": 2376}, "openai/gsm8k/main": {"test": 1319},
        "allenai/ai2_arc/ARC-Challenge": {"validation": 299, "test": 1172},
        "allenai/openbookqa/main": {"validation": 500, "test": 500}, "aps/super_glue/boolq": {"validation": 3270},
        "allenai/winogrande/winogrande_xl": {"validation": 1267}, "EleutherAI/lambada_openai/default": {"test": 5153},
        "allenai/sciq/default": {"validation": 1000, "test": 1000},
    }  # fmt: skip
    assert set(sizes) == set(MEMBERS)
    for name, splits in sizes.items():
        path, _, subset = name.rpartition("/")
        data = load_benchmark(path, None if subset == "default" else subset, cache)
        assert {split: len(rows) for split, rows in data.items() if split != "train"} == splits and not len(
            data["train"]
        )
    subjects = sorted(path.name for path in (folder / "cais/mmlu").iterdir())
    tests = [load_benchmark("cais/mmlu", subject, cache)["test"] for subject in subjects]
    assert (len(subjects), sum(map(len, tests))) == (57, 14042)
    arc = load_benchmark("allenai/ai2_arc", "ARC-Easy", cache)
    assert arc["test"].features == arc["validation"].features
    assert {tuple(row["choices"]["label"]) for row in arc["test"]} >= {tuple("ABCD"), tuple("ABC"), tuple("ABCDE")}
    assert set(load_benchmark("aps/super_glue", "boolq", cache)["validation"]["label"]) == {0, 1}


@pytest.mark.slow
@pytest.mark.real
def test_official_tasks_run_on_the_real_items(tiny_model, tmp_path):
    names = [
        "arc_easy",
        "piqa",
        "openbookqa",
        "sciq",
        "winogrande",
        "lambada_openai",
        "mmlu_anatomy",
        "boolq",
        "last_word",
    ]
    model = attached(tiny_model("llama", max_position_embeddings=8192))
    config = make_config(names, limit=2, controls=False)
    rows = all_rows(model, config, tmp_path)
    assert {row.task for row in rows if row.attention == HARD and row.scored} == set(names)
    assert all(row.error is None and row.source for row in rows)
