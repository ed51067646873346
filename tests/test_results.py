"""Measurements: their file, and loading them."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_config

from focus_exp.errors import UserError
from focus_exp.identity import identity
from focus_exp.models.files import hash_model
from focus_exp.results.environment import commit
from focus_exp.results.measurement import MEASUREMENTS, Measurement, format_measurements, read_measurements
from focus_exp.results.metrics import METRICS, read_metrics
from focus_exp.results.record import Record
from focus_exp.results.run_dir import name_data, name_model, run_folder
from focus_exp.runs.open import setup_key


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
def test_model_and_data_are_named_after_what_runs(overrides: list[str], names: tuple[str, str]) -> None:
    config = make_config(*overrides)
    assert (name_model(config), name_data(config)) == names


def test_run_folder_is_named_after_what_runs() -> None:
    config = make_config("+experiment=retrofit_124m", "job=train", "assets=embedded", "trainer.accelerator=cpu")
    folder = run_folder(config)
    assert folder.parts[:3] == ("runs", "retrofit", "smollm2_135m_q4-books-cpu")
    assert folder.name == f"focus-seed0-{identity(config)[:8]}"


def test_setup_key_differs_by_what_is_computed_alone() -> None:
    config, other_seed = make_config(), make_config("seed=1", "eval.tasks=[piqa]", "model.revision=ab12")
    record = Record(status="finished", experiment="x", device="cpu, 1 threads, float32", steps=3)
    other_device = replace(record, device="cpu, 2 threads, bf16")
    assert setup_key(config, record) == setup_key(other_seed, other_device)
    for change in ({"steps": 4}, {"model": {"fingerprint": "cd"}}, {"device": "cuda, bf16"}):
        assert setup_key(config, replace(record, **change)) != setup_key(config, record)
    assert setup_key(make_config("attention.groups=8"), record) != setup_key(config, record)


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


def test_identity_has_contents_of_local_files_in_place_of_their_names(tmp_path: Path) -> None:
    for name, text in {"a": "one", "b": "one", "c": "two"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(text)
    a, b, c = (identity(make_config("data=files", f"data.files={tmp_path / name}")) for name in "abc")
    assert a == b != c


def test_identity_of_a_scored_data_set_ignores_a_folder_of_its_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = make_config("eval.data=books")
    before = identity(config)
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "text.txt").write_text("one")
    assert identity(config) == before


def test_hash_of_a_large_model_reads_pages_of_it(tmp_path: Path) -> None:
    size, hashes = 3 * 2**30, set()
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    for place in (None, 0, size // 2, size - 3 * 2**20):
        with weights.open("wb") as file:
            file.truncate(size)
            if place is not None:  # as many bytes as a small weight has
                file.seek(place)
                file.write(b"x" * 2**22)
            file.truncate(size)
        hashes.add(hash_model(str(tmp_path)))
    assert len(hashes) == 4
