"""Weights & Biases without a server: the mode, tables, the saved workspace."""

import pandas as pd
import pytest
from running import succeed, tiny

from focus_exp.reporting import wandb as logging


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


def test_dashboard_logs_tables_without_a_server(tmp_path):
    pytest.importorskip("wandb_workspaces")
    succeed(*tiny(tmp_path), "recipe.steps=1")
    result = succeed(*tiny(tmp_path), "job=dashboard", "logger.wandb=disabled")
    assert "not saved" in result.out
