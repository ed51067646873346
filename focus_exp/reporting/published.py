"""The records that are committed: copied from finished runs, checked against their numbers, written anew from them."""

import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from focus_exp.errors import UserError
from focus_exp.records.comparison import RECORD, arm_folder, load_metrics, load_run
from focus_exp.records.differences import remade_between
from focus_exp.records.environment import unknown_commit
from focus_exp.records.losses import LOSSES, read_losses, remade
from focus_exp.records.metrics import METRICS, read_metrics, write_metrics
from focus_exp.records.record import Record
from focus_exp.reporting.gather import gather
from focus_exp.reporting.readme import readme, readme_of, write_readme
from focus_exp.reporting.report import all_findings, all_tables, table_files, write_report
from focus_exp.reporting.whole_report import NAME, report_files, sections, write_report_of
from focus_exp.storage import aside

# of a run that is not an arm; a comparison has its arms' tables, figures and curves
OF_ARMS = (LOSSES,)
FILES = ("table.md", "*.csv", "figures/*.svg", "continuations.md", "passage.html")
CURVES = ("figures/loss_curve.svg", "figures/training.svg")
LARGEST = 3 * 2**19  # bytes of an adapter; larger ones are made again by their command
# a float by itself, not a part of a hash, a version or a word
FLOAT = re.compile(r"(?<![\w.])([-+]?\d+(?:\.\d+(?:e[+-]\d+)?|e[+-]\d+))(?![\w.]*\w)")
DRAWN = ("phase", "step", "loss", "val_loss", "tokens_per_second")  # of a run's metrics, by its curves


def publish(places: list[Path], current: set[Path], runs: Path, records: Path) -> list[Path]:
    """Copy what is worth keeping of the finished runs at `places`, below `runs`, to the same places below `records`,
    and the adapters that they measured. Times of another kind of device are kept beside those that are there.

    Their experiments' records under the same seeds, from the same kind of device, that are not among `current`, the
    places of runs that can still be made, are superseded: removed and returned, once all of `current` that may stand in
    their place are there. All below `records` is then renewed, its report made. UserError, and nothing is copied, where
    the code that made a run cannot be had from its commit.
    """
    found = {place: Record.load(runs / place / RECORD) for place in places}
    said = {place: unknown_commit(record.commit) for place, record in found.items()}
    if unknown := [f"{place} ({why})" for place, why in said.items() if why]:
        raise UserError(f"not published, for nobody could repeat it: {'; '.join(unknown)}; commit, and run it again")
    homes = {place: records / _home(place, record, records) for place, record in found.items()}
    for place, record in found.items():
        with aside(homes[place]) as new:
            patterns = OF_ARMS if record.config.get("arm") else FILES
            for file in [file for pattern in patterns for file in sorted((runs / place).glob(pattern))]:
                copy = new / file.relative_to(runs / place)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
            text = anywhere((runs / place / RECORD).read_text(encoding="utf-8"), runs)
            (new / RECORD).write_text(text, encoding="utf-8")
    for place, record in found.items():
        if any((runs / place / curve).exists() for curve in CURVES):
            for folder in [arm_folder(runs / place, arm) for arm in record.arms] or [runs / place]:
                lines = [{key: line[key] for key in DRAWN if key in line} for line in read_metrics(folder / METRICS)]
                if lines:
                    home = homes[place] if folder == runs / place else records / folder.relative_to(runs)
                    write_metrics(home / METRICS, lines)
    for adapter in {adapter for record in found.values() for adapter in measured(record, runs)}:
        if same_run(runs / adapter.parent, records / adapter.parent) and bytes_in(runs / adapter) <= LARGEST:
            with aside(records / adapter) as new:
                shutil.copytree(runs / adapter, new)
    removed = []
    awaited = {_experiment_and_seed(place) for place in current if not (records / place / RECORD).exists()}
    published = {_purpose(record) for place, record in found.items() if _experiment_and_seed(place) not in awaited}
    for path in sorted(records.rglob(RECORD)):
        folder = path.parent
        kept = folder in homes.values() or folder.relative_to(records) in current
        if _purpose(Record.load(path)) in published and not kept:
            shutil.rmtree(folder)
            removed.append(folder)
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()
    (records / NAME).mkdir(exist_ok=True)
    renew(records)
    return removed


def anywhere(text: str, runs: Path) -> str:
    """A record's text without the folders of this machine, of which none decides a number: `runs` is runs/."""
    text = re.sub(rf"(?<![\w./-]){re.escape(str(runs))}/", "runs/", text)
    text = re.sub(r' (runs|cache)_dir=[^\s"]+', "", text)
    text = re.sub(r'"runs_dir": "[^"]*"', '"runs_dir": "runs"', text)
    return re.sub(r'"cache_dir": "[^"]*"', '"cache_dir": null', text)


def measured(record: Record, runs: Path) -> Iterator[Path]:
    """The adapters of other runs that the numbers of `record` are of, from `runs` on."""
    others = [*(record.setting("eval", "adapters") or []), *(record.setting("analyze", "others") or [])]
    for adapter in map(Path.absolute, map(Path, filter(None, [record.config.get("adapter"), *others]))):
        if adapter.is_dir() and adapter.is_relative_to(runs.absolute()):
            yield adapter.relative_to(runs.absolute())


def same_run(here: Path, there: Path) -> bool:
    """Whether these two folders are of one run, not of its repetition."""
    paths = here / RECORD, there / RECORD
    return all(path.exists() for path in paths) and len({Record.load(path).started for path in paths}) == 1


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _experiment_and_seed(place: Path) -> tuple[str, str]:
    """Return experiment and seed of a run's directory."""
    return place.parts[0], re.findall(r"seed=?(\d+)-", place.name)[-1]


def _home(place: Path, record: Record, records: Path) -> Path:
    """Where a run is published: a configuration does not name the device, but times are of one."""
    there = records / place / RECORD
    if not record.is_timed or not there.exists() or Record.load(there).device_kind == record.device_kind:
        return place
    return place.with_name(f"{place.name}-{record.device_kind.lower().replace(' ', '_')}")


def _purpose(record: Record) -> tuple[str, int | None, str]:
    return record.experiment, record.seed, record.device_kind


def _published(top: Path) -> Iterator[tuple[Path, Record]]:
    """Runs whose numbers are whole, with tables, which an arm's copy has not."""
    for path in sorted(top.rglob(RECORD)):
        if (path.parent / "table.md").exists() and (record := load_run(path.parent)).counts:
            yield path.parent, record


def stale(top: Path, scale: str = "") -> list[str]:
    """What no longer follows below `top`: published tables, as text and as CSV, from their record, its intervals from
    the losses beside it, the report, if there is one in `top`/report, from all of them, and the project's README if
    `top` is in one."""
    said = []
    for path in sorted(top.rglob(RECORD)):
        record = Record.load(path)
        wrong = remade(record, read_losses(path.parent / LOSSES)) + remade_between(record, path.parent)
        said += [f"{path}: {name} does not follow from {LOSSES}" for name in wrong]
    for folder, record in _published(top):
        expected = table_files(all_findings(record), all_tables(record))
        said += [f"{folder / name} does not follow from its record" for name in _differing(folder, expected)]
    if (published := top / NAME).is_dir():
        expected = report_files(sections(gather(top, scale), top, published), published)
        said += [f"{published / name} does not follow from the records" for name in _differing(published, expected)]
    if (page := readme_of(top)) and not agree(page.read_text(encoding="utf-8"), readme(top)):
        said.append(f"{page} does not follow from the records; make readme")
    return said


def _differing(folder: Path, expected: dict[str, str]) -> list[str]:
    files = {name: folder / name for name in expected}
    return [
        name
        for name, file in files.items()
        if not file.exists() or not agree(file.read_text(encoding="utf-8"), expected[name])
    ]


def agree(text: str, other: str) -> bool:
    """Compare two texts, their floats with a relative tolerance of 1e-9 (1e-12 absolute).

    The last digits of a float differ between processors: libm and BLAS round differently.
    """
    if text == other:
        return True
    # re.split with one capturing group: text and floats alternate
    parts, others = FLOAT.split(text), FLOAT.split(other)
    if len(parts) != len(others) or parts[::2] != others[::2]:
        return False
    pairs = zip(parts[1::2], others[1::2], strict=True)
    return all(a == b or math.isclose(float(a), float(b), rel_tol=1e-9, abs_tol=1e-12) for a, b in pairs)


def renew(top: Path) -> None:
    """Write tables, figures and the report below `top`, and the project's README, anew from the numbers of records."""
    for folder, record in _published(top):
        write_report(record, load_metrics(folder, record), folder)
    if (top / NAME).is_dir():
        with aside(top / NAME) as new:  # without the tables of runs that are gone
            write_report_of(top, new)
    write_readme(top)
    for picture in top.rglob("figures/*.png"):  # the same as the SVG beside it
        picture.unlink()
