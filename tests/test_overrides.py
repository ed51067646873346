"""Overrides as a user types them: any path is taken literally, and run folders need no quotes."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from running import only_run, record_of, succeed, tiny, without_attention

from focus_exp.cli import quote_override

PATHS = [
    *("é/ü", "br[1]/(x", "{a}", "#x", "it's", 'a "b"', "a=b", "a b", "a,b", "1e5", "true", " x", "tail\\", "p|q"),
    *("[x]", "x$y", "`x`", "a:b", "1_0", "\N{SNOWMAN}"),
]


def parse(override: str):
    return OverridesParser.create().parse_override(override)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["runs_dir", "data.files", "model.path", "adapter", "cache_dir"])
def test_quote_override_path_is_taken_literally(key, path):
    assert parse(quote_override(f"{key}={path}")).value() == path


@pytest.mark.parametrize("path", [path for path in PATHS if "," not in path and path != " x"])
@pytest.mark.parametrize("key", ["eval.adapters", "analyze.others", "+reproduce.tables.mine"])
def test_quote_override_element_of_a_list_is_taken_literally(key, path):
    assert parse(quote_override(f"{key}=[{path},runs/seed=0-x/adapter]")).value() == [path, "runs/seed=0-x/adapter"]


def test_quote_override_quoted_value_stays():
    for override in ("runs_dir='a b'", "eval.adapters=[\"a,b\",'c']", "data.files=???", "cache_dir=null", "seed=1,2"):
        assert quote_override(override) == override


def test_quote_override_nested_list_is_one_element():
    value = parse(quote_override("+reproduce.tables.mine=[attention.groups=16,eval.top_k=[1,2]]")).value()
    assert value == ["attention.groups=16", "eval.top_k=[1,2]"]


def test_quote_override_sweep_comma_separates_values():
    sweep = parse(quote_override("adapter=é/a,b c,seed=0/d", is_sweep=True))
    assert sweep.is_choice_sweep() and [str(getattr(x, "text", x)) for x in sweep.value().list] == [
        *("é/a", "b c", "seed=0/d")
    ]
    assert quote_override("adapter=choice(a,b)", is_sweep=True) == "adapter=choice(a,b)"


def test_run_in_a_folder_with_special_characters_is_trained_and_measured(tmp_path):
    odd = tmp_path / "é [1] (x) #'={,"
    settings = [part for part in tiny(odd) if not part.startswith(("runs_dir", "cache_dir"))]
    succeed(*settings, f"runs_dir={odd}/runs", f"cache_dir={odd}/cache", "recipe.steps=2")
    made = only_run(odd / "runs")
    assert "=" not in made.name
    given = ["job=evaluate", f"adapter={made}", f'eval.adapters=["{made}/adapter"]', f"runs_dir={tmp_path / 'again'}"]
    succeed(*without_attention(settings), f"cache_dir={odd}/cache", *given)
    assert record_of(tmp_path / "again").status == "finished"
