"""Token streams on disk, and the blocks that training and evaluation read from them."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from focus_exp.errors import UserError
from focus_exp.progress import ProgressBar

TOKEN_FORMAT = 1
LEFT_OUT = 0.05  # of the tokens: so many are not passed over without a word
BATCH_CHARACTERS = 1_000_000

# a document's name and text
Document = tuple[str, str]


@dataclass(frozen=True)
class TokenStream:
    """The documents of one split, end to end; each document ends with the tokenizer's end-of-text token."""

    name: str
    tokens: np.ndarray  # int32 [tokens], memory-mapped
    starts: np.ndarray  # int64 [documents + 1]: document i is tokens[starts[i]:starts[i + 1]]
    documents: list[str]

    def __len__(self) -> int:
        return len(self.tokens)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over all that decides how text becomes tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else dict(tokenizer.get_vocab())
    for key in ("truncation", "padding"):  # left behind by the last call
        state.pop(key, None)
    text = json.dumps([type(tokenizer).__name__, tokenizer.eos_token_id, state], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def bos_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that the tokenizer itself puts before plain text, if any."""
    plain = list(tokenizer("probe", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("probe")["input_ids"])
    return full[0] if full[1 : len(plain) + 1] == plain and full[: len(plain)] != plain else None


def write_stream(
    folder: Path,
    split: str,
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    split_special_tokens: bool = False,
) -> int:
    """Tokenise `documents` into `folder` until `limit` tokens are there.

    Args:
        split_special_tokens: as of transformers' tokenizers: the string of a special token becomes ordinary tokens.

    Returns:
        The number of special tokens that strings in the text became.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("The tokenizer has no end-of-text token to put between documents: set eos_token in its config.")
    names: list[str] = []
    starts, total, special = [0], 0, 0
    ids_of_special = special_ids(tokenizer)
    progress = ProgressBar(total=limit, desc=f"tokenising {split}", unit="token", unit_scale=True, delay=2)
    with progress, (folder / f"{split}.bin").open("wb") as file:
        for name, ids in _tokenised(documents, tokenizer, split_special_tokens):
            kept = ids if limit is None else ids[: limit - total]
            file.write(np.asarray(kept, dtype=np.int32).tobytes())  # tofile hides the reason of a failed write
            names.append(name)
            total += len(kept)
            special += sum(token in ids_of_special for token in kept[:-1])
            starts.append(total)
            progress.update(len(kept))
            if total == limit:
                break
    content = io.BytesIO()
    np.save(content, np.asarray(starts, dtype=np.int64))
    (folder / f"{split}.starts.npy").write_bytes(content.getvalue())
    (folder / f"{split}.documents.json").write_text(json.dumps(names), encoding="utf-8")
    return special


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids that stand for no text: all special tokens but the unknown one."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return (added | set(tokenizer.all_special_ids)) - {tokenizer.unk_token_id}


def _tokenised(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, split_special_tokens: bool
) -> Iterator[tuple[str, list[int]]]:
    for batch in _batches(documents):
        texts = [text for _, text in batch]
        encoded = tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False,
            split_special_tokens=split_special_tokens,
        )  # fmt: skip
        for (name, _), ids in zip(batch, encoded["input_ids"], strict=True):
            yield name, [*ids, tokenizer.eos_token_id]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        if not document[1].strip():
            continue
        batch.append(document)
        size += len(document[1])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def read_stream(folder: Path, split: str, name: str) -> TokenStream:
    """Open what `write_stream` wrote; the tokens stay on disk. ValueError where its files do not fit each other."""
    path = folder / f"{split}.bin"
    empty = path.stat().st_size == 0  # which cannot be mapped
    tokens = np.zeros(0, np.int32) if empty else np.memmap(path, dtype=np.int32, mode="r")
    documents = json.loads((folder / f"{split}.documents.json").read_text(encoding="utf-8"))
    starts = np.load(folder / f"{split}.starts.npy", allow_pickle=False)
    if (len(tokens), len(documents)) != (starts[-1], len(starts) - 1):
        raise ValueError(f"{path.name} holds {len(tokens)} tokens of {starts[-1]}, in {len(documents)} documents")
    return TokenStream(name, tokens, starts, documents)


class Blocks(Dataset):
    """Blocks of `seq_len` tokens, `stride` text tokens apart (default: disjoint).

    With `bos` every block starts with it and has one text token less. With `cross_documents` the stream is cut as one
    piece; otherwise a block stays inside one document. Tails shorter than a block are dropped.

    An item holds input_ids and document_ids, int64 [seq_len], and scored_from: the index of the first token to
    score. All tokens of a document's first block are scored (save one that nothing predicts); later overlapping
    blocks score only what the block before did not. Raises UserError when there is not one block.
    """

    def __init__(
        self,
        stream: TokenStream,
        seq_len: int,
        *,
        stride: int | None = None,
        bos: int | None = None,
        cross_documents: bool,
    ):
        self.stream, self.seq_len, self.bos = stream, seq_len, bos
        self.length = seq_len - (bos is not None)
        stride = self.length if stride is None else stride
        if self.length < 1 or not 1 <= stride <= self.length:
            raise UserError(
                f"stride {stride} does not fit a block of {seq_len} tokens: it must lie between 1 and {self.length}."
            )
        self.scored_later = max(1, seq_len - stride)
        edges = np.asarray([0, len(stream)]) if cross_documents else stream.starts
        counts = np.maximum(0, (np.diff(edges) - self.length) // stride + 1)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        index_in_span = np.arange(len(firsts)) - firsts
        self.is_first = index_in_span == 0
        self.starts = np.repeat(edges[:-1], counts) + index_in_span * stride
        self.document = np.searchsorted(stream.starts, self.starts, side="right") - 1  # in which each begins
        if not len(self.starts):
            what = "do not fill" if cross_documents else "have no document that fills"
            raise UserError(
                f"{stream.name}: its {len(stream)} tokens {what} one block of {seq_len}.\n"
                "Use a smaller data.seq_len or eval.seq_len, or more text."
            )

    def __len__(self) -> int:
        return len(self.starts)

    def left_out(self, key: str) -> Iterator[str]:
        """That many tokens are of documents shorter than a block, which `key` sets, where blocks stay inside one."""
        lengths = np.diff(self.stream.starts)
        short = np.delete(lengths, np.unique(self.document))
        if (share := short.sum() / len(self.stream)) > LEFT_OUT:
            yield (
                f"{np.count_nonzero(short)} of {np.count_nonzero(lengths)} held-out documents, {share:.0%} of the "
                f"tokens, are shorter than {key}={self.seq_len} and not scored; a smaller one scores more of them"
            )

    def places(self, indices: list[int]) -> list[tuple[str, int]]:
        """Of every block the document in which it begins, and the tokens of that document before it."""
        found = self.document[indices]
        offsets = self.starts[indices] - self.stream.starts[found]
        return [(self.stream.documents[one], int(offset)) for one, offset in zip(found, offsets, strict=True)]

    def spread(self, count: int | None) -> list[int]:
        """`count` blocks (default: all), of every document as many as of any other while it has them, evenly spaced."""
        if count is None or count >= len(self):
            return list(range(len(self)))
        blocks = [np.flatnonzero(self.document == document) for document in np.unique(self.document)]
        taken = np.zeros(len(blocks), dtype=np.int64)
        while left := count - taken.sum():
            more = [number for number, own in enumerate(blocks) if taken[number] < len(own)]
            taken[[more[i * len(more) // left] for i in range(left)] if left < len(more) else more] += 1
        middles = (((np.arange(n) + 0.5) * len(own) / n).astype(int) for own, n in zip(blocks, taken, strict=True))
        return sorted(int(own[i]) for own, chosen in zip(blocks, middles, strict=True) for i in chosen)

    def sample(self, count: int, seed: int) -> list[Tensor]:
        """The input_ids of up to `count` blocks, drawn without replacement."""
        chosen = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count]
        return [self[int(i)]["input_ids"] for i in chosen]

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = int(self.starts[index])
        positions = np.arange(start, start + self.length)
        tokens = np.asarray(self.stream.tokens[start : start + self.length], dtype=np.int64)
        documents = np.searchsorted(self.stream.starts, positions, side="right") - 1
        if self.bos is not None:
            tokens = np.concatenate([[self.bos], tokens])
            documents = np.concatenate([documents[:1], documents])
        return {
            "input_ids": torch.from_numpy(tokens),
            "document_ids": torch.from_numpy(documents),
            "scored_from": 1 if self.is_first[index] else self.scored_later,
        }
