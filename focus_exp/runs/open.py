"""The folder, record and loggers of a run."""

from __future__ import annotations

import hashlib
import json
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
from pytorch_lightning.loggers import WandbLogger

from focus_exp.assets import Provenance, cache_root
from focus_exp.config import Config
from focus_exp.errors import Interrupted, UserError, first_line
from focus_exp.identity import identity
from focus_exp.reporting.load import Results
from focus_exp.reporting.run_report import TABLE, write_run_report
from focus_exp.reporting.wandb import init_options, log_run, wandb_mode
from focus_exp.results.environment import command_line, environment
from focus_exp.results.record import RECORD, TRAINING_TEXT, Record
from focus_exp.results.run_dir import earlier_record, lock_path, name_data, name_model, run_folder
from focus_exp.runs.compose import command_overrides, describe_budget
from focus_exp.runs.resume import check_fingerprint, resume_record
from focus_exp.speed.timing import begin_peak_memory, device_name, peak_memory
from focus_exp.storage import file_lock, remove_stale_temp, replace_file
from focus_exp.training.distributed import is_main, strategy_name
from focus_exp.training.phases import CHECKPOINTS
from focus_exp.training.precision import MAX_WIDTH, Precision, choose_precision

WANDB_TIMEOUT = 10.0  # seconds in which a server must answer


@dataclass
class Run:
    """One run: its folder, record, precision and loggers."""

    config: Config
    folder: Path
    record: Record
    precision: Precision
    loggers: list[WandbLogger] = field(default_factory=list)

    def save(self) -> None:
        self.record.setup = setup_key(self.config, self.record)
        if is_main():
            self.record.save(self.folder / RECORD)

    @contextmanager
    def count_training_time(self) -> Iterator[None]:
        """Add the time of the block to that of earlier attempts."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.record.train_seconds = (self.record.train_seconds or 0.0) + time.perf_counter() - start

    def describe(self, part: str, provenance: Provenance, detail: str, **facts: Any) -> None:
        """Print and record the model or the data, after checking that an earlier attempt had the same.

        Args:
            part: `model` or `data`.
            detail: printed.
            facts: recorded.
        """
        check_fingerprint(part, getattr(self.record, part), provenance.fingerprint, self.folder)
        setattr(self.record, part, {"name": provenance.name, **asdict(provenance), **facts})
        print(f"{part}: {provenance.used} ({detail}; {provenance.source})")
        if provenance.substitution:
            print(f"  SUBSTITUTE: {provenance.substitution}")

    def warn(self, message: str) -> None:
        """Print a warning now, and below the tables."""
        if is_main():
            print(f"WARNING: {message}", file=sys.stderr)
            if message not in self.record.warnings:
                self.record.warnings.append(message)

    def write_report(self) -> tuple[Results, dict[str, pd.DataFrame]]:
        """Write measurements, tables and figures, print the tables and return all."""
        self.save()
        report = write_run_report(self.folder)
        for name, table in report[1].items():
            print(f"\n{name}\n{table.to_string(index=False)}")
        return report

    def report(self) -> None:
        """Write and print the results, and log them to W&B."""
        results, tables = self.write_report()
        for logger in self.loggers:
            log_run(logger.experiment, results, tables)
        print(f"run folder: {self.folder}")


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Open a new or resumed run and lock its folder."""
    with lock_run_dir(config), record_run(config) as run:
        print(f"{describe_work(config)}; {run.record.device}\nrun folder: {run.folder}")
        yield run


def setup_key(config: Config, record: Record) -> str:
    """Hash what runs that differ in their seed alone share: settings, model, text, kind of device and training."""
    # random weights are drawn from the seed
    weights = None if record.model.get("source") == "random" else record.model.get("fingerprint")
    texts = [record.data, *filter(None, [record.data.get(TRAINING_TEXT)])]
    used = [record.model.get("name"), weights, *(text.get(key) for text in texts for key in ("name", "fingerprint"))]
    device = record.device.partition(",")[0]  # cpu or cuda
    key = [identity(config, of="setup"), *used, device, record.steps, record.tokens_seen]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]


def describe_work(config: Config) -> str:
    """Return one line on what is about to run."""
    phases = ", then ".join(f"{phase.steps} steps ({phase.trainable})" for _, phase in config.phases)
    fit = f"{config.fitting.steps} steps a layer" if config.fitting else "no training"
    work = f"adapter {config.adapter}" if config.adapter else phases or fit
    recipe = config.recipe.name if phases else "fit" if config.fitting else "measurement"
    what = f"{recipe} of {name_model(config)} with {config.attention.name} on {name_data(config)}"
    return f"{config.job} {config.experiment}: {what}, seed {config.seed}: {work}; {describe_budget(config)}"


def lock_run_dir(config: Config) -> AbstractContextManager[None]:
    """Lock the run folder against other commands; InUse if one holds it."""
    folder = run_folder(config)
    return file_lock(lock_path(folder), f"the run folder {folder}") if is_main() else nullcontext()


@contextmanager
def record_run(config: Config) -> Iterator[Run]:
    """Record a run in a locked folder: as running until the block ends, then as finished, interrupted or failed.

    Only the first of several processes writes.
    """
    run = new_run(config)
    if not is_main():
        yield run
        return
    record, folder = run.record, run.folder
    if config.overwrite and folder.exists():
        shutil.rmtree(folder)
    if earlier := earlier_record(config):
        for warning in resume_record(record, earlier, folder):
            run.warn(warning)
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale_temp(folder)
    replace_file(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)).encode())
    run.save()
    begin_peak_memory()
    start = time.perf_counter()
    try:
        run.loggers = make_loggers(config, folder)
        yield run
        record.status, record.error = "finished", None
    except Interrupted as stop:
        record.status, record.error = "interrupted", str(stop)
        raise
    except BaseException as error:
        record.status, record.error = "failed", f"{type(error).__name__}: {first_line(error)}"
        raise
    finally:
        record.wall_seconds = (record.wall_seconds or 0.0) + time.perf_counter() - start
        record.peak_memory_bytes = max(record.peak_memory_bytes or 0, peak_memory())
        run.save()
        if record.status != "finished":
            if (folder / TABLE).exists():
                write_run_report(folder)
        else:
            run.report()
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        for logger in run.loggers:
            with suppress(ConnectionError):  # its process may have had the signal too
                logger.experiment.finish(exit_code=0 if record.status == "finished" else 1)


def new_run(config: Config) -> Run:
    """Return a run that is not on disk yet."""
    trainer = config.trainer
    count = trainer.devices * trainer.num_nodes
    earlier = None if config.overwrite else earlier_record(config)
    sizes = config.model.architecture
    precision = choose_precision(
        trainer.precision,
        trainer.accelerator,
        config.recipe.trains("all"),
        width=sizes.get("hidden_size") or sizes.get("n_embd") or MAX_WIDTH,
        cache=cache_root(config.cache_dir) if count == 1 else None,  # several processes must choose alike
        earlier=earlier.device if earlier else "",
    )
    processes = "" if count == 1 else f", {strategy_name(trainer)} over {count} processes"
    is_sweep = HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN
    record = Record(
        status="running",
        experiment=config.experiment,
        command=command_line(command_overrides() if is_sweep else sys.argv[1:]),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        device=f"{device_name(precision.device)}, {precision}{processes}",
        seed=config.seed,
        config=json.loads(json.dumps(asdict(config))),
        config_hash=identity(config)[:8],
        **environment(),
    )
    return Run(config, run_folder(config), record, precision)


def make_loggers(config: Config, folder: Path) -> list[WandbLogger]:
    """Return the loggers besides metrics.jsonl. Attempts of one run share its W&B name."""
    mode: Any = wandb_mode(config.logger.wandb)
    if mode == "disabled":
        return []
    name, values = folder.relative_to(config.runs_dir).as_posix(), asdict(config)
    live = open_wandb(config, mode, name=name, dir=folder, config=values, **init_options(values))
    return [WandbLogger(experiment=live)]


def open_wandb(config: Config, mode: Any, /, **options: Any) -> Any:
    """Return a live W&B run; with logger.wandb=auto an offline one where the server does not answer.

    Raises:
        UserError: if it was to be online.
    """
    import wandb

    options |= {"project": config.logger.wandb_project, "entity": config.logger.wandb_entity}
    options |= {"settings": wandb.Settings(silent=True, init_timeout=WANDB_TIMEOUT)}
    try:
        return wandb.init(mode=mode, **options)
    except wandb.Error as error:
        if config.logger.wandb != "auto":
            raise UserError(
                f"W&B refused the run: {first_line(error)} Run wandb login, or type logger.wandb=offline."
            ) from error
        return wandb.init(mode="offline", **options)
