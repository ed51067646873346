"""A user's own text files, split by file."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from focus_exp.errors import UserError, first_line

PACKAGE = "package:"
SUFFIXES = (".txt", ".md")
LINES = ".jsonl"
NO_TEXT = (".json", ".csv", ".parquet")
BYTE_ORDERS = (b"\xff\xfe", b"\xfe\xff")
# one part of this many goes to validation, one to test
HELD_OUT = 20


@dataclass(frozen=True)
class TextFile:
    """A file that has been read once: its name among the others and the sha256 of its bytes, \\r\\n there being \\n.

    shared: the sha256 of what it has in common with its copies.
    """

    path: Path
    name: str
    digest: str
    shared: str

    @property
    def has_lines(self) -> bool:
        """Whether each of its lines is a document."""
        return self.path.suffix.lower() == LINES

    def read(self) -> str:
        return _newlines(self.path.read_bytes()).decode("utf-8-sig")

    def lines(self, column: str) -> Iterator[Line]:
        """The texts under `column` that are not blank. UserError for a line that has none."""
        for number, line in enumerate(self.read().split("\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{self.path}, line {number}: not JSON ({error})") from error
            text = text_of(row, column, f"{self.path}, line {number}")
            if text.strip():
                data = _newlines(text.encode("utf-8", "surrogatepass"))
                yield Line(
                    f"{self.name}:{number}", _sha256(data), _sha256(_core(data)), data.decode("utf-8", "replace")
                )


@dataclass(frozen=True)
class Line:
    """The document on a line of a .jsonl file."""

    name: str
    digest: str
    shared: str
    text: str

    def read(self) -> str:
        return self.text


def find_texts(pattern: str | None) -> list[TextFile]:
    """The non-empty text files of a folder or a glob; copies of a file count once, and so do such as differ in a
    byte-order mark or in white space at their ends.

    Of a folder those in .txt and .md at any depth, or those in .jsonl, each line of which is a document, but of no
    hidden one, in which editors keep older versions of files; a glob does not match those either. Files of one
    name are told apart by the folders in which they lie. Windows newlines are read as \\n.
    package:<name>/<folder or glob> is below an installed package, wherever that lies.

    Sorted by content hash, so that the split does not depend on where the files lie. Raises UserError if there is no
    text, a file is not UTF-8 or not text, or a folder has files of both kinds.
    """
    if not pattern:
        raise UserError("data.source=files needs data.files, a folder or a glob such as 'texts/*.txt'.")
    root = in_package(pattern) if pattern.startswith(PACKAGE) else Path(pattern).expanduser()
    if root.is_dir():
        below = [path for path in root.rglob("*") if not any(map(_is_hidden, path.relative_to(root).parts))]
        whole = [path for path in below if path.suffix.lower() in SUFFIXES]
        lined = [path for path in below if path.suffix.lower() == LINES]
        if whole and lined:  # such as a data set and the README.md about it
            raise UserError(
                f"data.files={pattern}: it has {min(whole).name} and {min(lined).name}, texts and lines that are "
                f"texts; name those meant with a glob, such as '{pattern.rstrip('/')}/**/*{LINES}'."
            )
        paths = whole or lined
        suffixes = " or ".join((*SUFFIXES, LINES))
        missing = f"data.files={pattern}: the folder has no {suffixes} file; name others with a glob."
    else:
        paths = _matching(root)
        missing = f"data.files={pattern}: no such folder, and no file matches it as a glob; check the path."
    texts: dict[str, tuple[str, Path]] = {}  # by what copies share
    if found := sorted(path for path in paths if path.is_file()):
        missing = f"data.files={pattern}: no text in {found[0]} or any other file there; give files that hold some."
    for path in found:
        state = path.stat()
        if digests := _digests(path, state.st_size, state.st_mtime_ns):
            shared, digest = digests
            texts.setdefault(shared, (digest, path))
    if not texts:
        raise UserError(missing)
    names = _names(root, [path for _, path in texts.values()])
    distinct = (TextFile(path, names[path], digest, shared) for shared, (digest, path) in texts.items())
    return sorted(distinct, key=attrgetter("digest"))


def _matching(pattern: Path) -> list[Path]:
    """Match a glob below the longest part of it that exists literally, such as a folder named br[1]."""
    literal = next(path for path in (pattern, *pattern.parents) if path.exists() or path == path.parent)
    if literal == pattern:
        return [pattern]
    rest = str(pattern.relative_to(literal))
    return [literal / path for path in glob.glob(rest, root_dir=literal, recursive=True)]


def text_of(row: Any, column: str, place: str) -> str:
    """Return what `row` holds under `column`, "" for null; UserError, which begins with `place`, if that is no text."""
    if not isinstance(row, dict):
        raise UserError(f"{place}: must be an object with a text under {column!r} (got {_kind(row)}).")
    if isinstance(text := row.get(column, 0), str | None):
        return text or ""
    others = [key for key, value in row.items() if isinstance(value, str)]
    got = f"must be a string (got {_kind(row[column])})" if column in row else "is no column"
    instead = f"Set data.text_column to {' or '.join(others)}" if others else "Write the text as a string"
    raise UserError(f"{place}: {column!r} {got}. {instead}.")


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _names(root: Path, paths: list[Path]) -> dict[Path, str]:
    """Of a folder the paths below it; of a glob the files' names, or where some share one the paths below all."""
    if not root.is_dir():
        if max(Counter(path.name for path in paths).values()) == 1:
            return {path: path.name for path in paths}
        root = Path(os.path.commonpath([path.parent for path in paths]))
    return {path: str(path.relative_to(root)) for path in paths}


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
def _digests(path: Path, size: int, modified: int) -> tuple[str, str] | None:
    """The sha256 of what it has in common with its copies, and of all its bytes; None where they are blank.

    Read again where `size` or the time `modified` changed.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        why = error.strerror or first_line(error)
        raise UserError(f"{path}: it cannot be read ({why}); leave it out with a glob in data.files.") from error
    _check(path, data)
    whole = _newlines(data)
    core = _core(whole)
    return (_sha256(core), _sha256(whole)) if core else None


def _core(data: bytes) -> bytes:
    """What a text has in common with its copies."""
    return data.removeprefix(codecs.BOM_UTF8).strip()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _newlines(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n")


def _check(path: Path, data: bytes) -> None:
    if path.suffix.lower() in NO_TEXT:
        raise UserError(
            f"{path}: {path.suffix} is not read; put its texts into a {LINES} file, an object a line, the text under "
            "data.text_column, or leave it out with a glob in data.files."
        )
    if data.startswith(BYTE_ORDERS):
        raise UserError(f"{path}: UTF-16, not UTF-8; convert it (iconv -f utf-16 -t utf-8).")
    if (place := data.find(b"\0")) >= 0:
        raise UserError(f"{path}: not text, for byte {place} is NUL; leave it out with a glob in data.files.")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 at byte {error.start} (0x{data[error.start]:02x}).\n"
            "Convert it (iconv -f latin1 -t utf-8) or leave it out with a glob in data.files."
        ) from None


def read_texts(texts: list[TextFile], split: str, column: str = "text") -> Iterator[tuple[str, str]]:
    """(name, text) of `split`. Three documents or more are split whole; fewer are each cut 90/5/5 from start to end.

    Those on the lines of .jsonl files, under `column`, are in the order of their hashes among the others.
    """
    found: dict[str, TextFile | Line] = {}
    for file in texts:
        for document in file.lines(column) if file.has_lines else [file]:
            found.setdefault(document.shared, document)
    documents = sorted(found.values(), key=attrgetter("digest"))
    if len(documents) < 3:
        for document in documents:
            text = document.read()
            first, second = len(text) * 90 // 100, len(text) * 95 // 100
            parts = {"train": text[:first], "validation": text[first:second], "test": text[second:]}
            yield document.name, parts[split]
        return
    held_out = max(1, len(documents) // HELD_OUT)
    test, validation, train = documents[:held_out], documents[held_out : 2 * held_out], documents[2 * held_out :]
    for document in {"train": train, "validation": validation, "test": test}[split]:
        yield document.name, document.read()
