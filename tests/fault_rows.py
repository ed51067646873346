"""Faults of a machine and of what a run reads: each done to a run of its own, put right, and compared with a twin."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from running import Result, only_run, outcome, tiny
from stopped import BACK, STAGES

PROGRAM = Path(__file__).with_name("stopped.py")
# two phases of a model whose training draws random numbers, a checkpoint every other step
SETTINGS = [
    *("recipe=finetune", "recipe.phases.router.steps=4", "recipe.phases.everything.steps=6"),
    *("model=tiny_gpt2", "model.architecture.resid_pdrop=0.1", "trainer.checkpoint_every=2", "trainer.log_every=1"),
    *("eval.max_sequences=2", "eval.controls=false", "eval.top_k=[1]", "trainer.keep_checkpoints=true"),
]
GOES_ON = "the same command goes on"
DAY = 86_400


@dataclass
class Row:
    """One line of the table. `equal`: whether the final record is the undisturbed one's; None where there is none."""

    tried: str
    survived: bool
    said: str
    equal: bool | None = None
    problems: list[str] = field(default_factory=list)


@dataclass
class Bench:
    """Where the runs are made, and what the undisturbed twin computed."""

    folder: Path
    twin: dict[str, object] = field(default_factory=dict)

    def command(self, name: str, *more: str) -> list[str]:
        """The settings of run `name`; all share texts and token cache."""
        return [*tiny(self.folder, name), *SETTINGS, *more]

    def make_twin(self) -> None:
        result = launch(self.command("twin"))
        assert result.code == 0, result.err
        self.twin = outcome(self.folder / "twin")

    def plain(self, text: str) -> str:
        """What was printed, without the folder that nobody else has."""
        return text.replace(f"{self.folder}/", "")


def launch(
    arguments: list[str],
    stage: str | None = None,
    value: float = 0,
    *,
    variables: dict[str, str] | None = None,
    largest_file: int | None = None,
) -> Result:
    """Run the command as a process of its own, stopped in `stage` where that is given.

    Args:
        variables: environment variables on top of this process's.
        largest_file: limit of a file's size [bytes], as of `ulimit -f`.
    """
    program = ["-m", "focus_exp"] if stage is None else [str(PROGRAM), stage, str(value)]
    limits = (largest_file, resource.getrlimit(resource.RLIMIT_FSIZE)[1]) if largest_file else None
    process = subprocess.run(
        [sys.executable, *program, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | (variables or {}),
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)) if limits else None,
    )
    return Result(process.returncode, process.stdout, process.stderr)


def sentence(result: Result) -> str:
    """What the user was told: the error, else the warnings, else the line that says how to go on."""
    _, error, reason = result.err.partition("error: ")
    lines = [line for line in result.err.splitlines() if line.startswith("WARNING:")]
    lines = lines or [line for line in result.err.splitlines() if GOES_ON in line]
    lines = lines or [line for line in result.out.splitlines() if "finished already" in line]
    return error + reason.strip() if error else " ".join(lines)


def checked(bench: Bench, tried: str, results: list[tuple[Result, int]], run: str | None) -> Row:
    """The row of commands that should end with these codes, the last one with the twin's record in `run`."""
    row = Row(tried, results[-1][0].code == 0, next((s for r, _ in results if (s := sentence(r))), ""))
    row.said = bench.plain(row.said)
    for number, (result, code) in enumerate(results, start=1):
        if result.code != code:
            row.problems.append(f"command {number} ended with {result.code}, not {code}: {result.err[-300:]}")
        if "Traceback" in result.err:
            row.problems.append(f"command {number} printed a stack trace")
        if code == 2 and result.err.count("error: ") != 1:
            row.problems.append(f"command {number} printed {result.err.count('error: ')} errors")
    if run is not None and not row.problems:
        row.equal = outcome(bench.folder / run) == bench.twin
        if not row.equal:
            row.problems.append("the final record is not that of the undisturbed run")
        if left := [path.name for path in (bench.folder / run).rglob(".*") if path.suffix in (".aside", ".lock")]:
            row.problems.append(f"left behind: {left}")
    return row


def stopped(bench: Bench, stage: str, signum: signal.Signals) -> Row:
    """Stopped in a stage, started again."""
    name = f"{STAGES.index(stage)}-{signum.name}"
    command = bench.command(name)
    if "cache" in stage:
        command.append(f"cache_dir={bench.folder / f'cache-{name}'}")
    first = launch(command, stage, signum)
    code = -signum if signum == signal.SIGKILL else 128 + signum
    how = "kill -9" if signum == signal.SIGKILL else signum.name
    return checked(bench, f"{how} while {stage}", [(first, code), (launch(command), 0)], name)


def damaged(bench: Bench, what: str, pattern: str, newest: int = 1, refused: bool = False) -> Row:
    """Stopped in the second phase; the last `newest` files of `pattern` in run folder or cache cut in half."""
    name = "cut-" + what.replace(" ", "-")
    cache = bench.folder / f"cache-{name}"
    shutil.copytree(bench.folder / "cache", cache)
    command = [*bench.command(name), f"cache_dir={cache}"]
    results = [(launch(command, "the second phase is trained", signal.SIGKILL), -signal.SIGKILL)]
    found = sorted([*only_run(bench.folder / name).rglob(pattern), *cache.rglob(pattern)])[:newest]
    for path in found:
        os.truncate(path, path.stat().st_size // 2)
    if refused:
        results.append((launch(command), 2))
        for path in found:
            path.unlink()
    results.append((launch(command), 0))
    row = checked(bench, f"{what} cut in half", results, name)
    return row if len(found) == newest else Row(row.tried, False, "", False, [f"there are {len(found)} {pattern}"])


def two_at_once(bench: Bench) -> Row:
    command = bench.command("two")
    arguments = [sys.executable, str(PROGRAM), "the second phase is trained", str(int(signal.SIGSTOP)), *command]
    first = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        results = [(launch(command), 2), (launch([*command, "overwrite=true"]), 2)]
        first.send_signal(signal.SIGCONT)
        out, err = first.communicate()
    finally:
        first.kill()
    last = Result(first.returncode, out, err)
    return checked(bench, "two runs at once, the second also with overwrite=true", [*results, (last, 0)], "two")


def clock_back(bench: Bench) -> Row:
    """What was written is a day younger than the clock of the process that goes on."""
    command = bench.command("clock")
    first = launch(command, "the second phase is trained", signal.SIGKILL)
    for path in (bench.folder / "clock").rglob("*"):
        os.utime(path, (path.stat().st_mtime + DAY,) * 2)
    again = launch(command, BACK, DAY)
    tried = "kill -9, then the clock a day back and the files' times a day ahead"
    return checked(bench, tried, [(first, -signal.SIGKILL), (again, 0)], "clock")


@contextmanager
def mounted(place: Path) -> Iterator[None]:
    """A small file system of its own at `place`, in memory."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def on_own_disk(bench: Bench, tried: str, name: str, key: str, spoil: Callable[[Path], None]) -> Row:
    """With `key` (runs_dir or cache_dir) on a disk that `spoil` makes unusable, and on the same one put right."""
    place = bench.folder / f"disk-{name}"
    with mounted(place):
        inner, runs = place / "inner", bench.folder / name
        command = [*bench.command(name), f"{key}={inner}"]
        spoil(place)
        first = launch(command)
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        (place / "ballast").unlink(missing_ok=True)
        again = launch(command)
        if key == "runs_dir" and inner.exists():
            shutil.copytree(inner, runs)
    return checked(bench, tried, [(first, 2), (again, 0)], name)


def fill(free: int) -> Callable[[Path], None]:
    """Leave `free` bytes."""

    def spoil(place: Path) -> None:
        disk = os.statvfs(place)
        with (place / "ballast").open("wb") as file:
            file.write(bytes(disk.f_bavail * disk.f_frsize - free))

    return spoil


def read_only(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)


def finished_on_a_read_only_disk(bench: Bench) -> Row:
    """Nothing needs to be written to say what was found."""
    place = bench.folder / "disk-finished"
    with mounted(place):
        shutil.copytree(bench.folder / "twin", place, dirs_exist_ok=True)
        read_only(place)
        result = launch([*bench.command("twin"), f"runs_dir={place}"])
    return checked(bench, "the same command again, finished, on a read-only disk", [(result, 0)], "twin")


def launcher_variables(bench: Bench, variables: dict[str, str]) -> Row:
    """Refuse a partial environment of torchrun or srun before any work."""
    shown = " ".join(f"{key}={value}" for key, value in variables.items())
    command = bench.command("variables-" + "-".join(variables))
    return checked(bench, f"`{shown}` alone in the environment", [(launch(command, variables=variables), 2)], None)


def file_size_limit(bench: Bench) -> Row:
    """Refuse a checkpoint beyond `ulimit -f`, and resume without the limit."""
    command = bench.command("file-size")
    limited = launch(command, largest_file=100_000)
    return checked(bench, "a limit of 100 kB for a file", [(limited, 2), (launch(command), 0)], "file-size")


def literal_path(bench: Bench, name: str) -> Row:
    """Read a folder whose name has special characters, next to one that a glob would match instead."""
    texts, other = bench.folder / name, bench.folder / "br1"
    shutil.copytree(bench.folder / "texts", texts)
    other.mkdir(exist_ok=True)
    (other / "other.txt").write_text("another text " * 100, encoding="utf-8")
    run = f"path-{abs(hash(name)) % 10_000}"
    result = launch([*bench.command(run), f"data.files={texts}/*.txt"])
    row = checked(bench, f"texts in a folder named `{name}`", [(result, 0)], None)
    if not row.problems:  # the configuration has another path, so its hash differs
        row.equal = outcome(bench.folder / run)["metrics"] == bench.twin["metrics"]
        row.problems += [] if row.equal else ["the training log is not that of the undisturbed run"]
    return row
