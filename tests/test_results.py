"""Measurements: their file, and loading them."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_config

from focus_exp.config_hash import config_hash
from focus_exp.errors import UserError
from focus_exp.results.environment import commit
from focus_exp.results.measurement import MEASUREMENTS, Measurement, format_measurements, read_measurements
from focus_exp.results.metrics import METRICS, read_metrics
from focus_exp.results.record import Record
from focus_exp.results.run_dir import run_folder
from focus_exp.results.setup import setup_key


def test_measurements_written_and_read_are_equal(tmp_path: Path) -> None:
    written = [
        Measurement(variant="base", metric="perplexity", value=38.1637680671, n=6, seed=0, density=1.0),
        Measurement(variant="sparq", metric="perplexity", value=float("inf"), settings={"phase": "router", "step": 3}),
        Measurement(variant="sparq", metric="nll", value=None, settings={"error": "out of memory"}),
        Measurement(variant="focus_hard", metric="nll_change", value=0.03, low=0.02, high=0.04, reference="base"),
    ]
    path = tmp_path / MEASUREMENTS
    path.write_text(format_measurements(written), encoding="utf-8")
    assert format_measurements(read_measurements(path)) == format_measurements(written)


@pytest.mark.parametrize("cut", [-40, -3])
def test_damaged_measurements_are_one_error(tmp_path: Path, cut: int) -> None:
    rows = [Measurement(variant="sparq", metric="nll", value=1.5, settings={"error": "out of memory"})]
    path = tmp_path / MEASUREMENTS
    path.write_text(format_measurements(rows)[:cut], encoding="utf-8")
    with pytest.raises(UserError, match=f"{MEASUREMENTS} is damaged"):
        read_measurements(path)


def test_damaged_lines_of_a_log_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n{"step"', encoding="utf-8")
    assert read_metrics(path) == [{"step": 1}, {"step": 3}]


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["assets=embedded"], ("smollm2_135m_q4", "books")),
        (["assets=hub"], ("gpt2", "pg19")),
        (["assets=hub", "model=mistral_7b", "model.quantization=nf4"], ("mistral_7b_v0.1_nf4", "pg19")),
        (["model.path=/data/my-model", "data.source=addresses"], ("my_model", "addresses")),
        (["model.path=/runs/x/y/full-seed0-ab/model", "data=code"], ("full_seed0_ab", "transformers")),
        (["assets=hub", "data.source=files", "data.files=t/a.txt"], ("gpt2", "a")),
    ],
)
def test_run_folder_is_named_after_what_runs(overrides: list[str], names: tuple[str, str]) -> None:
    config = make_config("+experiment=retrofit_124m", *overrides, "trainer.accelerator=cpu")
    folder = run_folder(config)
    assert folder.parts[:2] == ("runs", "retrofit")
    assert folder.parts[2] == f"{names[0]}-{names[1]}-cpu"
    assert folder.name == f"focus-seed0-{config_hash(config)}"


def test_setup_key_differs_by_what_is_computed_alone() -> None:
    config = {"seed": 0, "attention": {"groups": 4, "cap": None}, "eval": {"tasks": []}}
    record = Record(status="finished", experiment="x", config=config, device="cpu, 1 threads, float32", steps=3)
    other_seed = replace(
        record, config=config | {"seed": 1, "eval": {"tasks": ["piqa"]}}, device="cpu, 2 threads, bf16"
    )
    without_default = replace(record, config=config | {"attention": {"groups": 4}})
    assert setup_key(record) == setup_key(other_seed) == setup_key(without_default)
    for change in ({"steps": 4}, {"model": {"fingerprint": "cd"}}, {"config": config | {"attention": {"groups": 8}}}):
        assert setup_key(replace(record, **change)) != setup_key(record)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["environment.py", "c0ffee", ""], "c0ffee"),
        (["environment.py", "c0ffee", " M conf"], "c0ffee-dirty"),
        (["environment.py", "c0ffee", None], "c0ffee-dirty"),
        ([""], None),
        ([None], None),
    ],
)
def test_commit_names_changes_and_is_none_outside_of_git(monkeypatch, answers, expected) -> None:
    left = iter(answers)

    def git(command: list[str], **options: object) -> subprocess.CompletedProcess:
        if (answer := next(left)) is None:
            raise subprocess.TimeoutExpired(command, 10)
        return subprocess.CompletedProcess(command, 0, answer)

    monkeypatch.setattr(subprocess, "run", git)
    assert commit.__wrapped__() == expected
