"""What an adapter is measured under: its own settings and its own base, or one sentence that says why not."""

import shutil

import pytest
from running import fitting, only_run, record_of, run, tiny, without_attention

FIT = ["attention.fit_blocks=3", "attention.fit_held_out=1", "attention.fit_steps=4", "attention.groups=4"]


@pytest.fixture(scope="module")
def retrofit(tmp_path_factory):
    """The adapter of a run with Focus."""
    folder = tmp_path_factory.mktemp("retrofit")
    assert run(*tiny(folder), "regime.steps=2", "eval.tasks=[]").code == 0
    return only_run(folder) / "adapter"


@pytest.fixture(scope="module")
def dual(tmp_path_factory):
    """dual(): adapters of two encoders, with a budget of 0.3 of the pairs and without one."""
    folder = tmp_path_factory.mktemp("dual")
    made = {}
    for name, budget in (("budget", ["attention.pairs=0.3", "attention.top_k=1"]), ("free", ["attention.top_k=2"])):
        command = fitting(*tiny(folder, name), "attention=focus_dual", "regime=none", *FIT, *budget)
        assert run(*command).code == 0
        made[name] = only_run(folder / name) / "adapter"
    return made


def measured(folder, adapter, *typed):
    """The command, without the settings that other tests have typed."""
    return [*without_attention(tiny(folder)), "job=evaluate", f"adapter={adapter}", *typed]


def refused(*arguments):
    """The one error of a command that ends with code 2."""
    result = run(*arguments)
    assert result.code == 2 and result.err.startswith("error: ") and result.err.count("error:") == 1, result.err
    return result.err


def test_what_an_adapter_was_not_made_with_is_refused(tmp_path, retrofit):
    message = refused(*measured(tmp_path, retrofit, "attention.window=32"))
    assert "attention.window=32: the adapter in" in message and "has window=8, which stays as it is" in message
    assert "train anew" in message and "top_k, pair_rule, backend can be chosen" in message
    assert "has warm_start_steps=3" in refused(*measured(tmp_path, retrofit, "attention.warm_start_steps=9"))
    alone = shutil.copytree(retrofit, tmp_path / "alone")
    message = refused(*measured(tmp_path, alone, "attention.warm_start_steps=3"))
    assert "does not say its warm_start_steps" in message
    assert not (tmp_path / "runs").exists()


def test_what_an_adapter_was_made_with_may_be_typed(tmp_path, retrofit):
    command = measured(tmp_path, retrofit, "attention.window=8", "attention.warm_start_steps=3", "attention.top_k=2")
    assert run(*command).code == 0
    assert record_of(tmp_path).setting("attention", "top_k") == 2


def test_a_budget_is_the_one_that_it_was_made_with(tmp_path, dual):
    chosen = measured(tmp_path, dual["budget"], "attention=focus_dual", "attention.groups=4")
    message = refused(*chosen, "attention.pairs=0.1")
    assert "attention.pairs=0.1" in message and "has pairs=0.3" in message and "train anew for another" in message
    assert "reads as many groups as its budget says" in refused(*chosen, "attention.top_k=3")
    assert run(*chosen, "attention.pairs=0.3", "attention.top_k=1").code == 0
    without = measured(tmp_path, dual["free"], "attention=focus_dual", "attention.groups=4", "attention.pairs=0.1")
    assert "has pairs=None" in refused(*without)


def test_every_arm_is_measured_under_the_adapters_settings(tmp_path, retrofit):
    compared = [*measured(tmp_path, retrofit), "job=compare"]
    assert "attention.window=32: the adapter in" in refused(*compared, "+arms.wide=['attention.window=32']")
    shared = "every_arm=['attention.window=32']"
    assert "attention.window=32: the adapter in" in refused(*compared, "+arms.one=[]", shared)
    assert not (tmp_path / "runs").exists()


def test_settings_of_another_method_are_taken_or_refused(tmp_path, dual):
    """Without attention= they are those of Focus."""
    assert run(*measured(tmp_path, dual["free"], "attention.top_k=3")).code == 0
    found = record_of(tmp_path)
    assert (found.setting("attention", "method"), found.setting("attention", "top_k")) == ("focus_dual", 3)
    message = refused(*measured(tmp_path, dual["free"], "attention.temperature=0.2"))
    assert "is of focus_dual, which has no temperature" in message
    assert "has no pair_rule" in refused(*measured(tmp_path, dual["free"], "attention.pair_rule=share"))
