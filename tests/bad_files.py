"""Texts, models and adapters that no run can be made of: each is refused in one sentence."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from conftest import build
from fault_rows import Bench, Row, checked, launch
from running import only_run, tiny, without_attention
from safetensors.torch import load_file, save_file

from focus_exp.models.random import byte_tokenizer


def texts(folder: Path) -> dict[str, Path]:
    """What was written -> its file."""
    folder.mkdir()
    written = {
        "text that is not UTF-8": b"caf\xe9 " * 200,
        "empty text": b"",
        "text of spaces": b" \n" * 200,
        "one token of text": b"a",
        "text that is no text": bytes(range(256)) * 20,
    }
    found = {}
    for number, (what, content) in enumerate(written.items()):
        found[what] = folder / f"{number}.txt"
        found[what].write_bytes(content)
    return found


def make_base(folder: Path) -> Path:
    build("tiny_gpt2").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def spoil_weights(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    """Change one matrix, or leave it out."""

    def spoil(place: Path) -> None:
        path, name = place / "model.safetensors", "transformer.h.1.mlp.c_fc.weight"
        tensors = load_file(path)
        changed = change(tensors.pop(name))
        save_file(tensors if changed is None else tensors | {name: changed}, path, metadata={"format": "pt"})

    return spoil


def cut(name: str) -> Callable[[Path], None]:
    return lambda place: os.truncate(place / name, (place / name).stat().st_size // 2)


def without_tokenizer(place: Path) -> None:
    for path in place.glob("tokenizer*"):
        path.unlink()


MODELS: dict[str, Callable[[Path], None]] = {
    "a model whose weights hold NaN": spoil_weights(lambda tensor: tensor.fill_(torch.nan)),
    "a model with one infinite weight": spoil_weights(lambda tensor: tensor.index_fill_(0, torch.tensor(0), torch.inf)),
    "a model that lacks a matrix": spoil_weights(lambda tensor: None),
    "a model with a matrix of another shape": spoil_weights(lambda tensor: tensor[:8].clone()),
    "a model without a tokenizer": without_tokenizer,
    **{f"{name} of a model cut in half": cut(name) for name in ("model.safetensors", "config.json", "tokenizer.json")},
}
ADAPTERS = {f"{name} cut in half": cut(name) for name in ("focus_adapter.safetensors", "focus_adapter.json")}


def refused(bench: Bench, what: str, *settings: str) -> Row:
    run = tiny(bench.folder, "refused")
    if any(setting.startswith("adapter=") for setting in settings):
        run = without_attention(run)
    return checked(bench, what, [(launch([*run, *settings]), 2)], None)


def bad_files(bench: Bench) -> list[Callable[[], Row]]:
    """One a row, not yet run."""
    rows = []

    def add(what: str, *settings: str) -> None:
        rows.append(lambda: refused(bench, what, *settings))

    for what, path in texts(bench.folder / "bad-texts").items():
        add(what, f"data.files={path}")
    base = make_base(bench.folder / "base")
    for number, (what, spoil) in enumerate(MODELS.items()):
        place = Path(shutil.copytree(base, bench.folder / f"base-{number}"))
        spoil(place)
        add(what, f"model.path={place}")
    twin = only_run(bench.folder / "twin")
    for number, (what, spoil) in enumerate(ADAPTERS.items()):
        place = Path(shutil.copytree(twin / "adapter", bench.folder / f"adapter-{number}"))
        spoil(place)
        add(what, "job=evaluate", f"adapter={place}", f"model.path={twin / 'model'}")
    add("an adapter of another model", "job=evaluate", f"adapter={twin / 'adapter'}")
    return rows
