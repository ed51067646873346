"""Where a run lives, and what it left there."""

from dataclasses import dataclass
from pathlib import Path

from focus_exp.config import Config
from focus_exp.config_hash import config_hash, moved_defaults
from focus_exp.errors import UserError
from focus_exp.records.record import Record
from focus_exp.storage import is_held

# the reason in a record until its run has ended
NOT_ENDED = "it is still running, or was killed"


@dataclass(frozen=True)
class State:
    """`name` is running, finished, failed or interrupted; `reason`: of the last two."""

    name: str
    reason: str = ""


def run_folder(config: Config) -> Path:
    """Return runs/<experiment>/<model>-<attention>-<regime>/seed<n>-<config hash>; a variant's has its name there.

    A run that an earlier version made as seed=<n>-<config hash> stays there.
    """
    regime = config.regime.name if config.job == "train" else config.job
    parts = config.variant or f"{config.model.name}-{config.attention.name}-{regime}"
    parent, name = Path(config.runs_dir) / config.experiment / parts, f"{config.seed}-{config_hash(config)}"
    earlier = parent / f"seed={name}"
    return earlier if earlier.exists() else parent / f"seed{name}"


def finished_record(config: Config) -> Record | None:
    """The record of this configuration, if it came to its end before. UserError as `earlier_record`."""
    record = earlier_record(config)
    return record if record and record.status == "finished" else None


def earlier_record(config: Config) -> Record | None:
    """What its folder holds, of a run that came to its end or not. UserError where that run had other defaults."""
    path = run_folder(config) / "record.json"
    record = Record.load(path) if path.exists() else None
    if record is None:
        return None
    phases = list(config.regime.phases)
    if (then := list(record.setting("regime", "phases") or phases)) != phases:  # a name tells all but their order
        raise UserError(
            f"{path.parent} holds a run of other regime.phases, {', then '.join(then)} (now {', then '.join(phases)}); "
            "overwrite=true makes it anew, another runs_dir leaves it alone"
        )
    # a tuned run has another rate, a comparison what its arms share; they are looked at one by one
    apart = bool(record.tries or config.variants)
    if moved := {} if apart else moved_defaults(config, record.config):
        raise UserError(
            f"{path.parent} holds a run with {', '.join(f'{key}={value}' for key, value in moved.items())}, which was "
            "the default when it was made; overwrite=true makes it anew, another runs_dir leaves it alone"
        )
    return record


def lock_of(folder: Path) -> Path:
    """What the command that writes to a run folder holds; outside of what overwrite=true removes."""
    return folder.with_name(f".{folder.name}.lock")


def state_of(record: Record, folder: Path) -> State:
    """What has become of the run in `folder`: a record that nobody ended is of a run that goes on, or was killed."""
    if record.error != NOT_ENDED:
        return State(record.status, record.error or "")
    if is_held(lock_of(folder)):
        return State("running")
    return State("interrupted", "it was killed; the same command goes on from its last checkpoint")
