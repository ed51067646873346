"""Overrides with paths: quoted as Hydra asks, also those of the commands that a command starts."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from running import only_run, record_of, succeed, tiny, without_attention

from focus_exp.cli import quote

PATHS = [
    *("é/ü", "br[1]/(x", "{a}", "#x", "it's", 'a "b"', "a=b", "a b", "a,b", "1e5", "true", " x", "tail\\", "p|q"),
    *("[x]", "x$y", "`x`", "a:b", "1_0", "\N{SNOWMAN}"),
]


@pytest.mark.parametrize("path", PATHS)
def test_quote_path_is_taken_literally(path):
    assert OverridesParser.create().parse_override(f"runs_dir={quote(path)}").value() == path


def test_run_in_a_folder_with_special_characters_is_trained_and_measured(tmp_path):
    odd = tmp_path / "é [1] (x) #'={,"
    settings = [part for part in tiny(tmp_path) if not part.startswith(("runs_dir", "cache_dir"))]
    cache = f"cache_dir={quote(f'{odd}/cache')}"
    succeed(*settings, f"runs_dir={quote(f'{odd}/runs')}", cache, "recipe.steps=2")
    made = only_run(odd / "runs")
    assert "=" not in made.name
    given = ["job=evaluate", f"adapter={quote(str(made))}", f"eval.adapters=[{quote(f'{made}/adapter')}]"]
    succeed(*without_attention(settings), cache, *given, f"runs_dir={tmp_path / 'again'}")
    assert record_of(tmp_path / "again").status == "finished"
