"""Create, resume and finish a run folder and its record."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf
from pytorch_lightning.loggers import CSVLogger, Logger, WandbLogger
from rich.console import Console
from rich.table import Table

from focus_exp.assets import Provenance
from focus_exp.config import Config
from focus_exp.config_hash import config_hash
from focus_exp.errors import Interrupted, UserError, first_line
from focus_exp.jobs.inputs import refuse_another, refuse_other_inputs, take_over, tokenizer_of
from focus_exp.reporting.run_report import TABLE, write_run_extras, write_run_figures, write_run_table
from focus_exp.reporting.wandb import init_options, log_run, wandb_mode
from focus_exp.results import run_dir
from focus_exp.results.environment import command_line, environment
from focus_exp.results.record import RECORD, Record
from focus_exp.results.run_dir import (
    EMBEDDED_DATA,
    EMBEDDED_MODEL,
    NOT_ENDED,
    lock_of,
    name_data,
    name_model,
    run_folder,
)
from focus_exp.speed.timing import begin_peak_memory, peak_memory
from focus_exp.storage import file_lock, remove_stale_temp, replace_file
from focus_exp.training.distributed import is_main
from focus_exp.training.phases import CHECKPOINTS

TABLE_WIDTH = 190
COMMIT = re.compile("[0-9a-f]{40}")


@dataclass
class Run:
    """One run: its folder, its record, and the loggers that watch it."""

    config: Config
    folder: Path
    record: Record
    loggers: list[Logger] = field(default_factory=list)

    def save(self) -> None:
        if is_main():
            self.record.save(self.folder / RECORD)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count the time of the block, and of earlier parts of the run, as that of training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.record.train_seconds = (self.record.train_seconds or 0.0) + time.perf_counter() - began

    def describe_model(self, provenance: Provenance, parameters: int) -> None:
        refuse_another("model", self.record.model, provenance.fingerprint, self.folder)
        self.check_name(name_model(self.config) == EMBEDDED_MODEL, provenance)
        told = {"parameters": parameters, **tokenizer_of(self.config)}
        self.record.model = {"name": shown(provenance), **asdict(provenance), **told}
        announce("model", provenance, f"{parameters:,} parameters")

    def describe_data(self, provenance: Provenance, tokens: dict[str, int]) -> None:
        refuse_another("data", self.record.data, provenance.fingerprint, self.folder)
        if self.config.data.source == "hub":
            self.check_name(name_data(self.config) == EMBEDDED_DATA, provenance)
        self.record.data = {"name": shown(provenance), **asdict(provenance), "tokens": tokens}
        asked = self.config.data.revision
        if provenance.source.startswith("hub") and not COMMIT.fullmatch(asked or ""):
            self.warn(
                f"data.revision={asked} of {provenance.requested} can name another text tomorrow; before numbers are "
                f"published pin it to a commit, such as {provenance.revision}"
            )
        announce("data", provenance, ", ".join(f"{name} {count:,} tokens" for name, count in tokens.items()))

    def check_name(self, is_embedded: bool, provenance: Provenance) -> None:
        """Raise UserError where the run's directory names a substitute and the hub's was loaded, or the other way."""
        if provenance.source in ("hub", "hub_cache", "embedded") and is_embedded != (provenance.source == "embedded"):
            raise UserError(
                f"assets must be hub or embedded (got {self.config.assets}): {self.folder} is not named after "
                f"{provenance.used}. Give assets=hub or assets=embedded."
            )

    def warn(self, sentence: str) -> None:
        """Say it now, and below the tables."""
        if is_main():
            print(f"WARNING: {sentence}", file=sys.stderr)
            if sentence not in self.record.warnings:
                self.record.warnings.append(sentence)

    def report(self) -> None:
        """Write measurements, tables and figures; log them to W&B and print the tables."""
        tables, figures = self.write_tables(), write_run_figures(self.folder)
        write_run_extras(self.folder)
        for logger in self.loggers:
            if isinstance(logger, WandbLogger):
                log_run(logger.experiment, self.folder, tables, figures)
        print(f"run folder: {self.folder}")

    def write_tables(self) -> dict[str, pd.DataFrame]:
        """Write and print the tables of what is measured so far."""
        self.save()
        tables = write_run_table(self.folder)
        console = Console()
        console.width = max(console.width, TABLE_WIDTH)
        for name, table in tables.items():
            shown = Table(*table.columns, title=name, title_justify="left")
            for row in table.itertuples(index=False):
                shown.add_row(*row)
            console.print(shown)
        return tables


def finished_record(config: Config) -> Record | None:
    """The record of this configuration, if it came to its end before.

    UserError where it had other defaults (`records.runs`), and where files that it read, or the base that was trained
    for it, have changed since it began.
    """
    from focus_exp.jobs.base import refuse_another_base  # which asks for the record of the base's own run

    record = run_dir.earlier_record(config)
    if record is not None:
        refuse_other_inputs(config, record)
        refuse_another_base(config, record)
    return record if record and record.status == "finished" else None


def already_finished(config: Config) -> bool:
    """Whether this configuration came to its end before, and says so with what was found; `overwrite` forgets it."""
    record = None if config.overwrite else finished_record(config)
    if record is None:
        return False
    folder = run_folder(config)
    if (folder / TABLE).exists():
        print((folder / TABLE).read_text(encoding="utf-8"))
    print(f"finished already on {record.device}, in {folder}; overwrite=true runs it again")
    return True


def claimed(folder: Path) -> AbstractContextManager[None]:
    """Within the block no other command writes to the run folder; InUse, naming it, where one does already."""
    return file_lock(lock_of(folder), f"the run folder {folder}") if is_main() else nullcontext()


@contextmanager
def open_run(config: Config, device: str) -> Iterator[Run]:
    """A new or continued run, whose folder is its own until the block ends."""
    with claimed(run_folder(config)), recorded(config, device) as run:
        yield run


@contextmanager
def recorded(config: Config, device: str) -> Iterator[Run]:
    """A run in a folder that is claimed. Its record says "interrupted" until the block ends, then finished or failed.

    Of several processes the first one alone writes.
    """
    run = new_run(config, device)
    if not is_main():
        yield run
        return
    record, folder = run.record, run.folder
    if config.overwrite and folder.exists():
        shutil.rmtree(folder)
    if earlier := run_dir.earlier_record(config):
        for sentence in take_over(record, earlier, folder):
            run.warn(sentence)
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale_temp(folder)
    replace_file(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)).encode())
    run.save()
    begin_peak_memory()
    began = time.perf_counter()
    try:
        with judged(record):
            run.loggers = make_loggers(config, folder)
            yield run
        record.status, record.error = "finished", None
    finally:
        record.wall_seconds = (record.wall_seconds or 0.0) + time.perf_counter() - began
        record.peak_memory_bytes = max(record.peak_memory_bytes or 0, peak_memory())
        record.save(folder / RECORD)
        if record.status == "finished":
            run.report()
        if record.status == "finished" and not config.trainer.keep_checkpoints:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        for logger in run.loggers:
            if isinstance(logger, WandbLogger):
                with suppress(ConnectionError):  # its process may have had the signal too
                    logger.experiment.finish(exit_code=0 if record.status == "finished" else 1)


def new_run(config: Config, device: str) -> Run:
    """A run of which nothing is on disk."""
    record = Record(
        status="interrupted",
        error=NOT_ENDED,
        experiment=config.experiment,
        command=command_line(overrides()),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        device=device,
        seed=config.seed,
        config=json.loads(json.dumps(asdict(config))),
        config_hash=config_hash(config),
        **environment(),
    )
    return Run(config, run_folder(config), record)


def overrides() -> list[str]:
    """Return the arguments of this run's command; of a job of a sweep its own."""
    if HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN:
        return list(HydraConfig.get().overrides.task)
    return sys.argv[1:]


@contextmanager
def judged(record: Record) -> Iterator[None]:
    """Note why the block ended early, if it did."""
    try:
        yield
    except Interrupted as stop:
        record.error = str(stop)
        raise
    except BaseException as failure:
        record.status, record.error = "failed", f"{type(failure).__name__}: {first_line(failure)}"
        raise


def make_loggers(config: Config, folder: Path) -> list[Logger]:
    """What watches the run beside metrics.jsonl. W&B runs of one folder share its name, whatever is resumed."""
    loggers: list[Logger] = []
    if config.logger.csv:
        loggers.append(CSVLogger(folder, name="csv", version=""))
    mode: Any = wandb_mode(config.logger.wandb)
    if mode != "disabled":
        import wandb

        try:
            live = wandb.init(
                name=folder.relative_to(config.runs_dir).as_posix(),
                project=config.logger.wandb_project,
                entity=config.logger.wandb_entity,
                dir=folder,
                mode=mode,
                config=asdict(config),
                settings=wandb.Settings(silent=True),
                **init_options(asdict(config)),
            )
        except wandb.Error as error:
            raise UserError(
                f"W&B does not take the run: {first_line(error)}; run wandb login, or use logger.wandb=offline"
            ) from error
        loggers.append(WandbLogger(experiment=live))
    return loggers


def announce(what: str, provenance: Provenance, detail: str) -> None:
    """Say what is really used, before any work is done with it."""
    print(f"{what}: {provenance.used} ({detail}; {provenance.source})")
    if provenance.substitution:
        print(f"  SUBSTITUTE: {provenance.substitution}")


def shown(provenance: Provenance) -> str:
    return provenance.used.split(" (")[0]


def seconds_text(seconds: float) -> str:
    return f"{math.floor(seconds / 60)} min {seconds % 60:.0f} s" if seconds >= 60 else f"{seconds:.0f} s"
