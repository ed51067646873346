"""One passage: its words, and the base's attention that hard routing prunes."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from textblob.taggers import PatternTagger
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.dense import scores, weights
from focus_exp.attention.selection import (
    AttentionArgs,
    Selection,
    Sequence,
    base_mask_or_self,
    fold_heads,
    group_mask,
    local_mask,
)
from focus_exp.evaluation.perplexity import token_losses
from focus_exp.models.methods import attached_methods, disable_method, observe_selections, swap_methods
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


Keys = tuple[Tensor, Tensor, Tensor]  # index, attention mass and affinity g_i . g_j of one key of each query (T,)


@dataclass
class AttentionMass:
    """Attention mass under one grouping, averaged over the heads that share it.

    near, kept, cut: (T,) mass of each query on window and sinks, on kept and on pruned distant keys; sums to 1.
    heavy_keys, close_keys: the kept distant key of most mass and of highest affinity, 0 and -1 where there is none.
    density: of the distant pairs, None without any.
    """

    near: Tensor
    kept: Tensor
    cut: Tensor
    heavy_keys: Keys
    close_keys: Keys
    density: float | None

    @staticmethod
    def measure(mass: Tensor, selection: Selection, near: Tensor, distant: Tensor) -> AttentionMass:
        """Split attention `mass` (T, T) by groups; near, distant: (T, T) masks."""
        assert selection.assignment is not None
        same = group_mask(selection, slice(0, len(mass)), len(mass))[0]
        affinity = (selection.assignment @ selection.effective_key_assignment.transpose(-1, -2))[0]
        kept, cut = distant & same, distant & ~same

        def take(index: Tensor, default: float) -> Keys:
            is_kept = kept.gather(-1, index)
            keys = index, mass.gather(-1, index) * is_kept, affinity.gather(-1, index).where(is_kept, default)
            return keys[0][:, 0].cpu(), keys[1][:, 0].cpu(), keys[2][:, 0].cpu()

        return AttentionMass(
            near=(mass * near).sum(-1).cpu(),
            kept=(mass * kept).sum(-1).cpu(),
            cut=(mass * cut).sum(-1).cpu(),
            heavy_keys=take((mass * kept).argmax(-1, keepdim=True), 0.0),
            close_keys=take(affinity.masked_fill(~kept, -1.0).argmax(-1, keepdim=True), -1.0),
            density=float(kept.sum() / distant.sum()) if distant.any() else None,
        )


class MassProbe(AttentionMethod):
    """Full attention that measures its mass under the groups of another method."""

    def __init__(self, shape: LayerShape, window: int, sinks: int, selections: Mapping[Grouping, Selection]) -> None:
        super().__init__(shape, window, sinks)
        self.selections = selections
        self.masses: dict[Grouping, AttentionMass] = {}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, sequence: Sequence, args: AttentionArgs
    ) -> Tensor:
        """Return full attention (1, H, T, D)."""
        length, rows = q.shape[2], slice(0, q.shape[2])
        visible = base_mask_or_self(sequence, rows, length)
        logits = scores(q, k, args).masked_fill(~visible[:, None], float("-inf"))
        attention = weights(logits, args.sink_logits)
        near = (local_mask(sequence, rows, length, self.window, self.sinks) & visible)[0]
        per_grouping = attention[0].unflatten(0, (len(self.selections), -1)).mean(1)
        for (grouping, groups), mass in zip(self.selections.items(), per_grouping, strict=True):
            self.masses[grouping] = AttentionMass.measure(mass, groups, near, visible[0] & ~near)
        return attention.to(v.dtype) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


@dataclass
class PassageAttention:
    """A passage under hard routing and full attention.

    nll_full, nll_hard: (T,) nats, 0 for the first token. selections, masses: of the layers with groups.
    """

    nll_full: Tensor
    nll_hard: Tensor
    selections: dict[Grouping, Selection] = field(default_factory=dict)
    masses: dict[Grouping, AttentionMass] = field(default_factory=dict)


@torch.no_grad()
def measure_passage(model: PreTrainedModel, tokens: Tensor, precision: Precision) -> PassageAttention:
    """Run `tokens` (T,) with hard routing and with full attention.

    The pairs are those that hard routing prunes while the model runs with it; the attention is the base's own.
    """
    batch = tokens[None].to(model.device)
    selections: dict[int, dict[Grouping, Selection]] = {}

    def store(layer: int, method: AttentionMethod, selection: Selection, sequence: Sequence) -> None:
        if groups := split_heads(layer, selection):
            selections[layer] = groups

    with precision.context():
        with observe_selections(model, store):
            hard = token_losses(model, batch)[0].cpu()
        with disable_method(model):
            full = token_losses(model, batch)[0].cpu()
        probes: dict[int, Any] = {
            index: MassProbe(method.shape, method.window, method.sinks, selections[index])
            for index, method in attached_methods(model).items()
            if index in selections
        }
        with swap_methods(model, probes):
            model(input_ids=batch, use_cache=False, logits_to_keep=1)
    masses = {grouping: mass for probe in probes.values() for grouping, mass in probe.masses.items()}
    return PassageAttention(full, hard, {g: s for groups in selections.values() for g, s in groups.items()}, masses)


def make_measurement(
    metric: str, value: float | None, unit: str = "fraction", variant: str = "router", **settings: Any
) -> Measurement:
    return Measurement(variant=variant, metric=metric, value=value, unit=unit, settings=settings)


def describe_passage(result: PassageAttention, passage: Passage, listed: int) -> Iterator[Measurement]:
    """Yield the base's attention mass on the groups, and `listed` pairs per layer.

    near + kept + cut mass is 1.
    """
    for grouping, mass in result.masses.items():
        make: Callable[..., Measurement] = partial(make_measurement, **grouping._asdict())
        yield make("passage_distant_density", mass.density)
        for where in ("near", "kept", "cut"):
            yield make("attention_mass", float(getattr(mass, where).mean()), pairs=where)
        for by, keys, number in (
            ("affinity", mass.close_keys, listed - listed // 2), ("mass", mass.heavy_keys, listed // 2)
        ):  # fmt: skip
            for query, key in best_pairs(keys, by, number):
                words = {"query_word": passage.words[query], "key_word": passage.words[key]}
                pair = {"query": query, "key": key, **words, "by": by}
                yield make("pair_affinity", float(keys[2][query]), "", **pair)
                yield make("pair_attention_mass", float(keys[1][query]), **pair)


def best_pairs(keys: Keys, by: str, number: int) -> list[tuple[int, int]]:
    """Return the highest (query, key) pairs, no key twice."""
    indices, mass, affinity = keys
    measure = mass if by == "mass" else affinity
    queries: dict[int, int] = {}  # by key
    for query in measure.sort(descending=True, stable=True).indices.tolist():
        if len(queries) == number or measure[query] <= 0:
            break
        queries.setdefault(int(indices[query]), query)
    return [(query, key) for key, query in queries.items()]


def write_passage(path: Path, result: PassageAttention, passage: Passage) -> None:
    """Write the data of passage.html: pieces, and each token's group."""
    layers = [
        {"layer": layer, "head": head, "groups": selection.effective_key_assignment[0].argmax(-1).tolist()}
        for (layer, head), selection in result.selections.items()
    ]
    content = {"pieces": passage.pieces, "layers": layers}
    replace_file(path, json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode())
