"""What lies on disk whole or not at all, and locks that end with the process that holds them."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from focus_exp.errors import UserError

ASIDE = ".aside"
LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
PATIENCE = 1.0  # seconds: `is_held` has the lock for an instant

_held: set[IO[str]] = set()


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
    """Hold the lock `path` of `what`, which ends with the process, however that ends.

    InUse with who holds it, unless told to `wait`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + (math.inf if wait else PATIENCE)
    while (file := _locked(path)) is None:
        if time.monotonic() > deadline:
            holder = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            raise InUse(f"{what} is in use{holder and f' by {holder}'}; wait until that has ended, or stop it")
        time.sleep(0.05)
    try:
        _held.add(file)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()} since {since}")
        file.flush()
        yield
    finally:
        _held.discard(file)
        with suppress(OSError):  # the next holder removes it
            path.unlink(missing_ok=True)
        file.close()


def _locked(path: Path) -> IO[str] | None:
    """The open file with its lock; None where another has that, or has just removed the file."""
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        if error.errno in LOCKLESS:
            raise UserError(
                f"{path}: this file system has no locks; give another with runs_dir= or cache_dir="
            ) from error
        raise
    file.close()
    return None


def is_held(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _let_go() -> None:
    """A forked child, such as a worker that loads data, may outlive a killed parent; it holds nothing."""
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
