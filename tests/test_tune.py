"""Learning rates tried on validation text: each arm as often, the best one used, what is finished not repeated."""

from types import SimpleNamespace

import pytest
from builders import write_variants
from running import run, tiny

from focus_exp.config import PhaseConfig, RecipeConfig
from focus_exp.errors import UserError
from focus_exp.jobs import train as job
from focus_exp.jobs.tune import with_rate
from focus_exp.records.answers import answer, trained_row
from focus_exp.records.comparison import load_run
from focus_exp.records.rows import Row
from focus_exp.results.record import Record

TUNED = ["recipe.steps=2", "recipe.tune.factors=[0.001,1]", "recipe.tune.sequences=2"]
ARMS = {
    "focus": [],
    "lora": ["attention=full", "recipe=lora"],
    "window": ["attention=window", "recipe=none"],
    "fitted": ["recipe.steps=0"],
}


def found_in(folder):
    """Experiment and arm -> its records; the comparison's own is of no arm."""
    found = {}
    for path in sorted(folder.rglob("record.json")):
        record = load_run(path.parent)
        found.setdefault((record.experiment, record.config["variant"]), []).append(record)
    return found


def compared(folder, *more):
    return run(*tiny(folder), *TUNED, "job=compare", *write_variants(folder / "conf", ARMS), *more)


def test_every_trained_arm_takes_the_best_of_as_many_rates_by_its_loss_on_validation_text(tmp_path):
    assert compared(tmp_path).code == 0
    found = found_in(tmp_path)
    (comparison,) = found["adhoc", None]
    assert set(found) == {("adhoc", arm) for arm in (None, *ARMS)} | {("tries", "focus"), ("tries", "lora")}
    for arm in comparison.arms[:2]:
        tries = {rate_of(one): one for one in found["tries", arm.name]}
        assert all(one.config["eval"]["split"] == "validation" and one.steps == 2 for one in tries.values())
        by_rate = {rate: trained_row(one).nll for rate, one in tries.items()}
        assert {one.learning_rate: one.nll for one in arm.tries} == by_rate
        (own,) = found["adhoc", arm.name]
        assert arm.learning_rate == rate_of(own) == min((one.nll, one.learning_rate) for one in arm.tries)[1]
        assert own.config["eval"]["split"] == "test" and own.tries == arm.tries and len(arm.tries) == 2
    assert all(arm.tries == [] for arm in comparison.arms[2:])


def test_a_rate_is_chosen_by_the_loss_of_what_is_trained_and_not_by_how_little_its_groups_drop():
    soft = Row(name="Focus soft", kind="soft", method="focus", causal=True, nll=3.0)
    hard = Row(name="Focus hard k=1", kind="hard", method="focus", causal=True, nll=2.0, top_k=1)
    record = Record(status="finished", experiment="tries", rows=[hard, soft])
    record.config = {"attention": {"method": "focus", "top_k": 1}}
    assert trained_row(record) is soft and answer(record) is hard
    record.rows = [hard]
    assert trained_row(record) is hard


def rate_of(record):
    (phase,) = record.config["recipe"]["phases"].values()
    return phase["learning_rate"]


def test_other_seeds_share_the_tries_and_nothing_finished_is_repeated(tmp_path):
    assert run(*tiny(tmp_path), *TUNED).code == 0
    again = run(*tiny(tmp_path), *TUNED)
    assert "finished already" in again.out and "on validation text" not in again.out
    other = run(*tiny(tmp_path), *TUNED, "seed=1")
    assert other.code == 0 and "learning rate 1 of 2" not in other.out and "the best of 2" in other.out
    found = found_in(tmp_path)
    first, second = found["adhoc", None]
    assert len(found["tries", "retrofit"]) == 2 and {first.seed, second.seed} == {0, 1}
    assert first.tries == second.tries


def test_what_rates_are_chosen_on_is_not_reported_as_held_out(tmp_path):
    refused = run(*tiny(tmp_path), *TUNED, "eval.split=validation")
    assert refused.code == 2 and "eval.split=validation would report as held out; use eval.split=test" in refused.err


@pytest.mark.parametrize("job", ["analyze", "bench", "generate"])
def test_a_job_that_would_try_none_of_the_rates_is_refused(tmp_path, job):
    refused = run(*tiny(tmp_path), *TUNED, f"job={job}")
    assert refused.code == 2 and "recipe.tune.factors=[0.001, 1.0] are tried by job=train" in refused.err
    assert f"not by job={job}; use recipe.tune.factors=[]" in refused.err


def test_a_try_without_a_loss_is_on_record_and_the_others_are_chosen_from(tmp_path, monkeypatch):
    fit = job.fit

    def failing(run_, *arguments):
        if run_.config.recipe.phases["router"].learning_rate == 1e-5 and run_.config.experiment == "tries":
            raise UserError("a loss is not finite")
        fit(run_, *arguments)

    monkeypatch.setattr(job, "fit", failing)
    assert run(*tiny(tmp_path / "one"), *TUNED).code == 0
    (record,) = found_in(tmp_path / "one")["adhoc", None]
    assert [(one.learning_rate, one.error) for one in record.tries] == [(1e-5, "a loss is not finite"), (1e-2, None)]
    none = run(*tiny(tmp_path / "none"), *TUNED, "recipe.tune.factors=[0.001]")
    assert none.code == 2 and "no learning rate" in none.err and "a loss is not finite" in none.err


@pytest.mark.parametrize("factors", ["[0]", "[-1]"])
def test_rates_that_are_none_are_refused(tmp_path, factors):
    result = run(*tiny(tmp_path), f"recipe.tune.factors={factors}")
    assert result.code == 2 and "recipe.tune.factors holds" in result.err


def test_the_rate_that_is_tuned_is_that_of_the_last_phase_that_runs():
    phases = {part: PhaseConfig(train=part, steps=1, learning_rate=0.1) for part in ("all", "router")}
    for method, last in (("focus", "router"), ("longformer", "all")):
        config = SimpleNamespace(
            recipe=RecipeConfig(name="mine", phases=phases), has_router=method == "focus", dual=None
        )
        changed = with_rate(config, 7.0).phases
        assert [name for name, phase in changed.items() if phase.learning_rate == 7.0] == [last]
