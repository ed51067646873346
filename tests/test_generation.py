"""job=generate: every continuation is what the model generates there, scored by the base."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import attach_focus, compute_logits, make_config
from running import DUAL, fitting, only_run, succeed, tiny
from torch.nn.functional import cross_entropy

from focus_exp import attach, disable_method
from focus_exp.data import SequenceDataset, TokenStream
from focus_exp.evaluation import generation
from focus_exp.evaluation.generation import Continuation, Generation, measure_cache
from focus_exp.models.cache_size import count_keys_and_bytes
from focus_exp.models.random import byte_tokenizer
from focus_exp.results.measurement import format_measurements
from focus_exp.results.record import Record
from focus_exp.training.precision import choose_precision

JOB = ["job=generate", "recipe.steps=2"]


def continuations(folder):
    record = Record.load(only_run(folder) / "record.json")
    rows = [Continuation(**row) for row in record.continuations]
    expected = [replace(m, seed=0) for row in rows for m in row.measurements()]
    assert format_measurements(record.measurements[-len(expected) :]) == format_measurements(expected)
    return rows


@pytest.mark.parametrize(
    ("tokens", "expected"), [([1, 2, 3], None), ([1, 2, 3, 4, 5], 0.0), ([7] * 8, 0.8), ([1, 2, 3, 4] * 2, 0.2)]
)
def test_repetition_counts_runs_of_four_that_came_before(tokens, expected):
    assert generation.repetition(tokens) == (expected if expected is None else pytest.approx(expected))


def test_continuations_of_every_attention_follow_their_prompt(tmp_path):
    succeed(*tiny(tmp_path), *JOB)
    rows = continuations(tmp_path)
    names = ["text", "base", "focus_hard", "focus_hard_k2_query_topk"]
    assert [(row.prompt, row.variant) for row in rows] == [(n, name) for n in (0, 1) for name in names]
    assert all(row.error is None and (row.prompt_tokens, row.tokens) == (20, 12) for row in rows)
    by_name = {(row.prompt, row.variant): row for row in rows}
    for prompt in (0, 1):
        full, everything = by_name[prompt, "base"], by_name[prompt, names[-1]]
        assert full.keys_read == 20 + 12 - 1
        assert 0 <= full.repetition < 1
        # two of two groups are full attention
        assert everything.text == full.text and everything.agreeing == 12
        assert everything.base_nll == pytest.approx(full.base_nll, abs=1e-5)
        assert by_name[prompt, "focus_hard"].keys_read < everything.keys_read
    text = (only_run(tmp_path) / "continuations.md").read_text()
    assert text.count("**base**") == 2 and "## Prompt 1, 20 tokens" in text


@pytest.fixture
def make_generation(tiny_model, tmp_path):
    """make_generation(*overrides): continuations of a tiny attached model."""

    def make(*overrides: str) -> Generation:
        torch.manual_seed(0)
        model = attach(tiny_model("llama"), "focus", groups=2, window=8, sinks=1)
        tokens = np.random.default_rng(0).integers(3, 250, 256, dtype=np.int32)
        sequences = SequenceDataset(TokenStream("text", tokens, np.array([0, 256]), ["text"]), 32, cross_documents=True)
        config = make_config(*tiny(tmp_path), "job=generate", *overrides)
        return Generation(model, byte_tokenizer(), sequences, config, choose_precision("float32", "cpu", False))

    return make


def test_base_nll_is_that_of_the_new_tokens_under_full_attention(make_generation):
    generation = make_generation()
    text = next(generation.rows())
    tokens = generation.blocks[generation.indices[0]]["input_ids"]
    with disable_method(generation.model):
        logits = compute_logits(generation.model, tokens[None])[0]
    expected = cross_entropy(logits[19:31], tokens[20:32])  # of 12 tokens after 20
    assert text.base_nll == pytest.approx(float(expected), abs=1e-5)


def test_generation_ignores_the_models_own_generation_config(make_generation):
    """Such as a penalty of repetitions, which no record would show."""
    plain, penalized = make_generation(), make_generation()
    penalized.model.generation_config.repetition_penalty = 5.0
    assert [row.text for row in penalized.rows()] == [row.text for row in plain.rows()]


def test_generation_failed_full_attention_has_an_error_and_no_agreement(make_generation):
    generation = make_generation("generate.prompts=1", "generate.top_k=[1]")

    def fail_once(*_):
        failing.remove()
        raise torch.OutOfMemoryError("no room")

    next(rows := generation.rows())  # of the text
    failing = generation.model.register_forward_pre_hook(fail_once)
    full, hard = rows
    assert "no room" in full.error and hard.tokens == 12 and hard.agreeing is None


def test_generation_takes_every_token_of_a_prompt_as_text(make_generation):
    generation, masks = make_generation("generate.prompts=1", "generate.top_k=[1]"), []
    generation.model.register_forward_pre_hook(
        lambda model, args, options: masks.append(options.get("attention_mask")), with_kwargs=True
    )
    generation.generate(0, torch.tensor([5, 0, 7, 0, 9]), "base")  # 0 is the token of padding
    assert masks and all(mask is None or mask.bool().all() for mask in masks)


@pytest.mark.parametrize("sequences", [1, 2, 4, 5, 8, 40])
def test_prompts_are_distinct_and_spread(sequences):
    tokens = np.zeros(8 * sequences, dtype=np.int32)
    blocks = SequenceDataset(
        TokenStream("text", tokens, np.array([0, len(tokens)]), ["text"]), 8, cross_documents=False
    )
    config = SimpleNamespace(generate=SimpleNamespace(prompts=4))
    indices = Generation(None, None, blocks, config, None).indices
    assert len(set(indices)) == len(indices) == min(4, sequences) and indices == sorted(indices)
    assert indices == [8, 16, 23, 31] or sequences < 40


def test_dual_router_with_a_budget_generates(tmp_path):
    dual = fitting(*tiny(tmp_path), *DUAL, "attention.density=0.5")
    succeed(*dual, "job=generate")
    rows = continuations(tmp_path)
    assert [row.variant for row in rows] == ["text", "base", "focus_dual"] * 2
    assert all(row.error is None and row.tokens == 12 for row in rows)
    assert rows[2].keys_read < rows[1].keys_read


def test_dual_router_generates_with_other_top_k(tmp_path):
    dual = fitting(*tiny(tmp_path), *DUAL, "generate.top_k=[1,4]")
    succeed(*dual, "job=generate")
    _, full, top_1, everything = continuations(tmp_path)[:4]
    assert (top_1.variant, everything.variant) == ("focus_dual k=1", "focus_dual k=4")
    assert everything.text == full.text and top_1.keys_read < everything.keys_read == full.keys_read

    # an adapter takes top_k of the command line too
    (adapter,) = (tmp_path / "runs").rglob("adapter")
    given = fitting(*tiny(tmp_path, "read"), "attention=focus_dual", "attention.groups=4", "attention.top_k=1")
    succeed(*given, "job=generate", f"adapter={adapter}")
    assert [row.text for row in continuations(tmp_path / "read")[1:3]] == [full.text, top_1.text]


def test_measure_cache_counts_what_sliding_layers_hold(tiny_model):
    model = tiny_model("qwen2")  # its second layer slides over 8 tokens
    output = model.generate(
        torch.arange(3, 23)[None], max_new_tokens=5, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True
    )
    assert measure_cache(output.past_key_values)[0] == (24 + 8) / 2


def test_measure_cache_counts_layers_with_full_attention(tiny_model):
    model = attach_focus(tiny_model("llama"), layers=[1])
    output = model.generate(
        torch.arange(3, 63)[None], max_new_tokens=5, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True
    )
    cache = output.past_key_values
    assert measure_cache(cache)[0] == (64 + count_keys_and_bytes(cache.layers[1])[0]) / 2
    assert count_keys_and_bytes(cache.layers[1])[0] < 64


def test_key_gate_generates(tmp_path):
    succeed(*fitting(*tiny(tmp_path), "attention=key_gate", "recipe=none", "job=generate"))
    rows = continuations(tmp_path)
    assert [row.variant for row in rows[:3]] == ["text", "base", "key_gate"] and not rows[2].error and rows[2].text
