"""Where and how a record was made: command, commit, versions, machine."""

import platform
import shlex
import subprocess
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "focus_exp", "torch", "transformers", "lightning", "pytorch_lightning", "hydra-core", "omegaconf", "datasets",
    "tokenizers", "numpy", "wandb", "lm_eval", "peft", "flash-attn",
)  # fmt: skip

DECIDES = (":/focus_exp", ":/conf")  # what the numbers of a run follow from


def command_line(arguments: list[str]) -> str:
    return shlex.join(["python", "-m", "focus_exp", *(part.replace("\\=", "=") for part in arguments)])


def environment() -> dict[str, Any]:
    """The Record fields `commit` (see `commit`), `versions` and `machine`."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "commit": commit(),
        "versions": versions,
        "machine": {"platform": platform.platform(), "cpu": cpu_name()},
    }


@cache
def commit() -> str | None:
    """Of the code that runs here; with "-dirty" where what numbers follow from differs from it, or git does not say in
    time whether it does; None outside git. What is committed while this process runs is not the code that it loaded.
    """
    # an installed copy may lie in a virtual environment inside someone else's repository
    if not _git("ls-files", Path(__file__).name) or not (head := _git("rev-parse", "HEAD")):
        return None
    return head if _git("status", "--porcelain", "--", *DECIDES) == "" else f"{head}-dirty"


def unknown_commit_reason(commit: str | None) -> str | None:
    """Return why the code of a record is not in the history of this repository, None if it is."""
    if not commit:
        return "made outside of git"
    if commit.endswith("-dirty"):
        return f"made with uncommitted changes on {commit[:7]}"
    return None if _git("merge-base", "HEAD", commit) == commit else f"commit {commit[:7]} is not in the history"


def _git(*arguments: str) -> str | None:
    """What git prints; None where it fails, or says nothing in time."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
