"""Published records: copied from finished runs, checked against losses, rendered again from measurements."""

import json
import re
import shutil
from pathlib import Path

import pytest
from running import run, tiny, without_attention

from focus_exp.errors import UserError
from focus_exp.reporting import publish as publishing
from focus_exp.reporting import report
from focus_exp.reporting.load import build_report_results, load_results
from focus_exp.reporting.publish import check_runs, find_stale, publish, renew, strip_local_paths
from focus_exp.reporting.report import check_report, write_report
from focus_exp.results.comparison import compare_variants
from focus_exp.results.measurement import Measurement
from focus_exp.results.record import Record, VariantRun

MAX_BYTES = 3 * 2**19  # of an adapter
ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "runs" / "records"


@pytest.fixture
def runs(finished_run, tmp_path, monkeypatch):
    """A copy of the directory of one finished run, whose commit counts as known; figures are not drawn."""
    monkeypatch.setattr(publishing, "unknown_commit_reason", lambda commit: None)
    monkeypatch.setattr(publishing, "write_run_figures", lambda folder: {})
    monkeypatch.setattr(report, "write_report_figures", lambda tables, folder: None)
    return shutil.copytree(finished_run, tmp_path / "runs")


def place_of(runs: Path) -> Path:
    (path,) = (path for path in runs.rglob("record.json") if "records" not in path.relative_to(runs).parts)
    return path.parent.relative_to(runs)


def make_timing(value):
    settings = {"clock": "attention", "seq_len": 1024, "groups": 4, "assignment": "balanced", "top_k": 1}
    return Measurement(variant="focus", metric="speedup", value=value, unit="x", reference="full", settings=settings)


# --- publish ---


def test_publish_removes_superseded_runs_once_all_are_there(runs):
    records, place = runs / "records", place_of(runs)
    record = Record.load(runs / place / "record.json")
    older, current, other_seed, elsewhere = (records / record.experiment / name / "seed=0-01" for name in "abcd")
    h200 = "NVIDIA H200, 1 device, bfloat16"
    cells = [
        (older, 0, record.device),
        (current, 0, record.device),
        (other_seed, 1, record.device),
        (elsewhere, 0, h200),
    ]
    for folder, record.seed, record.device in cells:
        record.save(folder / "record.json")
    made = {place, current.relative_to(records)}
    awaited = current.relative_to(records).with_name("seed=0-02")  # may replace the older one
    assert publish([place], {*made, awaited}, runs, records) == []
    assert publish([place], made, runs, records) == [older]
    assert not older.parent.exists()
    assert all((folder / "record.json").exists() for folder in (current, other_seed, elsewhere))
    kept = {file.relative_to(records / place).as_posix() for file in (records / place).rglob("*") if file.is_file()}
    files = {"record.json", "table.md", "measurements.csv", "losses.csv", "metrics.jsonl"}
    assert files | {"figures/loss_curve.svg"} <= kept
    assert not any(name.endswith((".safetensors", ".ckpt", ".npz", ".png", ".yaml")) for name in kept)


def test_publish_timings_of_another_device_are_kept_next_to_each_other(runs, tmp_path):
    runs, records, place = tmp_path / "timed", tmp_path / "records", Path("speed", "focus-bench", "seed=0-01")
    (runs / place).mkdir(parents=True)
    (runs / place / "table.md").write_text("")
    homes = [records / place, records / place.with_name("seed=0-01-nvidia_h200")]
    for device, value in (("cpu, 2 threads, float32", 0.5), ("NVIDIA H200, bfloat16", 0.25)) * 2:
        record = Record(status="finished", experiment="speed", device=device)
        record.measurements.append(make_timing(value))
        record.save(runs / place / "record.json")
        assert publish([place], {place}, runs, records) == []
    assert [Record.load(home / "record.json").measurements[0].value for home in homes] == [0.5, 0.25]
    assert find_stale(records) == []


def test_publish_measured_adapter_of_the_same_run_within_the_limit(runs, tmp_path, monkeypatch):
    records, made = runs / "records", place_of(runs)
    command = without_attention(tiny(tmp_path))
    assert run(*command, "job=evaluate", f"adapter={runs / made / 'adapter'}").code == 0
    (other,) = {path.parent.relative_to(runs) for path in runs.rglob("record.json")} - {made}
    weights = records / made / "adapter" / "focus_adapter.safetensors"
    publish([made], {made, other}, runs, records)
    assert not weights.exists()
    publish([other], {made, other}, runs, records)
    assert weights.exists()
    monkeypatch.setattr(publishing, "MAX_ADAPTER_BYTES", 100)
    publish([made, other], {made, other}, runs, records)
    assert not weights.exists()
    monkeypatch.setattr(publishing, "MAX_ADAPTER_BYTES", MAX_BYTES)
    record = Record.load(runs / made / "record.json")
    record.started = "later"  # a repetition, with other weights
    record.save(runs / made / "record.json")
    publish([other], {made, other}, runs, records)
    assert not weights.exists()


@pytest.mark.parametrize("commit", [None, "", "0" * 40, "0" * 40 + "-dirty"])
def test_publish_unknown_commit_raises(tmp_path, commit):
    runs, place = tmp_path / "runs", Path("x", "full", "seed=0-01")
    Record(status="finished", experiment="x", commit=commit).save(runs / place / "record.json")
    with pytest.raises(UserError, match=str(place)):
        publish([place], {place}, runs, runs / "records")
    assert not (runs / "records").exists()


@pytest.mark.parametrize("runs_dir", ["/home/me/runs", "out"])
def test_strip_local_paths_keeps_what_decides_numbers(runs_dir):
    record = {
        "command": f"python -m focus_exp adapter={runs_dir}/a/adapter runs_dir={runs_dir} cache_dir=/big/cache seed=1",
        "variants": [{"folder": f"{runs_dir}/layout/a"}],
        "config": {"runs_dir": runs_dir, "cache_dir": "/big/cache"},
    }
    assert json.loads(strip_local_paths(json.dumps(record), Path(runs_dir))) == {
        "command": "python -m focus_exp adapter=runs/a/adapter seed=1",
        "variants": [{"folder": "runs/layout/a"}],
        "config": {"runs_dir": "runs", "cache_dir": None},
    }


# --- checks ---


def test_find_stale_names_changed_files_and_renew_mends_them(runs):
    place = runs / place_of(runs)
    write_report(load_results(runs), runs / "report")
    record = (place / "record.json").read_bytes()
    assert find_stale(runs) == []
    changed = [place / "table.md", runs / "report" / "claims.csv"]
    for file in changed:
        file.write_text("id\ntyped by hand")
    assert {line.split()[0] for line in find_stale(runs)} == set(map(str, changed))
    renew(runs)
    assert find_stale(runs) == []
    assert (place / "record.json").read_bytes() == record


@pytest.mark.parametrize("damage", ["losses", "no losses", "measurements"])
def test_find_stale_compares_measurements_with_losses(runs, damage):
    place = runs / place_of(runs)
    losses, measurements = place / "losses.csv", place / "measurements.csv"
    if damage == "losses":
        head, first, *rest = losses.read_text().splitlines()
        *cells, last = first.split(",")
        losses.write_text("\n".join([head, ",".join([*cells, str(float(last) + 0.01)]), *rest]))
    elif damage == "no losses":
        losses.unlink()
    else:
        text = measurements.read_text()
        value = next(line for line in text.splitlines() if ",perplexity," in line).split(",")[2]
        measurements.write_text(text.replace(value, str(float(value) + 1)))
    assert any("losses.csv" in line for line in find_stale(runs))


def test_job_report_check_fails_on_stale_run(runs, tmp_path):
    (runs / place_of(runs) / "table.md").write_text("typed by hand")
    result = run(*tiny(tmp_path), "job=report", "report.check=true")
    assert result.code == 2
    assert "table.md" in result.err


def test_published_report_follows_from_measurements(published):
    assert check_report(published, RECORDS / "report") == []


def test_published_runs_follow_from_their_measurements(published_files):
    """A fixed sample; `make report` checks all."""
    folders = sorted(path.parent for path in RECORDS.rglob("record.json"))[::5]
    assert check_runs(published_files, folders) == []


def test_published_results_keep_every_run(published_files):
    results = build_report_results(published_files)
    assert len(results.runs) == len(list(RECORDS.rglob("record.json")))


# --- comparisons, records ---


@pytest.mark.parametrize("state", ["repeated", "missing"])
def test_compare_variants_changed_run_raises(tmp_path, state):
    home = tmp_path / "adhoc" / "tiny"
    if state == "repeated":
        Record(status="finished", experiment="adhoc", started="later").save(home / "one-seed0-ab" / "record.json")
    variant = VariantRun(name="one", settings=[], folder="runs/adhoc/tiny/one-seed0-ab", started="earlier")
    comparison = Record(status="finished", experiment="adhoc", variants=[variant])
    with pytest.raises(UserError, match=state):
        compare_variants(comparison, home / "compare-seed0-cd", [])


@pytest.mark.parametrize(
    ("status", "timed", "scored", "complete"),
    [("finished", False, True, True), ("interrupted", True, False, True), ("interrupted", True, True, False),
     ("interrupted", False, True, False), ("failed", True, False, False)],
)  # fmt: skip
def test_record_timings_of_an_interrupted_run_are_complete(status, timed, scored, complete):
    record = Record(status=status, experiment="speed")
    record.measurements += [make_timing(2.0)] if timed else []
    record.measurements += [Measurement(variant="base", metric="perplexity", value=2.0)] if scored else []
    assert record.is_complete == complete


def test_published_files_are_small():
    sizes = {str(path): path.stat().st_size for path in RECORDS.rglob("*") if path.is_file()}
    assert {path: size for path, size in sizes.items() if size > MAX_BYTES} == {}
    assert sum(sizes.values()) < 40 * 2**20


def test_published_files_name_no_local_directory():
    for path in RECORDS.rglob("*"):
        if path.suffix in (".json", ".yaml", ".md", ".csv", ".html", ".tex", ".jsonl"):
            assert not re.search(r"""["' =:(]/(home|root|tmp|work|Users|mnt|data)/""", path.read_text()), path
