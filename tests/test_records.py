"""Committed records: copied from finished runs, checked against their numbers, written anew from them."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from builders import write_variants
from running import run, tiny

from focus_exp.errors import UserError
from focus_exp.records.comparison import load_run
from focus_exp.records.rows import Row
from focus_exp.reporting.load import load_results
from focus_exp.reporting.publish import find_stale, publish, renew, strip_local_paths
from focus_exp.reporting.report import write_report
from focus_exp.results.environment import unknown_commit
from focus_exp.results.measurement import Measurement
from focus_exp.results.record import Record

LARGEST = 3 * 2**19  # bytes: an adapter
RECORDS = Path(__file__).parent.parent / "runs" / "records"


def test_published_runs_supersede_those_that_no_table_makes_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr("focus_exp.reporting.publish.unknown_commit", lambda commit: "")
    assert run(*tiny(tmp_path), "recipe.steps=2").code == 0
    runs, records = tmp_path / "runs", tmp_path / "runs" / "records"
    (path,) = runs.rglob("record.json")
    place = path.parent.relative_to(runs)
    record = Record.load(path)
    record.rows, record.benchmarks = [], []  # of those that are no runs there are no losses
    names = ("old", "new", "seed", "gpu")
    older, current, seed_1, elsewhere = (records / record.experiment / name / "seed=0-01" for name in names)
    for folder in (older, current):
        record.save(folder / "record.json")
    record.seed = 1
    record.save(seed_1 / "record.json")
    record.seed = 0
    record.device = "NVIDIA H200, 1 device, bfloat16"
    record.save(elsewhere / "record.json")

    made = {place, current.relative_to(records)}
    awaited = current.relative_to(records).with_name("seed=0-02")  # what may stand in the place of the older one
    assert publish([place], {*made, awaited}, runs, records) == []
    for removed in ([older], []):
        assert publish([place], made, runs, records) == removed
        assert not older.parent.exists()
        assert all((folder / "record.json").exists() for folder in (current, seed_1, elsewhere))
        kept = {file.relative_to(records / place).as_posix() for file in (records / place).rglob("*")}
        expected = {
            "record.json",
            "table.md",
            "measurements.csv",
            "losses.csv",
            "metrics.jsonl",
            "figures/loss_curve.svg",
        }
        assert expected <= kept
        assert not any(name.endswith((".safetensors", ".ckpt", ".npz", ".png", ".yaml")) for name in kept)
        assert find_stale(records) == []

    losses = records / place / "losses.csv"
    head, first, *others = losses.read_text().splitlines()
    *cells, last = first.split(",")
    losses.write_text("\n".join([head, ",".join([*cells, str(float(last) + 0.01)]), *others]))
    assert any("record.json: " in said and "does not follow from losses.csv" in said for said in find_stale(records))
    losses.unlink()
    assert any("does not follow from losses.csv" in said for said in find_stale(records))


def test_times_of_another_kind_of_device_are_published_beside_those_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr("focus_exp.reporting.publish.unknown_commit", lambda commit: "")
    runs, records, place = tmp_path / "runs", tmp_path / "records", Path("speed", "focus-bench", "seed=0-01")
    (runs / place).mkdir(parents=True)
    (runs / place / "table.md").write_text("")
    homes = [records / place, records / place.with_name("seed=0-01-nvidia_h200")]
    for device, seconds in (("cpu, 2 threads, float32", 0.5), ("NVIDIA H200, bfloat16", 0.25)) * 2:
        record = Record(status="finished", experiment="speed", device=device)
        record.measurements.append(make_timing(seconds))
        record.save(runs / place / "record.json")
        assert publish([place], {place}, runs, records) == []
    assert [Record.load(home / "record.json").measurements[0].value for home in homes] == [0.5, 0.25]
    assert all((home / "table.md").exists() for home in homes) and find_stale(records) == []


def test_the_adapter_that_a_published_run_measured_is_published_beside_the_run_that_made_it(tmp_path, monkeypatch):
    monkeypatch.setattr("focus_exp.reporting.publish.unknown_commit", lambda commit: "")
    runs, records = tmp_path / "runs", tmp_path / "runs" / "records"
    assert run(*tiny(tmp_path), "recipe.steps=2").code == 0
    (made,) = (path.parent.relative_to(runs) for path in runs.rglob("record.json"))
    adapter = str(runs / made / "adapter")
    assert run(*tiny(tmp_path), "job=evaluate", f"adapter={adapter}").code == 0
    (other,) = {path.parent.relative_to(runs) for path in runs.rglob("record.json")} - {made}
    publish([made], {made, other}, runs, records)
    assert not (records / made / "adapter").exists()
    publish([other], {made, other}, runs, records)
    assert (records / made / "adapter" / "focus_adapter.safetensors").exists()
    assert find_stale(records) == []
    monkeypatch.setattr("focus_exp.reporting.publish.MAX_ADAPTER_BYTES", 100)
    publish([made, other], {made, other}, runs, records)
    assert not (records / made / "adapter").exists()
    monkeypatch.undo()
    monkeypatch.setattr("focus_exp.reporting.publish.unknown_commit", lambda commit: "")
    again = Record.load(runs / made / "record.json")
    again.started = "later"  # another run of the same settings, whose adapter is another one
    again.save(runs / made / "record.json")
    publish([other], {made, other}, runs, records)
    assert not (records / made / "adapter").exists()


def make_timing(value):
    settings = {"clock": "attention", "seq_len": 1024, "groups": 4, "assignment": "balanced", "top_k": 1}
    return Measurement(variant="focus", metric="speedup", value=value, unit="x", reference="full", settings=settings)


@pytest.mark.parametrize("commit", [None, "", "0" * 40, "0" * 40 + "-dirty"])
def test_a_run_that_nobody_could_repeat_is_not_published(tmp_path, commit):
    runs, place = tmp_path / "runs", Path("x", "full", "seed=0-01")
    Record(status="finished", experiment="x", commit=commit).save(runs / place / "record.json")
    with pytest.raises(UserError, match=str(place)):
        publish([place], {place}, runs, runs / "records")
    assert not (runs / "records").exists()


def test_the_commit_of_a_record_is_looked_up_in_the_history():
    root = Path(__file__).parent.parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
    if not head:
        pytest.skip("not a git checkout")
    assert unknown_commit(head) == "" and "changes" in unknown_commit(f"{head}-dirty")
    assert "history" in unknown_commit("1" * 40) and "outside" in unknown_commit(None)


def test_a_comparison_refers_to_the_records_of_its_arms(tmp_path):
    variants = {
        name: ["attention=window", f"attention.window={size}", "recipe=none"] for name, size in (("one", 8), ("two", 4))
    }
    assert run(*tiny(tmp_path), "job=compare", *write_variants(tmp_path / "conf", variants)).code == 0
    (place,) = (tmp_path / "runs").glob("*/*/*-compare-seed*")
    stored, read = Record.load(place / "record.json"), load_run(place)
    assert not stored.rows and not stored.probes and len(stored.differences) == 1
    assert [row.arm for row in read.rows] == [None, "one", "two"]
    assert read.rows[2].delta_vs_hard == stored.differences[0].value
    (other,) = (tmp_path / "runs").glob("*/*/two-seed*/record.json")
    again = Record.load(other)
    again.started = "later"
    again.save(other)
    with pytest.raises(UserError, match="made again.*run the comparison again"):
        load_run(place)
    other.unlink()
    with pytest.raises(UserError, match="not there; run the comparison again"):
        load_run(place)


def test_no_committed_record_is_large():
    sizes = {path: path.stat().st_size for path in RECORDS.rglob("*") if path.is_file()}
    assert {str(path): size for path, size in sizes.items() if size > LARGEST} == {}
    assert sum(sizes.values()) < 40 * 2**20


def test_no_committed_record_names_a_folder_of_the_machine_that_made_it():
    for path in RECORDS.rglob("*"):
        if path.suffix in (".json", ".yaml", ".md", ".csv", ".html", ".tex", ".jsonl"):
            assert not re.search(r"""["' =:(]/(home|root|tmp|work|Users|mnt|data)/""", path.read_text()), path


@pytest.mark.parametrize("runs", ["/home/me/runs", "out"])
def test_a_record_is_published_without_the_folders_of_its_machine(runs):
    record = {
        "command": f"python -m focus_exp adapter={runs}/a/adapter runs_dir={runs} cache_dir=/big/cache seed=1",
        "arms": [{"folder": f"{runs}/layout/a"}],
        "config": {"runs_dir": runs, "cache_dir": "/big/cache"},
    }
    assert json.loads(strip_local_paths(json.dumps(record), Path(runs))) == {
        "command": "python -m focus_exp adapter=runs/a/adapter seed=1",
        "arms": [{"folder": "runs/layout/a"}],
        "config": {"runs_dir": "runs", "cache_dir": None},
    }


def test_a_published_table_that_does_not_follow_is_named(tmp_path):
    assert run(*tiny(tmp_path), "recipe.steps=2").code == 0
    assert run(*tiny(tmp_path), "job=report", "report.check=true").code == 0
    (path,) = (tmp_path / "runs").rglob("record.json")
    values = json.loads(path.read_text())
    values["rows"][1]["perplexity"] += 1
    path.write_text(json.dumps(values))
    result = run(*tiny(tmp_path), "job=report", "report.check=true")
    assert result.code == 2 and "does not follow from" in result.err


def test_what_does_not_follow_is_renewed(tmp_path):
    assert run(*tiny(tmp_path), "recipe.steps=2").code == 0
    (path,) = (tmp_path / "runs").rglob("record.json")
    before = path.read_bytes()
    report = tmp_path / "runs" / "report"
    write_report(load_results(tmp_path / "runs"), report)
    assert find_stale(tmp_path / "runs") == []
    by_hand = [path.parent / "table.md", report / "claims.csv"]
    for file in by_hand:
        file.write_text("id\ntyped by hand")
    assert {said.split()[0] for said in find_stale(tmp_path / "runs")} == {*map(str, by_hand)}
    renew(tmp_path / "runs")
    assert find_stale(tmp_path / "runs") == [] and path.read_bytes() == before


def test_every_committed_table_follows_from_its_record():
    assert find_stale(RECORDS) == []


@pytest.mark.parametrize(
    ("status", "timed", "scored", "counts"),
    [("finished", False, True, True), ("interrupted", True, False, True), ("interrupted", True, True, False),
     ("interrupted", False, True, False), ("failed", True, False, False)],
)  # fmt: skip
def test_times_of_an_interrupted_run_count_and_scores_do_not(status, timed, scored, counts):
    record = Record(status=status, experiment="speed")
    record.measurements += [make_timing(2.0)] if timed else []
    record.rows = [Row(name="base", kind="base", method="full", causal=True)] if scored else []
    assert record.counts == counts
