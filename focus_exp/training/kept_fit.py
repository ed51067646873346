"""Fits that are kept in the cache by all that decides them, and go on at the block or the layer where they stopped."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.attention.method import AttentionMethod
from focus_exp.models.load import fingerprint, select_numerics
from focus_exp.progress import ProgressBar
from focus_exp.storage import atomic_write, file_lock, remove, remove_stale_temp
from focus_exp.training.importance import Observed, observe, read
from focus_exp.training.precision import Precision

Method = TypeVar("Method", bound=AttentionMethod)

SECONDS = "seconds"  # that the layers took, in all processes that worked on them
FORMAT = 5  # raise it when the same inputs give another fit


@contextmanager
def kept_fit(
    cache: Path, model: PreTrainedModel, blocks: list[Tensor], precision: Precision, kind: list[str], *decide: Any
) -> Iterator[Path]:
    """The folder of the fit of `kind` to `model` on `blocks`, each `[T]` token ids, that `precision` and these values
    decide; no other process has it within the block."""
    text = hashlib.sha256(torch.stack(blocks).cpu().numpy().tobytes()).hexdigest()
    base = [fingerprint(model), select_numerics(model.config)]
    key = json.dumps([*kind, FORMAT, precision.name, *base, text, *decide], sort_keys=True)
    folder = cache / "fits" / hashlib.sha256(key.encode()).hexdigest()[:16]
    with file_lock(folder / "lock", str(folder), wait=True):
        remove_stale_temp(folder)
        yield folder


def fit_layers(
    model: PreTrainedModel,
    methods: Mapping[int, Method],
    blocks: list[Tensor],
    precision: Precision,
    folder: Path,
    seed: int,
    fit: Callable[[Method, list[Observed], torch.Generator], dict[str, Tensor]],
    worth: str = "loss",
) -> dict[int, dict[str, Tensor]]:
    """What `fit` returns of each layer, given what it was observed to be on every block; from `folder` where it is."""
    paths = {layer: folder / f"layer-{layer:03d}.safetensors" for layer in methods}
    if todo := [layer for layer, path in paths.items() if not path.exists()]:
        with timed(folder / SECONDS):
            observed = observe(model, methods, blocks, precision, folder / "observed", worth)
            for layer in ProgressBar(todo, desc="fitting layers", unit="layer"):
                found = fit(methods[layer], read(observed, layer), torch.Generator().manual_seed(seed + layer))
                with atomic_write(paths[layer]) as new:
                    save_file(found, new)
        remove(folder / "observed")
    return {layer: load_file(path) for layer, path in paths.items()}


@contextmanager
def timed(path: Path) -> Iterator[None]:
    """Add the seconds of the block, however it ends, to those in the file `path`."""
    began = time.perf_counter()
    try:
        yield
    finally:
        spent = seconds_in(path) + time.perf_counter() - began
        with atomic_write(path) as new:
            new.write_text(f"{spent:.3f}")


def seconds_in(*paths: Path) -> float:
    return sum(float(path.read_text()) for path in paths if path.exists())
