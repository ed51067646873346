"""Where a record was made: commit, versions, machine."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "focus_exp", "torch", "transformers", "lightning", "pytorch_lightning", "hydra-core", "omegaconf", "datasets",
    "tokenizers", "numpy", "wandb", "lm_eval", "peft", "flash-attn",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """The Record fields `commit` (None outside git, "-dirty" with local changes), `versions` and `machine`."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "commit": _commit(),
        "versions": versions,
        "machine": {"platform": platform.platform(), "cpu": _cpu_name()},
    }


def _commit() -> str | None:
    # an installed copy may lie in a virtual environment inside someone else's repository
    if not _git("ls-files", Path(__file__).name):
        return None
    head = _git("rev-parse", "HEAD")
    return f"{head}-dirty" if head and _git("status", "--porcelain") else head or None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
