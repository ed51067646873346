"""The long-range suite: tasks in lm-eval's format, made of the held-out books, the same bytes on every machine."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from focus_exp.assets import BOOKS, build_once
from focus_exp.data.books import LICENCE
from focus_exp.data.books import read as read_books
from focus_exp.data.long_range_items import MAKERS, Book, Draws, Shape
from focus_exp.errors import UserError

ITEMS = 100
SEED = 0
# words of a passage per word of window: four windows of tokens and more at 4/3 tokens a word, which English exceeds
WINDOWS = 3
# words beyond the window for what is told there
ROOM = 64
MANIFEST = "suite.json"


@dataclass(frozen=True)
class Suite:
    """A folder with a JSONL file per task; `digest` (sha256 over their contents) names it."""

    folder: Path
    digest: str
    shape: Shape

    def items(self, task: str) -> list[dict[str, Any]]:
        lines = (self.folder / f"{task}.jsonl").read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line]


def build_suite(cache: Path, window: int, words: int | None = None) -> Suite:
    """The suite that looks beyond `window` in passages of `words` (default: three windows), written to `cache` once.

    UserError where a passage has no room beyond the window, or no held-out book is that long.
    """
    words = max(WINDOWS * window, window + ROOM) if words is None else words
    if words < window + ROOM:
        raise UserError(
            f"a passage of {words} words is too short for a window of {window}; use {window + ROOM} or more"
        )
    books = [Book(title, text) for title, text in read_books(cache, "test")]
    longest = max(map(len, books)) - ROOM
    if words > longest:
        raise UserError(f"no held-out book has room for passages of {words} words; use {longest} or less")
    files = make_files([book for book in books if len(book) >= words + ROOM], Shape(window, words))
    digest = hashlib.sha256(b"".join(name.encode() + content for name, content in sorted(files.items()))).hexdigest()
    manifest = {
        "sha256": digest, "window": window, "words": words, "items": ITEMS, "seed": SEED,
        "text": f"{BOOKS.name} {BOOKS.version}, test split", "licence": LICENCE,
    }  # fmt: skip

    def write(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

    folder = build_once(cache / "long_range" / f"window={window}-words={words}-{digest[:16]}", write)
    return Suite(folder, digest, Shape(window, words))


def make_files(books: list[Book], shape: Shape) -> dict[str, bytes]:
    """File name -> content of every task."""
    files = {}
    for task, make in MAKERS.items():
        items = islice(make(books, shape, Draws(f"{SEED} {task}")), ITEMS)
        lines = [json.dumps({"id": index, **item}, ensure_ascii=False) + "\n" for index, item in enumerate(items)]
        files[f"{task}.jsonl"] = "".join(lines).encode()
    return files


def task_config(suite: Suite, task: str, name: str) -> dict[str, Any]:
    """lm-eval's description of `task` of the suite, to be called `name`."""
    choice = "choices" in suite.items(task)[0]
    if choice:
        answer = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"}
    else:
        answer = {"output_type": "loglikelihood", "doc_to_target": "target", "target_delimiter": ""}
    metrics = [("acc", "mean", True)] + ([] if choice else [("perplexity", "perplexity", False)])
    return {
        "task": name,
        "custom_dataset": lambda **_: as_dataset(suite.items(task)),
        "test_split": "test",
        "doc_to_text": "context",
        **answer,
        "metric_list": [{"metric": m, "aggregation": a, "higher_is_better": h} for m, a, h in metrics],
        "num_fewshot": 0,
        "metadata": {"version": suite.digest[:12]},
    }


def as_dataset(items: list[dict[str, Any]]) -> Any:
    import datasets

    return datasets.DatasetDict({"test": datasets.Dataset.from_list(items)})
