"""What a run leaves behind, and what each recipe does, seen from the command line."""

from math import isfinite

import pandas as pd
import pytest
import torch
from builders import load_recorded, make_config, scored
from conftest import build
from omegaconf import OmegaConf
from running import fitting, metrics_of, only_run, outcome, record_of, run, succeed, tiny, without_attention
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from focus_exp.identity import identity
from focus_exp.jobs.train import save_weights
from focus_exp.models.random import byte_tokenizer
from focus_exp.results.record import Record

STEPS = "recipe.steps=4"
BOTH = ("recipe=finetune", "recipe.phases.router.steps=3", "recipe.phases.everything.steps=3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def retrofit(folder):
    """The command of a finished retrofit."""
    command = [*tiny(folder, "retrofit"), STEPS]
    succeed(*command)
    return command


@pytest.fixture(scope="module")
def finetuned(folder, retrofit):
    """The folder of a finished finetuning with Focus."""
    succeed(*tiny(folder, "finetuned"), *BOTH)
    return only_run(folder / "finetuned")


def rows(record):
    return {row.name: row for row in scored(record.measurements)}


def kinds(record):
    return {row.kind for row in scored(record.measurements)}


def change_text(folder):
    text = next((folder / "texts").glob("*.txt"))
    text.write_text(text.read_text(encoding="utf-8") + "more", encoding="utf-8")


def change_tokenizer(folder):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "e"})
    tokenizer.save_pretrained(folder / "weights")


def change_weights(folder):
    model = build("tiny_llama")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(folder / "weights")


@pytest.mark.parametrize("change", [change_text, change_tokenizer, change_weights])
def test_run_with_changed_inputs_is_another(tmp_path, change):
    for part in (build("tiny_llama"), byte_tokenizer()):
        part.save_pretrained(tmp_path / "weights")
    command = [*tiny(tmp_path), "recipe=none", "eval.tasks=[]", f"model.path={tmp_path / 'weights'}"]
    succeed(*command)
    assert "already finished" in run(*command).out
    change(tmp_path)
    assert "already finished" not in succeed(*command).out
    assert len([*(tmp_path / "runs").rglob("record.json")]) == 2


def test_run_folder_has_every_file(folder, retrofit):
    place = only_run(folder / "retrofit")
    record = record_of(folder / "retrofit")
    parts = place.relative_to(folder / "retrofit").parts
    assert parts == ("adhoc", "tiny_llama-texts-cpu", f"focus-seed0-{record.config_hash}")
    files = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert files >= {
        *("config.yaml", "metrics.jsonl", "record.json", "table.md", "measurements.csv"),
        *("adapter/focus_adapter.safetensors", "adapter/focus_adapter.json"),
        *("figures/loss_curve.svg",),
    }
    config = OmegaConf.to_object(load_recorded(OmegaConf.load(place / "config.yaml")))
    assert config.attention.window == 8 and config.recipe.phases["router"].steps == 4
    assert [line["step"] for line in metrics_of(folder / "retrofit")] == [1, 2, 3, 4]
    measured = pd.read_csv(place / "measurements.csv")
    assert (measured.metric == "perplexity").sum() == len(scored(record.measurements))


def test_save_weights_keeps_an_untied_head(tmp_path, monkeypatch):
    monkeypatch.setattr("focus_exp.jobs.train.is_sharded", lambda _: True)
    monkeypatch.setattr("focus_exp.jobs.train.gather_tensor", lambda tensor: tensor)
    for tied in (False, True):
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            tie_word_embeddings=tied,
        ))  # fmt: skip
        save_weights(tmp_path / str(tied), model, byte_tokenizer())
        found = AutoModelForCausalLM.from_pretrained(tmp_path / str(tied) / "model")
        assert torch.equal(found.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("method", ["performer", "random_groups"])
def test_identity_depends_on_the_seed_of_the_attention(method):
    hashes = {}
    for seed, own in ((0, None), (0, 0), (1, None), (1, 1), (1, 0), (2, 0)):
        overrides = [] if own is None else [f"attention.seed={own}"]
        config = make_config(f"attention={method}", "recipe=none", f"seed={seed}", *overrides)
        hashes[seed, own] = identity(config)
    assert hashes[0, None] == hashes[0, 0] and hashes[1, None] == hashes[1, 1]
    assert len(set(hashes.values())) == 4


def test_record_has_provenance_and_measurements(folder, retrofit):
    record = record_of(folder / "retrofit")
    assert (record.status, record.error, record.seed, record.steps) == ("finished", None, 0, 4)
    router = record.config["recipe"]["router"]
    sequences = router["warm_start_sequences"] + router["balance_sequences"]
    assert record.tokens_seen == (4 * 2 * 2 + sequences) * 32
    assert record.command.startswith("python -m focus_exp model=tiny_llama")
    assert record.model["used"].startswith("random weights") and record.data["fingerprint"]
    assert record.method["causal"] and record.method["trainable_parameters"] > 0
    assert all(row.error is None and isfinite(row.nll) for row in scored(record.measurements))
    assert kinds(record) == {"base", "soft", "hard", "control"}


def test_finished_run_is_repeated_only_with_overwrite(folder, retrofit):
    def stamps():
        return {str(path): path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}

    place = only_run(folder / "retrofit")
    before, times = outcome(folder / "retrofit"), stamps()
    assert str(place) in run(*retrofit).out
    assert stamps() == times
    succeed(*retrofit, "overwrite=true")
    assert stamps().keys() == times.keys() and not set(stamps().items()) & set(times.items())
    assert outcome(folder / "retrofit") == before


def test_evaluate_adapter_equals_training(folder, retrofit):
    adapter = only_run(folder / "retrofit") / "adapter"
    command = [*without_attention(tiny(folder, "evaluated")), "job=evaluate"]
    succeed(*command, f"adapter={adapter}")
    trained, evaluated = record_of(folder / "retrofit"), record_of(folder / "evaluated")
    assert {name: row.nll for name, row in rows(evaluated).items()} == {n: r.nll for n, r in rows(trained).items()}
    assert evaluated.method["causal"] and "-seed0-" in evaluated.command

    other = [*tiny(folder, "longer"), "recipe.steps=5"]
    succeed(*other)
    second = run(*command, f"adapter={only_run(folder / 'longer') / 'adapter'}")
    assert second.code == 0 and "already finished" not in second.out
    assert len(list((folder / "evaluated").rglob("record.json"))) == 2


def test_train_zero_steps_fits_and_measures_routers(tmp_path):
    untrained, fitted = [*tiny(tmp_path, "untrained"), "recipe=none"], [*tiny(tmp_path, "fitted"), "recipe.steps=0"]
    succeed(*untrained)
    succeed(*fitted)
    record, other = record_of(tmp_path / "fitted"), record_of(tmp_path / "untrained")
    assert (record.steps, record.tokens_seen) == (0, 2 * 32) and record.method["trainable_parameters"] > 0
    assert rows(record)["focus_soft"].nll != rows(other)["focus_soft"].nll
    assert metrics_of(tmp_path / "fitted") == []
    assert list((tmp_path / "fitted").rglob("focus_adapter.safetensors"))


@pytest.mark.parametrize("attention", ["full", "window", "random_groups", "focus"])
def test_train_recipe_none_measures_without_training(tmp_path, attention):
    succeed(*fitting(*tiny(tmp_path), "recipe=none", f"attention={attention}", "attention.window=8"))
    record = record_of(tmp_path)
    balanced = 32 if attention == "focus" else 0  # tokens that the random router's groups were made even on
    assert (record.status, record.steps, record.tokens_seen) == ("finished", 0, balanced)
    assert record.method["trainable_parameters"] == 0
    assert metrics_of(tmp_path) == []


def test_train_finetune_measures_the_base_before_training(folder, retrofit, finetuned):
    record = Record.load(finetuned / "record.json")
    base, other = (each.find("nll", "base") for each in (record, record_of(folder / "retrofit")))
    assert base == pytest.approx(other, rel=1e-6)
    (trained,) = [row for row in scored(record.measurements) if row.kind == "trained"]
    assert trained.nll != base
    assert [line["phase"] for line in metrics_of(folder / "finetuned")] == ["router"] * 3 + ["everything"] * 3
    model = AutoModelForCausalLM.from_pretrained(finetuned / "model")
    assert record.method["trainable_parameters"] > sum(p.numel() for p in model.parameters())


def test_evaluate_finetuned_model_and_adapter_equals_training(folder, finetuned):
    saved = (f"model.path={finetuned / 'model'}", f"adapter={finetuned / 'adapter'}")
    succeed(*without_attention(tiny(folder, "reused")), "job=evaluate", *saved)
    trained, reused = Record.load(finetuned / "record.json"), record_of(folder / "reused")
    assert trained.model["fingerprint"] != trained.method["weights"] == reused.model["fingerprint"]
    before, after = rows(trained), rows(reused)
    assert after["base"].nll == pytest.approx(before["trained"].nll, rel=1e-5)
    assert after["focus_hard"].nll == pytest.approx(before["focus_hard"].nll, rel=1e-5)


@pytest.mark.parametrize("recipe", ["finetune", "scratch"])
def test_train_full_attention_saves_weights_alone(tmp_path, recipe):
    succeed(*fitting(*tiny(tmp_path), f"recipe={recipe}", "recipe.steps=3", "attention=full"))
    record, place = record_of(tmp_path), only_run(tmp_path)
    assert kinds(record) == {"base", "trained"} and record.steps == 3
    assert (place / "model" / "model.safetensors").exists() and not (place / "adapter").exists()
    assert record.method["trainable_parameters"] == record.model["parameters"]


def test_train_focus_paper_is_recorded_as_noncausal(tmp_path):
    settings = ["attention=focus_paper", STEPS, "attention.window=8", "attention.groups=3"]
    settings += ["recipe.router.balance_sequences=1"]
    succeed(*tiny(tmp_path), *settings)
    record = record_of(tmp_path)
    assert record.method["causal"] is False
    causal = {row.kind: row.causal for row in scored(record.measurements)}
    assert causal == {"base": True, "soft": False, "hard": False, "control": True, "causal_counterpart": True}
    table = (only_run(tmp_path) / "table.md").read_text()
    assert table.count("| no |") == sum(not row.causal for row in scored(record.measurements))
