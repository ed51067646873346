"""What lies on disk whole or not at all, and locks that end with the process that holds them."""

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

ASIDE = ".aside"
LOCKLESS = (errno.ENOLCK, errno.EOPNOTSUPP)
PATIENCE = 1.0  # seconds: `is_held` has the lock for an instant


class InUse(UserError):
    """Another process holds the lock."""


@contextmanager
def aside(path: str | Path) -> Iterator[Path]:
    """Where to write what is to become `path`, a file or a whole folder: it takes its name at the end of the block.

    Readers see the old one or the whole new one. An error leaves the old one as it was, and nothing beside it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = (path.with_name(f".{path.name}.{kind}{os.getpid()}{ASIDE}") for kind in ("", "old-"))
    try:
        yield new
        if new.is_dir() and path.is_dir():  # no rename replaces a folder that holds something
            path.rename(old)
        os.replace(new, path)
    except SafetensorError as error:  # its name for a failed write
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, str(error).split(": ")[-1], str(path)) from error
    except OSError as error:
        error.filename = error.filename or str(path)  # which a failed write does not tell
        raise
    finally:
        for left in (new, old):
            remove(left)


def replace_file(path: str | Path, content: bytes) -> None:
    """Write `content` to `path`: readers see the old file or the whole new one."""
    with aside(path) as new:
        new.write_bytes(content)


def clear_aside(folder: Path, name: str = "*") -> None:
    """Remove what killed processes left aside of `name` below `folder`; for whoever is the only one to write there."""
    for left in list(folder.rglob(f".{name}.*{ASIDE}")):
        remove(left)


def remove(path: Path) -> None:
    """A file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def held(path: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path` of `what` within the block; it ends with the process, however that ends.

    Raises:
        InUse: another process holds it, which the message names; not with `wait`.
        UserError: the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=-1 if wait else PATIENCE)
    try:
        lock.acquire(poll_interval=0.05)
    except Timeout:
        holder = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        by = holder and f" by {holder}"
        raise InUse(f"{what} is in use{by}; wait until that has ended, or stop it") from None
    except OSError as error:
        if error.errno in LOCKLESS:
            raise UserError(
                f"{path}: this file system has no locks; give another with runs_dir= or cache_dir="
            ) from error
        raise
    try:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(f"process {os.getpid()} on {platform.node()} since {since}", encoding="utf-8")
        yield
    finally:
        path.unlink(missing_ok=True)  # a waiting process notices, and takes the next file
        lock.release()


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock file `path`."""
    if not path.exists():
        return False
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        return True
    lock.release()
    return False
