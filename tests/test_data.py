"""Splits, token streams, blocks and the order of batches."""

import errno
import hashlib
import json
import re
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

import focus_exp
from focus_exp import assets
from focus_exp.config import DataConfig
from focus_exp.data import (
    Blocks,
    ResumableLoader,
    TokenStream,
    addresses,
    books,
    bos_of,
    corpora,
    files,
    hub,
    load_corpus,
)
from focus_exp.data.books import WORKS, clean
from focus_exp.data.tokens import read_stream, write_stream
from focus_exp.errors import UserError
from focus_exp.models.random import byte_tokenizer

BOS = 999


def stream_of(lengths: list[int]) -> TokenStream:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenStream("stream", np.arange(starts[-1], dtype=np.int32), starts, [str(i) for i in range(len(lengths))])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(2, 12), st.booleans())
@settings(max_examples=60)
def test_training_blocks_hold_every_token_once_in_order(lengths, seq_len, with_bos):
    stream = stream_of(lengths)
    text = seq_len - with_bos
    if len(stream) < text:
        with pytest.raises(UserError, match="do not fill one block"):
            Blocks(stream, seq_len, bos=BOS if with_bos else None, cross_documents=True)
        return
    blocks = Blocks(stream, seq_len, bos=BOS if with_bos else None, cross_documents=True)
    items = [blocks[i] for i in range(len(blocks))]
    assert all((item["input_ids"][0] == BOS) == with_bos for item in items)
    tokens = torch.cat([item["input_ids"][with_bos:] for item in items])
    assert tokens.tolist() == list(range(len(stream) // text * text))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    documents = torch.cat([item["document_ids"][with_bos:] for item in items])
    assert documents.tolist() == owner[: len(tokens)].tolist()
    assert all(len(item["input_ids"]) == len(item["document_ids"]) == seq_len for item in items)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(3, 12), st.integers(1, 11), st.booleans())
@settings(max_examples=100)
def test_evaluation_scores_each_token_once(lengths, seq_len, stride, with_bos):
    stream = stream_of(lengths)
    text = seq_len - with_bos
    stride = min(stride, text)
    spans = [
        range(start, start + (length - text) // stride * stride + text)
        for start, length in zip(stream.starts, lengths, strict=False)
        if length >= text
    ]
    if not spans:
        return
    blocks = Blocks(stream, seq_len, stride=stride, bos=BOS if with_bos else None, cross_documents=False)
    scored: list[int] = []
    for i in range(len(blocks)):
        item = blocks[i]
        assert len(set(item["document_ids"].tolist())) == 1
        scored += item["input_ids"][item["scored_from"] :].tolist()
    # without BOS nothing predicts a document's first token, nor, in disjoint blocks, that of any block
    period = text if stride == text else len(stream)
    expected = [token for span in spans for token in span if with_bos or (token - span.start) % period]
    assert scored == expected


def test_stride_must_fit_the_block():
    with pytest.raises(UserError, match="stride 9"):
        Blocks(stream_of([30]), 8, stride=9, cross_documents=False)


def test_bos_is_what_the_tokenizer_prepends():
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    assert bos_of(tokenizer) is None
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    assert bos_of(tokenizer) == 256


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_resume_goes_on_with_the_very_next_batch(workers, stop):
    blocks = Blocks(stream_of([84]), 4, cross_documents=True)

    def order(loader, epochs, limit=None):
        batches = []
        for epoch in epochs:
            loader.order.set_epoch(epoch)
            for batch in loader:
                batches.append(batch["input_ids"][:, 0].tolist())
                if len(batches) == limit:
                    return batches
        return batches

    whole = order(ResumableLoader(blocks, 4, seed=3), range(2))
    first = ResumableLoader(blocks, 4, seed=3, workers=workers)
    begun = order(first, [0], stop)
    state = first.state_dict()
    torch.manual_seed(stop)
    second = ResumableLoader(blocks, 4, seed=3, workers=workers)
    second.load_state_dict(state)
    assert second.state_dict() == state and len(second) == 5
    assert begun + order(second, range(state["epoch"], 2)) == whole
    assert whole[:5] != whole[5:]


def test_ranks_see_disjoint_blocks():
    blocks = Blocks(stream_of([92]), 4, cross_documents=True)
    loaders = [ResumableLoader(blocks, 6, seed=0, rank=rank, world_size=3) for rank in range(3)]
    seen = [{int(x) for batch in loader for x in batch["input_ids"][:, 0]} for loader in loaders]
    assert len(set().union(*seen)) == sum(map(len, seen)) == 18
    assert len({len(loader) for loader in loaders}) == 1


def test_an_epoch_ends_with_a_whole_step():
    blocks = Blocks(stream_of([44]), 4, cross_documents=True)
    loader = ResumableLoader(blocks, 2, seed=0, accumulate=2)
    assert len(blocks) == 11 and len(loader) == len(list(loader)) == 4


def test_loader_errors():
    blocks = Blocks(stream_of([40]), 4, cross_documents=True)
    for sizes in ({"batch_size": 12}, {"batch_size": 4, "accumulate": 3}):
        with pytest.raises(UserError, match=r"less than one step of \d x \d"):
            ResumableLoader(blocks, seed=0, world_size=2, **sizes)
    for sizes in ({"batch_size": 3}, {"batch_size": 1, "accumulate": 5}):
        with pytest.raises(UserError, match=r"over 2 processes; make their product a multiple of 2"):
            ResumableLoader(blocks, seed=0, world_size=2, **sizes)
    state = ResumableLoader(blocks, 2, seed=0).state_dict()
    with pytest.raises(UserError, match="batch_size=2, this run has 5"):
        ResumableLoader(blocks, 5, seed=0).load_state_dict(state)


def files_config(path: Path, **fields) -> DataConfig:
    return DataConfig(name="files", source="files", files=str(path), **fields)


def load(cfg: DataConfig, cache: Path, policy: str = "auto") -> corpora.Corpus:
    return load_corpus(cfg, byte_tokenizer(), assets=policy, cache=cache)


def texts_of(stream: TokenStream) -> list[str]:
    spans = zip(stream.starts, stream.starts[1:], strict=False)
    return [byte_tokenizer().decode(stream.tokens[start : end - 1].tolist()) for start, end in spans]


def test_files_are_split_by_file_and_tokenised_once(tmp_path, monkeypatch):
    texts = {f"{i}.txt": f"text number {i} – ü\r\n" * 5 for i in range(5)}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "copy.txt").write_bytes(texts["0.txt"].encode())
    corpus = load(files_config(tmp_path), tmp_path / "cache")
    tokenizer = byte_tokenizer()
    found = {}
    for stream in (corpus.train, corpus.validation, corpus.test):
        assert stream.documents
        for name, start, end in zip(stream.documents, stream.starts, stream.starts[1:], strict=False):
            assert stream.tokens[end - 1] == tokenizer.eos_token_id
            found[name] = tokenizer.decode(stream.tokens[start : end - 1].tolist())
    read = {text.replace("\r\n", "\n") for text in texts.values()}
    assert len(found) == 5 and set(found.values()) == read
    assert "5 text files" in corpus.provenance.used

    monkeypatch.setattr(corpora, "write_stream", lambda *_: pytest.fail("tokenised twice"))
    again = load(files_config(tmp_path), tmp_path / "cache")
    assert again.provenance == corpus.provenance and np.array_equal(again.train.tokens, corpus.train.tokens)
    (tmp_path / "0.txt").write_text("changed")
    with pytest.raises(pytest.fail.Exception):
        load(files_config(tmp_path), tmp_path / "cache")
    assert not list((tmp_path / "cache" / "tokens").glob(".*.????????"))


def test_copies_of_a_file_are_not_both_trained_on_and_scored(tmp_path):
    text = "one novel\nof two lines\n"
    written = {
        "plain": text.encode(), "windows": b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
        "longer": f"\n{text} \n".encode(), "other": b"another", "third": b"a third", "mark alone": b"\xef\xbb\xbf\n",
    }  # fmt: skip
    for name, data in written.items():
        (tmp_path / f"{name}.txt").write_bytes(data)
    found = files.find_texts(str(tmp_path))
    assert sorted(each.path.stem for each in found) == ["longer", "other", "third"]
    assert {each.digest for each in found} == {hashlib.sha256(written[each.path.stem]).hexdigest() for each in found}


def test_copies_on_lines_are_not_both_trained_on_and_scored(tmp_path):
    """Of one another, and of files."""
    rows = [text for number in range(40) for text in (f"text {number}", f" text {number}\n", f"\ufefftext {number}")]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in rows))
    (tmp_path / "one.txt").write_text("text 7\n\n")
    corpus = load(files_config(tmp_path / "*.*"), tmp_path / "cache")
    streams = (corpus.train, corpus.validation, corpus.test)
    read = [text.strip(" \n\ufeff") for stream in streams for text in texts_of(stream)]
    assert len(read) == len(set(read)) == 40


def test_what_editors_keep_beside_a_text_is_not_read(tmp_path):
    (tmp_path / ".ipynb_checkpoints").mkdir()
    for name in ("1.md", "2.md", "3.md", ".ipynb_checkpoints/1-checkpoint.md", ".3.md"):
        (tmp_path / name).write_text(f"a text, {name}")
    assert sorted(text.name for text in files.find_texts(str(tmp_path))) == ["1.md", "2.md", "3.md"]
    assert [text.name for text in files.find_texts(str(tmp_path / ".ipynb_checkpoints"))] == ["1-checkpoint.md"]


def test_documents_too_short_to_be_scored_are_told_of():
    lengths = np.array([30, 5, 5, 12, 0])
    stream = TokenStream("texts", np.zeros(52, np.int32), np.concatenate([[0], lengths.cumsum()]), [*"abcde"])
    assert [*Blocks(stream, 5, cross_documents=False).left_out("eval.seq_len")] == []
    (said,) = Blocks(stream, 10, cross_documents=False).left_out("eval.seq_len")
    assert said.startswith("2 of 4 held-out documents, 19% of the tokens, are shorter than eval.seq_len=10")


def test_a_single_file_is_cut_in_three_and_caps_hold(tmp_path):
    (tmp_path / "one.txt").write_text("0123456789" * 100)
    corpus = load(files_config(tmp_path / "one.txt", max_train_tokens=300, max_test_tokens=20), tmp_path / "cache")
    assert [len(s) for s in (corpus.train, corpus.validation, corpus.test)] == [300, 20, 20]
    assert "90/5/5" in corpus.provenance.used


def test_other_caps_are_other_tokens_and_texts_of_blanks_are_none(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{number}" * 50)
    (tmp_path / "blank.txt").write_text(" \n" * 20)
    whole, capped = (load(files_config(tmp_path, max_train_tokens=cap), tmp_path / "cache") for cap in (None, 7))
    assert len(capped.train) == 7 < len(whole.train)
    names = [name for stream in (whole.train, whole.validation, whole.test) for name in stream.documents]
    assert len(names) == 3 and not any("blank" in name for name in names)


def test_a_document_of_blanks_is_left_out(tmp_path):
    documents = [("first", "some text"), ("blank", " \n\t"), ("last", "more")]
    write_stream(tmp_path, "train", documents, byte_tokenizer(), None)
    stream = read_stream(tmp_path, "train", "x")
    assert stream.documents == ["first", "last"] and len(stream) == 9 + 4 + 2


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), ByT5Tokenizer()], ids=["fast", "python"])
def test_write_stream_strings_of_special_tokens_are_counted(tmp_path, tokenizer):
    end = tokenizer.eos_token
    documents = [("first", f"a{end}b{end}"), ("last", "plain é <unk>")]
    assert write_stream(tmp_path, "train", documents, tokenizer, None) == 2
    assert write_stream(tmp_path, "test", documents, tokenizer, None, split_special_tokens=True) == 0
    merged, split = (read_stream(tmp_path, name, name).tokens.tolist() for name in ("train", "test"))
    assert (merged.count(tokenizer.eos_token_id), split.count(tokenizer.eos_token_id)) == (4, 2)


def test_load_corpus_split_special_tokens_is_another_corpus(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{number} <|endoftext|> and on")
    whole, split, again = (
        load(files_config(tmp_path, split_special_tokens=asked), tmp_path / "cache") for asked in (False, True, False)
    )
    assert (whole.special_tokens, split.special_tokens, again.special_tokens) == (3, 0, 3)
    assert whole.provenance.fingerprint == again.provenance.fingerprint != split.provenance.fingerprint


def test_write_stream_beyond_a_file_size_limit_has_the_errno(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError) as caught:
            write_stream(tmp_path, "train", [("a", "x" * 2000)], byte_tokenizer(), None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG


def test_file_errors(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        load(files_config(tmp_path / "absent"), tmp_path)
    (tmp_path / "texts").mkdir()
    with pytest.raises(UserError, match="has no .txt or .md"):
        load(files_config(tmp_path / "texts"), tmp_path)
    (tmp_path / "texts" / "bad.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(UserError, match=r"bad.txt: not UTF-8 at byte 3 \(0xe9\)"):
        load(files_config(tmp_path / "texts"), tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("notes.txt", "text".encode("utf-16"), "UTF-16, not UTF-8; convert it (iconv -f utf-16 -t utf-8)"),
        ("notes.txt", b"\xfe\xff\0t", "UTF-16, not UTF-8; convert it (iconv -f utf-16 -t utf-8)"),
        ("notes.txt", b"text\0", "not text, for byte 4 is NUL"),
        *((f"rows.{suffix}", b"text", f".{suffix} is not read") for suffix in ("json", "csv", "parquet")),
        ("rows.jsonl", b'{"text": "a"}\nb', "line 2: not JSON"),
        ("rows.jsonl", b'\n{"body": "a"}', "'text' is no column. Set data.text_column to body"),
        ("rows.jsonl", b'{"text": 3, "body": "a", "id": 1}', "(got a number). Set data.text_column to body."),
        ("rows.jsonl", b'{"text": 3}', "'text' must be a string (got a number). Write the text as a string."),
        ("rows.jsonl", b'{"text": ["a"]}', "'text' must be a string (got a list)."),
        ("rows.jsonl", b"[1]", "line 1: must be an object with a text under 'text' (got a list)"),
    ],
)  # fmt: skip
def test_files_that_hold_no_plain_text_are_refused(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as refusal:
        load(files_config(tmp_path / "*.*"), tmp_path / "cache")
    assert f"{name}" in str(refusal.value) and said in str(refusal.value)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [("*/text.txt", ["a/text.txt", "b/text.txt"]), ("a/*", ["text.txt"]), ("**/*", ["a/text.txt", "b/text.txt"])],
)
def test_files_of_one_name_are_documents_of_their_own(tmp_path, pattern, names):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text(f"text of {folder}")
    assert sorted(text.name for text in files.find_texts(str(tmp_path / pattern))) == names


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path):
    rows = [{"id": number, "body": f"text {number}\r\n" + "\u2028" * 9} for number in range(40)]
    rows += [rows[0], {"id": 41, "body": ""}, {"id": 42, "body": None}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = load(files_config(tmp_path, text_column="body"), tmp_path / "cache")
    assert [len(split.documents) for split in (corpus.train, corpus.validation, corpus.test)] == [36, 2, 2]
    text = byte_tokenizer().decode(corpus.test.tokens[: corpus.test.starts[1] - 1].tolist())
    assert text in {row["body"].replace("\r\n", "\n") for row in rows[:40]}
    (tmp_path / "README.md").write_text("what the texts are")
    with pytest.raises(UserError, match=r"README.md and rows.jsonl, .*such as '.*/\*\*/\*.jsonl'"):
        files.find_texts(f"{tmp_path}/")
    assert [text.name for text in files.find_texts(f"{tmp_path}/**/*.jsonl")] == ["rows.jsonl"]
    with pytest.raises(UserError, match="data.text_column"):
        load(files_config(tmp_path / "*.jsonl"), tmp_path / "cache")


def test_files_of_a_package_are_named_without_where_it_lies(tmp_path):
    config = DataConfig(name="code", source="files", files="package:focus_exp/data/*.py", max_train_tokens=300)
    found = load(config, tmp_path).provenance
    assert found.requested == "package:focus_exp/data/*.py" and found.used.startswith(found.requested)
    # tokenised once, whatever they are called: the same files by their path are named by it
    by_path = replace(config, files=str(Path(focus_exp.__file__).parent / "data" / "*.py"))
    again = load(by_path, tmp_path).provenance
    assert again.fingerprint == found.fingerprint and again.used.startswith(by_path.files)
    for absent in ("package:no_such_package/*.py", "package:a b/*.py"):
        with pytest.raises(UserError, match="is not installed"):
            load(DataConfig(name="code", source="files", files=absent), tmp_path)


HUB = DataConfig(name="hub", source="hub", hub_id="owner/texts")


def test_a_missing_split_is_held_out_of_train():
    rows = {"train": [{"text": f"document {i}"} for i in range(200)], "validation": [{"text": "own"}]}
    read = {split: [text for _, text in hub.read_split(rows, split, HUB)] for split in corpora.SPLITS}
    assert read["validation"] == ["own"]
    assert read["test"] == [f"document {i}" for i in range(49, 200, 50)]
    assert len(read["train"]) == 196 and not set(read["train"]) & set(read["test"])


def test_wikitext_lines_become_articles():
    lines = ["", " = One = \n", "", " = = Section = = \n", " text \n", " = Two = \n", " more \n"]
    rows = {split: [{"text": line} for line in lines] for split in corpora.SPLITS}
    cfg = DataConfig(name="w", source="hub", hub_id="owner/wikitext")
    articles = [text for _, text in hub.read_split(rows, "test", cfg)]
    assert articles == [" = One = \n = = Section = = \n text \n", " = Two = \n more \n"]


def test_missing_column_is_named():
    with pytest.raises(UserError, match="'text' is no column. Set data.text_column to body"):
        list(hub.read_split({"test": [{"body": "x"}]}, "test", HUB))
    with pytest.raises(UserError, match=r"'text' must be a string \(got a number\)"):
        list(hub.read_split({"test": [{"text": 3}]}, "test", HUB))


def test_books_stand_in_for_an_unreachable_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "hub_reachable", lambda: False)
    monkeypatch.setattr(hub, "in_cache", lambda cfg: False)
    monkeypatch.setattr(corpora.books, "read", lambda cache, split: [(split, f"text of {split} " * 10)])
    shipped = replace(HUB, hub_id="emozilla/pg19")
    corpus = load(shipped, tmp_path)
    assert corpus.provenance.source == "embedded" and corpus.provenance.requested == "emozilla/pg19"
    assert "stands in for emozilla/pg19: the Hugging Face hub cannot be reached" in str(corpus.provenance.substitution)
    with pytest.raises(UserError, match="HF_HOME"):
        load(shipped, tmp_path, "hub")
    with pytest.raises(UserError, match="owner/texts"):  # a text of the user's own
        load(HUB, tmp_path)
    asked = DataConfig(name="books", source="books")
    assert load(asked, tmp_path).provenance.substitution is None


def test_clean_strips_what_printers_added():
    printed = "\r\n............Of Cerberus\r\nthence        10\r\n@@@@\r\nin 1645 it was  \r\n"
    assert clean(printed) == "Of Cerberus\nthence\n\nin 1645 it was\n"


def runs_of_words(texts: dict[str, str]) -> set[int]:
    """All runs of 15 words, by their hashes."""
    words = [re.findall(r"[a-z]+", text.lower()) for text in texts.values()]
    return {hash(tuple(w[i : i + 15])) for w in words for i in range(len(w) - 14)}


@pytest.mark.real
def test_no_long_passage_of_the_books_stands_in_two_splits():
    runs: dict[str, set[int]] = {}
    for split, works in WORKS.items():
        texts = dict(books.read(assets.cache_root(), split))
        assert len(texts) == sum(map(len, works.values()))
        assert all(text.isascii() and "gutenberg" not in text.lower() for text in texts.values())
        runs[split] = runs_of_words(texts)
    assert not runs["train"] & runs["validation"] and not runs["train"] & runs["test"]
    assert not runs["validation"] & runs["test"]


@pytest.mark.real
def test_addresses_are_split_by_president_and_share_no_more_than_quotations():
    splits = {split: dict(addresses.read(assets.cache_root(), split)) for split in corpora.SPLITS}
    assert sum(map(len, splits.values())) == 237
    names = {split: {name.split("-")[1] for name in texts} for split, texts in splits.items()}
    # namesakes: John Quincy Adams, Benjamin Harrison and the elder Bush are held out, the others of the name are not
    assert names["test"] & names["train"] == {"Adams", "Harrison", "Bush"} & names["train"]
    assert not names["validation"] & (names["train"] | names["test"])
    assert not any(re.search(r"\[(?i:laughter|applause)", text) for texts in splits.values() for text in texts.values())
    assert sum(len(text.split()) > 6000 for text in splits["test"].values()) == 39
    held_out, train = runs_of_words(splits["test"]), runs_of_words(splits["train"])
    assert 0 < len(held_out & train) < 0.002 * len(held_out)


def test_find_texts_folder_with_brackets_beside_its_glob_match_is_read_literally(tmp_path):
    for name in ("br[1]", "br1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"text of {name}")
        (tmp_path / name / "b*.txt").write_text(f"star of {name}")
    (tmp_path / "br1" / "bc.txt").write_text("another")

    def found(pattern):
        return sorted(text.path.relative_to(tmp_path).as_posix() for text in files.find_texts(f"{tmp_path}/{pattern}"))

    assert found("br[1]/a*.txt") == ["br[1]/a.txt"]
    assert found("br[1]/a.txt") == ["br[1]/a.txt"]
    assert found("br1/b*.txt") == ["br1/b*.txt"]
    assert found("b[r]1/a.txt") == ["br1/a.txt"]
    assert found("**/a.txt") == ["br1/a.txt", "br[1]/a.txt"]
