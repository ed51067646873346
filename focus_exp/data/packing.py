"""Token streams on disk, and the sequences of fixed length read from them."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from focus_exp.errors import UserError
from focus_exp.progress import ProgressBar

log = logging.getLogger(__name__)

TOKEN_FORMAT = 1
MAX_UNSCORED = 0.05  # fraction of tokens in short documents that is not reported
MIN_UNITS = 3  # sequences or documents, for an interval
BATCH, BATCH_CHARACTERS = 64, 8_000_000  # documents tokenized at once, and their characters at most

PARALLELISM = "TOKENIZERS_PARALLELISM"

Document = tuple[str, str]  # name and text


@dataclass(frozen=True)
class TokenStream:
    """The documents of one split, end to end, each with an end-of-text token.

    tokens: int32 `[tokens]`, memory-mapped.
    starts: int64 `[documents + 1]`; document i is `tokens[starts[i]:starts[i + 1]]`.
    documents: their names.
    """

    name: str
    tokens: np.ndarray
    starts: np.ndarray
    documents: list[str]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def digest(self) -> str:
        """Return the hash of documents and tokens."""
        names = json.dumps([self.documents, self.starts.tolist()])
        return hashlib.sha256(names.encode() + self.tokens.tobytes()).hexdigest()


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash everything that decides how text becomes tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else dict(tokenizer.get_vocab())
    for key in ("truncation", "padding"):  # set by the last call
        state.pop(key, None)
    text = json.dumps([type(tokenizer).__name__, tokenizer.eos_token_id, state], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def find_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer itself puts before plain text."""
    plain = list(tokenizer("probe", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("probe")["input_ids"])
    ends = [end for end in range(len(full)) if full[end : end + len(plain)] == plain]
    if not ends:
        log.warning("sequences begin with no special token: the tokenizer puts some that cannot be told from its text")
    return full[: ends[0]] if ends else []


def write_stream(
    folder: Path,
    split: str,
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
) -> None:
    """Tokenize `documents` into `folder`, up to `limit` tokens."""
    if tokenizer.eos_token_id is None:
        raise UserError("The tokenizer has no end-of-text token to put between documents. Set eos_token in its config.")
    names: list[str] = []
    starts, total = [0], 0
    progress = ProgressBar(total=limit, desc=f"tokenizing {split}", unit="token", unit_scale=True, delay=2)
    with progress, tokenizer_threads(), (folder / f"{split}.bin").open("wb") as file:
        for name, ids in tokenize(documents, tokenizer):
            ids = ids if limit is None else ids[: limit - total]
            file.write(np.asarray(ids, dtype=np.int32).tobytes())  # tofile hides the reason of a failed write
            names.append(name)
            total += len(ids)
            starts.append(total)
            progress.update(len(ids))
            if total == limit:
                break
    content = io.BytesIO()
    np.save(content, np.asarray(starts, dtype=np.int64))
    (folder / f"{split}.starts.npy").write_bytes(content.getvalue())
    (folder / f"{split}.documents.json").write_text(json.dumps(names), encoding="utf-8")


def tokenize(documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[int]]]:
    """Yield name and token ids of each document that is not blank, with eos."""
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    for batch in make_batches(document for document in documents if document[1].strip()):
        encoded = tokenizer([text for _, text in batch], **options)
        for (name, _), ids in zip(batch, encoded["input_ids"], strict=True):
            yield name, [*ids, tokenizer.eos_token_id]


def make_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield documents to tokenize at once; none is asked for before it is needed."""
    batch, characters = list[Document](), 0
    for document in documents:
        batch.append(document)
        characters += len(document[1])
        if len(batch) == BATCH or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@contextmanager
def tokenizer_threads() -> Iterator[None]:
    """Let a fast tokenizer take all cores within the block."""
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "true"
    try:
        yield
    finally:
        os.environ.pop(PARALLELISM)
        os.environ |= {} if before is None else {PARALLELISM: before}


def read_stream(folder: Path, split: str, name: str) -> TokenStream:
    """Open a written stream, memory-mapped."""
    path = folder / f"{split}.bin"
    is_empty = path.stat().st_size == 0  # an empty file cannot be mapped
    tokens = np.zeros(0, np.int32) if is_empty else np.memmap(path, dtype=np.int32, mode="r")
    documents = json.loads((folder / f"{split}.documents.json").read_text(encoding="utf-8"))
    starts = np.load(folder / f"{split}.starts.npy", allow_pickle=False)
    return TokenStream(name, tokens, starts, documents)


class SequenceDataset(Dataset):
    """Sequences of `seq_len` tokens from a stream; shorter tails are dropped.

    An item has input_ids, int64 `[seq_len]`.

    Args:
        prefix: tokens that every sequence starts with, in place of as many tokens of text.
        cross_documents: whether a sequence may span documents.

    Raises:
        UserError: the stream has no sequence of that length.
    """

    def __init__(
        self,
        stream: TokenStream,
        seq_len: int,
        *,
        prefix: Iterable[int] = (),
        cross_documents: bool,
    ):
        self.stream, self.seq_len, self.prefix = stream, seq_len, [*prefix]
        self.length = seq_len - len(self.prefix)
        self.unscored = max(len(self.prefix), 1)  # first tokens of a sequence that are not predicted
        edges = np.asarray([0, len(stream)]) if cross_documents else stream.starts
        starts = [start for begin, end in pairwise(edges) for start in range(begin, end - self.length + 1, self.length)]
        self.starts = np.array(starts, dtype=np.int64)
        self.document = np.searchsorted(stream.starts, self.starts, side="right") - 1  # in which each starts
        if not len(self.starts):
            what = "do not fill" if cross_documents else "have no document that fills"
            raise UserError(
                f"{stream.name}: its {len(stream)} tokens {what} one sequence of {seq_len} tokens.\n"
                "Use a smaller data.seq_len or eval.seq_len, or more text."
            )

    def __len__(self) -> int:
        return len(self.starts)

    def length_warnings(self, key: str) -> Iterator[str]:
        """Yield what to say of text that is too short for `key`, the setting of `seq_len`."""
        lengths = np.diff(self.stream.starts)
        short = np.delete(lengths, np.unique(self.document))
        if (fraction := short.sum() / len(self.stream)) > MAX_UNSCORED:
            yield (
                f"{np.count_nonzero(short)} of {np.count_nonzero(lengths)} held-out documents, {fraction:.0%} of the "
                f"tokens, are shorter than {key}={self.seq_len} and not scored. A smaller one scores more of them."
            )
        if len(self) < MIN_UNITS:
            yield (
                f"{self.stream.name}: {len(self.stream):,} tokens are too few for an interval: {key}={self.seq_len} "
                f"needs {MIN_UNITS * self.seq_len:,} or more. Use more text, or a smaller {key}."
            )

    def locate(self, indices: list[int]) -> list[tuple[str, int]]:
        """Return the document of each sequence, and its offset there in tokens."""
        documents = self.document[indices]
        offsets = self.starts[indices] - self.stream.starts[documents]
        return [(self.stream.documents[i], int(offset)) for i, offset in zip(documents, offsets, strict=True)]

    def select_evenly(self, count: int | None) -> list[int]:
        """Select `count` sequences, evenly spaced, as many from each document."""
        if count is None or count >= len(self):
            return list(range(len(self)))
        groups = [np.flatnonzero(self.document == document) for document in np.unique(self.document)]
        taken = np.zeros(len(groups), dtype=np.int64)
        while left := count - taken.sum():
            more = [i for i, group in enumerate(groups) if taken[i] < len(group)]
            taken[[more[i * len(more) // left] for i in range(left)] if left < len(more) else more] += 1
        middles = (((np.arange(n) + 0.5) * len(group) / n).astype(int) for group, n in zip(groups, taken, strict=True))
        return sorted(int(group[i]) for group, chosen in zip(groups, middles, strict=True) for i in chosen)

    def sample(self, count: int, seed: int) -> list[Tensor]:
        """Draw the input_ids of up to `count` sequences, without replacement."""
        chosen = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count]
        return [self[int(i)]["input_ids"] for i in chosen]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = int(self.starts[index])
        tokens = np.asarray(self.stream.tokens[start : start + self.length], dtype=np.int64)
        return {"input_ids": torch.from_numpy(np.concatenate([np.array(self.prefix, np.int64), tokens]))}
