"""The script for GPU machines runs with torch and triton alone, and ends in a record."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = ("hydra", "omegaconf", "transformers", "pytorch_lightning", "datasets", "pytest", "hypothesis", "tqdm")


def test_the_script_needs_torch_and_triton_alone_and_ends_in_a_record(tmp_path):
    pytest.importorskip("triton", reason="Triton is there on Linux alone")
    code = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED})); import gpu_clock; gpu_clock.main()"
    arguments, tests = [sys.executable, "-c", code, "--tiny", "--out", str(tmp_path)], Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{tests}:{tests.parent}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["checks"] == {"right": 2, "wrong": {}} and record["device"].startswith("cpu")
    forms = [("published form", 2, "triton"), ("two encoders", 4, "triton"), ("key gate", 1, "triton")]
    steps = [("published form", 2, f"{kernel}, step") for kernel in ("triton", "flash")]
    found = [(row["form"], row["K"], row["kernel"]) for row in record["rows"]]
    assert found == [*forms, ("published form", 2, "flash"), *steps]
    assert all(row["bound by pairs"] >= 1 and row["ratio"] > 0 for row in record["rows"][:4])


def test_the_committed_table_follows_from_the_records_beside_it(tmp_path):
    committed = Path(__file__).parent.parent / "runs" / "records" / "gpu"
    for path in committed.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    script = [sys.executable, str(Path(__file__).parent / "gpu_clock.py"), "--table", str(tmp_path)]
    paths = f"{Path(__file__).parent}:{Path(__file__).parent.parent}"
    subprocess.run(script, check=True, env=os.environ | {"PYTHONPATH": paths})
    table = (tmp_path / "speed_gpu.md").read_text()
    assert table == (committed / "speed_gpu.md").read_text()
    assert "51 of 52 cases" in table and "NVIDIA H200" in table
