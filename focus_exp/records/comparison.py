"""A comparison's record refers to those of its arms; here they are read together."""

from dataclasses import replace
from pathlib import Path

from focus_exp.errors import UserError
from focus_exp.records.answers import answer
from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.rows import Arm, Row
from focus_exp.results.record import Record

RECORD = "record.json"


def load_run(folder: Path) -> Record:
    """The record in a run's folder, a comparison's `with_arms`. UserError for an unreadable one."""
    return with_arms(Record.load(folder / RECORD), folder)


def with_arms(record: Record, folder: Path) -> Record:
    """Of a comparison in `folder`, with its arms' rows, phases, probes and benchmarks, each with its arm.

    UserError where an arm is gone or was run again since.
    """
    if not record.arms or record.rows:
        return record
    found = {arm.name: arm_record(folder, arm) for arm in record.arms}
    return joined(record, {name: own for name, own in found.items() if own is not None})


def arm_folder(folder: Path, arm: Arm) -> Path:
    """Return the directory of an arm's run below that of its experiment, wherever both were copied or moved."""
    experiment = folder.parent.parent
    path = experiment.joinpath(*Path(arm.folder).parts[-2:])
    if path.exists() or not arm.config_hash:
        return path
    return next((found.parent for found in experiment.glob(f"*/*{arm.config_hash}/{RECORD}")), path)


def arm_record(folder: Path, arm: Arm) -> Record | None:
    path = arm_folder(folder, arm) / RECORD
    if not arm.started:
        return None
    if not path.exists():
        raise UserError(f"{folder / RECORD} refers to {path}, which is not there; run the comparison again")
    found = Record.load(path)
    if found.started != arm.started:
        raise UserError(f"{path} was made again after {folder / RECORD} referred to it; run the comparison again")
    return found


def joined(comparison: Record, arms: dict[str, Record]) -> Record:
    """A comparison with what its arms found, by their names, and the paired differences that are its own.

    The base is that of the first arm that has one, which all arms measured alike where they are of one model and text.
    """
    record = replace(comparison, rows=[], phases=[], probes=[], benchmarks=[])
    differences = {each.arm: each for each in comparison.differences if each.against is None}
    for name, found in arms.items():
        if not record.rows and found.base:
            record.rows.append(found.base)
            record.benchmarks += [row for row in found.benchmarks if row.kind in ("base", "missing")]
        record.phases += [replace(row, arm=name) for row in found.phases]
        record.probes += [replace(probe, arm=name) for probe in found.probes]
        row = answer(found)
        if row is None:
            continue
        other = differences.get(name)
        value, low, high = (other.value, other.low, other.high) if other else (None, None, None)
        row = replace(row, arm=name, delta_vs_hard=value, delta_vs_hard_low=low, delta_vs_hard_high=high)
        record.rows.append(row)
        record.benchmarks += [replace(b, attention=name) for b in found.benchmarks if stands_beside(b, row)]
    return record


def stands_beside(benchmark: BenchmarkRow, row: Row) -> bool:
    """Whether a benchmark was run under what the quality row `row` was."""
    return benchmark.kind == row.kind and (row.kind != "control" or benchmark.method == row.method)
