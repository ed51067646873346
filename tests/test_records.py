"""Published records: checked against losses, rendered again from measurements."""

import re
import shutil
from pathlib import Path

import pytest
from running import only_run, run, tiny

from focus_exp.errors import UserError
from focus_exp.reporting import report
from focus_exp.reporting.check import check_runs, find_stale, renew
from focus_exp.reporting.load import load_results
from focus_exp.reporting.pages import fill_pages
from focus_exp.reporting.report import check_report, report_tables, write_report
from focus_exp.results.comparison import compare_variants
from focus_exp.results.record import Record, VariantRun

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "runs" / "records"


@pytest.fixture
def runs(finished_run, tmp_path, monkeypatch):
    """A copy of the directory of one finished run; figures of the report are not drawn."""
    monkeypatch.setattr(report, "report_figures", lambda tables: {})
    return shutil.copytree(finished_run, tmp_path / "runs")


def test_find_stale_names_changed_files_and_renew_mends_them(runs):
    place = only_run(runs)
    write_report(load_results(runs), runs / "report")
    record = (place / "record.json").read_bytes()
    assert find_stale(runs) == []
    changed = [place / "table.md", runs / "report" / "claims.csv", runs / "report" / "report.md"]
    for file in changed:
        file.write_text("id\ntyped by hand")
    assert {line.split()[0] for line in find_stale(runs)} == set(map(str, changed))
    renew(runs)
    write_report(load_results(runs), runs / "report")
    assert find_stale(runs) == []
    assert (place / "record.json").read_bytes() == record


@pytest.mark.parametrize("damage", ["losses", "no losses", "measurements"])
def test_find_stale_compares_measurements_with_losses(runs, damage):
    place = only_run(runs)
    losses, measurements = place / "losses.csv", place / "measurements.csv"
    if damage == "losses":
        head, first, *rest = losses.read_text().splitlines()
        *cells, last = first.split(",")
        losses.write_text("\n".join([head, ",".join([*cells, str(float(last) + 0.01)]), *rest]))
    elif damage == "no losses":
        losses.unlink()
    else:
        text = measurements.read_text()
        value = next(line for line in text.splitlines() if ",nll," in line).split(",")[2]
        measurements.write_text(text.replace(value, str(float(value) + 1)))
    assert any("losses.csv" in line for line in find_stale(runs))


def test_job_report_check_fails_on_stale_run(runs, tmp_path):
    (only_run(runs) / "table.md").write_text("typed by hand")
    result = run(*tiny(tmp_path), "job=report", "report.check=true")
    assert result.code == 2
    assert "table.md" in result.err


def test_published_report_and_pages_follow_from_measurements(published):
    tables = report_tables(published)
    assert check_report(tables, RECORDS / "report") == []
    pages = fill_pages(RECORDS, tables)
    assert [page.name for page in pages] == ["README.md", "results.md", "conclusions.md"]
    for page, text in pages.items():
        assert page.read_text(encoding="utf-8") == text


def test_published_runs_follow_from_their_measurements():
    """A fixed sample; `make report` checks all."""
    folders = sorted(path.parent for path in RECORDS.rglob("record.json"))[::5]
    assert check_runs(folders) == []


def test_published_results_keep_every_run(published):
    assert len(published.runs) == len(list(RECORDS.rglob("record.json")))


def test_compare_variants_without_a_run_has_no_changes(tmp_path):
    variant = VariantRun(name="one", settings=[], folder="runs/adhoc/tiny/one-seed0-ab")
    comparison = Record(status="running", experiment="adhoc", variants=[variant])
    compare_variants(comparison, tmp_path / "adhoc" / "tiny" / "compare-seed0-cd", [])
    assert comparison.measurements == [] and comparison.model == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-9], "Invalid JSON"),
        (lambda text: "[]", "Input should be an object"),
        (lambda text: text.replace('"schema_version": ', '"schema_version": 9'), "schema_version: Input should be 3"),
        (lambda text: text.replace('"status": "finished"', '"status": 3'), "status: .*got '3'"),
    ],
)
def test_load_damaged_record_raises(tmp_path, change, message):
    path = tmp_path / "record.json"
    Record(status="finished", experiment="mine").save(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=message):
        Record.load(path)


def test_published_files_name_no_local_directory():
    for path in RECORDS.rglob("*"):
        if path.suffix in (".json", ".yaml", ".md", ".csv", ".html", ".tex", ".jsonl"):
            assert not re.search(r"""["' =:(]/(home|root|tmp|work|Users|mnt|data)/""", path.read_text()), path
