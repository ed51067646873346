"""A user's own text files, split by file."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from focus_exp.errors import UserError

PACKAGE = "package:"
SUFFIXES = (".txt", ".md")
# one part of this many goes to validation, one to test
HELD_OUT = 20


@dataclass(frozen=True)
class TextFile:
    """A file that has been read once: its name below the folder and the sha256 of its bytes."""

    path: Path
    name: str
    digest: str

    def read(self) -> str:
        return self.path.read_bytes().decode("utf-8-sig")


def find_texts(pattern: str | None) -> list[TextFile]:
    """The non-empty text files of a folder (.txt and .md at any depth) or a glob; copies of a file count once.

    package:<name>/<folder or glob> is below an installed package, wherever that lies.

    Sorted by content hash, so that the split does not depend on where the files lie. Raises UserError if there is no
    text or a file is not UTF-8.
    """
    if not pattern:
        raise UserError("data.source=files needs data.files, a folder or a glob such as 'texts/*.txt'.")
    root = in_package(pattern) if pattern.startswith(PACKAGE) else Path(pattern).expanduser()
    if root.is_dir():
        paths = [path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES]
        missing = f"data.files={pattern}: the folder has no {' or '.join(SUFFIXES)} file; name others with a glob."
    else:
        paths = [Path(path) for path in glob.glob(str(root), recursive=True)]
        missing = f"data.files={pattern}: no such folder, and no file matches it as a glob; check the path."
    texts: dict[str, TextFile] = {}
    if found := sorted(path for path in paths if path.is_file()):
        missing = f"data.files={pattern}: no text in {found[0]} or any other file there; give files that hold some."
    for path in found:
        state = path.stat()
        if digest := _digest(path, state.st_size, state.st_mtime_ns):
            name = str(path.relative_to(root)) if root.is_dir() else path.name
            texts.setdefault(digest, TextFile(path, name, digest))
    if not texts:
        raise UserError(missing)
    return [texts[digest] for digest in sorted(texts)]


def revision_of(texts: list[TextFile]) -> str:
    """Twelve hex digits of what all of them hold, in whatever place."""
    return hashlib.sha256("".join(text.digest for text in texts).encode()).hexdigest()[:12]


def in_package(pattern: str) -> Path:
    """The path that package:<name>/<path> stands for. UserError where there is no such package."""
    name, _, below = pattern.removeprefix(PACKAGE).partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None:
        raise UserError(f"data.files={pattern}: the package {name} is not installed.")
    return Path(spec.origin).parent / below


@cache
def _digest(path: Path, size: int, modified: int) -> str | None:
    """The sha256 of its bytes, None where they are blank; read again where `size` or the time `modified` changed."""
    data = path.read_bytes()
    _check_utf8(path, data)
    return hashlib.sha256(data).hexdigest() if data.strip() else None


def _check_utf8(path: Path, data: bytes) -> None:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 at byte {error.start} (0x{data[error.start]:02x}).\n"
            "Convert it (iconv -f latin1 -t utf-8) or leave it out with a glob in data.files."
        ) from None


def read_texts(texts: list[TextFile], split: str) -> Iterator[tuple[str, str]]:
    """(name, text) of `split`. Three files or more are split by file; fewer are each cut 90/5/5 from start to end."""
    if len(texts) < 3:
        for file in texts:
            text = file.read()
            first, second = len(text) * 90 // 100, len(text) * 95 // 100
            yield file.name, {"train": text[:first], "validation": text[first:second], "test": text[second:]}[split]
        return
    held_out = max(1, len(texts) // HELD_OUT)
    test, validation, train = texts[:held_out], texts[held_out : 2 * held_out], texts[2 * held_out :]
    for file in {"train": train, "validation": validation, "test": test}[split]:
        yield file.name, file.read()
