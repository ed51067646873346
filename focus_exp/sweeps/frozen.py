"""What a job of a sweep is, written down before it starts: configuration, command and code version.

A sweep's folder holds sweep.json (all jobs), conf/ (the YAML files as they were) and a folder for each job: config.yaml
(resolved), log.txt, and, once it has run, started.json and outcome.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from focus_exp.checks import parse
from focus_exp.config import Config, structured
from focus_exp.errors import UserError, first_line
from focus_exp.records.environment import environment
from focus_exp.results.run_dir import finished_record, run_folder
from focus_exp.storage import held, replace_file

# jobs that leave a record in run_folder(config), unless an adapter's method or an arm's settings decide where
RECORDED = ("train", "bench", "generate", "compare")


@dataclass
class Job:
    """One point of a sweep. `run` is the folder of its run, where that is known before it starts."""

    number: int
    overrides: list[str]
    run: str | None = None
    error: str | None = None  # why it is not started
    finished_before: bool = False
    slurm_id: str | None = None
    log: str | None = None

    @property
    def waiting(self) -> bool:
        return self.error is None and not self.finished_before


@dataclass
class Sweep:
    """A list of jobs as submitted, in the order of their numbers."""

    folder: Path
    command: list[str]
    submitted: str
    code: dict[str, Any]
    jobs: list[Job] = field(default_factory=list)

    def save(self) -> None:
        values = asdict(self) | {"folder": str(self.folder)}
        replace_file(self.folder / "sweep.json", (json.dumps(values, indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Sweep:
        """UserError where there is no sweep."""
        try:
            values = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
            jobs = [Job(**job) for job in values.pop("jobs")]
            return cls(**values | {"folder": folder, "jobs": jobs})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"sweep={folder} is not the folder of a sweep ({error}); give one that python -m focus_exp -m made"
            ) from error

    def place(self, job: Job) -> Path:
        return self.folder / str(job.number)

    def command_of(self, job: Job) -> list[str]:
        """What runs `job` as it was frozen."""
        place = str(self.place(job)).replace("\\", "\\\\").replace("'", "\\'")
        options = [f"--config-path={self.folder / 'conf'}", f"hydra.run.dir='{place}'"]
        return [sys.executable, "-m", "focus_exp", *options, *job.overrides]


def open_sweep(config: DictConfig) -> Sweep:
    """The sweep that the composed hydra configuration is about, with its YAML files copied beside it."""
    folder = Path(config.hydra.sweep.dir).resolve()
    if (folder / "sweep.json").exists():
        raise UserError(f"hydra.sweep.dir={folder} holds another sweep; give a new folder, or leave the key out")
    places = [Path(source.path) for source in config.hydra.runtime.config_sources if source.schema == "file"]
    for place in reversed(places):  # the first has precedence
        shutil.copytree(place, folder / "conf", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return Sweep(folder, rerun_command(config, folder), now(), code_version())


def rerun_command(config: DictConfig, folder: Path) -> list[str]:
    """The command of the sweep, on the YAML files as they were; what is finished will not run again."""
    given = [*config.hydra.overrides.hydra, *config.hydra.overrides.task]
    left_out = ("hydra.mode=", "hydra.sweep.dir=", "overwrite=")
    kept = [part.replace("\\=", "=") for part in given if not part.startswith(left_out)]
    return ["python", "-m", "focus_exp", "-m", f"--config-path={folder / 'conf'}", *kept]


def freeze(sweep: Sweep, number: int, overrides: list[str], composed: DictConfig) -> Job:
    """Write one job down; what is wrong with its configuration is its error."""
    job = Job(number, overrides)
    try:
        config = parse(composed)
        if config.job in RECORDED and not config.adapter and not config.variant:
            job.run = str(run_folder(config).resolve())
            record = None if config.overwrite else finished_record(config)
            # a comparison is finished with arms that failed, which its command runs again
            job.finished_before = record is not None and all(arm.status == "finished" for arm in record.arms)
        twins = [other.number for other in sweep.jobs if job.run and other.run == job.run]
        if twins:
            raise UserError(f"this is the run of job {twins[0]}: what differs does not change what is computed")
    except UserError as error:
        job.error = str(error)
        return job
    job.log = str(sweep.place(job) / "log.txt")
    replace_file(sweep.place(job) / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)).encode())
    return job


def load_config(place: Path) -> Config:
    """The configuration of the job whose folder this is; UserError where it is not as it was written."""
    path = place / "config.yaml"
    try:
        frozen = OmegaConf.load(path)
    except (OSError, ValueError, YAMLError) as error:
        raise UserError(f"{path} is damaged ({first_line(error)}); submit the sweep again") from error
    return parse(structured(frozen))


class FrozenJob:
    """The job of a sweep that this process runs: it takes its configuration from `place` and notes its end there."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.overrides = list(HydraConfig.get().overrides.task)
        # of the tasks of one job, the first alone takes notes
        self.leads = not int(os.environ.get("SLURM_PROCID") or os.environ.get("RANK") or 0)

    @classmethod
    def here(cls) -> FrozenJob | None:
        if not HydraConfig.initialized():
            return None
        place = Path(HydraConfig.get().runtime.output_dir)
        frozen = (place / "config.yaml").exists() and (place.parent / "sweep.json").exists()
        return cls(place) if frozen else None

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Within, others can tell that the job is running."""
        with held(self.place / "alive", f"job {self.place}") if self.leads else nullcontext():
            yield

    def start(self) -> Config:
        """The frozen configuration; other code than was submitted is on record, and said."""
        if self.leads:
            (self.place / "outcome.json").unlink(missing_ok=True)
            changed = self.changed()
            started = {"at": now(), "host": platform.node(), "process": os.getpid(), "changed": changed}
            replace_file(self.place / "started.json", json.dumps(started).encode())
            for change in changed:
                print(f"WARNING: {change}", file=sys.stderr)
        return load_config(self.place)

    def changed(self) -> list[str]:
        """Sentences on how this code differs from what it was at submission."""
        before, after = Sweep.load(self.place.parent).code, code_version()
        keys = [key for key in after if after[key] != before.get(key)]
        return [f"{key} was {before.get(key)} at submission and is {after[key]} now" for key in keys]

    def enter_run(self, folder: Path) -> bool:
        """Note that the job runs in `folder`; whether it did so before, in a life that was cut short."""
        path = self.place / "runs.txt"
        known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        entered = str(folder.resolve())
        if self.leads:
            others = [other for other in known if other != entered]
            replace_file(path, "".join(f"{line}\n" for line in [*others, entered]).encode())
        return entered in known

    def end(self, code: int, reason: str) -> None:
        if self.leads:
            note_end(self.place, code, reason)


def note_end(place: Path, code: int, reason: str) -> None:
    """How the job with the folder `place` has ended."""
    replace_file(place / "outcome.json", json.dumps({"code": code, "reason": reason}).encode())


def code_version() -> dict[str, Any]:
    """The commit, a hash of the package's files, which tells apart what "-dirty" does not, and the packages used."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    known = environment()
    return {"commit": known["commit"], "source hash": digest.hexdigest()[:12], **known["versions"]}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
