"""Publish finished runs: copy, check and render them again."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from focus_exp.errors import UserError
from focus_exp.reporting.load import Loaded, build_report_results, build_results, load_results, read_runs
from focus_exp.reporting.report import REPORT, check_numbers, check_report, write_report
from focus_exp.reporting.run_report import TABLE, render_run, run_tables, write_run_figures, write_run_table
from focus_exp.results.comparison import compare_variants, variant_folder
from focus_exp.results.environment import unknown_commit_reason
from focus_exp.results.losses import LOSSES, find_inconsistent, is_same_change, read_losses
from focus_exp.results.measurement import MEASUREMENTS
from focus_exp.results.metrics import METRICS, read_metrics, write_metrics
from focus_exp.results.record import RECORD, Record
from focus_exp.storage import atomic_write

FILES = (TABLE, MEASUREMENTS, LOSSES, "figures/*.svg", "continuations.md", "passage.html")
VARIANT_FILES = (MEASUREMENTS, LOSSES)
CURVES = ("figures/loss_curve.svg",)
MAX_ADAPTER_BYTES = 3 * 2**19  # larger adapters are made again by their command
LOGGED = ("phase", "step", "loss", "val_loss", "tokens_per_second")  # what the curves need of the training log
CHECKED_TEXTS = ("README.md", "docs/results.md")


def publish(places: list[Path], current: set[Path], runs: Path, records: Path) -> list[Path]:
    """Copy finished runs and the adapters that they measured to `records`.

    Published runs of the same experiment, seed and device that are not among `current`, the places that the tables of
    job=reproduce can still make, are superseded: they are removed once their replacements are there. The report and all
    tables are then written again.

    Returns:
        The removed folders.

    Raises:
        UserError: if a run's commit is unknown; nothing is copied.
    """
    runs_by_place = {place: Record.load(runs / place / RECORD) for place in places}
    reasons = {place: unknown_commit_reason(record.commit) for place, record in runs_by_place.items()}
    if unknown := [f"{place} ({reason})" for place, reason in reasons.items() if reason]:
        raise UserError(f"runs must come from a known commit (got {'; '.join(unknown)}). Commit and run again.")
    homes = {place: records / _home(place, record, records) for place, record in runs_by_place.items()}
    for place, record in runs_by_place.items():
        with atomic_write(homes[place]) as new:
            patterns = VARIANT_FILES if record.config.get("variant") else FILES
            for file in [file for pattern in patterns for file in sorted((runs / place).glob(pattern))]:
                copy = new / file.relative_to(runs / place)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
            text = strip_local_paths((runs / place / RECORD).read_text(encoding="utf-8"), runs)
            (new / RECORD).write_text(text, encoding="utf-8")
    for place, record in runs_by_place.items():
        if any((runs / place / curve).exists() for curve in CURVES):
            for folder in [variant_folder(runs / place, variant) for variant in record.variants] or [runs / place]:
                lines = [{key: line[key] for key in LOGGED if key in line} for line in read_metrics(folder / METRICS)]
                if lines:
                    home = homes[place] if folder == runs / place else records / folder.relative_to(runs)
                    write_metrics(home / METRICS, lines)
    for adapter in {adapter for record in runs_by_place.values() for adapter in measured_adapters(record, runs)}:
        if (
            is_same_run(runs / adapter.parent, records / adapter.parent)
            and directory_bytes(runs / adapter) <= MAX_ADAPTER_BYTES
        ):
            with atomic_write(records / adapter) as new:
                shutil.copytree(runs / adapter, new)
    removed = []
    awaited = {_experiment_and_seed(place) for place in current if not (records / place / RECORD).exists()}
    published = {
        _purpose(record) for place, record in runs_by_place.items() if _experiment_and_seed(place) not in awaited
    }
    for path in sorted(records.rglob(RECORD)):
        folder = path.parent
        kept = folder in homes.values() or folder.relative_to(records) in current
        if _purpose(Record.load(path)) in published and not kept:
            shutil.rmtree(folder)
            removed.append(folder)
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()
    (records / REPORT).mkdir(exist_ok=True)
    renew(records)
    return removed


def strip_local_paths(text: str, runs: Path) -> str:
    """Return a record without the folders of this machine."""
    text = re.sub(rf"(?<![\w./-]){re.escape(str(runs))}/", "runs/", text)
    text = re.sub(r' (runs|cache)_dir=[^\s"]+', "", text)
    text = re.sub(r'"runs_dir": "[^"]*"', '"runs_dir": "runs"', text)
    return re.sub(r'"cache_dir": "[^"]*"', '"cache_dir": null', text)


def measured_adapters(record: Record, runs: Path) -> Iterator[Path]:
    """Yield the adapters of other runs that `record` measured, relative to `runs`."""
    others = [*(record.setting("eval", "adapters") or []), *(record.setting("analyze", "others") or [])]
    for adapter in map(Path.absolute, map(Path, filter(None, [record.config.get("adapter"), *others]))):
        if adapter.is_dir() and adapter.is_relative_to(runs.absolute()):
            yield adapter.relative_to(runs.absolute())


def is_same_run(here: Path, there: Path) -> bool:
    """Return whether two folders hold the same run, not a repetition."""
    paths = here / RECORD, there / RECORD
    return all(path.exists() for path in paths) and len({Record.load(path).started for path in paths}) == 1


def directory_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _experiment_and_seed(place: Path) -> tuple[str, str]:
    """Return experiment and seed of a run's folder."""
    return place.parts[0], re.findall(r"seed=?(\d+)-", place.name)[-1]


def _home(place: Path, record: Record, records: Path) -> Path:
    """Return where a run is published: next to timings of another device."""
    there = records / place / RECORD
    if not record.is_timed or not there.exists() or Record.load(there).device_kind == record.device_kind:
        return place
    return place.with_name(f"{place.name}-{record.device_kind.lower().replace(' ', '_')}")


def _purpose(record: Record) -> tuple[str, int | None, str]:
    return record.experiment, record.seed, record.device_kind


def find_stale(records: Path, budget: str = "") -> list[str]:
    """Return what no longer follows from the measurements below `records`.

    Checks the intervals against the losses, the table of each run, the tables of the report (within a tolerance), and
    the marked numbers of the report, README.md and docs/results.md.
    """
    loaded = read_runs(records)
    wrong = check_runs(loaded, sorted(path.parent for path in records.rglob(RECORD)))
    report = records / REPORT
    if report.is_dir():
        wrong += [f"{report / name} does not follow from the measurements" for name in
                  check_report(build_report_results(loaded, budget), report)]  # fmt: skip
        project = records.absolute().parent.parent
        for text in (report / f"{REPORT}.md", *(project / name for name in CHECKED_TEXTS)):
            if text.exists():
                wrong += [f"{text}: {number}" for number in check_numbers(text.read_text(encoding="utf-8"), report)]
    return wrong


def check_runs(loaded: Loaded, folders: list[Path]) -> list[str]:
    """Return the files of runs that do not follow from losses and measurements."""
    wrong = [
        f"{folder / RECORD}: {name} does not follow from {LOSSES}"
        for folder in folders
        for name in find_inconsistent_run(folder)
    ]
    runs = build_results(loaded, loaded.runs, details=True)
    for folder in folders:
        if (folder / TABLE).exists():  # variants of comparisons have none
            results = runs.select_run(folder.relative_to(loaded.root).as_posix())
            if (folder / TABLE).read_text(encoding="utf-8") != render_run(results, run_tables(results.rows)):
                wrong.append(f"{folder / TABLE} does not follow from its measurements")
    return wrong


def find_inconsistent_run(folder: Path) -> list[str]:
    """Return the measurements of a run that do not follow from its losses."""
    record = Record.load(folder / RECORD)
    if not record.variants:
        return find_inconsistent(record.measurements, read_losses(folder / LOSSES))
    again = replace(record, path=None)
    compare_variants(again, folder, record.config.get("references", []))
    stored, made = (
        {(m.variant, m.reference): m for m in each_record.measurements if m.metric == "nll_change"}
        for each_record in (record, again)
    )
    return [
        f"{variant} against {reference}"
        for (variant, reference), change in stored.items()
        if not is_same_change(change, made.get((variant, reference)))
    ]


def renew(records: Path) -> None:
    """Write the tables and figures of all runs below `records` and the report again."""
    for path in sorted(records.rglob(TABLE)):  # variants of comparisons have none
        write_run_table(path.parent)
        write_run_figures(path.parent)
    if (records / REPORT).is_dir():
        with atomic_write(records / REPORT) as new:  # without the tables of runs that are gone
            write_report(load_results(records), new)
    for picture in records.rglob("figures/*.png"):  # the SVG is enough
        picture.unlink()
