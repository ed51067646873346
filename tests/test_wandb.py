"""Weights & Biases without a server: the mode, tables, the saved workspace."""

import json
from unittest.mock import Mock

import pandas as pd
import pytest
import wandb
from PIL import Image
from running import run, succeed, tiny

from focus_exp.jobs import report as job
from focus_exp.reporting import wandb as logging
from focus_exp.reporting.load import load_results
from focus_exp.reporting.report import report_tables

UNTUNED = ("recipe.tune.factors=[]", "recipe.warmup_steps=0", "references=[]")


def test_wandb_mode_follows_request_then_environment_then_key(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert logging.wandb_mode("auto") == "offline"
    assert logging.wandb_mode("disabled") == "disabled"
    monkeypatch.setattr("wandb.login", lambda **options: not options["prompt"])
    assert logging.wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert logging.wandb_mode("auto") == "disabled"


def test_init_options_name_variant():
    options = logging.init_options(
        {"experiment": "x", "job": "train", "variant": "lora", "seed": 1, "model": {"name": "m"}}
    )
    assert options == {"group": "x", "job_type": "variant", "tags": ["m", "variant:lora", "seed:1"]}


def test_log_tables_logs_unrounded_tables_and_images(tmp_path):
    logged = {}
    live = type("Run", (), {"log": lambda self, values: logged.update(values)})()
    table = pd.DataFrame({"a": [0.1 + 0.2, None], "b": ["x", "y"]})
    logging.log_tables(live, {"claims": table}, {})
    assert logged["claims"].columns == ["a", "b"]
    assert logged["claims"].data == [[0.1 + 0.2, "x"], [None, "y"]]


def find_values(node, key):
    """Return every value of `key` in nested JSON."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    own = [node[key]] if isinstance(node, dict) and key in node else []
    return own + [value for child in inner for value in find_values(child, key)]


def sections_of(workspace):
    spec = json.loads(workspace._to_model().model_dump_json(by_alias=True))["spec"]
    spec = json.loads(spec) if isinstance(spec, str) else spec
    return {section["name"]: section for section in spec["section"]["panelBankConfig"]["sections"]}


def test_workspace_shows_the_comparison_tables_and_the_frontier():
    pytest.importorskip("wandb_workspaces")
    tables = ["claims", "paper_table1_retrofit", "paper_table10_token_selection", "frontier", "runs"]
    sections = sections_of(logging.build_workspace("team", "project", tables, ["frontier", "figure1"]))
    first, second, *others = sections.values()
    assert [panel["viewType"] for panel in first["panels"]] == ["Weave"] * 3
    assert find_values(first, "val") == tables[:3] and first["isOpen"] and second["isOpen"]
    assert find_values(second, "mediaKeys") == [["figures/frontier"], ["figures/figure1"]]
    assert find_values(second, "val") == ["frontier"]
    assert "runs" in find_values(others, "val")


@pytest.fixture
def drawn(monkeypatch):
    """Stand in for figures, which tests do not draw."""
    monkeypatch.setattr(job, "report_figures", lambda tables: {"frontier": Image.new("L", (2, 2)), "speed": None})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wandb")
    succeed(*tiny(folder), "+experiment=compare", "variants=[focus]", "recipe.steps=1", "eval.tasks=[]", *UNTUNED)
    return folder


def test_dashboard_leaves_its_tables_in_files_offline(trained, drawn):
    pytest.importorskip("wandb_workspaces")
    result = succeed(*tiny(trained), "job=dashboard", "logger.wandb=offline")
    files = {path.name.split("_0_")[0]: path for path in trained.rglob("media/table/*.table.json")}
    report = report_tables(load_results(trained / "runs", "embedded"))
    expected = logging.dashboard_tables(report)
    assert files.keys() == expected.keys() >= {"claims", "paper_table1_retrofit", "frontier"}
    for name, path in files.items():
        stored = json.loads(path.read_text())
        assert stored["columns"] == list(map(str, expected[name].columns))
        assert len(stored["data"]) == len(expected[name]) > 0
    assert "not saved" in result.out and str(next(iter(files.values())).parent) in result.out


def test_dashboard_saves_a_workspace_with_the_tables_that_it_logs(trained, drawn, monkeypatch):
    workspaces = pytest.importorskip("wandb_workspaces.workspaces")
    live, saved = Mock(offline=False, entity="team"), []
    monkeypatch.setattr("wandb.init", lambda **_: live)
    monkeypatch.setattr(workspaces.Workspace, "save", lambda self: saved.append(self) or Mock(url="its address"))
    assert "its address" in succeed(*tiny(trained), "job=dashboard", "logger.wandb=online").out
    (logged,) = live.log.call_args.args
    (workspace,) = saved
    shown = {*find_values([*sections_of(workspace).values()], "val")} - {*logging.RUN_TABLES}
    assert logged.keys() == shown | {"figures/frontier"}
    assert find_values([*sections_of(workspace).values()], "mediaKeys") == [["figures/frontier"]]
    assert workspace.entity == "team" and "claims" in shown


def test_dashboard_is_offline_where_the_server_does_not_answer(trained, drawn, monkeypatch):
    pytest.importorskip("wandb_workspaces")
    init = wandb.init

    def refuse(mode, **options):
        if mode == "online":
            raise wandb.errors.CommError("no answer")
        return init(mode=mode, **options)

    monkeypatch.setattr("wandb.init", refuse)
    monkeypatch.setenv("WANDB_MODE", "online")
    assert "not saved" in succeed(*tiny(trained), "job=dashboard", "logger.wandb=auto").out
    assert run(*tiny(trained), "job=dashboard", "logger.wandb=online").code == 2
