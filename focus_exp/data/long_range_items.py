"""How the items of the long-range suite are made of a text: what they ask lies farther back than a window reaches.

Lengths and distances are counted in words. A word has at least one token under any tokenizer that does not merge across
spaces, so every distance holds in tokens too.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

Item = dict[str, Any]
T = TypeVar("T")

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CHOICES = 4
CONTINUATION_WORDS = 24
CUE_WORDS, COPIED_WORDS = 12, 4
# times in ten thousand words above which a word is too common to be looked up
COMMON = 10
NAMES = (
    "Agnes", "Barnaby", "Clarence", "Dorothy", "Edmund", "Flora", "Gilbert", "Harriet", "Isabel", "Jasper", "Lydia",
    "Matilda", "Nathaniel", "Oswald", "Prudence", "Rupert",
)  # fmt: skip


class Draws:
    """Draws that are the same on every machine: of `random`, only `random()` is promised never to change."""

    def __init__(self, seed: str) -> None:
        self.generator = random.Random(seed)

    def below(self, limit: int) -> int:
        return int(self.generator.random() * limit)

    def sample(self, population: Sequence[T], count: int) -> list[T]:
        """`count` different elements, in random order."""
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
        """The text of words first <= i < last, with its own line breaks."""
        return self.text[self.spans[first][0] : self.spans[last - 1][1]]

    def sentence_starts(self) -> list[int]:
        """Words that follow the end of a sentence and have a continuation's length after them."""
        return [i for i in range(1, len(self) - CONTINUATION_WORDS) if self.words[i - 1][-1] in ".!?"]


@dataclass(frozen=True)
class Shape:
    """Numbers of words: `window` to be looked beyond, `words` of a passage."""

    window: int
    words: int

    def place(self, depth: float) -> int:
        """Where in a passage something stands at `depth` 0..1 of what is farther from its end than the window."""
        return round(depth * (self.words - self.window - CUE_WORDS - COPIED_WORDS))


def last_word(books: list[Book], shape: Shape, draws: Draws) -> Iterator[Item]:
    """LAMBADA's form: the last word of a passage, which occurs in it before, but nowhere within the window."""
    candidates = []
    for book in books:
        plain = [re.sub("[^a-z]", "", word.lower()) for word in book.words]
        counts = Counter(plain)
        last_seen: dict[str, int] = {}
        for index, word in enumerate(plain):
            distance = index - last_seen.get(word, -len(plain))
            last_seen[word] = index
            ends_a_sentence = re.fullmatch(r"[a-z]{4,}[.!?]", book.words[index])
            rare = counts[word] * 10_000 <= COMMON * len(plain)
            on_its_line = book.text[book.spans[index][0] - 1] == " "
            if ends_a_sentence and on_its_line and rare and shape.window < distance < shape.words <= index:
                candidates.append((book, index, distance, word))
    for book, index, distance, word in draws.sample(candidates, len(candidates)):
        context = book.passage(index - shape.words, index)
        yield {"book": book.title, "context": context, "target": f" {word}", "distance": distance}


def continuation(books: list[Book], shape: Shape, draws: Draws) -> Iterator[Item]:
    """How a passage goes on: the right text among others from elsewhere in the same book, each from a sentence's start.

    The nearest words decide much of it; what the window alone scores says how much.
    """
    starts = {book.title: book.sentence_starts() for book in books}
    places = [(book, start) for book in books for start in starts[book.title] if start >= shape.words]
    for book, start in draws.sample(places, len(places)):
        near = range(start - shape.words - CONTINUATION_WORDS, start + shape.words)
        elsewhere = [other for other in starts[book.title] if other not in near]
        if len(elsewhere) < CHOICES:
            continue
        answer = draws.below(CHOICES)
        begins = draws.sample(elsewhere, CHOICES - 1)
        begins.insert(answer, start)
        choices = [book.passage(begin, begin + CONTINUATION_WORDS) for begin in begins]
        context = book.passage(start - shape.words, start)
        yield {"book": book.title, "context": context, "choices": choices, "answer": answer}


def passkey(books: list[Book], shape: Shape, draws: Draws) -> Iterator[Item]:
    """A number told somewhere in a passage and asked for at its end (Mohtashami and Jaggi, 2023)."""
    for depth in cycle(DEPTHS):
        key = str(10_000 + draws.below(90_000))
        told = {shape.place(depth): f"The pass key is {key}. Remember it. {key} is the pass key."}
        book, text = with_facts(books, shape, draws, told)
        question = "What is the pass key? The pass key is"
        yield {"book": book, "context": f"{text}\n\n{question}", "target": f" {key}", "depth": depth}


def multi_key(books: list[Book], shape: Shape, draws: Draws) -> Iterator[Item]:
    """Several people's numbers told in a passage, one person's asked for at its end: a choice among the numbers."""
    depths = [index / (CHOICES - 1) for index in range(CHOICES)]
    for answer in cycle(range(CHOICES)):
        names = draws.sample(NAMES, CHOICES)
        keys = [str(key) for key in draws.sample(range(10_000, 100_000), CHOICES)]
        facts = [f"The pass key of {name} is {key}." for name, key in zip(names, keys, strict=True)]
        told = {shape.place(depth): fact for depth, fact in zip(depths, facts, strict=True)}
        book, text = with_facts(books, shape, draws, told)
        question = f"What is the pass key of {names[answer]}? The pass key of {names[answer]} is"
        # in no order that gives the place away
        choices = draws.sample(keys, CHOICES)
        yield {
            "book": book, "context": f"{text}\n\n{question}", "choices": choices,
            "answer": choices.index(keys[answer]), "depth": depths[answer],
        }  # fmt: skip


def copying(books: list[Book], shape: Shape, draws: Draws) -> Iterator[Item]:
    """Words of a passage begun again at its end: the next ones are to be copied from where they stood."""
    for depth in cycle(DEPTHS):
        target = ""
        while not re.fullmatch(r"( [A-Za-z,;']+)+", target):  # on one line, and no stage direction
            book = books[draws.below(len(books))]
            start = draws.below(len(book) - shape.words)
            cue = start + shape.place(depth)
            end = cue + CUE_WORDS
            target = book.text[book.spans[end - 1][1] : book.spans[end + COPIED_WORDS - 1][1]]
        context = f"{book.passage(start, start + shape.words)}\n\n{book.passage(cue, end)}"
        yield {"book": book.title, "context": context, "target": target, "depth": depth}


def induction(books: list[Book], shape: Shape, draws: Draws) -> Iterator[Item]:
    """Copying without a language to help: random words, the last ones of which stood there once before."""
    counts = Counter(word for book in books for word in book.words if re.fullmatch("[a-z]{3,8}", word))
    vocabulary = sorted(word for word, count in counts.items() if count > 1)
    # short words are a token each, so that a passage takes more of them
    shape = Shape(shape.window, shape.words * 4 // 3)
    for depth in cycle(DEPTHS):
        words = [vocabulary[draws.below(len(vocabulary))] for _ in range(shape.words)]
        end = shape.place(depth) + CUE_WORDS
        context = " ".join([*words, *words[end - CUE_WORDS : end]])
        yield {"context": context, "target": f" {words[end]}", "depth": depth}


def with_facts(books: list[Book], shape: Shape, draws: Draws, told: dict[int, str]) -> tuple[str, str]:
    """The title of a book and a passage of it into which facts are put, each as a paragraph after so many words."""
    book = books[draws.below(len(books))]
    start = draws.below(len(book) - shape.words)
    edges = [*sorted(told), shape.words]
    parts = ["There is something to remember in this text.", book.passage(start, start + edges[0]) if edges[0] else ""]
    for edge, following in pairwise(edges):
        parts += [told[edge], book.passage(start + edge, start + following)]
    return book.title, "\n\n".join(part for part in parts if part)


def cycle(values: Sequence[T] | range) -> Iterator[Any]:
    while True:
        yield from values


MAKERS: dict[str, Callable[[list[Book], Shape, Draws], Iterator[Item]]] = {
    "last_word": last_word,
    "continuation": continuation,
    "passkey": passkey,
    "multi_key": multi_key,
    "copying": copying,
    "induction": induction,
}
