"""The checkpoint of a phase: written atomically, read without pickled classes, checked before a run resumes."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import TorchCheckpointIO

from focus_exp.errors import first_line
from focus_exp.storage import atomic_write
from focus_exp.training.distributed import is_main, world_size


def checkpoint_path(folder: Path, phase: str) -> Path:
    return folder / f"{phase}.ckpt"


class CheckpointIO(TorchCheckpointIO):
    """Write checkpoints atomically, by process 0 alone."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        if not is_main():
            return
        with atomic_write(path) as temporary:
            try:
                with temporary.open("wb") as file:
                    torch.save(checkpoint, file)
            except RuntimeError as error:  # torch reports missing bytes in place of the full disk
                if isinstance(reason := error.__context__, OSError):
                    raise OSError(reason.errno, reason.strerror, str(path)) from error
                raise

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True) -> dict[str, Any]:
        return read_checkpoint(Path(path), mmap=world_size() > 1)  # the processes of a node read it once


def read_checkpoint(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; with `mmap` its tensors stay on disk."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    return state


def remove_damaged(folder: Path, phases: list[str]) -> list[str]:
    """Remove the first damaged checkpoint and those of the phases after it; returns warnings."""
    for index, phase in enumerate(phases):
        path = checkpoint_path(folder, phase)
        if path.exists() and (reason := damage_reason(path)):
            for later in phases[index:]:
                checkpoint_path(folder, later).unlink(missing_ok=True)
            return [f"checkpoint {path} is damaged ({reason}); phase {phase} starts again"]
    return []


def damage_reason(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, None if its checksums are right."""
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.testzip()
        return f"{member} does not match its checksum" if member else None
    except Exception as error:  # any reader may fail on arbitrary bytes
        return first_line(error)
