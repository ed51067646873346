"""Atomic writes and file locks."""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from focus_exp.errors import UserError

TEMP_SUFFIX = ".aside"
LOCK_TIMEOUT = 1.0  # seconds


class InUse(UserError):
    """Another process holds the lock."""


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path`, a file or a folder, when the block ends without an error.

    Raises:
        OSError: naming `path`, if a write fails; also for safetensors, which reports a full disk in its own class.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = (path.with_name(f".{path.name}.{kind}{os.getpid()}{TEMP_SUFFIX}") for kind in ("", "old-"))
    try:
        yield new
        if new.is_dir() and path.is_dir():  # os.replace takes no folder that is not empty
            path.rename(old)
        os.replace(new, path)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, str(error).split(": ")[-1], str(path)) from error
    except OSError as error:
        error.filename = error.filename or str(path)  # a failed write does not set it
        raise
    finally:
        remove(new)
        remove(old)


def replace_file(path: str | Path, content: bytes) -> None:
    """Write `content` to `path` atomically."""
    with atomic_write(path) as new:
        new.write_bytes(content)


def remove_stale_temp(folder: Path, name: str = "*") -> None:
    """Remove temporary files that killed processes left below `folder`; the caller must hold its lock."""
    for path in list(folder.rglob(f".{name}.*{TEMP_SUFFIX}")):
        remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def file_lock(path: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path` within the block. The lock ends with the process.

    Args:
        path: lock file.
        what: subject of the error message.
        wait: wait for another process instead of raising InUse.

    Raises:
        InUse: if another process holds the lock.
        UserError: if the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=-1 if wait else LOCK_TIMEOUT)
    try:
        lock.acquire(poll_interval=0.05)
    except Timeout:
        holder = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        raise InUse(f"{what} is in use by {holder or 'another process'}. Wait for it to end, or stop it.") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        raise UserError(
            f"{path} must be on a file system with locks. Choose another with runs_dir= or cache_dir=."
        ) from error
    try:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(f"process {os.getpid()} on {platform.node()} since {since}", encoding="utf-8")
        yield
    finally:
        path.unlink(missing_ok=True)  # before the release: a waiting process then takes a new file
        lock.release()
