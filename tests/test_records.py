"""Committed records: copied from finished runs, checked against their numbers, written anew from them."""

import json
import re
from pathlib import Path

from running import run, tiny

from focus_exp.records.record import Record
from focus_exp.reporting.gather import gather
from focus_exp.reporting.published import publish, renew, stale
from focus_exp.reporting.whole_report import claim_table, write_report_of

RECORDS = Path(__file__).parent.parent / "runs" / "records"


def test_published_runs_supersede_those_that_no_table_makes_any_more(tmp_path):
    assert run(*tiny(tmp_path), "regime.steps=2").code == 0
    runs, records = tmp_path / "runs", tmp_path / "runs" / "records"
    (path,) = runs.rglob("record.json")
    place = path.parent.relative_to(runs)
    record = Record.load(path)
    names = ("old", "new", "seed", "gpu")
    older, current, seed_1, elsewhere = (records / record.experiment / name / "seed=0-01" for name in names)
    for folder in (older, current):
        record.save(folder / "record.json")
    record.seed = 1
    record.save(seed_1 / "record.json")
    record.seed = 0
    record.device = "NVIDIA H200, 1 device, bfloat16"
    record.save(elsewhere / "record.json")

    for removed in ([older], []):
        assert publish([place], {place, current.relative_to(records)}, runs, records) == removed
        assert not older.parent.exists()
        assert all((folder / "record.json").exists() for folder in (current, seed_1, elsewhere))
        kept = {file.relative_to(records / place).as_posix() for file in (records / place).rglob("*")}
        assert {"config.yaml", "record.json", "table.md", "quality.csv", "metrics.jsonl", "figures"} <= kept
        assert not any(name.endswith((".safetensors", ".ckpt", ".npz")) for name in kept)
        assert stale(records) == []


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
    assert claim_table(gather(RECORDS)).rows
