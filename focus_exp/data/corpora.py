"""From a data configuration to the token streams of train, validation and test."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from focus_exp.assets import Provenance, build_once, choose_source, why_embedded
from focus_exp.config import DataConfig
from focus_exp.data import addresses, books, files, hub
from focus_exp.data.tokens import (
    TOKEN_FORMAT,
    Document,
    TokenStream,
    read_stream,
    tokenizer_fingerprint,
    write_stream,
)
from focus_exp.errors import UserError, first_line
from focus_exp.shipped import is_shipped

SPECIAL_TOKENS = "special_tokens.json"
SPLITS = ("train", "validation", "test")
# corpora that a package carries; the first stands in for what the hub would have
EMBEDDED = {"books": books, "addresses": addresses}


@dataclass(frozen=True)
class Corpus:
    """The token streams of the three splits and where their text came from.

    special_tokens: how many tokens are special ones because the text holds their strings.
    """

    train: TokenStream
    validation: TokenStream
    test: TokenStream
    provenance: Provenance
    special_tokens: int = 0


@dataclass(frozen=True)
class Source:
    """Text not read yet: `identity` tells it apart from all other text, `open` gives its provenance and reader."""

    identity: dict[str, Any]
    open: Callable[[], tuple[Provenance, Callable[[str], Iterable[Document]]]]


def load_corpus(cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, *, assets: str, cache: Path) -> Corpus:
    """Tokenise the corpus, or find it tokenised in `cache`.

    max_train_tokens caps train, max_test_tokens caps test and validation. Raises UserError for text that is missing,
    unreadable or not to be had under the policy `assets` (auto, hub or embedded).
    """

    def folder_of(source: Source) -> Path:
        return cache / "tokens" / _fingerprint(source.identity, cfg, tokenizer)

    source = _source(cfg, assets, cache, lambda candidate: folder_of(candidate).is_dir())
    folder = folder_of(source)
    build_once(folder, lambda new: _tokenise(source, cfg, tokenizer, new), _damage)
    stored = _stored(folder)
    # files are known before they are read, and may have moved since they were tokenised
    found = source.open()[0] if cfg.source == "files" else stored
    provenance = replace(found, requested=_requested(cfg), fingerprint=folder.name)
    if provenance.source == "embedded" and cfg.source == "hub":
        provenance = replace(provenance, substitution=why_embedded(assets, books.NAME, provenance.requested))
    train, validation, test = (read_stream(folder, split, f"{split} split of {provenance.used}") for split in SPLITS)
    return Corpus(train, validation, test, provenance, _special_tokens(folder))


def _special_tokens(folder: Path) -> int:
    path = folder / SPECIAL_TOKENS  # text that an earlier version tokenised has none
    return int(path.read_text(encoding="utf-8")) if path.exists() else 0


def _damage(folder: Path) -> str | None:
    """What is wrong with the files of tokenised text; None where they fit each other."""
    try:
        _stored(folder)
        for split in SPLITS:
            read_stream(folder, split, split)
    except (OSError, EOFError, ValueError, TypeError) as error:
        return first_line(error)
    return None


def _stored(folder: Path) -> Provenance:
    return Provenance(**json.loads((folder / "provenance.json").read_text(encoding="utf-8")))


def _tokenise(source: Source, cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    provenance, documents = source.open()
    special = 0
    for split in SPLITS:
        limit = cfg.max_train_tokens if split == "train" else cfg.max_test_tokens
        special += write_stream(folder, split, documents(split), tokenizer, limit, cfg.split_special_tokens)
    (folder / SPECIAL_TOKENS).write_text(json.dumps(special), encoding="utf-8")
    (folder / "provenance.json").write_text(json.dumps(asdict(provenance)), encoding="utf-8")


def _fingerprint(identity: dict[str, Any], cfg: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    caps = [cfg.max_train_tokens, cfg.max_test_tokens, *(["split_special_tokens"] if cfg.split_special_tokens else [])]
    key = json.dumps([TOKEN_FORMAT, identity, tokenizer_fingerprint(tokenizer), caps], sort_keys=True)
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _requested(cfg: DataConfig) -> str:
    if cfg.source == "hub":
        return f"{cfg.hub_id}/{cfg.subset}" if cfg.subset else str(cfg.hub_id)
    return EMBEDDED[cfg.source].NAME if cfg.source in EMBEDDED else str(cfg.files)


def _source(cfg: DataConfig, policy: str, cache: Path, tokenised: Callable[[Source], bool]) -> Source:
    if cfg.source in EMBEDDED:
        return _embedded(cfg.source, cache)
    if cfg.source == "files":
        return _files(cfg)
    if cfg.source != "hub":
        raise UserError(f"data.source={cfg.source} is unknown: choose hub, files, {' or '.join(EMBEDDED)}.")
    if not cfg.hub_id:
        raise UserError("data.source=hub needs data.hub_id, the data set's name on the hub.")
    requested = _requested(cfg)
    identity = {"hub": cfg.hub_id, "subset": cfg.subset, "revision": cfg.revision, "column": cfg.text_column}
    source = Source(identity, lambda: hub.open_dataset(cfg, requested, origin))
    known = is_shipped("data", cfg.hub_id)
    origin = choose_source(policy, requested, lambda: tokenised(source) or hub.in_cache(cfg), known)
    return _embedded("books", cache) if origin == "embedded" else source


def _embedded(name: str, cache: Path) -> Source:
    text = EMBEDDED[name]
    provenance = Provenance(text.NAME, text.NAME, "embedded", text.PACKAGE.version, licence=text.LICENCE)
    return Source(text.IDENTITY, lambda: (provenance, lambda split: text.read(cache, split)))


def _files(cfg: DataConfig) -> Source:
    found = files.find_texts(cfg.files)
    rule = "split by file" if len(found) >= 3 else "each text split 90/5/5 from its start to its end"
    identity: dict[str, Any] = {"files": [[text.name, text.digest] for text in found]}
    if any(text.has_lines for text in found):
        rule = "split by document, one a line, fewer than three each split 90/5/5"
        identity |= {"column": cfg.text_column, "copies": "but for white space at their ends"}
    used = f"{cfg.files} ({len(found)} text file{'s' * (len(found) > 1)}, {rule})"
    provenance = Provenance(str(cfg.files), used, "local", revision=files.revision_of(found))
    return Source(identity, lambda: (provenance, lambda split: files.read_texts(found, split, cfg.text_column)))
