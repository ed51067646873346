"""Read documents from text, .jsonl, .parquet or stdin; split them by hash."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from focus_exp.assets import HUB_ID
from focus_exp.errors import UserError, first_line

STDIN = Path("-")
PACKAGE_PREFIX = "package:"
TEXT_SUFFIXES, ROW_SUFFIXES, UNREADABLE_SUFFIXES = (".txt", ".md"), (".jsonl", ".parquet"), (".json", ".csv")
HELD_OUT = 20  # one document in 20 is for validation, one for test


@dataclass(frozen=True)
class Document:
    """A document of a file.

    digest: sha256 of its bytes with newlines as \\n. core: sha256 without byte-order mark and outer white space, equal
    for copies.
    """

    name: str
    digest: str
    core: str
    read: Callable[[], str]


@dataclass(frozen=True)
class TextFile:
    """A file with one document, or with a document in each row."""

    path: Path
    name: str
    digest: str
    core: str

    @property
    def has_rows(self) -> bool:
        return self.path.suffix.lower() in ROW_SUFFIXES

    def read(self) -> str:
        return normalize_newlines(read_bytes(self.path)).decode("utf-8-sig")

    def documents(self, column: str) -> Iterator[Document]:
        """Yield the documents that are not blank, of rows those under `column`."""
        if not self.has_rows:
            yield Document(self.name, self.digest, self.core, self.read)
            return
        for number, row in self.rows(column):
            text = get_text(row, column, f"{self.path}, row {number}")
            if text.strip():
                data = normalize_newlines(text.encode("utf-8", "surrogatepass"))
                read = partial(data.decode, "utf-8", "replace")
                yield Document(f"{self.name}:{number}", sha256(data), sha256(strip(data)), read)

    def rows(self, column: str) -> Iterator[tuple[int, Any]]:
        """Yield (number from 1, row)."""
        if self.path.suffix.lower() == ".parquet":
            from pyarrow import ArrowException, parquet

            try:
                file = parquet.ParquetFile(self.path)
                columns = [column] if column in file.schema_arrow.names else None
                batches = (row for batch in file.iter_batches(columns=columns) for row in batch.to_pylist())
                yield from enumerate(batches, 1)
            except (ArrowException, OSError) as error:
                raise UserError(f"{self.path}: must be a Parquet file (got {first_line(error)}).") from error
            return
        for number, line in enumerate(self.read().split("\n"), 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise UserError(f"{self.path}, row {number}: must be JSON ({error}).") from error


def find_texts(pattern: str) -> list[TextFile]:
    """Find the non-empty files that `data.files` names, sorted by hash.

    Args:
        pattern: a file, a glob, a folder (its .txt and .md files at any depth, or its .jsonl and .parquet files),
            package:<name>/<folder or glob> for the files of an installed package, or - for standard input. Hidden
            files, in which editors keep older versions, are skipped.

    Raises:
        UserError: there is no text, or a file is not UTF-8 text.
    """
    root = find_in_package(pattern) if pattern.startswith(PACKAGE_PREFIX) else Path(pattern).expanduser()
    if root == STDIN:
        paths = [STDIN]
    elif root.is_dir():
        paths = list_folder(root, pattern)
    else:
        paths = sorted(path for path in match_glob(root) if path.is_file())
    if not paths:
        hub = f", or data=hub data.hub_id={pattern} for the Hub" if HUB_ID.fullmatch(pattern) else ""
        reason = f"the folder has no {', '.join((*TEXT_SUFFIXES, *ROW_SUFFIXES))} file"
        reason = f"{reason}. Name others with a glob" if root.is_dir() else "no such folder, and no file matches"
        reason += "; a list of files is not supported, use a glob" if pattern.startswith("[") else ""
        raise UserError(f"data.files={pattern}: {reason}{hub}.")
    unique: dict[str, tuple[str, Path]] = {}  # core -> digest, path
    for path in paths:
        if hashes := hash_file(path):
            unique.setdefault(hashes[0], (hashes[1], path))
    if not unique:
        raise UserError(f"data.files={pattern}: no text in {paths[0]} or the other files. Give files with text.")
    names = name_files(root, [path for _, path in unique.values()])
    files = (TextFile(path, names[path], digest, core) for core, (digest, path) in unique.items())
    return sorted(files, key=attrgetter("digest"))


def list_folder(root: Path, pattern: str) -> list[Path]:
    """List the text files of a folder, or its files with rows; not both."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
    paths = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    texts, rows = (
        [path for path in paths if path.suffix.lower() in suffixes] for suffixes in (TEXT_SUFFIXES, ROW_SUFFIXES)
    )
    if texts and rows:  # such as a data set and its README.md
        raise UserError(
            f"data.files={pattern} must have one kind of files (got {texts[0].name} and {rows[0].name}). Give a glob, "
            f"such as '{pattern.rstrip('/')}/**/*{rows[0].suffix}'."
        )
    return texts or rows


def match_glob(pattern: Path) -> list[Path]:
    """Match a glob below the longest literal part, such as a folder br[1]."""
    literal = next(path for path in (pattern, *pattern.parents) if path.exists() or path == path.parent)
    if literal == pattern:
        return [pattern]
    matches = glob.glob(str(pattern.relative_to(literal)), root_dir=literal, recursive=True)
    return [literal / path for path in matches]


def name_files(root: Path, paths: list[Path]) -> dict[Path, str]:
    """Name files by their path in a folder, or by file name where unique."""
    if not root.is_dir():
        if max(Counter(path.name for path in paths).values()) == 1:
            return {path: path.name for path in paths}
        root = Path(os.path.commonpath([path.parent for path in paths]))
    return {path: str(path.relative_to(root)) for path in paths}


def find_in_package(pattern: str) -> Path:
    """Return the path that package:<name>/<path> names."""
    name, _, below = pattern.removeprefix(PACKAGE_PREFIX).partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None:
        raise UserError(f"data.files={pattern}: the package {name} is not installed.")
    return Path(spec.origin).parent / below


def get_text(row: Any, column: str, place: str) -> str:
    """Return the text of `row` under `column`, "" for null."""
    if not isinstance(row, dict):
        raise UserError(f"{place}: must be an object with a string under {column!r} (got {type(row).__name__}).")
    if column in row and isinstance(row[column], str | None):
        return row[column] or ""
    columns = [key for key, value in row.items() if isinstance(value, str)]
    problem = f"must be a string (got {type(row[column]).__name__})" if column in row else "is no column"
    fix = f"Set data.text_column to {' or '.join(columns)}" if columns else "Write the text as a string"
    raise UserError(f"{place}: {column!r} {problem}. {fix}.")


def hash_texts(texts: list[TextFile]) -> str:
    """Hash the content of all files to twelve hex digits, wherever they are."""
    return sha256("".join(text.digest for text in texts).encode())[:12]


def hash_file(path: Path) -> tuple[str, str] | None:
    """Return core and digest of a file (see `Document`); None if it is blank.

    A run asks for its texts several times, and a comparison for those of every variant.
    """
    if path == STDIN:
        return hash_content(path)
    state = path.stat()
    return hash_state(path, state.st_size, state.st_mtime_ns)


@cache
def hash_state(path: Path, size: int, modified: int) -> tuple[str, str] | None:
    """Hash a file once for each size and time of change."""
    return hash_content(path)


def hash_content(path: Path) -> tuple[str, str] | None:
    """Return core and digest of what a file or standard input holds."""
    try:
        data = read_bytes(path)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise UserError(f"{path}: it cannot be read ({reason}). Leave it out with a glob in data.files.") from error
    if path.suffix.lower() == ".parquet":
        return sha256(data), sha256(data)
    check_text(path, data)
    data = normalize_newlines(data)
    return (sha256(strip(data)), sha256(data)) if strip(data) else None


def read_bytes(path: Path) -> bytes:
    return read_stdin() if path == STDIN else path.read_bytes()


@cache
def read_stdin() -> bytes:
    return b"" if sys.stdin.isatty() else sys.stdin.buffer.read()


def strip(data: bytes) -> bytes:
    return data.removeprefix(codecs.BOM_UTF8).strip()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def normalize_newlines(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n")


def check_text(path: Path, data: bytes) -> None:
    """Raise UserError unless `data` is UTF-8 text."""
    leave_out = "leave it out with a glob in data.files"
    if path.suffix.lower() in UNREADABLE_SUFFIXES:
        raise UserError(
            f"{path}: {path.suffix} is not read. Write a .jsonl file, an object a line with the text under "
            f"data.text_column, or {leave_out}."
        )
    index = data.find(b"\0")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        index = error.start
    if index >= 0:
        raise UserError(
            f"{path}: must be UTF-8 text (got 0x{data[index]:02x} at byte {index}). Convert it (iconv -f <encoding> "
            f"-t utf-8), or {leave_out}."
        )


def read_split(texts: list[TextFile], split: str, column: str = "text") -> Iterator[tuple[str, str]]:
    """Yield (name, text) of `split`: documents, or each of few cut 90/5/5."""
    unique: dict[str, Document] = {}
    for file in texts:
        for document in file.documents(column):
            unique.setdefault(document.core, document)
    documents = sorted(unique.values(), key=attrgetter("digest"))
    if len(documents) < 3:
        for document in documents:
            text = document.read()
            first, second = len(text) * 90 // 100, len(text) * 95 // 100
            parts = {"train": text[:first], "validation": text[first:second], "test": text[second:]}
            yield document.name, parts[split]
        return
    n = max(1, len(documents) // HELD_OUT)
    splits = {"train": documents[2 * n :], "validation": documents[n : 2 * n], "test": documents[:n]}
    for document in splits[split]:
        yield document.name, document.read()
