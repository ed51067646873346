"""Evaluating an adapter: with its own settings and base model, or refused."""

import json
import re
import shutil

import pytest
from builders import make_config, write_comparison, write_variants
from running import fitting, only_run, run, tiny, without_attention

from focus_exp.models.adapter import DESCRIPTION
from focus_exp.results.record import RECORD, Record
from focus_exp.runs.compose import compose_adapter

FIT = [
    "recipe.fit.sequences=3",
    "recipe.fit.validation_sequences=1",
    "recipe.fit.steps=4",
    "attention.groups=4",
]


@pytest.fixture(scope="module")
def retrofit(finished_run):
    return only_run(finished_run) / "adapter"


@pytest.fixture(scope="module")
def dual(tmp_path_factory):
    """dual(): adapters of two encoders, with a budget of 0.3 of the pairs and without one."""
    folder = tmp_path_factory.mktemp("dual")
    made = {}
    for name, budget in (("budget", ["attention.density=0.3", "attention.top_k=1"]), ("free", ["attention.top_k=2"])):
        command = fitting(*tiny(folder, name), "attention=focus_dual", "recipe=none", *FIT, *budget)
        assert run(*command).code == 0
        made[name] = only_run(folder / name) / "adapter"
    return made


def make_command(folder, adapter, *typed):
    """The command, without the settings that other tests have typed."""
    return [*without_attention(tiny(folder)), "job=evaluate", f"adapter={adapter}", *typed]


def refused(*arguments):
    """Return the key that the error of a command starts with."""
    result = run(*arguments)
    assert result.code == 2 and result.err.count("error:") == 1, result.err
    return re.search(r"(\S+) must be", result.err)[1]


def test_evaluate_adapter_other_setting_raises(tmp_path, retrofit):
    for setting in ("attention.window=32", "attention.temperature=9", "recipe.fit.steps=9", "recipe.steps=2"):
        assert refused(*make_command(tmp_path, retrofit, setting)) == setting.partition("=")[0]
    assert not (tmp_path / "runs").exists()


def test_evaluate_adapter_same_setting_is_accepted(retrofit):
    assert configured(f"adapter={retrofit}", "attention.window=8", "attention.top_k=2").attention.top_k == 2


def test_evaluate_adapter_other_budget_raises(tmp_path, dual):
    dual_options = ["attention=focus_dual", "attention.groups=4"]
    command = make_command(tmp_path, dual["budget"], *dual_options)
    assert refused(*command, "attention.density=0.1") == "attention.density"
    assert refused(*command, "attention.top_k=3") == "attention.top_k"
    assert configured(f"adapter={dual['budget']}", *dual_options).attention.groups_per_layer  # that was fitted for it
    without = make_command(tmp_path, dual["free"], *dual_options, "attention.density=0.1")
    assert refused(*without) == "attention.density"


def test_with_adapter_top_k_is_the_adapters_unless_given(tmp_path, retrofit, dual):
    place = shutil.copytree(retrofit, tmp_path / "share")
    description = json.loads((place / DESCRIPTION).read_text())
    description["options"] |= {"top_k": 2, "pair_rule": "share"}
    (place / DESCRIPTION).write_text(json.dumps(description))

    def read(adapter, *typed):
        attention = configured(f"adapter={adapter}", *typed).attention
        return attention.top_k, getattr(attention, "pair_rule", None)

    assert read(place) == read(place, "attention=focus") == (2, "share")
    assert read(place, "attention.top_k=1") == (1, "share")
    assert read(place, "attention.top_k=1", "attention.pair_rule=query_topk") == (1, "query_topk")
    assert read(retrofit, "+experiment=model_scale", "model=tiny_llama", "variants=[]") == (
        2,
        "share",
    )  # which asks for it
    assert read(dual["free"])[0] == read(dual["free"], "attention=focus_dual")[0] == 2
    assert read(dual["free"], "attention=focus_dual", "attention.top_k=4")[0] == 4


def test_compare_adapter_other_setting_raises(tmp_path, retrofit):
    compared = [*make_command(tmp_path, retrofit), "job=compare"]
    conf = tmp_path / "conf"
    wide = write_variants(conf, {"wide": ["attention.window=32"]})
    assert refused(*compared, *wide) == "attention.window"
    one = write_variants(conf, {"one": []})
    assert refused(*compared, *one, "shared_variant=adhoc/wide") == "attention.window"
    assert not (tmp_path / "runs").exists()


def configured(*arguments):
    """Return the configuration of an evaluation."""
    typed = ["job=evaluate", *arguments]
    return compose_adapter(make_config(*typed), typed)


def find_base(*arguments):
    return configured(*arguments).model


def test_with_adapter_base_is_its_runs(retrofit):
    given = f"adapter={retrofit}"
    assert find_base(given).name == "tiny_llama"
    assert find_base(given, "model=tiny_gpt2").name == "tiny_gpt2"
    assert find_base(given, "+experiment=retrofit_124m").name == "gpt2_124m"


def test_compare_adapter_variant_keeps_its_model(tmp_path, retrofit):
    command = [part for part in make_command(tmp_path, retrofit) if not part.startswith("model=")]
    result = run(*write_comparison(tmp_path / "conf", command, {"own": [], "other": ["model=tiny_gpt2"]}))
    assert result.code == 2 and "other" in result.err
    arms = {record.config["variant"]: record for record in map(Record.load, (tmp_path / "runs").rglob("record.json"))}
    assert arms["own"].status == "finished" and arms["own"].setting("model", "name") == "tiny_llama"
    assert arms["other"].status == "failed" and "model.path=" in arms["other"].error


def test_with_adapter_base_is_the_trained_model(tmp_path, retrofit):
    place = shutil.copytree(retrofit, tmp_path / "run" / "adapter")
    (tmp_path / "run" / "model").mkdir()
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    assert find_base(f"adapter={place}").path == str(tmp_path / "run" / "model")


def test_with_adapter_without_run_uses_the_hubs_base(tmp_path, retrofit):
    place = shutil.copytree(retrofit, tmp_path / "adapter")
    assert find_base(f"adapter={place}").name == "gpt2_124m"
    description = json.loads((place / DESCRIPTION).read_text())
    description["base_model"] |= {"name": "mine/llama", "revision": "abc"}
    (place / DESCRIPTION).write_text(json.dumps(description))
    model = find_base(f"adapter={place}")
    assert (model.name, model.hub_id, model.revision, model.path) == ("llama", "mine/llama", "abc", None)


def test_with_adapter_missing_base_raises(tmp_path, retrofit):
    place = tmp_path / "run" / "adapter"
    shutil.copytree(retrofit, place)
    record = Record.load(retrofit.with_name(RECORD))
    record.config["model"]["path"] = "my/model"
    record.save(place.with_name(RECORD))
    result = run(*(part for part in make_command(tmp_path, place) if not part.startswith("model=")))
    assert result.code == 2 and result.err.startswith("error: model.path of adapter=")


def test_evaluate_adapter_other_methods_settings(tmp_path, dual):
    """Without attention= they are those of Focus."""
    attention = configured(f"adapter={dual['free']}", "attention.top_k=3").attention
    assert (attention.method, attention.top_k) == ("focus_dual", 3)
    for setting in ("attention.temperature=0.2", "attention.pair_rule=share"):
        assert refused(*make_command(tmp_path, dual["free"], setting)) == setting.partition("=")[0]
