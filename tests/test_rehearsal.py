"""Eight rows of `make rehearse`, and the report on them: commands on the models that they name, from a local Hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REHEARSE = Path(__file__).parent / "rehearse.py"
ROWS = {
    *("retrofit_124m", "speed", "decode", "speed_quality", "frontier", "long_context", "model_scale", "evaluate"),
    "report",
}


@pytest.fixture(scope="session")
def rehearsal(tmp_path_factory) -> tuple[Path, dict]:
    """The folder of a short rehearsal, and its rows by name."""
    folder = tmp_path_factory.mktemp("rehearsal") / "short"
    command = [sys.executable, str(REHEARSE), str(folder), "short"]
    result = subprocess.run(command, env=os.environ | {"JOBS": "1"}, capture_output=True, text=True)
    assert (folder / "rehearsal.json").exists(), result.stderr
    return folder, {row["name"]: row for row in json.loads((folder / "rehearsal.json").read_text())}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_rehearsal_row_fills_its_table(rehearsal, name):
    folder, rows = rehearsal
    row = rows[name]
    assert (row["code"], row["missing"]) == (0, []), (folder / "logs" / f"{name}.log").read_text()[-2000:]
    assert not row["filled"].startswith(("0", "-"))


def test_rehearsal_runs_the_models_that_are_named(rehearsal):
    folder, _ = rehearsal
    assert {path.name for path in (folder / "runs" / "model_scale").iterdir()} == {
        "gpt2-pg19-cpu", "gpt2_large-pg19-cpu", "mistral_7b_v0.1-pg19-cpu"
    }  # fmt: skip
    assert (folder / "runs" / "retrofit" / "gpt2-pg19-cpu").is_dir()
