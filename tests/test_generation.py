"""job=generate: every text is what the model writes there, and its numbers are those of the base."""

import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from running import fitting, only_run, record_of, run, tiny, without_attention
from transformers import LlamaForCausalLM

from focus_exp.data import Blocks, TokenStream
from focus_exp.evaluation import generation
from focus_exp.evaluation.generation import Generation, agreement, read_and_held
from focus_exp.jobs import prepare

JOB = ["job=generate", "recipe.steps=2"]


def test_texts_of_every_attention_stand_under_their_prompt(tmp_path):
    result = run(*tiny(tmp_path), *JOB)
    assert result.code == 0, result.err
    rows = record_of(tmp_path).continuations
    names = ["the book", "full attention", "Focus hard k=1", "Focus hard k=2 (query_topk)"]
    assert [(row.prompt, row.attention) for row in rows] == [(n, name) for n in (0, 1) for name in names]
    assert all(row.error is None and (row.prompt_tokens, row.tokens) == (20, 12) for row in rows)
    by_name = {(row.prompt, row.attention): row for row in rows}
    for prompt in (0, 1):
        full, everything = by_name[prompt, "full attention"], by_name[prompt, names[-1]]
        assert full.read_share == 1 and full.read == 20 + 12 - 1
        # two of two groups are full attention
        assert everything.text == full.text and everything.agrees == 12
        assert everything.base_nll == pytest.approx(full.base_nll, abs=1e-5)
        assert by_name[prompt, "Focus hard k=1"].read < everything.read
    text = (only_run(tmp_path) / "continuations.md").read_text()
    assert text.count("**full attention**") == 2 and "## Prompt 1, 20 tokens" in text
    assert "2 prompts of 20 tokens, each continued by 12" in result.out


def test_a_models_own_wishes_for_texts_do_not_decide_them(tmp_path, monkeypatch):
    """Such as a penalty of repetitions in its generation_config.json, of which no record tells."""
    texts = []
    for place, penalty in (("without", 1.0), ("with", 5.0)):
        (tmp_path / place).mkdir()
        load = prepare.load_model

        def penal(*args, load=load, penalty=penalty, **options):
            loaded = load(*args, **options)
            loaded.model.generation_config.repetition_penalty = penalty
            return loaded

        with monkeypatch.context() as patch:
            patch.setattr(prepare, "load_model", penal)
            assert run(*tiny(tmp_path / place), *JOB).code == 0
        texts.append([row.text for row in record_of(tmp_path / place).continuations])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("windows", [1, 2, 4, 5, 8, 40])
def test_no_text_is_continued_twice_while_there_are_others(windows):
    tokens = np.zeros(8 * windows, dtype=np.int32)
    blocks = Blocks(TokenStream("text", tokens, np.array([0, len(tokens)]), ["text"]), 8, cross_documents=False)
    config = SimpleNamespace(generate=SimpleNamespace(prompts=4))
    found = Generation(None, None, blocks, config, None, None).indices
    assert len(set(found)) == len(found) == min(4, windows) and found == sorted(found)
    assert found == [8, 16, 23, 31] or windows < 40


@pytest.mark.parametrize("budget", [["attention.top_k=2"], ["attention.density=0.5"]])
def test_two_encoders_write_too_fitted_here_or_read_from_an_adapter(tmp_path, budget):
    fit = [
        "attention.calibration_sequences=2",
        "attention.validation_sequences=1",
        "attention.fit_steps=4",
        "attention.groups=4",
        *budget,
    ]
    dual = fitting(*tiny(tmp_path), "attention=focus_dual", "recipe=none", *fit)
    result = run(*dual, "job=generate")
    assert result.code == 0, result.err
    rows = record_of(tmp_path).continuations
    assert [row.attention for row in rows] == ["the book", "full attention", "focus_dual"] * 2
    assert all(row.error is None and row.tokens == 12 for row in rows)
    assert rows[2].read < rows[1].read

    adapter = only_run(tmp_path) / "adapter"
    assert run(*without_attention(tiny(tmp_path, "read")), "job=generate", f"adapter={adapter}").code == 0
    assert [row.text for row in record_of(tmp_path / "read").continuations] == [row.text for row in rows]


def test_two_encoders_write_with_other_numbers_of_groups_too(tmp_path):
    fit = [
        "attention.calibration_sequences=2",
        "attention.validation_sequences=1",
        "attention.fit_steps=4",
        "attention.groups=4",
    ]
    dual = fitting(*tiny(tmp_path), "attention=focus_dual", "recipe=none", *fit, "generate.top_k=[1,4]")
    assert run(*dual, "job=generate").code == 0
    _, full, one, everything = record_of(tmp_path).continuations[:4]
    assert (one.attention, everything.attention) == ("focus_dual k=1", "focus_dual k=4")
    assert everything.text == full.text and one.read < everything.read == full.read

    # an adapter too takes the number of groups of the command line
    (adapter,) = (tmp_path / "runs").rglob("adapter")
    given = fitting(*tiny(tmp_path, "read"), "attention=focus_dual", "attention.groups=4", "attention.top_k=1")
    assert run(*given, "job=generate", f"adapter={adapter}").code == 0
    assert [row.text for row in record_of(tmp_path / "read").continuations[1:3]] == [full.text, one.text]

    for setting, said in (("generate.top_k=[5]", "use 1 to"), ("attention.density=0.2", "does not go with a budget")):
        refused = run(*dual, "job=generate", setting)
        assert refused.code == 2 and said in refused.err


def test_the_bases_loss_is_that_of_the_text(tmp_path, monkeypatch):
    real, seen = Generation.base_nll, []

    def checking(self, prompt, new):
        found = real(self, prompt, new)
        with generation.disabled(self.model), torch.no_grad():
            logits = self.model(input_ids=torch.cat([prompt, new])[None], use_cache=False).logits[0]
        logs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        assert found == pytest.approx(-float(logs[torch.arange(len(new)), new].mean()), abs=1e-5)
        seen.append(found)
        return found

    monkeypatch.setattr(Generation, "base_nll", checking)
    assert run(*tiny(tmp_path), *JOB, "generate.top_k=[1]").code == 0
    assert len(seen) == 6


def test_an_interrupted_run_goes_on_with_the_next_text(tmp_path, monkeypatch):
    real, calls = Generation.write, []

    def stopping(self, number, prompt, name):
        calls.append((number, name))
        if len(calls) == 4:
            signal.raise_signal(signal.SIGTERM)
        return real(self, number, prompt, name)

    monkeypatch.setattr(Generation, "write", stopping)
    assert run(*tiny(tmp_path), *JOB).code == 128 + signal.SIGTERM
    assert run(*tiny(tmp_path), *JOB).code == 0
    full, *hard = ["full attention", "Focus hard k=1", "Focus hard k=2 (query_topk)"]
    assert calls == [(number, name) for number in (0, 1) for name in [full] * (1 + number) + hard]
    assert len(record_of(tmp_path).continuations) == 8


def test_samples_follow_from_the_seed(tmp_path):
    texts = []
    for folder in ("first", "second"):
        assert run(*tiny(tmp_path, runs=folder), *JOB, "generate.do_sample=true").code == 0
        texts.append([row.text for row in record_of(tmp_path / folder).continuations])
    assert texts[0] == texts[1] and len(set(texts[0])) > 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["attention=focus_paper", "attention.groups=2"], "reads the future"),
        (["attention=window", "recipe=none"], "not attention=window"),
        (["generate.prompt_tokens=32"], "generate.prompt_tokens=32 leaves nothing of eval.seq_len=32"),
        (["generate.top_k=[3]"], "generate.top_k holds 3; use 1 to attention.groups=2"),
        (["generate.new_tokens=0"], "generate.new_tokens=0"),
        (["generate.new_tokens=500"], "generate.prompt_tokens + generate.new_tokens=520 exceeds the 512 positions"),
    ],
    ids=str,
)
def test_bad_settings_are_one_message(tmp_path, settings, said):
    result = run(*fitting(*tiny(tmp_path), *JOB, *settings))
    assert result.code == 2 and said in result.err and "Traceback" not in result.err


def test_nothing_agrees_with_full_attention_that_failed(tmp_path, monkeypatch):
    generate, calls = LlamaForCausalLM.generate, []

    def failing_once(self, **options):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return generate(self, **options)

    monkeypatch.setattr(LlamaForCausalLM, "generate", failing_once)
    assert run(*tiny(tmp_path), *JOB, "recipe.steps=1", "generate.prompts=1", "generate.top_k=[1]").code == 0
    _, full, hard = record_of(tmp_path).continuations
    assert "no room" in full.error and hard.tokens == 12 and hard.agrees is None


def test_full_attention_reads_what_its_layers_hold(tiny_model):
    model = tiny_model("qwen2")  # whose second layer slides over 8 tokens
    out = model.generate(
        torch.arange(3, 23)[None], max_new_tokens=5, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True
    )
    assert read_and_held(out.past_key_values)[0] == (24 + 8) / 2


def test_agreement_ends_where_texts_part():
    assert agreement([1, 2, 3], [1, 2, 4]) == 2 and agreement([1, 2], [1, 2]) == 2 and agreement([5], [6]) == 0
