"""Kill, fill and damage tiny runs in processes of their own: each resumes to the record of an undisturbed run."""

import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from running import Result, only_run, outcome, run, tiny
from stopped import BACK, CALLS, STAGES

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("stopped.py")
# two phases of a model whose training draws random numbers, a checkpoint every other step
SETTINGS = (
    *("recipe=finetune", "recipe.phases.router.steps=4", "recipe.phases.everything.steps=6"),
    *("model=tiny_gpt2", "model.architecture.resid_pdrop=0.1", "trainer.checkpoint_every=2", "trainer.log_every=1"),
    *("eval.max_sequences=1", "eval.controls=false", "eval.top_k=[1]"),
)
SECOND_PHASE = "the second phase is trained"
SIGTERM_STAGES = (*CALLS, "a checkpoint is written", "the trained base is written", "the table is written")
DAY = 86_400  # seconds
can_mount = pytest.mark.skipif(os.geteuid() != 0 or platform.system() != "Linux", reason="mounting needs root")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def undisturbed(folder) -> dict[str, Any]:
    assert run(*command(folder, "undisturbed")).code == 0
    return outcome(folder / "undisturbed")


def command(folder: Path, name: str, *more: str) -> list[str]:
    """Return the settings of run `name`; all share texts and token cache."""
    return [*tiny(folder, name), *SETTINGS, *more]


def launch(
    arguments: list[str],
    stage: str | None = None,
    value: float = 0,
    *,
    variables: dict[str, str] | None = None,
    largest_file: int | None = None,
) -> Result:
    """Run a command in a process of its own, signalled by `value` in `stage`.

    Args:
        variables: additional environment variables.
        largest_file: limit of a file's size [bytes], as `ulimit -f`.
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
    assert "Traceback" not in process.stderr
    return Result(process.returncode, process.stdout, process.stderr)


def assert_refused(result: Result) -> None:
    assert result.code == 2
    assert result.err.count("error: ") == 1


def assert_recovers(folder: Path, name: str, arguments: list[str], undisturbed: dict[str, Any]) -> None:
    again = launch(arguments)
    assert again.code == 0, again.err
    assert outcome(folder / name) == undisturbed
    assert [path for path in (folder / name).rglob(".*") if path.suffix in (".aside", ".lock")] == []


@pytest.mark.parametrize(
    ("stage", "signum"),
    [*((stage, signal.SIGKILL) for stage in STAGES), *((stage, signal.SIGTERM) for stage in SIGTERM_STAGES)],
)
def test_run_signalled_in_any_stage_resumes(folder, undisturbed, stage, signum):
    name = f"{STAGES.index(stage)}-{signum.name}"
    arguments = command(folder, name)
    if "cache" in stage:
        arguments.append(f"cache_dir={folder / f'cache-{name}'}")
    assert launch(arguments, stage, signum).code == (-signum if signum == signal.SIGKILL else 128 + signum)
    assert_recovers(folder, name, arguments, undisturbed)


@pytest.mark.parametrize("file", ["everything.ckpt", "router.ckpt", "base.npz", "record.json"])
def test_run_with_a_truncated_file_resumes(folder, undisturbed, file):
    name = f"cut-{file}"
    cache = folder / f"cache-{name}"
    shutil.copytree(folder / "cache", cache)
    arguments = command(folder, name, f"cache_dir={cache}")
    assert launch(arguments, SECOND_PHASE, signal.SIGKILL).code == -signal.SIGKILL
    path = sorted([*only_run(folder / name).rglob(file), *cache.rglob(file)])[0]
    os.truncate(path, path.stat().st_size // 2)
    if file == "record.json":
        assert_refused(launch(arguments))
        path.unlink()
    assert_recovers(folder, name, arguments, undisturbed)


def test_second_command_in_a_run_folder_is_refused(folder, undisturbed):
    arguments = command(folder, "two")
    first = subprocess.Popen(
        [sys.executable, str(PROGRAM), SECOND_PHASE, str(int(signal.SIGSTOP)), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert_refused(launch(arguments))
        assert_refused(launch([*arguments, "overwrite=true"]))
        first.send_signal(signal.SIGCONT)
        first.communicate()
    finally:
        first.kill()
    assert first.returncode == 0
    assert outcome(folder / "two") == undisturbed


def test_clock_set_back_does_not_matter(folder, undisturbed):
    arguments = command(folder, "clock")
    launch(arguments, SECOND_PHASE, signal.SIGKILL)
    for path in (folder / "clock").rglob("*"):
        os.utime(path, (path.stat().st_mtime + DAY,) * 2)
    assert launch(arguments, BACK, DAY).code == 0
    assert outcome(folder / "clock") == undisturbed


def test_file_size_limit_is_refused_and_resumed_without(folder, undisturbed):
    arguments = command(folder, "file-size")
    assert_refused(launch(arguments, largest_file=100_000))
    assert_recovers(folder, "file-size", arguments, undisturbed)


@contextmanager
def mounted(place: Path) -> Iterator[None]:
    """Mount a small file system in memory at `place`."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(free: int) -> Callable[[Path], None]:
    """Leave `free` bytes of a file system."""

    def spoil(place: Path) -> None:
        disk = os.statvfs(place)
        (place / "ballast").write_bytes(bytes(disk.f_bavail * disk.f_frsize - free))

    return spoil


def read_only(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)


@can_mount
@pytest.mark.parametrize(
    ("key", "spoil"),
    [("runs_dir", fill(free)) for free in (0, 1_500_000, 3_000_000)]
    + [("cache_dir", fill(8_192)), ("runs_dir", read_only), ("cache_dir", read_only)],
)
def test_unusable_disk_is_refused_and_resumed_once_mended(folder, undisturbed, tmp_path, key, spoil):
    place, name = tmp_path / "disk", tmp_path.name
    with mounted(place):
        arguments = [*command(folder, name), f"{key}={place / 'inner'}"]
        spoil(place)
        assert_refused(launch(arguments))
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        (place / "ballast").unlink(missing_ok=True)
        assert launch(arguments).code == 0
        assert outcome(place / "inner" if key == "runs_dir" else folder / name) == undisturbed


@can_mount
def test_finished_run_on_a_read_only_disk_needs_no_writing(folder, undisturbed, tmp_path):
    place = tmp_path / "disk"
    with mounted(place):
        shutil.copytree(folder / "undisturbed", place, dirs_exist_ok=True)
        read_only(place)
        assert launch([*command(folder, "undisturbed"), f"runs_dir={place}"]).code == 0
