"""The long-range suite: lm-eval tasks with answers beyond the window.

Lengths and distances are in words. A word is at least one token under any tokenizer that does not merge across spaces,
so every distance holds in tokens too. The files are the same bytes on every machine.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from focus_exp.assets import build_once
from focus_exp.data.books import EMBEDDED
from focus_exp.errors import UserError

Item = dict[str, Any]
T = TypeVar("T")

ITEMS = 400  # that decide a difference of 5 points where one item in four changes
SEED = 0
WINDOWS = 3  # words of a passage per word of distance: four windows of tokens, at 4/3 tokens a word
ROOM = 64  # words of a passage beyond the distance, for what is asked
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CHOICES = 4
CONTINUATION_WORDS = 24
CUE_WORDS, COPIED_WORDS = 12, 4
COMMON = 10  # occurrences in 10,000 words above which a word is too common to be asked for
NAMES = (
    *("Agnes", "Barnaby", "Clarence", "Dorothy", "Edmund", "Flora", "Gilbert", "Harriet"),
    *("Isabel", "Jasper", "Lydia", "Matilda", "Nathaniel", "Oswald", "Prudence", "Rupert"),
)


class Draws:
    """Random draws that never change: only `random()` is stable."""

    def __init__(self, seed: str) -> None:
        self.generator = random.Random(seed)

    def below(self, limit: int) -> int:
        return int(self.generator.random() * limit)

    def sample(self, population: Sequence[T], count: int) -> list[T]:
        """Draw `count` elements without replacement, in random order."""
        left = list(population)
        return [left.pop(self.below(len(left))) for _ in range(count)]


@dataclass
class Book:
    """A text and its words: maximal runs without white space, at `spans` of the text."""

    title: str
    text: str
    spans: list[tuple[int, int]] = field(init=False)
    words: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.spans = [match.span() for match in re.finditer(r"\S+", self.text)]
        self.words = [self.text[start:end] for start, end in self.spans]

    def __len__(self) -> int:
        return len(self.spans)

    def passage(self, first: int, last: int) -> str:
        """Return the text of words first <= i < last, with its line breaks."""
        return self.text[self.spans[first][0] : self.spans[last - 1][1]]

    def sentence_starts(self) -> list[int]:
        """Return the words that begin a sentence and have a continuation."""
        return [i for i in range(1, len(self) - CONTINUATION_WORDS) if self.words[i - 1][-1] in ".!?"]


@dataclass(frozen=True)
class PassageShape:
    """Numbers of words: `window` that the answer is beyond, `words` of a passage."""

    window: int
    words: int

    def place(self, depth: float) -> int:
        """Return the word index at `depth` 0 to 1 of what is beyond the window."""
        return round(depth * (self.words - self.window - CUE_WORDS - COPIED_WORDS))


def last_word(books: list[Book], shape: PassageShape, draws: Draws) -> Iterator[Item]:
    """Ask for a passage's last word (as LAMBADA), which occurs beyond the window."""
    candidates = []
    for book in books:
        plain = [re.sub("[^a-z]", "", word.lower()) for word in book.words]
        counts = Counter(plain)
        last_seen: dict[str, int] = {}
        for index, word in enumerate(plain):
            distance = index - last_seen.get(word, -len(plain))
            last_seen[word] = index
            ends_sentence = re.fullmatch(r"[a-z]{4,}[.!?]", book.words[index])
            is_rare = counts[word] * 10_000 <= COMMON * len(plain)
            is_in_line = book.text[book.spans[index][0] - 1] == " "
            if ends_sentence and is_in_line and is_rare and shape.window < distance < shape.words <= index:
                candidates.append((book, index, distance, word))
    for book, index, distance, word in draws.sample(candidates, len(candidates)):
        context = book.passage(index - shape.words, index)
        yield {"book": book.title, "context": context, "target": f" {word}", "distance": distance}


def continuation(books: list[Book], shape: PassageShape, draws: Draws) -> Iterator[Item]:
    """Ask for the continuation of a passage among others of the same book."""
    starts = {book.title: book.sentence_starts() for book in books}
    places = [(book, start) for book in books for start in starts[book.title] if start >= shape.words]
    for book, start in draws.sample(places, len(places)):
        near = range(start - shape.words - CONTINUATION_WORDS, start + shape.words)
        distant = [other for other in starts[book.title] if other not in near]
        if len(distant) < CHOICES:
            continue
        answer = draws.below(CHOICES)
        begins = draws.sample(distant, CHOICES - 1)
        begins.insert(answer, start)
        choices = [book.passage(begin, begin + CONTINUATION_WORDS) for begin in begins]
        context = book.passage(start - shape.words, start)
        yield {"book": book.title, "context": context, "choices": choices, "answer": answer}


def passkey(books: list[Book], shape: PassageShape, draws: Draws) -> Iterator[Item]:
    """Ask for a number given in the passage (Mohtashami and Jaggi, 2023)."""
    for depth in itertools.cycle(DEPTHS):
        key = str(10_000 + draws.below(90_000))
        facts = {shape.place(depth): f"The pass key is {key}. Remember it. {key} is the pass key."}
        book, text = insert_facts(books, shape, draws, facts)
        question = "What is the pass key? The pass key is"
        yield {"book": book, "context": f"{text}\n\n{question}", "target": f" {key}", "depth": depth}


def multi_key(books: list[Book], shape: PassageShape, draws: Draws) -> Iterator[Item]:
    """Ask for one of several people's numbers: a choice among the numbers."""
    depths = [index / (CHOICES - 1) for index in range(CHOICES)]
    for answer in itertools.cycle(range(CHOICES)):
        names = draws.sample(NAMES, CHOICES)
        keys = [str(key) for key in draws.sample(range(10_000, 100_000), CHOICES)]
        sentences = [f"The pass key of {name} is {key}." for name, key in zip(names, keys, strict=True)]
        facts = {shape.place(depth): sentence for depth, sentence in zip(depths, sentences, strict=True)}
        book, text = insert_facts(books, shape, draws, facts)
        question = f"What is the pass key of {names[answer]}? The pass key of {names[answer]} is"
        choices = draws.sample(keys, CHOICES)  # in an order that does not reveal the place
        answers = {"choices": choices, "answer": choices.index(keys[answer]), "depth": depths[answer]}
        yield {"book": book, "context": f"{text}\n\n{question}", **answers}


def copying(books: list[Book], shape: PassageShape, draws: Draws) -> Iterator[Item]:
    """Repeat words of a passage at its end and ask for the words that followed them."""
    for depth in itertools.cycle(DEPTHS):
        target = ""
        while not re.fullmatch(r"( [A-Za-z,;']+)+", target):  # on one line, and no stage direction
            book = books[draws.below(len(books))]
            start = draws.below(len(book) - shape.words)
            cue = start + shape.place(depth)
            end = cue + CUE_WORDS
            target = book.text[book.spans[end - 1][1] : book.spans[end + COPIED_WORDS - 1][1]]
        context = f"{book.passage(start, start + shape.words)}\n\n{book.passage(cue, end)}"
        yield {"book": book.title, "context": context, "target": target, "depth": depth}


def induction(books: list[Book], shape: PassageShape, draws: Draws) -> Iterator[Item]:
    """Copy as above from random words, without a language to help."""
    counts = Counter(word for book in books for word in book.words if re.fullmatch("[a-z]{3,8}", word))
    vocabulary = sorted(word for word, count in counts.items() if count > 1)
    # short words are one token each, so that a passage has more of them
    shape = PassageShape(shape.window, shape.words * 4 // 3)
    for depth in itertools.cycle(DEPTHS):
        words = [vocabulary[draws.below(len(vocabulary))] for _ in range(shape.words)]
        end = shape.place(depth) + CUE_WORDS
        context = " ".join([*words, *words[end - CUE_WORDS : end]])
        yield {"context": context, "target": f" {words[end]}", "depth": depth}


def insert_facts(books: list[Book], shape: PassageShape, draws: Draws, facts: dict[int, str]) -> tuple[str, str]:
    """Return a book's title and a passage of it with facts as paragraphs."""
    book = books[draws.below(len(books))]
    start = draws.below(len(book) - shape.words)
    edges = [*sorted(facts), shape.words]
    parts = ["There is something to remember in this text.", book.passage(start, start + edges[0]) if edges[0] else ""]
    for edge, following in itertools.pairwise(edges):
        parts += [facts[edge], book.passage(start + edge, start + following)]
    return book.title, "\n\n".join(part for part in parts if part)


TASKS: dict[str, Callable[[list[Book], PassageShape, Draws], Iterator[Item]]] = {
    task.__name__: task for task in (last_word, continuation, passkey, multi_key, copying, induction)
}


def is_long_range(task: str) -> bool:
    """Return whether a name, maybe with @<words>, is of the suite."""
    return task.partition("@")[0] in TASKS


@dataclass(frozen=True)
class Suite:
    """A folder with a .jsonl file per task; `digest` (sha256) names it."""

    folder: Path
    digest: str
    shape: PassageShape

    def items(self, task: str) -> list[Item]:
        lines = (self.folder / f"{task}.jsonl").read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line]


def build_suite(cache: Path, window: int, words: int | None = None) -> Suite:
    """Build the suite in `cache`: answers beyond `window` in passages of `words`.

    Raises:
        UserError: passages are too short for the window, or too long for the books.
    """
    words = max(WINDOWS * window, window + ROOM) if words is None else words
    if words < window + ROOM:
        raise UserError(f"passages must have {window + ROOM} words or more for a window of {window} (got {words}).")
    books = [Book(title, text) for title, text in EMBEDDED["books"].read(cache, "test")]
    longest = max(map(len, books)) - ROOM
    if words > longest:
        raise UserError(f"passages must have {longest} words or fewer to fit in the held-out books (got {words}).")
    shape = PassageShape(window, words)
    files = make_files([book for book in books if len(book) >= words + ROOM], shape)
    digest = hashlib.sha256(b"".join(name.encode() + content for name, content in sorted(files.items()))).hexdigest()

    def write(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)

    folder = cache / "long_range" / f"window={window}-words={words}-{digest[:16]}"
    return Suite(build_once(folder, write), digest, shape)


def make_files(books: list[Book], shape: PassageShape) -> dict[str, bytes]:
    """Make the file of every task: name -> content."""
    files = {}
    for task, make in TASKS.items():
        items = itertools.islice(make(books, shape, Draws(f"{SEED} {task}")), ITEMS)
        lines = [json.dumps({"id": index, **item}, ensure_ascii=False) + "\n" for index, item in enumerate(items)]
        files[f"{task}.jsonl"] = "".join(lines).encode()
    return files


def task_config(suite: Suite, task: str, name: str) -> dict[str, Any]:
    """Describe a task of the suite for lm-eval, under `name`."""
    has_choices = "choices" in suite.items(task)[0]
    if has_choices:
        answer = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"}
    else:
        answer = {"output_type": "loglikelihood", "doc_to_target": "target", "target_delimiter": ""}
    metrics = [("acc", "mean", True)] + ([] if has_choices else [("perplexity", "perplexity", False)])

    def load(**_: Any) -> Any:
        import datasets

        return datasets.DatasetDict({"test": datasets.Dataset.from_list(suite.items(task))})

    return {
        "task": name,
        "custom_dataset": load,
        "test_split": "test",
        "doc_to_text": "context",
        **answer,
        "metric_list": [{"metric": m, "aggregation": a, "higher_is_better": h} for m, a, h in metrics],
        "num_fewshot": 0,
        "metadata": {"version": suite.digest[:12]},
    }
