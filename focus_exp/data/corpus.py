"""Load a corpus from files, the Hub or a package, tokenized once."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import dataset_info
from transformers import PreTrainedTokenizerBase

from focus_exp.assets import Provenance, build_once, explain_substitution, hub_reachable, uses_embedded
from focus_exp.config import DataConfig, data_set, is_shipped
from focus_exp.data import texts
from focus_exp.data.books import EMBEDDED
from focus_exp.data.hidden_facts import hide_facts
from focus_exp.data.packing import TOKEN_FORMAT, Document, TokenStream, hash_tokenizer, read_stream, write_stream
from focus_exp.errors import UserError, first_line

log = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
# where a Hub data set lacks a split, one document in 50 of train is held out for it
HELD_OUT_EVERY = 50
HELD_OUT_CHARACTERS = 8_000_000  # of a split that is held out: of each, 50 are read
HUB_TEST_TOKENS = 16_777_216  # validation and test tokens of a Hub data set
HELD_OUT_INDEX = {"validation": HELD_OUT_EVERY - 2, "test": HELD_OUT_EVERY - 1}
WIKITEXT_TITLE = re.compile(r" = (?!= ).+ = \n?")
Reader = Callable[[str], Iterable[Document]]


@dataclass(frozen=True)
class Corpus:
    """The token streams of the three splits and where their text came from."""

    train: TokenStream
    validation: TokenStream
    test: TokenStream
    provenance: Provenance


@dataclass(frozen=True)
class TextSource:
    """Text not read yet; `identity` is unique to it."""

    identity: dict[str, Any]
    open: Callable[[], tuple[Provenance, Reader]]
    is_streamed: bool = False  # from the Hub, as far as it is read


def load_corpus(
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    assets: str,
    cache: Path,
    train_tokens: int | None = None,
) -> Corpus:
    """Tokenize the corpus into `cache`, or read it from there.

    Args:
        cfg: max_train_tokens caps train, max_test_tokens caps validation and test. hidden_facts changes train only.
        assets: auto, hub or embedded.
        train_tokens: caps train of Hub data without max_train_tokens, which is read no further.

    Raises:
        UserError: the text is missing, unreadable or unavailable under the policy `assets`.
    """
    source = find_text(cfg, assets, cache)
    choices = [cfg.max_train_tokens, cfg.max_test_tokens], *(["hidden facts"] if cfg.hidden_facts else [])
    caps = [cfg.max_train_tokens, cfg.max_test_tokens]
    if source.is_streamed:
        caps = [cap or default for cap, default in zip(caps, (train_tokens, HUB_TEST_TOKENS), strict=True)]
    parts = [TOKEN_FORMAT, source.identity, hash_tokenizer(tokenizer)]
    fingerprint = hash_parts(*parts, *choices)  # however far runs of a comparison read the same text
    folder = cache / "tokens" / (hash_parts(*parts, *choices, *caps) if source.is_streamed else fingerprint)

    def tokenize(folder: Path) -> None:
        provenance, read = source.open()
        for split in SPLITS:
            limit = caps[0] if split == "train" else caps[1]
            documents = read(split)
            if cfg.hidden_facts and split == "train":
                documents = ((name, hide_facts(name, text)) for name, text in documents)
            write_stream(folder, split, documents, tokenizer, limit)
        (folder / "provenance.json").write_text(json.dumps(asdict(provenance)), encoding="utf-8")

    build_once(folder, tokenize)
    # files may have moved since they were tokenized
    stored = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    provenance = source.open()[0] if cfg.source == "files" else Provenance(**stored)
    provenance = replace(provenance, requested=requested_name(cfg), fingerprint=fingerprint)
    if cfg.hidden_facts:
        provenance = replace(provenance, used=f"{provenance.used} (facts hidden in the training text)")
    if provenance.source == "embedded" and cfg.source == "hub":
        provenance = replace(
            provenance, substitution=explain_substitution(assets, EMBEDDED["books"].name, provenance.requested)
        )
    streams = [read_stream(folder, split, f"{split} split of {provenance.used}") for split in SPLITS]
    counts = ", ".join(f"{len(stream.documents)} {split}" for split, stream in zip(SPLITS, streams, strict=True))
    log.info("data: %s, documents: %s", provenance.used, counts)
    train, validation, test = streams
    return Corpus(train, validation, test, provenance)


def hash_parts(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def requested_name(cfg: DataConfig) -> str:
    if cfg.source == "hub":
        return f"{cfg.hub_id}/{cfg.subset}" if cfg.subset else str(cfg.hub_id)
    if cfg.source == "mixture":
        return " + ".join(cfg.parts)
    return EMBEDDED[cfg.source].name if cfg.source in EMBEDDED else str(cfg.files)


def find_text(cfg: DataConfig, policy: str, cache: Path) -> TextSource:
    """Find the text that `cfg` names, or its embedded substitute."""
    if cfg.source == "files":
        return find_files(cfg)
    if cfg.source in EMBEDDED:
        return find_embedded(cfg.source, cache)
    if cfg.source == "mixture":
        sources = {part: find_text(data_set(part), policy, cache) for part in cfg.parts}
        if len({json.dumps(source.identity, sort_keys=True) for source in sources.values()}) < len(sources):
            raise UserError(
                f"data.parts must be different texts (got {','.join(cfg.parts)}, of which two are the same)."
            )
        return mix(sources)
    assert cfg.hub_id
    if uses_embedded(policy, "datasets", cfg.hub_id, is_shipped("data", cfg.hub_id)):
        return find_embedded("books", cache)
    identity = {"hub": cfg.hub_id, "subset": cfg.subset, "revision": cfg.revision, "column": cfg.text_column}
    identity |= {"split": cfg.split} if cfg.split else {}
    return TextSource(identity, lambda: open_dataset(cfg, requested_name(cfg)), is_streamed=True)


def find_embedded(name: str, cache: Path) -> TextSource:
    text = EMBEDDED[name]
    provenance = Provenance(text.name, text.name, "embedded", text.package.version, licence=text.licence)
    return TextSource(text.identity, lambda: (provenance, lambda split: text.read(cache, split)))


def find_files(cfg: DataConfig) -> TextSource:
    files = texts.find_texts(str(cfg.files))
    rule = "split by file" if len(files) >= 3 else "each text split 90/5/5 from its start to its end"
    identity: dict[str, Any] = {"files": [[file.name, file.digest] for file in files]}
    if any(file.has_rows for file in files):
        rule = "split by document, one a line, fewer than three each split 90/5/5"
        identity |= {"column": cfg.text_column, "copies": "but for white space at their ends"}
    used = f"{cfg.files} ({len(files)} text file{'s' * (len(files) > 1)}, {rule})"
    provenance = Provenance(str(cfg.files), used, "local", revision=texts.hash_texts(files))

    def read(split: str) -> Iterator[Document]:
        tokens = cfg.max_train_tokens if split == "train" else cfg.max_test_tokens
        return texts.read_split(files, split, cfg.text_column, tokens)

    return TextSource(identity, lambda: (provenance, read))


def mix(sources: dict[str, TextSource]) -> TextSource:
    """Mix documents: the next one is of the source with the fewest characters so far."""

    def open_sources() -> tuple[Provenance, Reader]:
        opened = {name: source.open() for name, source in sources.items()}
        origins = [origin for origin, _ in opened.values()]
        places = {origin.source for origin in origins}
        place = places.pop() if len(places) == 1 else "local"
        provenance = Provenance("mixture", f"mixture of {', '.join(origin.name for origin in origins)}", place)
        return provenance, lambda split: take_turns({name: iter(read(split)) for name, (_, read) in opened.items()})

    identity = {"mixture": [source.identity for source in sources.values()]}
    return TextSource(identity, open_sources, any(source.is_streamed for source in sources.values()))


def take_turns(documents: dict[str, Iterator[Document]]) -> Iterator[Document]:
    """Yield documents, named after their source, with as many characters of each source; then those left over."""
    taken = dict.fromkeys(documents, 0)
    while taken:
        source = min(taken, key=lambda name: taken[name])
        document = next(documents[source], None)
        if document is None:
            del taken[source]
            continue
        name, text = document
        taken[source] += len(text)
        yield f"{source}/{name}", text


def open_dataset(cfg: DataConfig, requested: str) -> tuple[Provenance, Reader]:
    """Open a Hub data set: streamed, or offline from the Hub's cache.

    Raises:
        UserError: the data set, its subset or its split does not exist.
    """
    import datasets

    is_online = hub_reachable()  # otherwise offline from here on
    assert cfg.hub_id
    try:
        revision = dataset_info(cfg.hub_id, revision=cfg.revision).sha if is_online else cfg.revision
        dataset = datasets.load_dataset(cfg.hub_id, cfg.subset, revision=revision, streaming=is_online)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{requested}: {first_line(error)}\n"
            "Check data.hub_id, data.subset and data.revision. A gated data set needs `hf auth login`. Or type "
            "assets=embedded."
        ) from error
    base, held_out = held_out_splits(dataset, cfg)
    rule = f" ({' and '.join(held_out)}: one document of {base} in {HELD_OUT_EVERY} each)" if held_out else ""
    return Provenance(requested, requested + rule, "hub", revision), lambda split: read_hub_split(dataset, split, cfg)


def held_out_splits(dataset: Mapping[str, Any], cfg: DataConfig) -> tuple[str, list[str]]:
    """Return the split of the data set that is divided, and the splits taken from it."""
    base = cfg.split or "train"
    held_out = [split for split in HELD_OUT_INDEX if cfg.split or split not in dataset]
    if base not in dataset:
        raise UserError(f"data.split must be one of {', '.join(dataset)} (got {base}).")
    return base, held_out


def read_hub_split(
    dataset: Mapping[str, Iterable[dict[str, Any]]], split: str, cfg: DataConfig
) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of `split`; a missing one is every 50th document, as far as HELD_OUT_CHARACTERS."""
    base, held_out = held_out_splits(dataset, cfg)
    source_split = split if split in dataset and not cfg.split else base
    rows = (texts.get_text(row, cfg.text_column, str(cfg.hub_id)) for row in dataset[source_split])
    left = HELD_OUT_CHARACTERS if split in held_out and cfg.max_test_tokens is None else math.inf
    for index, text in enumerate(join_articles(rows) if str(cfg.hub_id).endswith("wikitext") else rows):
        holder = next((name for name in held_out if index % HELD_OUT_EVERY == HELD_OUT_INDEX[name]), "train")
        if source_split != base or holder == split:
            yield f"{source_split}:{index}", text
            left -= len(text)
            if left <= 0:
                break


def join_articles(lines: Iterable[str]) -> Iterator[str]:
    """Join the rows of WikiText into articles at titles of the first level."""
    article: list[str] = []
    for line in lines:
        if WIKITEXT_TITLE.fullmatch(line) and article:
            yield "".join(article)
            article = []
        if article or line.strip():
            article.append(line)
    if article:
        yield "".join(article)
