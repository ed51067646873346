"""Published records: tables of runs, checked against their losses; the report and pages against them."""

import io
import re
from pathlib import Path

import pandas as pd
import pytest
from builders import find_inconsistent
from pandas.testing import assert_frame_equal
from running import only_run, run, tiny

from focus_exp.errors import UserError
from focus_exp.reporting.load import load_results, load_run
from focus_exp.reporting.pages import fill_pages
from focus_exp.reporting.report import render_markdown, report_tables
from focus_exp.results.measurement import format_measurements
from focus_exp.results.record import Record, VariantRun
from focus_exp.results.runs import collect_runs, find_variants, read_runs, read_tables

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "runs" / "records"


@pytest.fixture(scope="module")
def records():
    return read_runs(RECORDS)


def test_published_report_and_pages_follow_from_measurements(published):
    tables = report_tables(published)
    for name, table in tables.items():
        stored = pd.read_csv(RECORDS / "report" / f"{name}.csv")
        made = pd.read_csv(io.StringIO(table.to_csv(index=False)))
        assert_frame_equal(stored, made, check_dtype=False, rtol=1e-9, atol=1e-9, obj=name)
    pages = {RECORDS / "report" / "report.md": render_markdown(published, tables)} | fill_pages(RECORDS, tables)
    assert [page.name for page in pages] == ["report.md", "README.md", "results.md", "conclusions.md"]
    for page, text in pages.items():
        assert page.read_text(encoding="utf-8") == text


def test_published_measurements_follow_from_losses(records):
    wrong = {name: find_inconsistent(run) for name, run in records.items()}
    assert {name: rows for name, rows in wrong.items() if rows} == {}


def test_published_variants_have_runs(records):
    lost = {
        f"{name} {variant.name}"
        for name, run in records.items()
        for variant in run.variants
        if variant.status == "finished" and variant.name not in find_variants(name, records)
    }
    assert len(records) > 300 and len(lost) < 20, lost


def test_collected_runs_equal_their_folders(finished_run, tmp_path):
    place = only_run(finished_run)
    (name,) = collect_runs(place.parent, tmp_path)
    before, after = Record.load(place / "record.json"), read_tables(tmp_path)[name]
    assert name == place.relative_to(finished_run).as_posix()
    assert format_measurements(after.measurements) == format_measurements(before.measurements)
    (before_losses,), (after_losses,) = before.losses.values(), after.losses.values()
    assert before_losses.units == after_losses.units
    assert {name: [*values] for name, values in before_losses.nll.items()} == {
        name: [*values] for name, values in after_losses.nll.items()
    }
    facts = load_results(finished_run).runs, load_results(tmp_path).runs
    assert_frame_equal(*facts)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    collect_runs(finished_run, tmp_path)  # again
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written


def test_job_report_collects_runs_and_reports_them(finished_run, tmp_path):
    result = run(*tiny(tmp_path), "job=report", f"report.collect={finished_run}")
    assert result.code == 0, result.err
    assert {"runs.jsonl", "measurements.parquet", "losses.parquet", "report"} <= {
        path.name for path in (tmp_path / "runs").iterdir()
    }


def test_collect_runs_without_a_run_raises(tmp_path):
    with pytest.raises(UserError, match="report.collect"):
        collect_runs(tmp_path / "nowhere", tmp_path)


@pytest.mark.parametrize("damaged", ["runs.jsonl", "measurements.parquet", "losses.parquet"])
def test_read_tables_damaged_raises(finished_run, tmp_path, damaged):
    collect_runs(finished_run, tmp_path)
    (tmp_path / damaged).write_bytes((tmp_path / damaged).read_bytes()[:-9])
    with pytest.raises(UserError, match="Restore"):
        read_tables(tmp_path)


def test_comparison_without_runs_of_its_variants_has_no_rows(tmp_path):
    variant = VariantRun(name="one", settings=[], folder="runs/adhoc/tiny/one-seed0-ab")
    path = tmp_path / "adhoc" / "tiny" / "compare-seed0-cd" / "record.json"
    Record(status="finished", experiment="adhoc", started="now", variants=[variant]).save(path)
    assert load_run(path.parent).rows.empty


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
    local = re.compile(r"""["' =:(]/(home|root|tmp|work|Users|mnt|data)/""")
    for path in RECORDS.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".md", ".csv", ".tex"):
            assert not local.search(path.read_text()), path
    settings = pd.read_parquet(RECORDS / "measurements.parquet").settings
    assert not local.search("\n".join(settings))


def test_published_records_are_few_and_small():
    files = [path for path in RECORDS.rglob("*") if path.is_file()]
    assert len(files) <= 60 and sum(path.stat().st_size for path in files) <= 12e6
