"""One passage: its words, its groups, and the distant pairs that share one."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from textblob.taggers import PatternTagger
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.selection import Selection, Sequence, base_mask_or_self, fold_heads, group_mask, local_mask
from focus_exp.models.methods import observe_selections
from focus_exp.results.measurement import Measurement
from focus_exp.storage import replace_file
from focus_exp.training.precision import Precision

TAGGER = f"the tagger of textblob {version('textblob')} (Pattern's lexicon and rules, made from modern English)"
CLASSES = (
    *("punctuation", "determiner", "preposition", "connective", "pronoun", "verb", "noun", "adjective", "adverb"),
    *("number", "other word", "inside a word", "space"),
)
# by how the Penn tag begins; IN is split, because Penn has one tag for "of" and for "because"
PENN = {
    "DT": "determiner", "PDT": "determiner", "WDT": "determiner", "IN": "preposition", "TO": "preposition",
    "CC": "connective", "WRB": "connective", "PRP": "pronoun", "WP": "pronoun", "EX": "pronoun", "VB": "verb",
    "MD": "verb", "NN": "noun", "JJ": "adjective", "RB": "adverb", "RP": "adverb", "CD": "number",
}  # fmt: skip
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


@dataclass(frozen=True)
class Passage:
    """Tokens of a text: the piece that each adds, its class and its word."""

    pieces: list[str]
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
            words.append(format_piece(piece))
            continue
        word = text_words[bisect_right(begins, first) - 1]
        classes.append(word.kind if first == word.begin else "inside a word")
        words.append(word.text)
    return Passage(pieces, classes, words)


def format_piece(piece: str) -> str:
    """Return a token as tables show it: without outer spaces, or visible spaces."""
    if not piece:
        return "(part of a character)"
    return piece.strip() or repr(piece)[1:-1].replace(" ", "␣")


class Grouping(NamedTuple):
    """A layer, or one of its key/value heads with groups of its own."""

    layer: int
    head: int | None = None


def split_heads(layer: int, selection: Selection) -> dict[Grouping, Selection]:
    """Return the selection of one sequence for each grouping; {} without groups."""
    if selection.assignment is None:
        return {}
    rows, _, heads = fold_heads(selection, Sequence.plain(1, selection.assignment.shape[-2]))
    if heads == 1:
        return {Grouping(layer): rows}

    def take(head: int) -> Selection:
        tensors: dict[str, Any] = {n: x[head : head + 1] for n, x in vars(rows).items() if isinstance(x, Tensor)}
        return replace(rows, **tensors)

    return {Grouping(layer, head): take(head) for head in range(heads)}


@dataclass(frozen=True)
class RoutedPassage:
    """Groups of one layer or head on a passage of T tokens.

    selection: of batch size 1. distant: (T, T) bool, visible pairs beyond window and sinks.
    """

    selection: Selection
    distant: Tensor

    @property
    def kept(self) -> Tensor:
        """Return the distant pairs (T, T) that hard routing keeps."""
        length = len(self.distant)
        return self.distant & group_mask(self.selection, slice(0, length), length)[0]

    @property
    def affinity(self) -> Tensor:
        """Return g_i . g_j of all pairs (T, T)."""
        assert self.selection.assignment is not None
        return (self.selection.assignment @ self.selection.effective_key_assignment.transpose(-1, -2))[0]


@torch.no_grad()
def route_passage(model: PreTrainedModel, tokens: Tensor, precision: Precision) -> dict[Grouping, RoutedPassage]:
    """Run `tokens` (T,) with hard routing; return the layers that have groups."""
    routed: dict[Grouping, RoutedPassage] = {}
    rows = slice(0, len(tokens))

    def store(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        visible = base_mask_or_self(sequence, rows, len(tokens))[0]
        distant = visible & ~local_mask(sequence, rows, len(tokens), method.window, method.sinks)[0]
        routed.update({grouping: RoutedPassage(s, distant) for grouping, s in split_heads(layer, selection).items()})

    with precision.context(), observe_selections(model, store):
        model(input_ids=tokens[None].to(model.device), use_cache=False, logits_to_keep=1)
    return routed


def make_measurement(
    metric: str, value: float | None, unit: str = "fraction", variant: str = "router", **settings: Any
) -> Measurement:
    return Measurement(variant=variant, metric=metric, value=value, unit=unit, settings=settings)


def describe_passage(routed: dict[Grouping, RoutedPassage], passage: Passage, listed: int) -> Iterator[Measurement]:
    """Yield the density of the distant pairs of each layer, and `listed` kept ones of the highest affinity."""
    for grouping, layer in routed.items():
        make: Callable[..., Measurement] = partial(make_measurement, **grouping._asdict())
        distant = int(layer.distant.sum())
        yield make("passage_distant_density", float(layer.kept.sum()) / distant if distant else None)
        for query, key, affinity in best_pairs(layer.affinity, layer.kept, listed):
            words = {"query_word": passage.words[query], "key_word": passage.words[key]}
            yield make("pair_affinity", affinity, "", query=query, key=key, **words)


def best_pairs(affinity: Tensor, kept: Tensor, number: int) -> list[tuple[int, int, float]]:
    """Return the queries with the highest affinity (T, T) to a kept key, that key and the affinity; no key twice."""
    values, keys = affinity.masked_fill(~kept, -1.0).max(-1)
    best: dict[int, tuple[int, int, float]] = {}  # by key
    for query in values.sort(descending=True, stable=True).indices.tolist():
        if len(best) == number or values[query] <= 0:
            break
        key = int(keys[query])
        best.setdefault(key, (query, key, float(values[query])))
    return [*best.values()]


def write_passage(path: Path, routed: dict[Grouping, RoutedPassage], passage: Passage) -> None:
    """Write the data of passage.html: pieces, and each token's group."""
    layers = [
        {**grouping._asdict(), "groups": layer.selection.effective_key_assignment[0].argmax(-1).tolist()}
        for grouping, layer in routed.items()
    ]
    content = {"pieces": passage.pieces, "layers": layers}
    replace_file(path, json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode())
