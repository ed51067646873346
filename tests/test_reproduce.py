"""job=reproduce: tables in turn, adapters handed on, failures named, finished ones left alone."""

import pytest
from builders import scored
from hydra import initialize_config_dir
from running import records_of, run, tiny, without_attention
from test_experiments import CONF

from focus_exp.config import register_schemas
from focus_exp.jobs.reproduce import table_overrides
from focus_exp.runs.compose import compose_overrides

PLACES = ("runs_dir", "cache_dir", "logger")


def reproduce(folder, *more, **tables):
    """The command that makes `tables`, name -> overrides, of tiny runs below `folder`."""
    places = [setting for setting in tiny(folder) if setting.startswith(PLACES)]
    settings = [setting for setting in tiny(folder) if not setting.startswith(PLACES)]
    lists = []
    for name, overrides in tables.items():
        has_adapter = any(override.startswith("adapter=") for override in overrides)
        shared = without_attention(settings) if has_adapter else settings
        lists.append(f"+reproduce.tables.{name}=[{','.join(map(repr, [*shared, *overrides]))}]")
    return run("job=reproduce", "reproduce=none", *places, *lists, *more)


ROUTER = ["recipe.steps=2", "recipe.warmup_steps=1"]
AGAIN = ["job=evaluate", "adapter=@router", "eval.seq_len=24"]


def test_reproduce_runs_tables_in_order_and_names_failed_ones(tmp_path):
    result = reproduce(tmp_path, router=ROUTER, wrong=["data.files=nowhere"], again=AGAIN)
    assert result.code == 2
    assert "tables failed: wrong (1 of 3)" in result.err
    assert "[1/3] router: done" in result.out and "[3/3] again: done" in result.out
    records = records_of(tmp_path)
    (evaluated,) = [record for record in records if record.config["job"] == "evaluate"]
    assert evaluated.status == "finished" and evaluated.config["eval"]["seq_len"] == 24
    assert (tmp_path / "runs" / "report" / "report.md").exists()

    again = reproduce(tmp_path, router=ROUTER, again=AGAIN)
    assert again.code == 0
    assert [record.started for record in records_of(tmp_path)] == [record.started for record in records]


def test_reproduce_names_a_comparison_with_a_failed_variant(tmp_path):
    failing = ["job=compare", "variants=[compare/window]", "data.max_train_tokens=20"]
    result = reproduce(tmp_path, compared=[*failing, "eval.tasks=[]"], missing=["data.files=nowhere"])
    assert result.code == 2 and "tables failed: compared, missing (2 of 2)" in result.err


@pytest.mark.slow
def test_reproduce_variant_adapter_serves_other_tables(tmp_path):
    tables = {
        "compared": ["job=compare", *ROUTER, "variants=[stability/softmax,compare/window]"],
        "beside": [*ROUTER, "attention.sinks=2", "eval.adapters=[@compared.softmax]"],
    }
    assert reproduce(tmp_path, **tables).code == 0
    (record,) = [record for record in records_of(tmp_path) if record.setting("attention", "sinks") == 2]
    assert [row.error for row in scored(record.measurements) if row.name == "focus"] == [None]


def test_reproduce_without_any_run_names_the_failed_tables(tmp_path):
    result = reproduce(tmp_path, missing=["data.files=nowhere"])
    assert result.code == 2 and "tables failed: missing (1 of 1)" in result.err


def test_reproduce_list_of_the_embedded_model_takes_no_other_assets(tmp_path):
    result = run("job=reproduce", "assets=hub", f"runs_dir={tmp_path}")
    assert result.code == 2 and "assets must be embedded" in result.err
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert compose_overrides(["budget=paper"]).reproduce.assets is None


def test_reproduce_unknown_table_raises_with_suggestion(tmp_path):
    result = reproduce(tmp_path, "reproduce.only=[longest]", longer=ROUTER)
    assert result.code == 2 and "longest" in result.err and "did you mean longer?" in result.err


@pytest.mark.parametrize("reference", ["@nothing", "@router.arm"])
def test_reproduce_unknown_adapter_raises_before_any_run(tmp_path, reference):
    result = reproduce(tmp_path, router=ROUTER, again=["job=evaluate", f"adapter={reference}"])
    assert result.code == 2 and reference in result.err
    assert not records_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        pytest.param(name, scale, marks=() if name == scale else pytest.mark.slow)
        for name in (path.stem for path in CONF.glob("reproduce/*.yaml") if path.stem != "base")
        for scale in (("paper", "rehearsal") if name == "paper" else ("embedded", "quick"))
    ],
)
def test_lists_tables_compose(name, scale):
    register_schemas()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose_overrides([f"reproduce={name}", f"budget={scale}"])
        tables = config.reproduce.tables
        every = 6 if name == scale == "embedded" else 1  # the slow cases compose all
        made = [compose_overrides(table_overrides(table, config)) for table in [*tables.values()][::every]]
    assert {run.budget["name"] for run in made} <= {scale}
    assert set(tables) >= set(config.reproduce.only)
    if config.reproduce.only and scale != "quick":  # no table is left out but for another seed of it
        assert all(
            any(part.startswith("seed=") for part in tables[name])
            for name in tables
            if name not in config.reproduce.only
        )
