"""job=reproduce: tables in turn, adapters handed on, failures named, finished ones left alone."""

import shutil
from pathlib import Path

import pytest
from builders import scored
from hydra import initialize_config_dir
from running import run, tiny
from test_experiments import CONF

from focus_exp.config import register_schemas
from focus_exp.jobs.compose import compose_overrides
from focus_exp.jobs.reproduce import estimate, table_overrides
from focus_exp.results.record import Record

PLACES = ("runs_dir", "cache_dir", "logger")


@pytest.fixture(autouse=True)
def known_commit(monkeypatch):
    for place in ("focus_exp.jobs.reproduce", "focus_exp.reporting.publish"):
        monkeypatch.setattr(f"{place}.unknown_commit_reason", lambda commit: None)


def reproduce(folder, *more, **tables):
    """The command that makes `tables`, name -> overrides, of tiny runs below `folder`."""
    places = [setting for setting in tiny(folder) if setting.startswith(PLACES)]
    settings = [setting for setting in tiny(folder) if not setting.startswith(PLACES)]
    lists = [
        f"+reproduce.tables.{name}=[{','.join(map(repr, [*settings, *overrides]))}]"
        for name, overrides in tables.items()
    ]
    return run("job=reproduce", "reproduce=none", *places, *lists, *more)


ROUTER = ["recipe.steps=2", "recipe.warmup_steps=1"]
AGAIN = ["job=evaluate", "adapter=@router", "eval.seq_len=24"]


def test_reproduce_runs_tables_in_order_and_names_failed_ones(tmp_path):
    result = reproduce(tmp_path, router=ROUTER, wrong=["data.files=nowhere"], again=AGAIN)
    assert result.code == 2
    assert "tables failed: wrong (1 of 3)" in result.err
    assert "[1/3] router: done" in result.out and "[3/3] again: done" in result.out
    records = [Record.load(path) for path in (tmp_path / "runs").rglob("record.json")]
    (evaluated,) = [record for record in records if record.config["job"] == "evaluate"]
    assert evaluated.status == "finished" and evaluated.config["eval"]["seq_len"] == 24
    assert (tmp_path / "runs" / "report" / "report.md").exists()

    again = reproduce(tmp_path, router=ROUTER, again=AGAIN)
    assert again.code == 0
    assert "2 tables, 2 already finished" in again.out and "[1/2]" not in again.out


@pytest.mark.slow
def test_reproduce_comparison_with_shared_settings_is_not_repeated(tmp_path):
    arms = ["job=compare", "variants=[compare/window]", "attention.window=6", "eval.batch_size=2"]
    assert reproduce(tmp_path, compared=arms).code == 0
    assert "1 tables, 1 already finished" in reproduce(tmp_path, compared=arms).out
    loaded = {path.parent: Record.load(path) for path in (tmp_path / "runs").rglob("record.json")}
    ((folder, found),) = [(folder, record) for folder, record in loaded.items() if record.variants]
    assert found.setting("attention", "window") == 6  # what all arms share is on record

    published = reproduce(tmp_path, "reproduce.publish=true", compared=arms)
    assert "2 runs published" in published.out and "0 superseded" in published.out
    records = tmp_path / "runs" / "records"
    arm, whole = (records / Path(place).relative_to(tmp_path / "runs") for place in (found.variants[0].folder, folder))
    assert {file.name for file in arm.iterdir()} == {"record.json", "losses.csv", "measurements.csv"}
    assert (whole / "table.md").exists()

    # as if a file of conf/ that an arm names now said something else
    shutil.move(found.variants[0].folder, f"{found.variants[0].folder}-before")
    assert "1 tables, 0 already finished" in reproduce(tmp_path, compared=arms).out


@pytest.mark.slow
def test_reproduce_comparison_of_an_adapter_is_published(tmp_path):
    tables = {
        "router": ROUTER,
        "compared": ["job=compare", "adapter=@router", "variants=[ablation/paper,long_context/k_2]"],
    }
    assert reproduce(tmp_path, **tables).code == 0
    published = reproduce(tmp_path, "reproduce.publish=true", **tables)
    assert "2 tables, 2 already finished" in published.out and "4 runs published" in published.out


@pytest.mark.slow
def test_reproduce_variant_adapter_serves_other_tables(tmp_path):
    tables = {
        "compared": ["job=compare", *ROUTER, "variants=[stability/softmax,compare/window]"],
        "beside": [*ROUTER, "attention.sinks=2", "eval.adapters=[@compared.softmax]"],
    }
    assert reproduce(tmp_path, **tables).code == 0
    (record,) = [
        found
        for path in (tmp_path / "runs").rglob("record.json")
        if (found := Record.load(path)).setting("attention", "sinks") == 2
    ]
    assert [row.error for row in scored(record.measurements) if row.name == "focus"] == [None]
    assert "2 tables, 2 already finished" in reproduce(tmp_path, **tables).out


@pytest.mark.slow
def test_publish_record_of_a_listed_table_stays_without_its_run(tmp_path):
    tables = {"router": ROUTER, "longer": ["recipe.steps=3", "recipe.warmup_steps=1"]}
    assert "2 runs published" in reproduce(tmp_path, "reproduce.publish=true", **tables).out
    (gone,) = [
        path.parent for path in (tmp_path / "runs").glob("[!r]*/*/*/record.json") if Record.load(path).steps == 2
    ]
    shutil.rmtree(gone)
    again = reproduce(tmp_path, "reproduce.publish=true", "reproduce.only=[longer]", **tables)
    assert "1 runs published" in again.out and "0 superseded" in again.out


def test_publish_code_outside_of_git_raises_before_any_run(tmp_path, monkeypatch):
    monkeypatch.setattr("focus_exp.jobs.reproduce.unknown_commit_reason", lambda commit: "made outside of git")
    result = reproduce(tmp_path, "reproduce.publish=true", router=ROUTER)
    assert result.code == 2 and "made outside of git" in result.err and not (tmp_path / "runs").exists()


def test_publish_quick_budget_raises(tmp_path):
    result = reproduce(tmp_path, "budget=quick", "reproduce.publish=true", router=ROUTER)
    assert result.code == 2 and "reproduce.publish must" in result.err and not list(tmp_path.rglob("record.json"))


def test_reproduce_unknown_table_raises_with_suggestion(tmp_path):
    result = reproduce(tmp_path, "reproduce.only=[longest]", longer=ROUTER)
    assert result.code == 2 and "longest" in result.err and "did you mean longer?" in result.err


@pytest.mark.parametrize("reference", ["@nothing", "@router.arm"])
def test_reproduce_unknown_adapter_raises_before_any_run(tmp_path, reference):
    result = reproduce(tmp_path, router=ROUTER, again=["job=evaluate", f"adapter={reference}"])
    assert result.code == 2 and reference in result.err
    assert not list(tmp_path.rglob("record.json"))


def test_estimate_scales_with_pace():
    assert estimate({"a": 2.0, "b": 1.0}, 1.0) == ", about 3 min 0 s left"
    assert estimate({"b": 1.0}, 2.0) == ", about 2 min 0 s left"
    assert estimate({}, 1.0) == estimate({"b": 1.0}, None) == ""


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        pytest.param(name, scale, marks=pytest.mark.slow if (name, scale) != ("embedded", "embedded") else ())
        for name in (path.stem for path in CONF.glob("reproduce/*.yaml") if path.stem != "base")
        for scale in ("embedded", "quick")
    ],
)
def test_lists_tables_compose_and_have_minutes(name, scale):
    register_schemas()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose_overrides([f"reproduce={name}", f"budget={scale}"])
        tables = config.reproduce.tables
        every = 6 if (name, scale) == ("embedded", "embedded") else 1  # the slow cases compose all
        made = [compose_overrides(table_overrides(table, config)) for table in [*tables.values()][::every]]
    assert {run.budget["name"] for run in made} <= {scale}
    assert set(config.reproduce.minutes) == set(tables) >= set(config.reproduce.only)
    if config.reproduce.only:  # no table is left out but for another seed of it
        assert all(
            any(part.startswith("seed=") for part in tables[name])
            for name in tables
            if name not in config.reproduce.only
        )
    assert sum(config.reproduce.minutes.values()) <= 22 * 60  # what resumes may take a night and a day
