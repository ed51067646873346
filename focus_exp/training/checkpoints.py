"""Checkpoints of a phase: the last two are kept, so that a damaged one has a replacement."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import TorchCheckpointIO

from focus_exp.errors import first_line
from focus_exp.storage import atomic_write

SUFFIX, PREVIOUS, DAMAGED = ".ckpt", ".before", ".damaged"
CONTENTS = {"state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "random_states", "accumulated"}


def checkpoint_path(folder: Path, phase: str) -> Path:
    return folder / f"{phase}{SUFFIX}"


class CheckpointIO(TorchCheckpointIO):
    """Write checkpoints atomically next to their predecessor, and load tensors and plain data only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        with atomic_write(path) as temporary:
            try:
                with temporary.open("wb") as file:
                    torch.save(checkpoint, file)
            except RuntimeError as error:  # torch reports missing bytes in place of the full disk
                if isinstance(reason := error.__context__, OSError):
                    raise OSError(reason.errno, reason.strerror, str(path)) from error
                raise
            if path.exists():
                os.replace(path, previous_path(path))

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True) -> dict[str, Any]:
        return read_checkpoint(Path(path))


def read_checkpoint(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; with `mmap` its tensors stay on disk."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    return state


def previous_path(path: Path) -> Path:
    return path.with_name(path.name + PREVIOUS)


def repair_checkpoints(folder: Path) -> list[str]:
    """Move damaged checkpoints aside and their predecessors into place; returns warnings."""
    warnings = []
    names = {path.name.removesuffix(PREVIOUS) for path in folder.glob(f"*{SUFFIX}*")}
    for path in sorted(folder / name for name in names if name.endswith(SUFFIX)):
        damaged = []
        for candidate in filter(Path.exists, (path, previous_path(path))):
            reason = damage_reason(candidate)
            if reason is None:
                os.replace(candidate, path)
                break
            os.replace(candidate, candidate.with_name(candidate.name + DAMAGED))
            damaged.append(f"checkpoint {candidate} is damaged ({reason})")
        if damaged:
            action = "resuming from the previous one" if path.exists() else "its phase starts again"
            warnings.append(f"{' and '.join(damaged)}; {action}")
    return warnings


def damage_reason(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, None if its checksums and keys are right."""
    try:
        with zipfile.ZipFile(path) as archive:
            if member := archive.testzip():
                return f"{member} does not match its checksum"
        missing = CONTENTS - read_checkpoint(path, mmap=True).keys()
        return f"it has no {', '.join(sorted(missing))}" if missing else None
    except Exception as error:  # any reader may fail on arbitrary bytes
        return first_line(error)
