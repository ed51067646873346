"""Ways of naming a model or a text, right and wrong, with what they give."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build
from pyarrow import Table, parquet

from focus_exp.config import DataConfig, ModelConfig
from focus_exp.data import SPLITS, load_corpus
from focus_exp.errors import UserError
from focus_exp.models.load import load_model
from focus_exp.models.random import byte_tokenizer


def write_without_config(place: Path) -> None:
    build("tiny_llama").save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    (place / "config.json").unlink()


def write_texts(place: Path, count: int = 5) -> None:
    place.mkdir(parents=True)
    for i in range(count):
        (place / f"{i}.txt").write_text(f"text number {i} " * 9)


def write_rows(place: Path) -> None:
    place.mkdir()
    rows = [{"id": i, "text": f"text number {i}"} for i in range(40)]
    parquet.write_table(Table.from_pylist(rows), place / "a.parquet")


def write_files(place: Path, **files: bytes) -> None:
    place.mkdir(exist_ok=True)
    for name, content in files.items():
        (place / name.replace("_", ".")).write_bytes(content)


SAVED = "Give a folder written by save_pretrained, a .safetensors file in one, or a .gguf file."

# model.path below PLACE: what is there, and the error
MODELS = [
    ("", write_without_config, f"PLACE has no config.json. {SAVED}"),
    ("", lambda place: write_files(place, mine_gguf=b""), "PLACE has no config.json. Type model.path=PLACE/mine.gguf."),
    ("/model.safetensors", write_without_config, f"PLACE has no config.json. {SAVED}"),
    ("/x.bin", lambda place: write_files(place, x_bin=b""), "weights must be .safetensors or .gguf (got x.bin). "
     f"{SAVED}"),
    ("/x.gguf", lambda place: write_files(place, x_gguf=b"PK.."), "its weights cannot be converted (PLACE/x.gguf does "
     "not start with the GGUF magic bytes, so it is not a GGUF file.). Download it again, or give the folder of the "
     "original model with model.path, or its model.hub_id."),
]  # fmt: skip

# data.files below PLACE: what is there, and the documents by split or the error
TEXTS = [
    ("", write_texts, [3, 1, 1]),
    ("/0.txt", write_texts, [1, 1, 1]),  # one document in three pieces
    ("/[0-2].txt", write_texts, [1, 1, 1]),
    ("/a.parquet", write_rows, [36, 2, 2]),
    ("", lambda place: write_files(place, a_md=b" \n"), "no text in PLACE/a.md or the other files. Give files with "
     "text."),
    ("", lambda place: (write_texts(place), (place / "a.jsonl").touch()), "must have one kind of files (got 0.txt and "
     "a.jsonl). Give a glob, such as 'PLACE/**/*.jsonl'."),
    ("/a.parquet", lambda place: write_files(place, a_parquet=b"PAR1"), "must be a Parquet file (got Parquet file size "
     "is 4 bytes, smaller than the minimum file footer (8 bytes))."),
    ("/a.csv", lambda place: write_files(place, a_csv=b"a"), ".csv is not read. Write a .jsonl file, an object a line "
     "with the text under data.text_column, or leave it out with a glob in data.files."),
    ("/a.jsonl", lambda place: write_files(place, a_jsonl=b'{"body": "a"}'), "'text' is no column. Set "
     "data.text_column to body."),
]  # fmt: skip


def outcome(place: Path, read: Callable[[], Any]) -> Any:
    """Return what `read` returns, or its error without the part that names the place."""
    try:
        return read()
    except UserError as error:
        message = str(error).replace(str(place), "PLACE")
        return re.sub(r"^(model\.path=|data\.files=)?PLACE[^ :,]*(, row 1)?:? ", "", message)


@pytest.mark.parametrize(("suffix", "write", "expected"), MODELS)
def test_load_model_path_gives_its_error(tmp_path, suffix, write, expected):
    write(place := tmp_path / "place")
    cfg = ModelConfig(name="mine", path=f"{place}{suffix}")
    options = {"assets": "auto", "cache": tmp_path / "cache", "seed": 0, "dtype": torch.float32}
    assert outcome(place, lambda: load_model(cfg, **options)) == expected


@pytest.mark.parametrize(("suffix", "write", "expected"), TEXTS)
def test_load_corpus_files_give_documents_or_error(tmp_path, caplog, suffix, write, expected):
    write(place := tmp_path / "place")
    cfg = DataConfig(name="files", source="files", files=f"{place}{suffix}")
    caplog.set_level("INFO", "focus_exp")

    def read() -> list[int]:
        corpus = load_corpus(cfg, byte_tokenizer(), assets="auto", cache=tmp_path / "cache")
        return [len(getattr(corpus, split).documents) for split in SPLITS]

    assert outcome(place, read) == expected
    if isinstance(expected, list):
        assert "{} train, {} validation, {} test".format(*expected) in caplog.text
