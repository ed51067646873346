"""Tokens as text, and the word class of each, so that groups of tokens can be held against what a reader knows."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from importlib.metadata import version

from textblob.taggers import PatternTagger
from transformers import PreTrainedTokenizerBase

TAGGER = f"the tagger of textblob {version('textblob')} (Pattern's lexicon and rules, made from modern English)"
CLASSES = (
    *("punctuation", "determiner", "preposition", "connective", "pronoun", "verb", "noun", "adjective", "adverb"),
    *("number", "other word", "inside a word", "space"),
)
# by how the Penn tag begins; IN is split, for Penn has one tag for "of" and for "because"
PENN = {
    "DT": "determiner", "PDT": "determiner", "WDT": "determiner", "IN": "preposition", "TO": "preposition",
    "CC": "connective", "WRB": "connective", "PRP": "pronoun", "WP": "pronoun", "EX": "pronoun", "VB": "verb",
    "MD": "verb", "NN": "noun", "JJ": "adjective", "RB": "adverb", "RP": "adverb", "CD": "number",
}  # fmt: skip
JOINS_CLAUSES = {
    *("although", "as", "because", "ere", "if", "lest", "since", "so", "than", "that", "though", "till", "unless"),
    *("until", "whereas", "whether", "while", "whilst"),
}
CLITIC = r"['’](?:s|d|ll|re|ve|m|t|st)\b"
WORD = re.compile(rf"{CLITIC}|\w+(?:(?!{CLITIC})['’-]\w+)*|[^\w\s]", re.IGNORECASE)


def text_pieces(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """The text that each token adds; a character of several tokens stands at the last of them, "" at the others."""
    pieces: list[str] = []
    begin = read = 0
    for end in range(1, len(tokens) + 1):
        before, text = (
            str(tokenizer.decode(tokens[begin:stop], clean_up_tokenization_spaces=False)) for stop in (read, end)
        )
        if text.endswith("�") and end < len(tokens):  # in the midst of a character
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        begin, read = read, end
    return pieces


@dataclass(frozen=True)
class Word:
    """A word of a text, where it begins there, and its class."""

    text: str
    begin: int
    kind: str


def find_words(text: str) -> list[Word]:
    """Words and punctuation marks with their classes, in order; clitics such as 'll are words of their own."""
    found = list(WORD.finditer(text))
    if not found:
        return []
    tagged = PatternTagger().tag(" ".join(match.group() for match in found), tokenize=False)
    if len(tagged) != len(found):
        raise RuntimeError(f"the tagger gave {len(tagged)} tags for {len(found)} words")
    return [
        Word(match.group(), match.start(), word_class(match.group(), tag))
        for match, (_, tag) in zip(found, tagged, strict=True)
    ]


def word_class(word: str, tag: str) -> str:
    """One of CLASSES for a word with its Penn tag."""
    if not any(character.isalnum() for character in word):
        return "punctuation"
    if tag == "IN" and word.lower() in JOINS_CLAUSES:
        return "connective"
    if word.isdecimal():
        return "number"
    return next((kind for penn, kind in PENN.items() if tag.startswith(penn)), "other word")


@dataclass(frozen=True)
class Passage:
    """Tokens of a text: what each adds to it, the class of each, and the whole word it belongs to."""

    pieces: list[str]
    classes: list[str]
    words: list[str]


def read_passage(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> Passage:
    """A token that begins a word has the word's class, one that goes on with it is "inside a word"."""
    pieces = text_pieces(tokenizer, tokens)
    found = find_words("".join(pieces))
    begins = [word.begin for word in found]
    classes, words, place = [], [], 0
    for piece in pieces:
        first = place + len(piece) - len(piece.lstrip())
        place += len(piece)
        if not piece.strip():
            classes.append("space" if piece else "inside a word")
            words.append(shown(piece))
            continue
        word = found[bisect_right(begins, first) - 1]
        classes.append(word.kind if first == word.begin else "inside a word")
        words.append(word.text)
    return Passage(pieces, classes, words)


def shown(piece: str) -> str:
    """A token in a table: spaces around a word left out, those that are all of it spelled."""
    if not piece:
        return "(part of a character)"
    return piece.strip() or repr(piece)[1:-1].replace(" ", "␣")
