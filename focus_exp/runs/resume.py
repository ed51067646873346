"""Earlier runs of a configuration: finished or to be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from focus_exp.config import Config
from focus_exp.errors import UserError
from focus_exp.reporting.run_report import TABLE, write_run_report
from focus_exp.results.record import Record
from focus_exp.results.run_dir import earlier_record, lock_path, run_folder
from focus_exp.storage import file_lock, remove_stale_temp
from focus_exp.training.phases import CHECKPOINTS

REPEAT = "Type overwrite=true to replace the run, or another runs_dir."
PARTS = (CHECKPOINTS, "evaluation", "benchmarks")


def finished_record(config: Config) -> Record | None:
    """Return the record of this configuration if it finished before."""
    record = earlier_record(config)
    return record if record and record.status == "finished" else None


def print_finished(config: Config) -> bool:
    """Print the table of a finished run; False if there is none, or config.overwrite repeats it."""
    record = None if config.overwrite else finished_record(config)
    if record is None:
        return False
    folder = run_folder(config)
    if lock_path(folder).exists() or not (folder / TABLE).exists():  # killed while it wrote its tables
        with file_lock(lock_path(folder), f"the run folder {folder}"):
            remove_stale_temp(folder)
            write_run_report(folder)
    print((folder / TABLE).read_text(encoding="utf-8"))
    print(f"already finished on {record.device}: {folder}. Type overwrite=true to run it again.")
    return True


def check_fingerprint(part: str, earlier: dict[str, Any], fingerprint: str, folder: Path) -> None:
    """Raise UserError if the run started with another model or text, which its checkpoints belong to."""
    then = earlier.get("fingerprint")
    if then not in (None, fingerprint):
        raise UserError(f"the {part} must be that of {folder}, {then[:12]} (got {fingerprint[:12]}). {REPEAT}")


def resume_record(record: Record, earlier: Record, folder: Path) -> list[str]:
    """Copy model, data, times and warnings of an earlier attempt into `record`; returns warnings about it."""
    record.data, record.model = earlier.data, earlier.model  # until they are loaded
    if earlier.status == "finished":
        return []
    record.wall_seconds, record.train_seconds = earlier.wall_seconds, earlier.train_seconds
    record.peak_memory_bytes = earlier.peak_memory_bytes
    record.warnings = list(dict.fromkeys([*earlier.warnings, *record.warnings]))
    if not any((folder / part).exists() for part in PARTS):
        return []
    origins = {
        "commit": (earlier.commit, record.commit),
        "processor": (earlier.machine.get("cpu"), record.machine.get("cpu")),
        "device": (earlier.device, record.device),
        "torch": (earlier.versions.get("torch"), record.versions.get("torch")),
    }
    changed = [f"{name} {then} (now {now})" for name, (then, now) in origins.items() if then != now]
    warnings = [f"resumed from another {', '.join(changed)}"] if changed else []
    if earlier.status == "running":
        warnings.append("resumed after it was killed: time and memory of that attempt are missing")
    return warnings
