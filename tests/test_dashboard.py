"""job=dashboard: workspaces and the report as code, readable again by the library that the server's own pages use."""

import json
import socket

import pytest
from running import run, tiny

from focus_exp.errors import UserError
from focus_exp.reporting import workspace
from focus_exp.reporting.figures import figure_names
from focus_exp.reporting.tables import table_specs

pytest.importorskip("wandb_workspaces")


def read_back(text):
    from wandb_workspaces.workspaces import Workspace, internal

    return Workspace._from_model(internal.View.model_validate_json(text))


def test_what_is_written_can_be_read_again(tmp_path):
    views = workspace.workspaces("someone", "things")
    written = workspace.report("someone", "things", {"compare": ["comparison"]}, ["claims", "traps"])
    paths = {path.stem: path for path in workspace.write_specs(tmp_path, views, written)}
    assert set(paths) == {"workspace_runs", "workspace_comparisons", "report"}
    runs = read_back(paths["workspace_runs"].read_text())
    assert (runs.entity, runs.project, runs.name) == ("someone", "things", "focus_exp: runs by experiment")
    assert [section.name for section in runs.sections] == [
        *("Training", "Routing", "Speed", "Groups", "Quality", "Figures"),
    ]
    assert [panel.y[0].name for panel in runs.sections[0].panels] == [
        "train/loss", "train/val_loss", "train/tokens_per_second",
    ]  # fmt: skip
    probes = [panel.metric_regex for panel in runs.sections[1].panels]
    assert probes == ["probe/.*dominance$", "probe/.*dead_groups$", "probe/.*stability$"]
    assert [group.name for group in runs.runset_settings.groupby] == ["Group"]
    compared = read_back(paths["workspace_comparisons"].read_text())
    assert compared.runset_settings.filters == "Metric(\"JobType\") == 'compare'"
    assert "comparison" in [panel.table_name for panel in compared.sections[0].panels]


def test_every_table_and_figure_of_a_record_has_its_panel():
    runs, comparisons = workspace.workspaces("someone", "things").values()
    panels = [panel for view in (runs, comparisons) for section in view.sections for panel in section.panels]
    assert {panel.table_name for panel in panels if hasattr(panel, "table_name")} == set(table_specs())
    keys = {key for panel in panels for key in getattr(panel, "media_keys", ())}
    assert keys == {f"figures/{name}" for name in figure_names()}
    assert workspace.by_section(["speed_of_light", "new"]) == {
        "Arms side by side": [], "Speed": ["speed_of_light"], "Groups": [], "Quality": ["new"],
    }  # fmt: skip


def test_the_report_filters_itself(tmp_path):
    from wandb_workspaces.reports.v2 import internal

    written = workspace.report("someone", "things", {"compare": ["comparison"]}, ["claims"])
    path = workspace.write_specs(tmp_path, {}, written)[-1]
    spec = internal.ReportViewspec.model_validate_json(path.read_text())
    assert spec.display_name == "focus_exp"
    text = json.dumps(json.loads(path.read_text()))
    for name, value in (("jobType", "report"), ("group", "compare")):
        assert f'"key": {{"section": "run", "name": "{name}"}}, "op": "=", "value": "{value}"' in text
    assert "claims" in text and "figures/figure1" in text and "comparison" in text


def test_without_a_server_it_is_written_and_described(tmp_path, monkeypatch):
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def refuse(*_, **__):
        raise OSError("a test must not reach out")

    assert run(*tiny(tmp_path), "regime.steps=2").code == 0
    monkeypatch.setattr(socket, "create_connection", refuse)
    arguments = [part for part in tiny(tmp_path) if not part.startswith("logger.")]
    result = run(*arguments, "job=dashboard", "logger.wandb=offline")
    assert result.code == 0, result.err
    folder = tmp_path / "runs" / "report" / "dashboard"
    assert {path.name for path in folder.glob("*.json")} == {
        "workspace_runs.json", "workspace_comparisons.json", "report.json",
    }  # fmt: skip
    assert "wandb sync" in result.out and "WANDB_API_KEY" in result.out and "your-entity" in result.out
    tables = {path.name.split("_0_")[0] for path in folder.glob("wandb/offline-run-*/files/media/table/*.json")}
    assert {"claims", "traps", "seeds", "paper_table1_retrofit", "paper_figure1"} <= tables


def test_disabled_writes_the_views_alone(tmp_path):
    assert run(*tiny(tmp_path), "regime.steps=2").code == 0
    result = run(*tiny(tmp_path), "job=dashboard")
    assert result.code == 0 and "no W&B run" in result.out
    assert not list((tmp_path / "runs" / "report").rglob("offline-run-*"))


def test_bad_input_is_one_message(tmp_path, monkeypatch):
    result = run("job=dashboard", f"runs_dir={tmp_path}", "logger.wandb=disabled")
    assert result.code == 2 and "no record.json" in result.err
    monkeypatch.setitem(__import__("sys").modules, "wandb_workspaces", None)
    with pytest.raises(UserError, match="pip install"):
        workspace.need_library()
