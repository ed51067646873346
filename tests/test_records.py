"""Committed records: copied from finished runs, checked against their numbers, written anew from them."""

import json
import re
from pathlib import Path

from running import run, tiny

from focus_exp.reporting.record import Record
from focus_exp.reporting.records import renew, stale
from focus_exp.reporting.whole_report import write_report_of

RECORDS = Path(__file__).parent.parent / "runs" / "records"
PUBLISH = ("job=report", "report.publish=true")


def test_finished_runs_are_published_in_place_of_those_they_supersede(tmp_path):
    runs, records = tmp_path / "runs", tmp_path / "runs" / "records"
    assert run(*tiny(tmp_path), "regime.steps=2").code == 0
    (path,) = runs.rglob("record.json")
    record = Record.load(path)
    older, elsewhere = (records / record.experiment / name / "seed=0-0123" for name in ("older", "on_gpu"))
    record.save(older / "record.json")
    record.device = "NVIDIA H200, 1 device, bfloat16"
    record.save(elsewhere / "record.json")
    record.status = "interrupted"
    record.save(runs / record.experiment / "not_done" / "record.json")

    result = run(*tiny(tmp_path), *PUBLISH)
    assert result.code == 0 and "1 runs published" in result.out
    assert f"removed, superseded: {older}" in result.out and not older.parent.exists()
    assert (elsewhere / "record.json").exists() and not (records / record.experiment / "not_done").exists()
    place = path.parent.relative_to(runs)
    kept = {file.relative_to(records / place).as_posix() for file in (records / place).rglob("*") if file.is_file()}
    assert {"config.yaml", "record.json", "table.md", "quality.csv", "metrics.jsonl"} <= kept
    assert not any(name.endswith((".safetensors", ".ckpt", ".npz")) for name in kept)
    assert stale(records) == []
    again = run(*tiny(tmp_path), *PUBLISH)
    assert again.code == 0 and "0 superseded" in again.out


def test_of_an_arm_the_record_alone_is_published(tmp_path):
    arms = ["job=compare", "+arms.window=['attention=window','regime=none']"]
    assert run(*tiny(tmp_path), *arms).code == 0
    assert run(*tiny(tmp_path), *PUBLISH).code == 0
    (arm,) = [path.parent for path in (tmp_path / "runs" / "records").glob("*/window/*/record.json")]
    assert {file.name for file in arm.iterdir()} == {"config.yaml", "record.json"}


def test_quick_runs_are_not_published(tmp_path):
    assert run(*tiny(tmp_path), "regime.steps=2", "scale=quick").code == 0
    result = run(*tiny(tmp_path), *PUBLISH)
    assert result.code == 2 and "no finished run" in result.err


def test_no_committed_record_names_a_folder_of_the_machine_that_made_it():
    for path in RECORDS.rglob("*"):
        if path.suffix in (".json", ".yaml", ".md", ".csv", ".html", ".tex", ".jsonl"):
            assert not re.search(r"""["' =:(]/(home|root|tmp|work|Users|mnt|data)/""", path.read_text()), path


def test_a_published_table_that_does_not_follow_is_named(tmp_path):
    assert run(*tiny(tmp_path), "regime.steps=2").code == 0
    assert run(*tiny(tmp_path), "job=report", "report.check=true").code == 0
    (path,) = (tmp_path / "runs").rglob("record.json")
    values = json.loads(path.read_text())
    values["rows"][1]["perplexity"] += 1
    path.write_text(json.dumps(values))
    result = run(*tiny(tmp_path), "job=report", "report.check=true")
    assert result.code == 2 and "table.md does not follow from its record" in result.err


def test_what_does_not_follow_is_renewed(tmp_path):
    assert run(*tiny(tmp_path), "regime.steps=2").code == 0
    (path,) = (tmp_path / "runs").rglob("record.json")
    before = path.read_bytes()
    report = tmp_path / "runs" / "report"
    write_report_of(tmp_path / "runs", report)
    assert stale(tmp_path / "runs") == []
    by_hand = [path.parent / "quality.csv", report / "claims.csv"]
    for file in by_hand:
        file.write_text("typed by hand")
    (report / "report.md").unlink()
    said = [said.split()[0] for said in stale(tmp_path / "runs")]
    assert set(said) == {*map(str, by_hand), str(report / "report.md")}
    renew(tmp_path / "runs")
    assert stale(tmp_path / "runs") == [] and path.read_bytes() == before


def test_every_committed_table_follows_from_its_record():
    assert stale(RECORDS) == []
