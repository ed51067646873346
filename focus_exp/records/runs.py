"""Where a run lives, and what it left there."""

from pathlib import Path

from focus_exp.config import Config, config_hash
from focus_exp.records.record import Record


def run_folder(config: Config) -> Path:
    """runs/<experiment>/<model>-<attention>-<regime>/seed=<n>-<config hash>; an arm's has its name there."""
    regime = config.regime.name if config.job == "train" else config.job
    parts = config.arm or f"{config.model.name}-{config.attention.name}-{regime}"
    return Path(config.runs_dir) / config.experiment / parts / f"seed={config.seed}-{config_hash(config)}"


def finished_record(config: Config) -> Record | None:
    """The record of this configuration, if it came to its end before."""
    path = run_folder(config) / "record.json"
    record = Record.load(path) if path.exists() else None
    return record if record is not None and record.status == "finished" else None
