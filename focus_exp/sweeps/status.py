"""What has become of the jobs of a sweep, read from the files that they leave and from SLURM's queue."""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from focus_exp.config import Config, phases_of
from focus_exp.errors import UserError
from focus_exp.records.answers import configured_row
from focus_exp.records.comparison import load_run
from focus_exp.records.metrics import read_metrics
from focus_exp.reporting.text_table import Table, change_text, duration_text, perplexity_text
from focus_exp.storage import is_held
from focus_exp.sweeps.frozen import Job, Sweep, load_config

STOPPED = 128  # exit codes above it: by a signal
WIDTH = 150


@dataclass(frozen=True)
class State:
    """`name` is pending, running, done, failed, stopped (by a signal) or missing; `code` the exit code, once known."""

    name: str
    detail: str = ""
    code: int = 0

    @property
    def open(self) -> bool:
        return self.name in ("pending", "running")


def states(sweep: Sweep) -> list[State]:
    """One a job, as of now."""
    queue = slurm_queue() if any(job.slurm_id for job in sweep.jobs) else {}
    launching = is_held(sweep.folder / "launching")
    return [state_of(sweep, job, queue, launching) for job in sweep.jobs]


def state_of(sweep: Sweep, job: Job, queue: dict[str, tuple[str, str]] | None, launching: bool) -> State:
    """`queue` as slurm_queue gives it; `launching` whether the command that submitted the sweep is still at it."""
    place = sweep.place(job)
    if job.error is not None:
        return State("failed", job.error, 2)
    if job.finished_before:
        return State("done", f"{headline(place, job)} (before)")
    outcome = read_json(place / "outcome.json")
    code, reason = outcome.get("code"), outcome.get("reason", "")
    queued, why = (queue or {}).get(job.slurm_id or "", ("", ""))
    if queued and queued not in ("RUNNING", "COMPLETING"):
        return State("pending", "; ".join(filter(None, [f"{queued}, {why}", progress(place, job)])))
    if code == 0:
        return State("done", headline(place, job))
    if code is not None and code < STOPPED:
        return State("failed", reason, code)
    if is_held(place / "alive") or queued:
        return State("running", progress(place, job) or "starting")
    if job.slurm_id and queue is None:
        return State("pending", "; ".join(filter(None, ["squeue gives no answer here", progress(place, job)])))
    if code is not None:
        return State("stopped", reason, code)
    if (place / "started.json").exists():
        return State("failed", f"it ended without a word; its log ends with: {last_line(job)}", 1)
    if launching and not job.slurm_id:
        return State("pending")
    return State("missing", last_line(job) or "it was not started", 1)


def slurm_queue() -> dict[str, tuple[str, str]] | None:
    """job id -> (state, reason) of this user's jobs; None where SLURM cannot be asked."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i|%T|%r"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    lines = [line.split("|") for line in listed.splitlines()]
    return {job: (state, reason) for job, state, reason in lines}


def run_of(place: Path, job: Job) -> Path | None:
    """The folder that the job runs in, or will."""
    entered = place / "runs.txt"
    folder = entered.read_text(encoding="utf-8").splitlines()[-1] if entered.exists() else job.run
    return Path(folder) if folder else None


def progress(place: Path, job: Job) -> str:
    """Steps done of those planned, and the time that the rest of the training takes at the present speed."""
    folder = run_of(place, job)
    try:
        lines = read_metrics(folder / "metrics.jsonl") if folder else []
    except UserError:
        return ""
    return training_progress(load_config(place), lines) if lines else ""


def training_progress(config: Config, lines: list[dict[str, Any]]) -> str:
    """The same of a run, by the lines of its training log."""
    done, planned = steps_done(config, lines[-1]), sum(phase.steps for _, phase in phases_of(config))
    if done == planned:
        return f"step {done} of {planned}, measuring"
    left = (planned - done) * statistics.median(
        line["tokens"] / line["step"] / line["tokens_per_second"] for line in lines[-10:]
    )
    return f"step {done} of {planned}, {duration_text(left)} of training left"


def steps_done(config: Config, line: dict[str, Any]) -> int:
    """Of all phases, by the last line of the training log."""
    before = 0
    for name, phase in phases_of(config):
        if name == line["phase"]:
            break
        before += phase.steps
    return before + line["step"]


def headline(place: Path, job: Job) -> str:
    """What a finished run found, in a few words."""
    folder = run_of(place, job)
    try:
        record = load_run(folder) if folder else None
    except UserError as error:
        return f"its record is gone: {error}"
    if record is None:
        return ""
    row = configured_row(record) or record.base
    if row is None:
        return ""
    change = "" if row.kind == "base" else f" ({change_text(row.delta_nll)} against the base)"
    return f"{row.name}: perplexity {perplexity_text(row.perplexity)}{change}"


def sweep_table(sweep: Sweep, found: list[State]) -> Table:
    """One line a job, and what to do about those that are missing."""
    counts = Counter(state.name for state in found)
    failed = [job for job, state in zip(sweep.jobs, found, strict=True) if state.code]
    notes = [f"log of job {job.number}: {job.log}" for job in failed if job.log]
    for job in sweep.jobs:
        changes = read_json(sweep.place(job) / "started.json").get("changed", [])
        notes += [f"job {job.number} ran other code than was submitted: {change}" for change in changes]
    if failed:
        notes.append(f"what is missing runs with: {shlex.join(sweep.command)}")
    return Table(
        columns=["job", "settings", "state", "what is known"],
        rows=[
            [str(job.number), settings, state.name, state.detail]
            for job, settings, state in zip(sweep.jobs, differing(sweep), found, strict=True)
        ],
        name="sweep",
        title=f"sweep {sweep.folder}: " + ", ".join(f"{count} {name}" for name, count in counts.items()),
        notes=notes,
    )


def differing(sweep: Sweep) -> list[str]:
    """The overrides of each job that not all of them have."""
    shared = set.intersection(*(set(job.overrides) for job in sweep.jobs))
    return [" ".join(part for part in job.overrides if part not in shared) for job in sweep.jobs]


def watch(sweep: Sweep, going: Callable[[list[State]], bool], every: float) -> None:
    """Show the table while jobs are `going`, looking `every` so many seconds; on a pipe, a line for each change."""
    console = wide_console()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        before = [""] * len(sweep.jobs)
        while going(found := states(sweep)):
            if console.is_terminal:
                live.update(sweep_table(sweep, found).to_console(), refresh=True)
            else:
                say_changes(sweep, before, found)
            before = [state.name for state in found]
            time.sleep(every)


def conclude(sweep: Sweep) -> list[State]:
    """Print the table as it is now."""
    found = states(sweep)
    wide_console().print(sweep_table(sweep, found).to_console())
    return found


def wide_console() -> Console:
    console = Console()
    console.width = max(console.width, WIDTH)
    return console


def say_changes(sweep: Sweep, before: list[str], found: list[State]) -> None:
    for job, settings, old, state in zip(sweep.jobs, differing(sweep), before, found, strict=True):
        if state.name != (old or "pending"):
            print(": ".join(filter(None, [f"job {job.number} {state.name}", settings, state.detail])))


def last_line(job: Job) -> str:
    """The last thing that a job printed, without reading a long log whole."""
    path = Path(job.log) if job.log else None
    if path is None or not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def read_json(path: Path) -> dict[str, Any]:
    """{} for a file that is not there; UserError for one that is no JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return dict(values)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); remove it") from error


def complain_about(sweep: Sweep, found: list[State]) -> int:
    """One line on stderr for each job that is not done; returns the exit code of the sweep."""
    for job, name, state in zip(sweep.jobs, differing(sweep), found, strict=True):
        if state.code:
            print(f"error: job {job.number} {state.name} ({name}): {state.detail}", file=sys.stderr)
    return max((state.code for state in found), default=0)
