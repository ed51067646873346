"""The last two checkpoints of a phase: each whole or not there; for a damaged one the one before stands in."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import TorchCheckpointIO

from focus_exp.errors import first_line
from focus_exp.storage import atomic_write

SUFFIX, BEFORE, DAMAGED = ".ckpt", ".before", ".damaged"
PARTS = {"state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "random_states", "accumulated"}


def checkpoint_of(folder: Path, phase: str) -> Path:
    return folder / f"{phase}{SUFFIX}"


class Checkpoints(TorchCheckpointIO):
    """Writes beside a checkpoint, keeps the one before, and loads no code: Lightning's own goes through /tmp."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        with atomic_write(path) as new:
            try:
                with new.open("wb") as file:
                    torch.save(checkpoint, file)
            except RuntimeError as error:  # torch's own, that bytes are missing, hides the reason
                if isinstance(reason := error.__context__, OSError):
                    raise OSError(reason.errno, reason.strerror, str(path)) from error
                raise
            if path.exists():
                os.replace(path, before(path))

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True) -> dict[str, Any]:
        return read(Path(path))


def read(path: Path, mmap: bool = False) -> dict[str, Any]:
    """On the CPU, tensors and plain data alone; with `mmap` its tensors stay on disk."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    return state


def before(path: Path) -> Path:
    return path.with_name(path.name + BEFORE)


def mend(folder: Path) -> list[str]:
    """Give every phase with a checkpoint in `folder` its newest whole one; sentences on those that were not whole."""
    said = []
    names = {path.name.removesuffix(BEFORE) for path in folder.glob(f"*{SUFFIX}*")}
    for path in sorted(folder / name for name in names if name.endswith(SUFFIX)):
        damaged = []
        for candidate in filter(Path.exists, (path, before(path))):
            reason = damage(candidate)
            if reason is None:
                os.replace(candidate, path)
                break
            os.replace(candidate, candidate.with_name(candidate.name + DAMAGED))
            damaged.append(f"the checkpoint {candidate} is damaged ({reason})")
        if damaged:
            instead = "the one before it is used" if path.exists() else "its phase starts again"
            said.append(f"{' and '.join(damaged)}; {instead}")
    return said


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None if every byte is as it was written."""
    try:
        with zipfile.ZipFile(path) as archive:
            if part := archive.testzip():
                return f"{part} does not fit its checksum"
        missing = PARTS - read(path, mmap=True).keys()
        return f"it has no {', '.join(sorted(missing))}" if missing else None
    except Exception as error:  # whatever a reader makes of bytes that nobody wrote
        return first_line(error)
