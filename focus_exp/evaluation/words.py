"""Word classes of tokens."""

from __future__ import annotations

import re
from bisect import bisect_right
from importlib.metadata import version
from typing import NamedTuple

from textblob.taggers import PatternTagger
from transformers import PreTrainedTokenizerBase

TAGGER = f"the tagger of textblob {version('textblob')} (Pattern's lexicon and rules, made from modern English)"
CLASSES = (
    *("punctuation", "determiner", "preposition", "connective", "pronoun", "verb", "noun", "adjective", "adverb"),
    *("number", "other word", "inside a word", "space"),
)
# by how the Penn tag begins; IN is split, because Penn has one tag for "of" and for "because"
TAGS = {
    "determiner": "DT PDT WDT",
    "preposition": "IN TO",
    "connective": "CC WRB",
    "pronoun": "PRP WP EX",
    "verb": "VB MD",
    "noun": "NN",
    "adjective": "JJ",
    "adverb": "RB RP",
    "number": "CD",
}
PENN = {tag: kind for kind, tags in TAGS.items() for tag in tags.split()}
SUBORDINATORS = {
    *("although", "as", "because", "ere", "if", "lest", "since", "so", "than", "that", "though", "till", "unless"),
    *("until", "whereas", "whether", "while", "whilst"),
}
CLITIC = r"['’](?:s|d|ll|re|ve|m|t|st)\b"
WORD = re.compile(rf"{CLITIC}|\w+(?:(?!{CLITIC})['’-]\w+)*|[^\w\s]", re.IGNORECASE)


class Word(NamedTuple):
    text: str
    begin: int  # in the text
    kind: str  # one of CLASSES


class Passage(NamedTuple):
    """Class and word of each token of a text."""

    classes: list[str]
    words: list[str]


def split_pieces(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """Return the text that each token adds, a character with its last token."""
    pieces: list[str] = []
    begin = read = 0
    for end in range(1, len(tokens) + 1):
        before, text = (
            str(tokenizer.decode(tokens[begin:stop], clean_up_tokenization_spaces=False)) for stop in (read, end)
        )
        if text.endswith("�") and end < len(tokens):  # inside a character
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        begin, read = read, end
    return pieces


def find_words(text: str) -> list[Word]:
    """Return words and punctuation marks; clitics such as 'll are words."""
    matches = list(WORD.finditer(text))
    tags = PatternTagger().tag(" ".join(match.group() for match in matches), tokenize=False) if matches else []
    return [
        Word(match.group(), match.start(), classify_word(match.group(), tag))
        for match, (_, tag) in zip(matches, tags, strict=True)
    ]


def classify_word(word: str, tag: str) -> str:
    """Return one of CLASSES for a word with its Penn tag."""
    if not any(character.isalnum() for character in word):
        return "punctuation"
    if tag == "IN" and word.lower() in SUBORDINATORS:
        return "connective"
    if word.isdecimal():
        return "number"
    return next((kind for penn, kind in PENN.items() if tag.startswith(penn)), "other word")


def read_passage(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> Passage:
    """Classify tokens: the first of a word has its class."""
    pieces = split_pieces(tokenizer, tokens)
    text_words = find_words("".join(pieces))
    begins = [word.begin for word in text_words]
    classes, words, place = [], [], 0
    for piece in pieces:
        first = place + len(piece) - len(piece.lstrip())
        place += len(piece)
        if not piece.strip():
            classes.append("space" if piece else "inside a word")
            words.append(piece)
            continue
        word = text_words[bisect_right(begins, first) - 1]
        classes.append(word.kind if first == word.begin else "inside a word")
        words.append(word.text)
    return Passage(classes, words)
