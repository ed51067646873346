"""The records that are committed: copied from finished runs, checked against their numbers, written anew from them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from focus_exp.records.metrics import read_metrics
from focus_exp.records.record import Record
from focus_exp.reporting.report import all_findings, all_tables, write_report
from focus_exp.reporting.whole_report import NAME, write_report_of
from focus_exp.storage import aside

FILES = ("config.yaml", "record.json")
# of a run that is not an arm; a comparison has its arms' tables, figures and curves
FILES_OF_TABLES = (
    *("table.md", "*.csv", "metrics.jsonl", "probe.jsonl", "figures/*"),
    *("continuations.md", "passage.html", "groups/passage.json"),
)


def publish(places: list[Path], current: set[Path], runs: Path, records: Path) -> list[Path]:
    """Copy what is worth keeping of the finished runs at `places`, below `runs`, to the same places below `records`.

    Their experiments' records under the same seeds, from the same kind of device, that are not among `current`, the
    places of runs that can still be made, are superseded: removed and returned. All below `records` is then renewed,
    its report made.
    """
    published = set()
    for place in places:
        record = Record.load(runs / place / "record.json")
        published.add(_purpose(record))
        patterns = FILES if record.config.get("arm") else (*FILES, *FILES_OF_TABLES)
        with aside(records / place) as new:
            for file in [file for pattern in patterns for file in sorted((runs / place).glob(pattern))]:
                copy = new / file.relative_to(runs / place)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
    removed = []
    for path in sorted(records.rglob("record.json")):
        record, folder = Record.load(path), path.parent
        if _purpose(record) in published and folder.relative_to(records) not in current:
            shutil.rmtree(folder)
            removed.append(folder)
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()
    (records / NAME).mkdir(exist_ok=True)
    renew(records)
    return removed


def _purpose(record: Record) -> tuple[str, int | None, str]:
    return record.experiment, record.seed, record.device_kind


def _published(top: Path) -> Iterator[tuple[Path, Record]]:
    """Finished runs with tables, which an arm's copy has not."""
    for path in sorted(top.rglob("record.json")):
        record = Record.load(path)
        if (path.parent / "table.md").exists() and record.status == "finished":
            yield path.parent, record


def stale(top: Path, scale: str = "") -> list[str]:
    """What no longer follows from its record below `top`: published tables, as text and as CSV, findings, and the
    report of all of them if there is one in `top`/report."""
    said = []
    for folder, record in _published(top):
        tables = all_tables(record)
        expected = {"table.md": "\n".join(table.to_markdown() for table in tables)}
        expected |= {f"{table.name}.csv": table.to_csv() for table in tables}
        for name, text in expected.items():
            published = folder / name
            if not published.exists() or published.read_text(encoding="utf-8") != text:
                said.append(f"{published} does not follow from its record")
        if record.findings != all_findings(record):
            said.append(f"{folder / 'record.json'}: its findings do not follow from its numbers")
    published = top / NAME
    if published.is_dir():
        with TemporaryDirectory() as scratch:
            _, written = write_report_of(top, Path(scratch), scale)
            expected = {path.name: path.read_text(encoding="utf-8") for path in written if path.suffix != ".html"}
        found = {path.name: path.read_text(encoding="utf-8") for path in published.glob("*") if path.name in expected}
        said += [
            f"{published / name} does not follow from the records"
            for name in expected
            if found.get(name) != expected[name]
        ]
    return said


def renew(top: Path) -> None:
    """Write findings, tables, figures and the report below `top` anew from the numbers of their records."""
    for folder, record in _published(top):
        write_report(record, read_metrics(folder / "metrics.jsonl"), folder)
        if record.findings != (findings := all_findings(record)):
            record.findings = findings
            record.save(folder / "record.json")
    if (top / NAME).is_dir():
        with aside(top / NAME) as new:  # without the tables of runs that are gone
            write_report_of(top, new)
