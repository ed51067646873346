"""Command, commit, versions and machine of a run."""

import platform
import shlex
import subprocess
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    *("focus_exp", "torch", "transformers", "lightning", "pytorch_lightning", "hydra-core", "omegaconf", "datasets"),
    *("tokenizers", "numpy", "wandb", "lm_eval", "peft", "flash-attn"),
)

CODE = (":/focus_exp", ":/conf")  # what decides the numbers of a run


def command_line(arguments: list[str]) -> str:
    return shlex.join(["python", "-m", "focus_exp", *(part.replace("\\=", "=") for part in arguments)])


def environment() -> dict[str, Any]:
    """Return commit, versions and machine, as fields of a Record."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"commit": commit(), "versions": versions, "machine": {"platform": platform.platform(), "cpu": cpu_name()}}


@cache
def commit() -> str | None:
    """Return the commit of the running code, None outside git.

    It ends in "-dirty" where code or configuration differ from it, or git does not answer in time.
    """
    # an installed copy can be in a virtual environment inside another repository
    if not _git("ls-files", Path(__file__).name) or not (head := _git("rev-parse", "HEAD")):
        return None
    return head if _git("status", "--porcelain", "--", *CODE) == "" else f"{head}-dirty"


def _git(*arguments: str) -> str | None:
    """Return what git prints, None where it fails or needs more than 10 s."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
