"""Learning-rate trials: equally many per trained variant, the best on validation text is used."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from builders import make_config, write_comparison
from running import attention_of, records_of, succeed, tiny

from focus_exp.config import Config, PhaseConfig, RecipeConfig
from focus_exp.errors import UserError
from focus_exp.jobs import train as job
from focus_exp.jobs.train import make_trial, read_loss, run_trial, tune_learning_rate, with_rate
from focus_exp.results.measurement import Measurement
from focus_exp.results.record import Record, Trial
from focus_exp.results.run_dir import run_folder

TUNED = ["recipe.steps=1", "recipe.tune.factors=[0.001,1]", "recipe.tune.sequences=1", "eval.max_sequences=1"]
VARIANTS = {"focus": [], "fitted": ["recipe.steps=0"]}


def learning_rate(record):
    (phase,) = record.config["recipe"]["phases"].values()
    return phase["learning_rate"]


def test_comparison_tunes_trained_variants_on_validation_text(tmp_path):
    succeed(*write_comparison(tmp_path / "conf", [*tiny(tmp_path), *TUNED], VARIANTS))
    loaded = records_of(tmp_path)
    trials = {learning_rate(record): record for record in loaded if record.experiment == "tries"}
    runs = {record.config["variant"]: record for record in loaded if record.experiment != "tries"}
    assert set(runs) == {None, *VARIANTS}
    assert {trial.config["eval"]["split"] for trial in trials.values()} == {"validation"}
    losses = {rate: trial.find("nll", "focus_soft") for rate, trial in trials.items()}
    assert len(losses) == 2 and {trial.learning_rate: trial.nll for trial in runs["focus"].trials} == losses
    assert learning_rate(runs["focus"]) == min(losses, key=losses.get)
    assert runs["focus"].config["eval"]["split"] == "test"
    assert runs["fitted"].trials == []


def test_trials_of_other_seeds_and_experiments_are_the_same_runs():
    config = make_config("recipe=retrofit")
    configs = [config, replace(config, seed=1, experiment="mine")]
    assert len({run_folder(make_trial(config, 0.5)) for config in configs}) == 1
    other_text = replace(config, eval=replace(config.eval, data="code"))
    assert make_trial(other_text, 0.5) == make_trial(config, 0.5)
    assert run_folder(make_trial(configs[0], 0.5)) != run_folder(make_trial(configs[0], 1.0))


def test_failed_trial_is_recorded_and_excluded(tmp_path, monkeypatch):
    config = make_config("recipe=retrofit", f"runs_dir={tmp_path}", "recipe.tune.factors=[0.001,1]")
    monkeypatch.setattr(job, "train", Mock(side_effect=UserError("a loss is not finite")))
    failed = run_trial(make_trial(config, 0.001))
    assert (failed.error, failed.nll) == ("a loss is not finite", None)
    trials = [failed, Trial(learning_rate=1e-2, nll=3.0)]
    left = iter(trials)
    monkeypatch.setattr(job, "run_trial", lambda config: next(left))
    tuned, made = tune_learning_rate(config)
    assert made == trials and tuned.phases[-1][1].learning_rate == 1e-2
    monkeypatch.setattr(job, "run_trial", lambda config: failed)
    with pytest.raises(UserError, match="a loss is not finite"):
        tune_learning_rate(config)


def test_read_loss_is_of_soft_routing_where_there_is_one():
    settings = {"kind": "hard", "method": "focus", "top_k": 1}
    soft, hard = (
        Measurement(variant=name, metric="nll", value=x) for name, x in (("focus_soft", 3.0), ("focus_hard", 2.0))
    )
    scored = Measurement(variant="focus_hard", metric="perplexity", value=7.0, settings=settings)
    record = Record(status="finished", experiment="tries", config={"attention": {"method": "focus", "top_k": 1}})
    record.measurements += [scored, hard, soft]
    assert read_loss(record) == {"nll": 3.0}
    record.measurements.pop()
    assert read_loss(record) == {"nll": 2.0}
    record.measurements[:] = [replace(scored, value=None, settings=settings | {"error": "no memory"})]
    assert read_loss(record) == {"error": "no memory"}


@pytest.mark.parametrize(("method", "last"), [("focus", "router"), ("longformer", "all")])
def test_tuned_rate_is_that_of_the_last_phase_that_runs(method, last):
    phases = {part: PhaseConfig(trainable=part, steps=1, learning_rate=0.1) for part in ("all", "router")}
    config = Config(attention=attention_of(method), recipe=RecipeConfig(name="mine", phases=phases))
    tuned = with_rate(config, 7.0).phases
    assert [name for name, phase in tuned.items() if phase.learning_rate == 7.0] == [last]
