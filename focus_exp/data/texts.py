"""Read documents from text, .jsonl, .parquet or stdin; split them by hash.

Files are streamed: memory holds the text that the tokens asked for need, and about 100 bytes for each row.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import io
import json
import os
import sys
from array import array
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from focus_exp.assets import HUB_ID
from focus_exp.errors import UserError, first_line

STDIN = Path("-")
PACKAGE_PREFIX = "package:"
TEXT_SUFFIXES, ROW_SUFFIXES, UNREADABLE_SUFFIXES = (".txt", ".md"), (".jsonl", ".parquet"), (".json", ".csv")
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".lz4")
LEAVE_OUT = "leave it out with a glob in data.files"
HELD_OUT = 20  # one document in 20 is for validation, one for test
BLOCK = 2**20  # bytes or characters read at once
TOKEN_CHARACTERS, LEAST_CHARACTERS = 16, 2**18  # read for a token, far more than it has on average; in all


@dataclass(frozen=True)
class TextFile:
    """A file with one document, or with a document in each row.

    digest: sha256 of its bytes with newlines as \\n. core: sha256 without byte-order mark and outer white space, equal
    for copies.
    """

    path: Path
    name: str
    digest: str
    core: str

    @property
    def has_rows(self) -> bool:
        return self.path.suffix.lower() in ROW_SUFFIXES

    def read(self, begin: int = 0, end: int | None = None) -> str:
        """Read the characters from `begin` to `end`."""
        parts, place = [], 0
        for part in self.parts():
            parts.append(part[max(begin - place, 0) : None if end is None else max(end - place, 0)])
            place += len(part)
            if end is not None and place >= end:
                break
        return "".join(parts)

    def parts(self) -> Iterator[str]:
        """Yield the text in order, as parts of bounded size."""
        for number, part in enumerate(read_parts(self.path)):
            yield part.removeprefix("\ufeff") if number == 0 else part

    def texts(self, column: str, rows: Collection[int] | None = None) -> Iterator[tuple[int, str]]:
        """Yield (number from 1, text under `column`) of the rows that are not blank, or of `rows` alone."""
        read = self.parquet_rows if self.path.suffix.lower() == ".parquet" else self.json_rows
        for number, row in read(column, rows):
            text = get_text(row, column, f"{self.path}, row {number}").replace("\r\n", "\n")
            if text.strip():
                yield number, text

    def json_rows(self, column: str, rows: Collection[int] | None) -> Iterator[tuple[int, Any]]:
        for number, line in enumerate(read_lines(self.path), 1):
            if line.strip() and (rows is None or number in rows):
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{self.path}, row {number}: must be JSON ({error}).") from error

    def parquet_rows(self, column: str, rows: Collection[int] | None) -> Iterator[tuple[int, Any]]:
        from pyarrow import ArrowException, parquet, types

        try:
            file = parquet.ParquetFile(self.path, buffer_size=BLOCK)
            schema = file.schema_arrow
            if column not in schema.names:
                yield 1, {field.name: "" if types.is_string(field.type) else None for field in schema}
            batches = file.iter_batches(BLOCK // 1024, columns=[column])
            for number, value in enumerate(chain.from_iterable(batch.column(0) for batch in batches), 1):
                if rows is None or number in rows:
                    yield number, {column: value.as_py()}
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}, row {number}: must be UTF-8 text ({error.reason}).") from error
        except (ArrowException, OSError) as error:
            raise UserError(f"{self.path}: must be a Parquet file (got {first_line(error)}).") from error


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
        paths = sorted(path for path in match_glob(root) if is_named(path) or path.is_file())
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
    paths = [path for folder in walk_folders(root) for path in sorted(folder.iterdir()) if is_named(path)]
    texts, rows = (
        [path for path in paths if path.suffix.lower() in suffixes] for suffixes in (TEXT_SUFFIXES, ROW_SUFFIXES)
    )
    if texts and rows:  # such as a data set and its README.md
        raise UserError(
            f"data.files={pattern} must have one kind of files (got {texts[0].name} and {rows[0].name}). Give a glob, "
            f"such as '{pattern.rstrip('/')}/**/*{rows[0].suffix}'."
        )
    inner = (*TEXT_SUFFIXES, *ROW_SUFFIXES)
    packed = [path for path in paths if path.suffix.lower() in COMPRESSED_SUFFIXES and path.stem.endswith(inner)]
    return sorted([*(texts or rows), *packed])


def is_named(path: Path) -> bool:
    """Return whether a path names a file of a user's; a link to nothing does, so that it is not left out in silence."""
    return not path.name.startswith(".") and (path.is_file() or (path.is_symlink() and not path.exists()))


def walk_folders(root: Path) -> Iterator[Path]:
    """Yield a folder and those within it that are not hidden, each once, those behind links last."""
    seen: set[str] = set()
    folders: list[Path] = [root]
    links: list[Path] = []
    while folders or links:
        folder = folders.pop() if folders else links.pop()
        if (place := os.path.realpath(folder)) in seen:
            continue
        seen.add(place)
        yield folder
        for path in sorted(list_paths(folder), reverse=True):
            if path.is_dir() and not path.name.startswith("."):
                (links if path.is_symlink() else folders).append(path)


def list_paths(folder: Path) -> list[Path]:
    try:
        return [*folder.iterdir()]
    except OSError as error:
        raise UserError(f"{folder}: it cannot be read ({error.strerror}). Correct that, or {LEAVE_OUT}.") from error


def match_glob(pattern: Path) -> list[Path]:
    """Match a glob below the longest literal part, such as a folder br[1]."""
    literal = next(path for path in (pattern, *pattern.parents) if path.exists() or path == path.parent)
    if literal == pattern:
        return [pattern]
    return [*dict.fromkeys(match_parts(literal, pattern.relative_to(literal).parts))]


def match_parts(root: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    """Match the parts of a glob in a folder; `**` does not follow a loop of links, as glob.glob does."""
    if "**" not in parts:
        yield from (root / path for path in glob.glob(str(Path(*parts)), root_dir=root))
        return
    place = parts.index("**")
    for start in match_parts(root, parts[:place]) if place else [root]:
        for folder in walk_folders(start) if start.is_dir() else ():
            yield from match_parts(folder, parts[place + 1 :] or ("*",))


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
    return hashlib.sha256("".join(text.digest for text in texts).encode()).hexdigest()[:12]


def hash_file(path: Path) -> tuple[str, str] | None:
    """Return core and digest of a file (see `TextFile`), once for each size and time of change; None if it is blank."""
    try:
        state = None if path == STDIN else path.stat()
        key = (state.st_size, state.st_mtime_ns) if state else (len(read_stdin()), 0)
        return hash_content(path, *key)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise UserError(f"{path}: it cannot be read ({reason}). Correct that, or {LEAVE_OUT}.") from error


@cache
def hash_content(path: Path, size: int, modified: int) -> tuple[str, str] | None:
    if path.suffix.lower() in UNREADABLE_SUFFIXES:
        raise UserError(
            f"{path}: {path.suffix} is not read. Write a .jsonl file, an object a line with the text under "
            f"data.text_column, or {LEAVE_OUT}."
        )
    if path.suffix.lower() == ".parquet":
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return sha256, sha256
    core, digest, space, is_blank = hashlib.sha256(), hashlib.sha256(), b"", True
    for number, block in enumerate(part.encode() for part in read_parts(path)):
        digest.update(block)
        text = block.removeprefix(codecs.BOM_UTF8) if number == 0 else block
        body = (text.lstrip() if is_blank else text).rstrip()
        if body:
            core.update(body if is_blank else space + body)
            is_blank, space = False, text[len(text.rstrip()) :]
        elif not is_blank:
            space += text
    return None if is_blank else (core.hexdigest(), digest.hexdigest())


def read_parts(path: Path) -> Iterator[str]:
    """Yield the text of a file or of standard input in order, with \\r\\n as \\n; UserError unless it is UTF-8."""
    decoder, place, rest = codecs.getincrementaldecoder("utf-8")(), 0, ""
    with io.BytesIO(read_stdin()) if path == STDIN else path.open("rb") as file:
        for block in chain(iter(lambda: file.read(BLOCK), b""), [b""]):
            begin = place - len(decoder.getstate()[0])
            try:
                part = rest + decoder.decode(block, final=not block)
                wrong = (place + block.index(0), 0) if 0 in block else None
            except UnicodeDecodeError as error:
                wrong = begin + error.start, error.object[error.start]
            if wrong:
                raise UserError(
                    f"{path}: must be UTF-8 text (got 0x{wrong[1]:02x} at byte {wrong[0]}). Unpack or convert it "
                    f"(iconv -f <encoding> -t utf-8), or {LEAVE_OUT}."
                )
            rest = "\r" if block and part.endswith("\r") else ""
            place += len(block)
            if part := part.removesuffix(rest).replace("\r\n", "\n"):
                yield part


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text, which \\n alone ends."""
    with path.open("rb") as file:
        for number, line in enumerate(file):
            yield line.decode("utf-8-sig" if number == 0 else "utf-8")


@cache
def read_stdin() -> bytes:
    return b"" if sys.stdin.isatty() else sys.stdin.buffer.read()


@dataclass(frozen=True)
class Rows:
    """The documents of files that are no copies, in the order of their digests.

    file: index of the file. number: of the row from 1, 0 for a whole file. size: in bytes.
    """

    file: np.ndarray
    number: np.ndarray
    size: np.ndarray


@lru_cache(maxsize=1)
def index_documents(files: tuple[TextFile, ...], column: str) -> Rows:
    """Read all rows once; UserError if none has text."""
    core, digest, number, size = array("Q"), array("Q"), array("I"), array("Q")
    counts: list[int] = []
    for file in files:
        if not file.has_rows:
            core.append(int(file.core[:16], 16))
            digest.append(int(file.digest[:16], 16))
            number.append(0)
            size.append(0 if file.path == STDIN else file.path.stat().st_size)
        for row, text in file.texts(column) if file.has_rows else ():
            data = text.encode("utf-8", "surrogatepass")
            core.append(hash_start(data.removeprefix(codecs.BOM_UTF8).strip()))
            digest.append(hash_start(data))
            number.append(row)
            size.append(len(data))
        counts.append(len(core) - sum(counts))
    if not core:
        raise UserError(f"{files[0].path}: no row has text under {column!r}. Set data.text_column.")
    _, first = np.unique(np.frombuffer(core, np.uint64), return_index=True)
    order = first[np.frombuffer(digest, np.uint64)[first].argsort()]
    owner = np.repeat(np.arange(len(files), dtype=np.uint32), counts)
    return Rows(owner[order], np.asarray(number)[order], np.asarray(size)[order])


def hash_start(data: bytes) -> int:
    """Return the first 64 bits of the sha256."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def read_split(
    files: list[TextFile], split: str, column: str = "text", tokens: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of `split`: documents, or each of few cut 90/5/5.

    tokens: how many are asked for; text that they do not need is not held, so that long documents end early.
    """
    rows = index_documents(tuple(files), column)
    limit = sys.maxsize if tokens is None else max(TOKEN_CHARACTERS * tokens, LEAST_CHARACTERS)
    count = len(rows.number)
    n = max(1, count // HELD_OUT)
    splits = {"train": range(2 * n, count), "validation": range(n, 2 * n), "test": range(n)}
    places = iter(range(count) if count < 3 else splits[split])
    while part := take_size(places, rows.size, limit):
        texts = read_rows(files, rows, part, column)
        for place in part:
            file, number = files[rows.file[place]], int(rows.number[place])
            row, begin, end = texts.pop(place, None), 0, sys.maxsize
            if count < 3:
                begin, end = cut_document(sum(map(len, file.parts())) if row is None else len(row), split)
            end = min(end, begin + limit)
            text = file.read(begin, end) if row is None else row[begin:end]
            yield f"{file.name}:{number}" if number else file.name, text


def cut_document(length: int, split: str) -> tuple[int, int]:
    """Return begin and end of a split in a document."""
    first, second = length * 90 // 100, length * 95 // 100
    return {"train": (0, first), "validation": (first, second), "test": (second, length)}[split]


def take_size(places: Iterator[int], sizes: np.ndarray, limit: int) -> list[int]:
    """Take the next documents, of `limit` bytes together or the last one more."""
    taken, total = [], 0
    for place in places:
        taken.append(place)
        total += int(sizes[place])
        if total >= limit:
            break
    return taken


def read_rows(files: list[TextFile], rows: Rows, places: list[int], column: str) -> dict[int, str]:
    """Read the documents at `places` that are rows, in one pass over each file that has some."""
    wanted: dict[int, dict[int, int]] = {}
    for place in places:
        if number := int(rows.number[place]):
            wanted.setdefault(int(rows.file[place]), {})[number] = place
    return {
        numbers[number]: text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        for index, numbers in wanted.items()
        for number, text in files[index].texts(column, numbers.keys())
    }
