"""Bases that another run trains: trained once and found again."""

from dataclasses import replace

import pytest
from builders import make_config, scored
from hydra import initialize_config_dir
from running import fitting, run, tiny

from focus_exp.config import conf_dir
from focus_exp.results.record import Record
from focus_exp.runs.compose import compose_base

SMALL = ["recipe.steps=2", "recipe.warmup_steps=1", "recipe.phases.everything.learning_rate=1e-2"]


def base(folder):
    """Return the overrides of a run that trains a tiny model from scratch, without its folders."""
    places = ("runs_dir", "cache_dir", "logger")
    settings = fitting(*tiny(folder), "recipe=scratch", "attention=full", *SMALL)
    return [setting for setting in settings if not setting.startswith(places)]


def measure(folder, base_run, *others, **options):
    quoted = ",".join(map(repr, base_run))
    trained = f"model.base_run=[{quoted}]"
    return run(*fitting(*tiny(folder), "attention=window", "recipe=none", trained, *others), **options)


def records(folder):
    found = [Record.load(path) for path in (folder / "runs").rglob("record.json")]
    return {record.config["recipe"]["name"]: record for record in found}


def test_base_is_trained_once(tmp_path):
    variant = ["job=compare", "variants=[ablation/paper,ablation/K_4]", "+variant=ablation/paper"]
    settings = [*base(tmp_path), *variant]
    first = measure(tmp_path, settings)
    assert first.code == 0, first.err
    runs = records(tmp_path)
    assert runs["scratch"].steps == 2
    (weights,) = (tmp_path / "runs").rglob("model/model.safetensors")
    assert runs["none"].model["used"] == str(weights.parent)
    assert runs["none"].model["fingerprint"] != runs["scratch"].model["fingerprint"]
    trained = scored(runs["scratch"].measurements)[-1]
    assert runs["none"].find("nll", "base") == pytest.approx(trained.nll, rel=1e-4)

    before = weights.stat().st_mtime_ns
    second = measure(tmp_path, settings, "attention.window=6")
    assert second.code == 0 and " first: " not in second.out
    assert weights.stat().st_mtime_ns == before
    assert "already finished" in measure(tmp_path, settings).out


def test_base_run_is_not_tuned_unless_asked():
    from_scratch = ["+experiment=from_scratch", "+variant=from_scratch/full"]
    config = make_config(*from_scratch, "budget=embedded")
    assert config.recipe.tune.factors
    with initialize_config_dir(conf_dir(), version_base="1.3"):
        for more, searched in (([], []), (["recipe.tune.factors=[1,3]"], [1, 3])):
            made_by = replace(config, model=replace(config.model, base_run=[*from_scratch, *more]))
            assert compose_base(made_by).recipe.tune.factors == searched


@pytest.mark.slow
def test_base_that_cannot_be_trained_is_refused(tmp_path):
    result = measure(tmp_path, [*base(tmp_path), "data.files=nowhere"], apart=True)
    assert result.code == 2
    assert "model.path=" in result.err
