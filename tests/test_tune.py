"""Learning-rate trials: equally many per trained variant, the best on validation text is used."""

from dataclasses import replace

import pytest
from builders import write_variants
from running import attention_of, run, tiny

from focus_exp.config import Config, PhaseConfig, RecipeConfig
from focus_exp.errors import UserError
from focus_exp.jobs import train as job
from focus_exp.jobs.train import read_loss, with_rate
from focus_exp.results.measurement import Measurement
from focus_exp.results.record import Record

TUNED = ["recipe.steps=1", "recipe.tune.factors=[0.001,1]", "recipe.tune.sequences=1", "eval.max_sequences=1"]
VARIANTS = {
    "focus": [],
    "lora": ["attention=full", "recipe=lora"],
    "fitted": ["recipe.steps=0"],
}


def records_by_variant(folder):
    """Return (experiment, variant) -> records; the variant of the comparison itself is None."""
    records = {}
    for path in sorted(folder.rglob("record.json")):
        record = Record.load(path)
        records.setdefault((record.experiment, record.config["variant"]), []).append(record)
    return records


def learning_rate(record):
    (phase,) = record.config["recipe"]["phases"].values()
    return phase["learning_rate"]


def test_comparison_tunes_every_trained_variant_on_validation_text(tmp_path):
    command = [*tiny(tmp_path), *TUNED, "job=compare", *write_variants(tmp_path / "conf", VARIANTS)]
    assert run(*command).code == 0
    records = records_by_variant(tmp_path)
    (comparison,) = records["adhoc", None]
    assert set(records) == {("adhoc", name) for name in (None, *VARIANTS)} | {("tries", "focus"), ("tries", "lora")}
    for variant in comparison.variants[:2]:
        trials = {learning_rate(trial): trial for trial in records["tries", variant.name]}
        assert {trial.config["eval"]["split"] for trial in trials.values()} == {"validation"}
        losses = {
            rate: trial.find("nll", "focus_soft") or trial.find("nll", "lora_r4") for rate, trial in trials.items()
        }
        assert len(losses) == 2
        assert {trial.learning_rate: trial.nll for trial in variant.trials} == losses
        (record,) = records["adhoc", variant.name]
        assert variant.learning_rate == learning_rate(record) == min(losses, key=losses.get)
        assert record.config["eval"]["split"] == "test"
        assert record.trials == variant.trials
    assert [variant.trials for variant in comparison.variants[2:]] == [[]]


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


def test_other_seeds_share_trials_and_finished_runs_are_not_repeated(tmp_path):
    assert run(*tiny(tmp_path), *TUNED).code == 0
    assert "already finished" in run(*tiny(tmp_path), *TUNED).out
    assert run(*tiny(tmp_path), *TUNED, "seed=1").code == 0
    records = records_by_variant(tmp_path)
    first, second = records["adhoc", None]
    assert {first.seed, second.seed} == {0, 1}
    assert len(records["tries", "retrofit"]) == 2
    assert first.trials == second.trials


def test_failed_trial_is_recorded_and_excluded(tmp_path, monkeypatch):
    fit = job.fit

    def fail_at_low_rate(run_, *arguments):
        if run_.config.recipe.phases["router"].learning_rate == 1e-5 and run_.config.experiment == "tries":
            raise UserError("a loss is not finite")
        fit(run_, *arguments)

    monkeypatch.setattr(job, "fit", fail_at_low_rate)
    assert run(*tiny(tmp_path / "one"), *TUNED).code == 0
    (record,) = records_by_variant(tmp_path / "one")["adhoc", None]
    assert [(trial.learning_rate, trial.error) for trial in record.trials] == [
        (1e-5, "a loss is not finite"),
        (1e-2, None),
    ]
    failed = run(*tiny(tmp_path / "none"), *TUNED, "recipe.tune.factors=[0.001]")
    assert failed.code == 2
    assert "a loss is not finite" in failed.err


@pytest.mark.parametrize(("method", "last"), [("focus", "router"), ("longformer", "all")])
def test_tuned_rate_is_that_of_the_last_phase_that_runs(method, last):
    phases = {part: PhaseConfig(trainable=part, steps=1, learning_rate=0.1) for part in ("all", "router")}
    config = Config(attention=attention_of(method), recipe=RecipeConfig(name="mine", phases=phases))
    tuned = with_rate(config, 7.0).phases
    assert [name for name, phase in tuned.items() if phase.learning_rate == 7.0] == [last]
