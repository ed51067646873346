"""Checkpoints of a phase, the last two: written atomically, read without pickled classes, checked before use."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import TorchCheckpointIO

from focus_exp.errors import first_line
from focus_exp.storage import atomic_write
from focus_exp.training.distributed import is_main, world_size

BYTES_PER_PARAMETER = 12  # float32 weight and AdamW's two moments
LARGE = 1e9  # bytes
LARGE_MINUTES = 60.0  # between checkpoints that are larger


def checkpoint_path(folder: Path, phase: str) -> Path:
    return folder / f"{phase}.ckpt"


def previous_path(path: Path) -> Path:
    """Return where the checkpoint before `path` is kept."""
    return path.with_suffix(f".previous{path.suffix}")


def checkpoint_bytes(trained: int) -> int:
    """Return the size of a checkpoint of `trained` parameters [bytes]; buffers are left out."""
    return BYTES_PER_PARAMETER * trained


def minutes_between(configured: float | None, trained: int) -> float:
    """Return the least minutes between two checkpoints; null is an hour for those of over LARGE bytes."""
    if configured is not None:
        return configured
    return LARGE_MINUTES if checkpoint_bytes(trained) > LARGE else 0.0


class CheckpointIO(TorchCheckpointIO):
    """Write checkpoints atomically, by process 0 alone, and keep the one before."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        if not is_main():
            return
        with atomic_write(path) as temporary:
            try:
                with temporary.open("wb") as file:
                    torch.save(checkpoint, file)
                if path.exists():  # until the new one is in its place, the previous one is the last
                    os.replace(path, previous_path(path))
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
    """Replace the first damaged or missing checkpoint by the one before; returns warnings.

    The checkpoints of later phases are removed, as they follow from it.
    """
    for index, phase in enumerate(phases):
        path = checkpoint_path(folder, phase)
        previous = previous_path(path)
        if reason := damage_reason(path) if path.exists() else None:
            path.unlink()
        if not path.exists() and previous.exists():
            if damage_reason(previous):
                previous.unlink()
            else:
                os.replace(previous, path)
        if reason:
            for later in (checkpoint_path(folder, name) for name in phases[index + 1 :]):
                later.unlink(missing_ok=True)
                previous_path(later).unlink(missing_ok=True)
            again = "resumes from the one before" if path.exists() else "starts again"
            return [f"checkpoint {path} is damaged ({reason}); phase {phase} {again}"]
    return []


def damage_reason(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, None if its checksums are right."""
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.testzip()
        return f"{member} does not match its checksum" if member else None
    except Exception as error:  # any reader may fail on arbitrary bytes
        return first_line(error)
