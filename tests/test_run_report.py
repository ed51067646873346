"""What a finished run shows: its table, figures and continuations."""

import pandas as pd
import pytest
from running import only_run

from focus_exp.reporting import figures
from focus_exp.reporting.load import load_run
from focus_exp.reporting.run_report import render_continuations, run_tables


def test_run_tables_quality_has_paired_changes(finished_run):
    table = run_tables(load_run(only_run(finished_run)).rows)["Quality"]
    assert table.variant.iloc[0] == "base"
    hard = table[table.variant == "focus_hard"].iloc[0]
    assert hard["ΔPPL [%], base"].startswith(("+", "-"))
    assert table[table.variant == "base"]["ΔPPL [%], base"].item() == "-"


def test_loss_curves_continue_over_phases():
    log = [{"phase": name, "step": step, "loss": 1.0} for name in ("router", "all") for step in (1, 2)]
    (ax,) = figures.loss_curves(log).axes
    assert list(ax.lines[0].get_xdata()) == [1, 2, 3, 4]
    assert figures.loss_curves([]) is None


def make_points(models=("a",)):
    cells = {"experiment": "frontier", "data": "books", "low": 0.5, "high": 2.0, "change": 1.0}
    curves = {"dual_20": (0.2, 0.4), "dual_20_fast": (0.3,), "focus_k1": (0.25,), "sparq": (0.5,)}
    return pd.DataFrame(
        [
            {**cells, "model": model, "tokens": tokens, "variant": variant, "sparsity": sparsity}
            for model in models
            for tokens in (1024, 4096, 8192)
            for variant, values in curves.items()
            for sparsity in values
        ]
    )


@pytest.mark.parametrize("models", [["a"], ["SmolLM2-135M-Instruct", "b", "c"]])
def test_frontier_has_a_named_curve_of_each_model(models):
    (ax,) = figures.draw_frontier(make_points(models)).axes
    assert [text.get_text() for text in ax.texts] == [models[0].replace("-135M-Instruct", " 135M"), *models[1:]]
    assert [list(line.get_xdata()) for line in ax.lines[:2]] == [[20, 40], [25]]


def test_frontier_without_a_fit_is_not_drawn():
    points = make_points()
    assert figures.draw_frontier(points[points.variant == "sparq"]) is None
    assert figures.draw_frontier(points[points.tokens == 1024]) is None


def test_figures_same_data_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        figures.save_figures({"frontier": figures.draw_frontier(make_points())}, tmp_path / name)
    assert (tmp_path / "a/frontier.svg").read_bytes() == (tmp_path / "b/frontier.svg").read_bytes()


def test_render_continuations_groups_by_prompt():
    row = {"prompt": 0, "prompt_tokens": 3, "prompt_text": "a b c", "base_nll": 1.0, "text": "d", "error": None}
    text = render_continuations([{**row, "variant": "base"}, {**row, "variant": "focus", "error": "no memory"}], "t")
    assert text.count("## Prompt") == 1
    assert "failed: no memory" in text
