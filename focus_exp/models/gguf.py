"""Convert a GGUF file into a folder that `from_pretrained` reads: float32 weights and the tokenizer."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from focus_exp.assets import build_once
from focus_exp.errors import UserError, first_line
from focus_exp.models.files import PART

log = logging.getLogger(__name__)
MAGIC = b"GGUF"


def converted_gguf(file: Path, digest: str, cache: Path) -> Path:
    """Return the folder in `cache` that holds the conversion of `file`, made the first time; `digest` names it."""

    def build(folder: Path) -> None:
        log.info("gguf: converting %s (%.0f MB, digest %s), once", file, file.stat().st_size / 1e6, digest)
        start = time.monotonic()
        convert_gguf(file, folder)
        log.info("gguf: converted in %.0f s to %s", time.monotonic() - start, cache / "models")

    return build_once(cache / "models" / f"{file.stem}-{digest}", build)


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the dequantized float32 weights and the tokenizer of `file` into `folder`.

    Raises:
        UserError: the file is damaged, or has an architecture or a tokenizer that transformers does not convert.
    """
    check_magic(file)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    part = "weights"
    # its progress bars have no switch of their own
    bars = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    options: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    try:
        with bars:
            # without dequantize the weights stay packed: slow, and not to be saved
            unpacked = GgufConfig(dequantize=True, gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, dtype=torch.float32, quantization_config=unpacked, **options
            )
            model.save_pretrained(folder)
            part = "tokenizer"
            AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except OSError as error:
        if error.errno is not None:  # a full disk, say
            raise
        raise explain_gguf_error(file, part, error) from error
    except Exception as error:  # each reader fails in its own way on a damaged file
        raise explain_gguf_error(file, part, error) from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def gguf_config(file: Path) -> PreTrainedConfig:
    """Return the configuration in a GGUF file, without its weights."""
    check_magic(file)
    try:
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    except Exception as error:
        raise explain_gguf_error(file, "config", error) from error


def check_magic(file: Path) -> None:
    with file.open("rb") as content:
        if (start := content.read(len(MAGIC))) != MAGIC:
            raise UserError(f"{file} is not a GGUF file (it begins with {start!r}). Give another model.path.")


def explain_gguf_error(file: Path, part: str, error: Exception) -> UserError:
    reason = first_line(error)
    if "not supported" in reason:
        return UserError(
            f"{file}: transformers does not convert it ({reason}). Give the folder of the original model with "
            "model.path, or its model.hub_id."
        )
    return UserError(
        f"{file}: its {part} cannot be read ({reason}). Download the file again, or give the folder of the original "
        "model with model.path."
    )


def choose_gguf(names: Iterable[str], repo_id: str, variant: str) -> str:
    """Choose the file of a GGUF repository.

    Args:
        names: the files of the repository.
        variant: the file's name or the end of it, such as Q4_K_M; empty for a repository with one file.

    Raises:
        UserError: no file, or several, are meant; names them.
    """
    files = sorted(n for n in names if n.endswith(".gguf") and "mmproj" not in n and not PART.search(Path(n).stem))
    if not files:
        raise UserError(f"model.hub_id={repo_id} has no unsplit GGUF file. Give the repository of the original model.")
    wanted = variant.lower().removesuffix(".gguf")
    matching = [n for n in files if n.lower().removesuffix(".gguf").endswith(wanted)]
    exact = [n for n in matching if Path(n).stem.lower() == wanted]
    chosen = exact or matching
    if len(chosen) == 1:
        return chosen[0]
    choices = ", ".join(f"model.hub_id={repo_id}:{Path(n).stem}" for n in (chosen or files)[:6])
    raise UserError(f"model.hub_id={repo_id} must name one of {len(chosen or files)} GGUF files. Give {choices}.")
