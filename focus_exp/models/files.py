"""Find and check the files of a local model, and explain failures."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.assets import HUB_ID
from focus_exp.errors import UserError, first_line

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")  # one of these
TOKENIZER_EXTRAS = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
PAGE, PAGES, MEBIBYTE = 4096, 1024, 2**20
GIVE_PATH = "Give a folder written by save_pretrained, a .safetensors file in one, or a .gguf file"
CHECK_HUB = "Check model.hub_id and model.revision. A gated model needs its terms accepted and `hf auth login`."
GIVE_CAUSAL = "Give a causal language model with model.hub_id or model.path."
# shard of a checkpoint of transformers, or of a GGUF split by llama.cpp
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
# weight of a layer: the stack it belongs to, its number
LAYER = re.compile(r"(.*?\.)(\d+)\.")
# class names of heads that do not predict the next token, such as BertForMaskedLM
OTHER_HEAD = re.compile(r"For(?!CausalLM|ConditionalGeneration)[A-Z]\w+$")


def find_local_model(path: str) -> tuple[Path, Path | None]:
    """Find the model that `model.path` names: folder, .safetensors or .gguf.

    Returns:
        Its folder, and the one weights file to read; None for the usual names.

    Raises:
        UserError: there is no such model; names what was found and what to type.
    """
    place = Path(path).expanduser()
    folder = place if place.is_dir() else place.parent
    if not place.exists():
        hub = f", or model.hub_id={path} for the Hub" if HUB_ID.fullmatch(path) else ""
        raise UserError(f"model.path={path}: no such file or folder. {GIVE_PATH}{hub}.")
    if place.is_file() and place.suffix not in (".safetensors", ".gguf"):
        raise UserError(f"model.path={path}: weights must be .safetensors or .gguf (got {place.name}). {GIVE_PATH}.")
    if place.is_file() and place.suffix == ".gguf":
        if SHARD.search(place.stem):
            raise UserError(f"model.path={path} is one shard of a GGUF. Merge them with llama-gguf-split --merge.")
        return folder, place
    if not (folder / "config.json").is_file():
        models = sorted([*folder.rglob("*.gguf"), *(config.parent for config in folder.glob("*/config.json"))])
        fix = f"Type model.path={models[0]}" if models else GIVE_PATH
        raise UserError(f"model.path={path}: {folder} has no config.json. {fix}.")
    has_usual_name = place == folder or place.stem == "model" or SHARD.search(place.stem)
    return folder, None if has_usual_name else place


def is_gguf(file: Path | None) -> TypeGuard[Path]:
    return file is not None and file.suffix == ".gguf"


def hash_model(path: str) -> str:
    """Hash the configuration, weights and tokenizer of a local model to twelve hex digits."""
    folder, file = find_local_model(path)
    if is_gguf(file):  # which has all of them
        return hash_files([file])
    weights = [file.name] if file else ["*.safetensors", "*.bin"]
    patterns = ("config.json", *weights, *TOKENIZER_FILES, *TOKENIZER_EXTRAS)
    return hash_files(sorted(place for pattern in patterns for place in folder.glob(pattern)))


def hash_files(files: list[Path]) -> str:
    """Hash names and contents of files to twelve hex digits; see `hash_pages`."""
    hashes = [f"{file.name} {hash_pages(file, (s := file.stat()).st_size, s.st_mtime_ns)}" for file in files]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:12]


@cache
def hash_pages(path: Path, size: int, modified: int) -> str:
    """Hash the size and content of a file; of one from 64 MiB on, pages that are spread over it, the first among them.

    140 GB of weights in 30 files take at most 30,720 pages, which is seconds. Training moves all pages of a tensor.

    size, modified: bytes and mtime, keys of the cache.
    """
    digest, step = hashlib.sha256(str(size).encode()), PAGE if size < 64 * MEBIBYTE else max(MEBIBYTE, size // PAGES)
    with path.open("rb") as content:
        for begin in range(0, size, step):
            content.seek(begin)
            digest.update(content.read(PAGE))
    return digest.hexdigest()


def is_packed(parameter: Tensor) -> bool:
    """Return whether a quantization library stores the weight in its own class."""
    return type(parameter) not in (Tensor, nn.Parameter, DTensor)


def check_head(config: PreTrainedConfig, name: str) -> None:
    """Raise UserError if the saved head does not predict the next token."""
    saved = getattr(config, "architectures", None) or []
    if saved and all(OTHER_HEAD.search(architecture) for architecture in saved):
        raise UserError(f"{name} is a {saved[0]}, which does not predict the next token. {GIVE_CAUSAL}")


def check_weights(model: PreTrainedModel, loading: dict[str, Any], name: str) -> None:
    """Raise UserError if weights are missing, of another shape, or of more layers than the config has."""
    saved, wanted = model.config.architectures or [], type(model).__name__
    missing = sorted(loading["missing_keys"])
    if missing and saved and wanted not in saved and not any(key in saved[0] for key in ("CausalLM", "LMHead")):
        raise UserError(f"{name} is a {saved[0]}, without the head of a {wanted} ({missing[0]}). {GIVE_CAUSAL}")
    reasons = [f"{weight} is missing" for weight in missing]
    reasons += [f"{weight} has another shape" for weight, *_ in sorted(loading["mismatched_keys"])]
    if reasons:
        raise UserError(
            f"{name}: its weights are damaged ({reasons[0]}). Get the model again, or give another model.path."
        )
    depth = model.config.get_text_config().num_hidden_layers
    stacks = {match[1] for weight in model.state_dict() if (match := LAYER.match(weight))}
    beyond = [match for weight in loading["unexpected_keys"] if (match := LAYER.match(weight)) and match[1] in stacks]
    if (deepest := max((int(match[2]) for match in beyond), default=0)) >= depth:
        raise UserError(
            f"{name}: its weights have {deepest + 1} layers, but its config.json has num_hidden_layers={depth}. "
            "Correct num_hidden_layers, or give another model.path."
        )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise UserError for the empty tokenizer made without tokenizer files."""
    if not set(tokenizer("The quick brown fox", add_special_tokens=False)["input_ids"]) - {tokenizer.unk_token_id}:
        raise UserError(f"{name}: it has no {TOKENIZER_FILES[0]} or similar. Put the output of save_pretrained there.")


def explain_load_error(name: str, part: str, error: Exception, is_local: bool) -> UserError:
    """Turn an error of a reader into one sentence with the fix.

    Args:
        name: what the user gave.
        part: config, tokenizer or weights.
        is_local: whether it was read from a local folder, not from the Hub.
    """
    fix = "Give another with model.path=." if is_local else CHECK_HUB
    return UserError(f"{name}: its {part} cannot be read ({first_line(error)}). {fix}")
