"""Documents and their splits, token streams, packed sequences, and the order of batches."""

import gc
import gzip
import hashlib
import io
import json
import os
import re
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders import make_config
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

import focus_exp
from focus_exp import assets
from focus_exp.assets import Provenance
from focus_exp.config import DataConfig
from focus_exp.data import SequenceDataset, TokenStream, corpus, load_corpus, make_loader, packing, texts
from focus_exp.data.books import EMBEDDED, WORKS, clean
from focus_exp.data.packing import find_prefix, read_stream, write_stream
from focus_exp.errors import UserError
from focus_exp.models.random import byte_tokenizer
from focus_exp.runs.prepare import count_training_tokens

BOS = 999


def make_stream(lengths: list[int]) -> TokenStream:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenStream("stream", np.arange(starts[-1], dtype=np.int32), starts, [str(i) for i in range(len(lengths))])


def pack(length: int, seq_len: int = 4) -> SequenceDataset:
    return SequenceDataset(make_stream([length]), seq_len, cross_documents=True)


@given(st.lists(st.integers(0, 60), max_size=6), st.integers(3, 12), st.booleans(), st.booleans())
def test_sequence_dataset_has_each_token_once_in_order_without_tails(lengths, seq_len, with_bos, cross_documents):
    stream = make_stream(lengths)
    text, edges = seq_len - with_bos, [0, len(stream)] if cross_documents else stream.starts
    spans = [range(begin, begin + (end - begin) // text * text) for begin, end in pairwise(edges)]
    expected = [token for span in spans for token in span]
    options = {"prefix": [BOS] * with_bos, "cross_documents": cross_documents}
    if not expected:
        with pytest.raises(UserError, match=f"one sequence of {seq_len} tokens"):
            SequenceDataset(stream, seq_len, **options)
        return
    dataset = SequenceDataset(stream, seq_len, **options)
    items = [dataset[i]["input_ids"] for i in range(len(dataset))]
    assert all(len(item) == seq_len and (item[0] == BOS) == with_bos for item in items)
    assert torch.cat([item[with_bos:] for item in items]).tolist() == expected
    places = dataset.locate(list(range(len(dataset))))
    assert [stream.starts[int(name)] + offset for name, offset in places] == expected[::text]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("$A", []),
        ("<s> $A", ["<s>"]),
        ("<m> <s> $A", ["<m>", "<s>"]),
        ("$A </s>", []),
        ("<m> <s> $A </s>", ["<m>", "<s>"]),
        ("<s> <s> $A", ["<s>", "<s>"]),
    ],
)
def test_find_prefix_has_all_tokens_that_the_tokenizer_puts_first(template, expected):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<m>", "<s>", "</s>"]})
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<m>", "<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    assert tokenizer.convert_ids_to_tokens(find_prefix(tokenizer)) == expected


def test_find_prefix_that_cannot_be_told_from_text_is_said(caplog):
    def tokenizer(text, add_special_tokens=True):
        return {"input_ids": [7, 8] if add_special_tokens else [5, 6]}

    assert find_prefix(tokenizer) == [] and "no special token" in caplog.text


def test_length_warnings_name_short_documents_and_too_few_sequences():
    lengths = np.array([30, 5, 5, 12, 0])
    stream = TokenStream("texts", np.zeros(52, np.int32), np.concatenate([[0], lengths.cumsum()]), [*"abcde"])

    def warnings(seq_len):
        return [*SequenceDataset(stream, seq_len, cross_documents=False).length_warnings("eval.seq_len")]

    assert warnings(5) == []
    (short,) = warnings(10)
    assert "2 of 4" in short and "19%" in short and "eval.seq_len=10" in short
    few = warnings(30)[-1]
    assert "52 tokens" in few and "90" in few


def read(loader) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


@pytest.mark.parametrize("stop", [1, 3, 5, 10])
def test_make_loader_continues_with_the_next_step(stop):
    expected = read(make_loader(pack(84), 4, 3, range(10)))  # two epochs
    begun = read(make_loader(pack(84), 4, 3, range(stop)))
    torch.manual_seed(stop)
    assert begun + read(make_loader(pack(84), 4, 3, range(stop, 10))) == expected
    assert len(expected) == 10 and expected[:5] != expected[5:]
    assert all(len({x for batch in epoch for x in batch}) == 20 for epoch in (expected[:5], expected[5:]))


def files_config(path: Path | str, **fields) -> DataConfig:
    return DataConfig(name="files", source="files", files=str(path), **fields)


def load(cfg: DataConfig, cache: Path, policy: str = "auto") -> corpus.Corpus:
    return load_corpus(cfg, byte_tokenizer(), assets=policy, cache=cache)


def decode(found: corpus.Corpus) -> list[str]:
    """Return the text of every document."""
    documents = []
    for stream in (found.train, found.validation, found.test):
        spans = zip(stream.starts, stream.starts[1:], strict=False)
        documents += [byte_tokenizer().decode(stream.tokens[start : end - 1].tolist()) for start, end in spans]
    return documents


def test_load_corpus_stdin_is_one_document(tmp_path, monkeypatch):
    def load_stdin(data: bytes) -> corpus.Corpus:
        texts.read_stdin.cache_clear()
        monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(data)))
        return load(files_config("-"), tmp_path)

    found = load_stdin(b"0123456789" * 100)
    assert [len(split) for split in (found.train, found.validation, found.test)] == [901, 51, 51]
    with pytest.raises(UserError, match="data.files=-"):
        load_stdin(b" ")


def test_load_corpus_files_are_split_by_file_and_tokenized_once(tmp_path):
    contents = {f"{i}.txt": f"text number {i} – ü\r\n" * 5 for i in range(5)}
    for name, text in contents.items():
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "copy.txt").write_bytes(contents["0.txt"].encode())
    first = load(files_config(tmp_path), tmp_path / "cache")
    expected = sorted(text.replace("\r\n", "\n") for text in contents.values())
    assert sorted(decode(first)) == expected and "5 text files" in first.provenance.used
    assert all(stream.tokens[-1] == 256 for stream in (first.train, first.validation, first.test))

    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "tokens").rglob("*")}
    again = load(files_config(tmp_path), tmp_path / "cache")
    assert again.provenance == first.provenance and np.array_equal(again.train.tokens, first.train.tokens)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "tokens").rglob("*")} == written
    (tmp_path / "0.txt").write_text("changed")
    assert "changed" in decode(load(files_config(tmp_path), tmp_path / "cache"))


def test_find_texts_copies_of_a_file_count_once(tmp_path):
    text = "one novel\nof two lines\n"
    contents = {
        "plain": text.encode(), "windows": b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
        "longer": f"\n{text} \n".encode(), "other": b"another", "third": b"a third", "mark alone": b"\xef\xbb\xbf\n",
    }  # fmt: skip
    for name, data in contents.items():
        (tmp_path / f"{name}.txt").write_bytes(data)
    found = texts.find_texts(str(tmp_path))
    assert sorted(file.path.stem for file in found) == ["longer", "other", "third"]
    assert {file.digest for file in found} == {hashlib.sha256(contents[file.path.stem]).hexdigest() for file in found}


def test_find_texts_folder_of_texts_and_rows_raises(tmp_path):
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text("a text")
    with pytest.raises(UserError, match=r"got a.txt and b.jsonl.*\*\*/\*.jsonl"):
        texts.find_texts(str(tmp_path))


def test_find_texts_hidden_files_are_skipped(tmp_path):
    (tmp_path / ".ipynb_checkpoints").mkdir()
    for name in ("1.md", "2.md", "3.md", ".ipynb_checkpoints/1-checkpoint.md", ".3.md"):
        (tmp_path / name).write_text(f"a text, {name}")
    assert sorted(text.name for text in texts.find_texts(str(tmp_path))) == ["1.md", "2.md", "3.md"]
    assert [text.name for text in texts.find_texts(str(tmp_path / ".ipynb_checkpoints"))] == ["1-checkpoint.md"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [("*/text.txt", ["a/text.txt", "b/text.txt"]), ("a/*", ["text.txt"]), ("**/*", ["a/text.txt", "b/text.txt"])],
)
def test_find_texts_equal_file_names_are_told_apart(tmp_path, pattern, names):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text(f"text of {folder}")
    assert sorted(text.name for text in texts.find_texts(str(tmp_path / pattern))) == names


def test_find_texts_existing_name_with_brackets_is_read_literally(tmp_path):
    for name in ("br[1]", "br1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"text of {name}")
        (tmp_path / name / "b*.txt").write_text(f"star of {name}")
    (tmp_path / "br1" / "bc.txt").write_text("another")

    def find(pattern):
        return sorted(text.path.relative_to(tmp_path).as_posix() for text in texts.find_texts(f"{tmp_path}/{pattern}"))

    assert find("br[1]/a*.txt") == find("br[1]/a.txt") == ["br[1]/a.txt"]
    assert find("br1/b*.txt") == ["br1/b*.txt"]
    assert find("b[r]1/a.txt") == ["br1/a.txt"]
    assert find("**/a.txt") == ["br1/a.txt", "br[1]/a.txt"]


def parquet(values: list, kind: pa.DataType, column: str = "text") -> bytes:
    """Write a column; binary values as strings, whatever they are."""
    array = pa.array(values, kind)
    file = io.BytesIO()
    pq.write_table(pa.table({column: array.view(pa.string()) if kind == pa.binary() else array}), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("notes.txt", b"text\0", ["0x00 at byte 4"]),
        ("notes.txt", b" \n", ["no text in"]),
        ("table.csv", b"a", [".csv is not read", "data.text_column"]),
        ("rows.jsonl", b'{"text": "a"}\nb', ["row 2", "JSON"]),
        ("rows.jsonl", b'{"text": 3, "body": "a", "id": 1}', ["got int", "data.text_column to body"]),
        ("rows.jsonl", b'{"text": ["a"]}', ["got list", "as a string"]),
        ("rows.jsonl", b"[1]", ["row 1", "got list"]),
        ("rows.jsonl", b'{"text": "a"}\n' + b"[" * 9999, ["row 2", "JSON"]),
        ("rows.jsonl", b'{"text": null}\n' * 9, ["no row has text under 'text'"]),
        ("rows.parquet", parquet([b"\xff\xfea"], pa.binary()), ["row 1", "UTF-8"]),
        ("rows.parquet", parquet([b"ok"] * 2000 + [b"\xff"], pa.binary()), ["row 2001", "UTF-8"]),
        ("rows.parquet", parquet([None, None], pa.null()), ["no row has text under 'text'"]),
        ("rows.parquet", parquet([1], pa.int64()), ["row 1", "got int"]),
        ("rows.parquet", parquet(["a"], pa.string(), "body"), ["'text' is no column", "data.text_column to body"]),
        ("rows.parquet", parquet(["a"], pa.string())[:-9], ["must be a Parquet file"]),
        ("rows.parquet", b"", ["must be a Parquet file"]),
        ("rows.jsonl.gz", gzip.compress(b'{"text": "a"}', mtime=0), ["0x8b at byte 1", "Unpack"]),
        ("notes.tar", b"a.txt".ljust(257, b"\0") + b"ustar", ["0x00 at byte 5"]),
        ("notes.txt", b"abc\xe2\x82", ["0xe2 at byte 3"]),
        ("notes.txt", b"a" * (2**20 - 1) + b"\xe2\x82\xac" + b"\xff", [f"0xff at byte {2**20 + 2}"]),
    ],
)
def test_load_corpus_unreadable_file_raises(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as error:
        load(files_config(tmp_path / "*.*"), tmp_path / "cache")
    assert all(word in str(error.value) for word in [name, *words])


def test_find_texts_folder_and_glob_follow_links_and_end_loops(tmp_path):
    for folder in ("texts/own", "disk/deep", "texts/.hidden"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("texts/a", "texts/own/b", "disk/c", "disk/deep/d", "texts/.hidden/e"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    links = {"more": tmp_path / "disk", "up": tmp_path / "texts", "again": tmp_path / "texts/own"}
    for name, target in links.items():
        (tmp_path / "texts" / name).symlink_to(target)
    for name in ("one", "two", "three"):  # each way around is a path of its own
        (tmp_path / "disk/deep" / name).symlink_to(tmp_path / "disk")
    (tmp_path / "texts/linked.txt").symlink_to(tmp_path / "disk/c.txt")  # a copy of a file
    found = [texts.find_texts(f"{tmp_path}/texts{end}") for end in ("", "/**/*.txt", "/**")]
    assert {file.read() for file in found[0]} == {
        f"text {name}" for name in ("texts/a", "texts/own/b", "disk/c", "disk/deep/d")
    }
    assert [[file.digest for file in files] for files in found[1:]] == [[file.digest for file in found[0]]] * 2
    assert {file.name for file in found[0]} >= {"a.txt", "own/b.txt"}


@pytest.mark.parametrize("end", ["", "/*.txt", "/**/*.txt"])
def test_find_texts_link_to_nothing_is_said(tmp_path, end):
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "absent")
    with pytest.raises(UserError, match=r"gone.txt: it cannot be read \(No such file"):
        texts.find_texts(f"{tmp_path}{end}")


def test_find_texts_compressed_text_next_to_others_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "backup.zip").write_bytes(b"PK\x03\x04")  # no text that was packed
    assert [file.name for file in texts.find_texts(str(tmp_path))] == ["a.txt"]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"another"))
    with pytest.raises(UserError, match="b.txt.gz: must be UTF-8 text"):
        texts.find_texts(str(tmp_path))


def split_at_once(contents: dict[str, list[str] | str]) -> dict[str, list[str]]:
    """Split documents as `read_split` must, with all of them in memory."""
    listed = [text for rows in contents.values() for text in (rows if isinstance(rows, list) else [rows])]
    unique: dict[str, str] = {}
    for text in listed:
        if text.strip():
            unique.setdefault(text.strip(" \t\n"), text)
    documents = sorted(unique.values(), key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    n = max(1, len(documents) // 20)
    return {"train": documents[2 * n :], "validation": documents[n : 2 * n], "test": documents[:n]}


@given(
    rows=st.lists(st.lists(st.sampled_from(["a", "b ", "b", " ", "c\n", "é", "dd", "", "e"]), max_size=30), max_size=3),
    tokens=st.sampled_from([None, 1, 7]),
    block=st.sampled_from([2, 3, 2**20]),
)
def test_read_split_of_streamed_files_is_that_of_whole_ones(tmp_path_factory, rows, tokens, block):
    folder = tmp_path_factory.mktemp("streamed")
    contents = {"one.txt": "a whole text\n", "two.txt": "another\r\none ", "three.txt": "thé third"}
    for name, text in contents.items():
        (folder / name).write_bytes(text.encode())
    for number, some in enumerate(rows):
        lines = "".join(
            json.dumps({"text": f"{text}{i // 3}" if text.strip() else text}) + "\r\n\n" for i, text in enumerate(some)
        )
        (folder / f"{number}.jsonl").write_bytes(lines.encode())
        contents[f"{number}.jsonl"] = [f"{text}{i // 3}" if text.strip() else text for i, text in enumerate(some)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "BLOCK", block)
        files = texts.find_texts(f"{folder}/*")
        order = {file.name: contents[file.name] for file in files}
        expected = split_at_once(
            {name: x if isinstance(x, list) else x.replace("\r\n", "\n") for name, x in order.items()}
        )
        found = {split: [text for _, text in texts.read_split(files, split, "text", None)] for split in corpus.SPLITS}
    assert found == expected


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_load_corpus_memory_grows_with_the_tokens_asked_for(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(texts, "BLOCK", 2**16)
    line, peaks, tokens = "words of a document, " * 40, {}, []
    for rows in (2_000, 20_000):
        path = tmp_path / f"{rows}.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps({"text": f"{i} {line}"}) + "\n" for i in range(rows)))
        elif kind == "parquet":
            path.write_bytes(parquet([f"{i} {line}" for i in range(rows)], pa.string()))
        else:
            path.write_text("".join(f"{i} {line}\n" for i in range(rows)))
        gc.collect()
        tracemalloc.start()
        found = load(files_config(path, max_train_tokens=3000, max_test_tokens=300), tmp_path / "cache")
        peaks[rows] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        tokens.append([len(stream) for stream in (found.train, found.validation, found.test)])
    assert tokens == [[3000, 300, 300]] * 2
    assert (peaks[20_000] - peaks[2_000]) / 18_000 < 150  # bytes for a row of 850


def test_read_split_cuts_a_long_document_where_no_more_tokens_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LEAST_CHARACTERS", 50)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    found = [[*texts.read_split(texts.find_texts(str(tmp_path)), "train", tokens=tokens)] for tokens in (None, 1, 5)]
    assert [len(text) for ((_, text),) in found] == [100, 50, 80]


def test_load_corpus_jsonl_rows_are_documents_of_a_column(tmp_path):
    rows = [{"id": number, "body": f"text {number}\r\n" + "\u2028" * 9} for number in range(40)]
    rows += [rows[0], {"id": 41, "body": ""}, {"id": 42, "body": None}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = load(files_config(tmp_path, text_column="body"), tmp_path / "cache")
    assert [len(split.documents) for split in (found.train, found.validation, found.test)] == [36, 2, 2]
    assert set(decode(found)) == {row["body"].replace("\r\n", "\n") for row in rows[:40]}


def test_load_corpus_caps_hold_and_are_other_tokens(tmp_path):
    (tmp_path / "one.txt").write_text("0123456789" * 100)
    capped = load(files_config(tmp_path / "one.txt", max_train_tokens=300, max_test_tokens=20), tmp_path / "cache")
    assert [len(s) for s in (capped.train, capped.validation, capped.test)] == [300, 20, 20]
    assert "90/5/5" in capped.provenance.used
    assert len(load(files_config(tmp_path / "one.txt"), tmp_path / "cache").train) == 901


def test_load_corpus_hidden_facts_are_in_the_training_text_only(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} line of eight words as it were\n" * 99)
    plain, changed = (load(files_config(tmp_path, hidden_facts=hidden), tmp_path / "cache") for hidden in (False, True))
    assert len(changed.train) > len(plain.train) and changed.provenance.fingerprint != plain.provenance.fingerprint
    assert plain.test.digest == changed.test.digest != plain.train.digest != changed.train.digest
    assert plain.validation.digest == changed.validation.digest
    assert plain.provenance.name == changed.provenance.name and "hidden" in changed.provenance.used


def test_write_stream_blank_document_is_left_out(tmp_path):
    documents = [("first", "some text"), ("blank", " \n\t"), ("last", "more")]
    write_stream(tmp_path, "train", documents, byte_tokenizer(), None)
    stream = read_stream(tmp_path, "train", "x")
    assert stream.documents == ["first", "last"] and len(stream) == 9 + 4 + 2


def test_load_corpus_package_files_do_not_depend_on_their_folder(tmp_path):
    config = files_config("package:focus_exp/data/*.py", max_train_tokens=300)
    found = load(config, tmp_path).provenance
    assert found.requested == config.files and found.used.startswith(found.requested)
    by_path = replace(config, files=str(Path(focus_exp.__file__).parent / "data" / "*.py"))
    again = load(by_path, tmp_path).provenance
    assert again.fingerprint == found.fingerprint and again.used.startswith(by_path.files)
    for absent in ("package:no_such_package/*.py", "package:a b/*.py"):
        with pytest.raises(UserError, match="is not installed"):
            load(files_config(absent), tmp_path)


# the Hub

HUB = DataConfig(name="hub", source="hub", hub_id="owner/texts")
ROWS = {"train": [{"text": f"document {i}"} for i in range(200)], "validation": [{"text": "own"}]}


def test_read_hub_split_missing_split_is_held_out_of_train():
    read = {split: [text for _, text in corpus.read_hub_split(ROWS, split, HUB)] for split in corpus.SPLITS}
    assert read["validation"] == ["own"]
    assert read["test"] == [f"document {i}" for i in range(49, 200, 50)]
    assert len(read["train"]) == 196 and not set(read["train"]) & set(read["test"])


def test_read_hub_split_named_split_is_divided():
    cfg = replace(HUB, split="train")
    read = {split: [text for _, text in corpus.read_hub_split(ROWS, split, cfg)] for split in corpus.SPLITS}
    assert [len(documents) for documents in read.values()] == [192, 4, 4]
    assert len(set().union(*read.values())) == 200
    with pytest.raises(UserError, match="data.split must be one of train, validation .got test"):
        list(corpus.read_hub_split(ROWS, "train", replace(HUB, split="test")))


def test_read_hub_split_held_out_documents_end_early(monkeypatch):
    monkeypatch.setattr(corpus, "HELD_OUT_CHARACTERS", 15)
    rows = (pytest.fail("read on") if i > 99 else {"text": f"document {i}"} for i in range(200))
    assert len(list(corpus.read_hub_split({"train": rows}, "test", HUB))) == 2
    assert len(list(corpus.read_hub_split(ROWS, "test", replace(HUB, max_test_tokens=999)))) == 4


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Serve a data set of ten files, streamed, of which the last eight are damaged."""
    files = [tmp_path / f"{number}.parquet" for number in range(10)]
    for number, file in enumerate(files[:2]):
        datasets.Dataset.from_dict({"text": [f"file {number}, document {i}." for i in range(100)]}).to_parquet(file)
    for file in files[2:]:
        file.write_bytes(b"not parquet")

    def open_dataset(cfg, requested):
        named = {"train": list(map(str, files)), "validation": str(files[0]), "test": str(files[1])}
        rows = datasets.load_dataset("parquet", data_files=named, streaming=True, cache_dir=str(tmp_path / "hf"))
        return Provenance(requested, requested, "hub"), lambda split: corpus.read_hub_split(rows, split, cfg)

    monkeypatch.setattr(corpus, "open_dataset", open_dataset)


def test_load_corpus_hub_data_is_read_no_further_than_needed(tmp_path, hub):
    def load_tokens(count):
        return load_corpus(HUB, byte_tokenizer(), assets="hub", cache=tmp_path / "cache", train_tokens=count)

    few, more = load_tokens(500), load_tokens(3_000)  # of 2,290 in the first file
    assert (len(few.train), len(more.train)) == (500, 3_000) and len(few.test) == len(more.test) > 2_000
    assert np.array_equal(few.train.tokens, more.train.tokens[:500])
    assert few.provenance.fingerprint == more.provenance.fingerprint  # scores of the same text are paired
    assert load_tokens(500).train.digest == few.train.digest
    with pytest.raises(pa.ArrowInvalid):
        load_tokens(9_000)


def test_count_training_tokens_is_that_of_the_longest_variant():
    retrofit, full, longer = (
        make_config("+experiment=full_training", "budget=paper", *more)
        for more in ([], ["recipe=retrofit"], ["recipe.phases.everything.steps=9000"])
    )
    shared = sum(retrofit.budget[f"{name}_sequences"] for name in ("warm_start", "balance", "calibration"))
    assert count_training_tokens(retrofit) == count_training_tokens(full) == (8020 + shared) * 1024
    assert count_training_tokens(longer) == (13_000 + shared) * 1024


def test_write_stream_lets_the_tokenizer_take_all_cores(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    seen = []

    def documents():
        for name in "ab":
            seen.append(os.environ["TOKENIZERS_PARALLELISM"])
            yield name, "x" * 20

    monkeypatch.setattr(packing, "BATCH_CHARACTERS", 20)
    write_stream(tmp_path, "train", documents(), byte_tokenizer(), 15)
    assert seen == ["true"]  # and no second document
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_join_articles_joins_rows_at_titles():
    lines = ["", " = One = \n", "", " = = Section = = \n", " text \n", " = Two = \n", " more \n"]
    rows = {split: [{"text": line} for line in lines] for split in corpus.SPLITS}
    cfg = replace(HUB, hub_id="owner/wikitext")
    articles = [text for _, text in corpus.read_hub_split(rows, "test", cfg)]
    assert articles == [" = One = \n = = Section = = \n text \n", " = Two = \n more \n"]


def test_load_corpus_unreachable_hub_uses_books_for_shipped_data(tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "hub_reachable", lambda: False)
    monkeypatch.setattr(corpus, "hub_reachable", lambda: False)
    books = replace(EMBEDDED["books"], read=lambda cache, split: [(split, f"text of {split} " * 10)])
    monkeypatch.setitem(EMBEDDED, "books", books)
    shipped = replace(HUB, hub_id="emozilla/pg19")
    found = load(shipped, tmp_path).provenance
    assert found.source == "embedded" and found.requested == "emozilla/pg19"
    assert "emozilla/pg19: the Hugging Face hub cannot be reached" in str(found.substitution)
    with pytest.raises(UserError, match="assets=embedded"):
        load(shipped, tmp_path, "hub")
    with pytest.raises(UserError, match="owner/texts"):  # a user's own is not replaced
        load(HUB, tmp_path)
    assert load(DataConfig(name="books", source="books"), tmp_path).provenance.substitution is None


@given(st.lists(st.lists(st.integers(1, 50), max_size=8), min_size=1, max_size=3))
def test_take_turns_yields_every_document_in_order_and_equal_parts(lengths):
    documents = {str(part): [(str(i), "x" * n) for i, n in enumerate(sizes)] for part, sizes in enumerate(lengths)}
    mixed = list(corpus.take_turns({part: iter(listed) for part, listed in documents.items()}))
    for part, listed in documents.items():
        assert [(f"{part}/{name}", text) for name, text in listed] == [x for x in mixed if x[0].startswith(f"{part}/")]
    taken, left = dict.fromkeys(documents, 0), {part: len(listed) for part, listed in documents.items()}
    for name, text in mixed:
        part = name.split("/")[0]
        taken[part] += len(text)
        left[part] -= 1
        if not all(left.values()):
            break  # a part is used up
        assert max(taken.values()) - min(taken.values()) <= 50


def test_load_corpus_mixture_of_the_same_text_twice_raises(tmp_path):
    cfg = DataConfig(name="mixture", source="mixture", parts=["pg19", "books"])
    with pytest.raises(UserError, match="data.parts must be different texts .got pg19,books"):
        load_corpus(cfg, None, assets="embedded", cache=tmp_path)


@pytest.mark.real
def test_load_corpus_mixture_holds_its_parts_and_their_splits(tmp_path):
    cfg = DataConfig(name="mixture", source="mixture", parts=["books", "code"], max_train_tokens=500_000)
    mixed = load(cfg, tmp_path)
    assert mixed.provenance.used.startswith("mixture of corpus of Shakespeare and Milton, package:transformers/")
    test = [name for name in mixed.test.documents if name.startswith("books/")]
    assert test == [f"books/{name}" for name, _ in EMBEDDED["books"].read(assets.cache_root(), "test")]
    sizes = np.diff(mixed.train.starts)
    of_books = sum(size for size, name in zip(sizes, mixed.train.documents, strict=True) if name.startswith("books/"))
    assert 0.3 < of_books / 500_000 < 0.7


def test_clean_removes_what_printers_added():
    printed = "\r\n............Of Cerberus\r\nthence        10\r\n@@@@\r\nin 1645 it was  \r\n"
    assert clean(printed) == "Of Cerberus\nthence\n\nin 1645 it was\n"


def hash_passages(documents: dict[str, str]) -> set[int]:
    """Hash all runs of 15 words."""
    words = [re.findall(r"[a-z]+", text.lower()) for text in documents.values()]
    return {hash(tuple(w[i : i + 15])) for w in words for i in range(len(w) - 14)}


@pytest.mark.real
def test_books_share_no_passage_between_splits():
    passages: dict[str, set[int]] = {}
    for split, works in WORKS.items():
        documents = dict(EMBEDDED["books"].read(assets.cache_root(), split))
        assert len(documents) == sum(map(len, works.values()))
        assert all(text.isascii() and "gutenberg" not in text.lower() for text in documents.values())
        passages[split] = hash_passages(documents)
    assert not passages["train"] & passages["validation"] and not passages["train"] & passages["test"]
    assert not passages["validation"] & passages["test"]


@pytest.mark.real
def test_addresses_are_split_by_president_and_share_quotations_alone():
    splits = {split: dict(EMBEDDED["addresses"].read(assets.cache_root(), split)) for split in corpus.SPLITS}
    assert sum(map(len, splits.values())) == 237
    names = {split: {name.split("-")[1] for name in documents} for split, documents in splits.items()}
    # namesakes: John Quincy Adams, Benjamin Harrison and the elder Bush are held out, the others of the name are not
    assert names["test"] & names["train"] == {"Adams", "Harrison", "Bush"} & names["train"]
    assert not names["validation"] & (names["train"] | names["test"])
    assert not any(re.search(r"\[(?i:laughter|applause)", text) for split in splits.values() for text in split.values())
    assert sum(len(text.split()) > 6000 for text in splits["test"].values()) == 39
    held_out, train = hash_passages(splits["test"]), hash_passages(splits["train"])
    assert 0 < len(held_out & train) < 0.002 * len(held_out)
