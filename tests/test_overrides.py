"""Overrides as a user types them: any path is taken literally, and run folders need no quotes."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from running import only_run, record_of, run, tiny

from focus_exp.cli import quote_override

PATHS = ["é/ü", "br(x", "#x", "a=b", "a b", "p|q", "x$y", "`x`", "a:b", "\N{SNOWMAN}", "it's"]


def parse(override: str):
    return OverridesParser.create().parse_override(override)


@pytest.mark.parametrize("path", PATHS)
def test_quote_override_path_is_taken_literally(path):
    assert parse(quote_override(f"runs_dir={path}")).value() == path


@pytest.mark.parametrize("path", PATHS)
def test_quote_override_element_of_a_list_is_taken_literally(path):
    assert parse(quote_override(f"eval.adapters=[{path},runs/seed=0-x]")).value() == [path, "runs/seed=0-x"]


@pytest.mark.parametrize(
    "override",
    [
        *("runs_dir='a b'", "a=[\"a,b\",'c']", "data.files=???", "cache_dir=null", "seed=1", "seed=0,1", "cache_dir="),
        *("--cfg", "~data", "recipe.tune.factors=[0.1,1e-3]", "seed=range(1,5)", "x=${budget.steps}", "y={a:1}"),
        *("x=[1,[2,full]]", "x=[1"),
    ],
)
def test_quote_override_keeps_hydra_syntax(override):
    assert quote_override(override) == override


def test_quote_override_nested_list_is_one_element():
    value = parse(quote_override("+reproduce.tables.mine=[attention.groups=16,eval.top_k=[1,2]]")).value()
    assert value == ["attention.groups=16", "eval.top_k=[1,2]"]


def test_quote_override_sweep_comma_separates_values():
    sweep = parse(quote_override("adapter=é/a,b c,seed=0/d", is_sweep=True))
    assert sweep.is_choice_sweep()
    assert [str(getattr(x, "text", x)) for x in sweep.value().list] == ["é/a", "b c", "seed=0/d"]
    assert quote_override("adapter=choice(a,b)", is_sweep=True) == "adapter=choice(a,b)"


def test_run_in_a_folder_with_special_characters_is_trained_and_measured(tmp_path):
    odd = tmp_path / "é (x) #'="
    settings = [part for part in tiny(odd) if not part.startswith(("runs_dir", "cache_dir"))]
    assert run(*settings, f"runs_dir={odd}/runs", f"cache_dir={odd}/cache", "recipe.steps=2").code == 0
    made = only_run(odd / "runs")
    assert "=" not in made.name
    given = ["job=evaluate", f"adapter={made}", f'eval.adapters=["{made}/adapter"]', f"runs_dir={tmp_path / 'again'}"]
    result = run(*settings, f"cache_dir={odd}/cache", *given)
    assert result.code == 0, result.err
    assert record_of(tmp_path / "again").status == "finished"
