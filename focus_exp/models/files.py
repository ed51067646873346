"""Find the files of a local model, and explain in one sentence why they cannot be used."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.assets import ADAPTER_FILES, HUB_ID
from focus_exp.errors import UserError, first_line

TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")  # a tokenizer has one
BESIDE_TOKENIZER = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
NO_TOKENIZER = (
    f"it has no tokenizer: {', '.join(TOKENIZER[:-1])} or {TOKENIZER[-1]} is missing; put there what "
    "tokenizer.save_pretrained writes"
)
GIVE_PATH = "Give a folder that save_pretrained wrote, a .safetensors file in one, or a .gguf file"
# a part of a sharded checkpoint of transformers, or of a GGUF that llama.cpp split
PART = re.compile(r"-\d{5}-of-\d{5}$")
# class names of heads that do not predict the next token, e.g. BertForMaskedLM
OTHER_HEAD = re.compile(r"For(?!CausalLM|ConditionalGeneration)[A-Z]\w+$")


@dataclass(frozen=True)
class LocalModel:
    """Where the files of a local model are.

    folder: what `from_pretrained` reads. weights: the one file of it to read, None for the usual names.
    gguf: the GGUF file that is to be converted, with `folder` the one that contains it.
    """

    folder: Path
    weights: str | None = None
    gguf: Path | None = None

    @property
    def hashed_files(self) -> list[Path]:
        """The files that decide what the model computes."""
        if self.gguf:
            return [self.gguf]
        weights = [self.folder / self.weights] if self.weights else self.folder.glob("*.safetensors")
        return sorted([self.folder / "config.json", *weights, *([] if self.weights else self.folder.glob("*.bin"))])


def find_local_model(path: str) -> LocalModel:
    """Find the model that `model.path` names: a folder, a .safetensors file or a .gguf file.

    Raises:
        UserError: there is no such model; names what is there instead and what to type.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise UserError(f"model.path={path}: the folder has no config.json{hint_without_config(place)}")
        return LocalModel(place)
    if not place.exists():
        hub = f", or model.hub_id={path} for the hub" if HUB_ID.fullmatch(path) else ""
        raise UserError(f"model.path={path}: no such file or folder. {GIVE_PATH}{hub}.")
    if place.suffix == ".gguf":
        if PART.search(place.stem):
            raise UserError(
                f"model.path={path} is one part of a split GGUF. Merge the parts with llama-gguf-split --merge, and "
                "give the merged file."
            )
        return LocalModel(place.parent, gguf=place)
    if place.suffix != ".safetensors":
        raise UserError(f"model.path={path}: {place.suffix or 'this'} is no format of weights read here. {GIVE_PATH}.")
    if not (place.parent / "config.json").is_file():
        raise UserError(
            f"model.path={path}: its folder has no config.json, which says what the weights are. Put the config.json "
            "and the tokenizer files of the model next to it."
        )
    usual = place.stem == "model" or PART.search(place.stem)
    return LocalModel(place.parent, weights=None if usual else place.name)


def hint_without_config(folder: Path) -> str:
    """Name what a folder without config.json has, and the path to type if it can be told."""
    names = {path.name for path in folder.iterdir()}
    ggufs = sorted(path for path in folder.rglob("*.gguf") if not PART.search(path.stem))
    models = sorted(path.parent for path in (*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")))
    if "adapter_config.json" in names:
        return ", but a PEFT adapter. Merge it into its base with merge_and_unload(), save_pretrained, and give that."
    if names & {ADAPTER_FILES[0], ADAPTER_FILES[1]}:
        return f", but a Focus adapter. Give it as adapter={folder} with job=evaluate, and its base model here."
    if ggufs or models:
        return f". Give model.path={' or model.path='.join(map(str, [*ggufs, *models][:3]))}."
    files = ", ".join(sorted(names)[:4]) or "nothing"
    return f" (it has {files}). {GIVE_PATH}."


def is_packed(parameter: Tensor) -> bool:
    """Whether a quantization library stores the weight in a tensor class of its own (bitsandbytes, torchao)."""
    return type(parameter) not in (Tensor, nn.Parameter, DTensor)


def check_head(config: PreTrainedConfig, name: str) -> None:
    """UserError where the weights were saved with a head that does not predict the next token."""
    saved = getattr(config, "architectures", None) or []
    if saved and all(OTHER_HEAD.search(architecture) for architecture in saved):
        raise UserError(
            f"{name} is a {saved[0]}, which does not predict the next token. Give a causal language model with "
            "model.hub_id or model.path."
        )


def check_weights(model: PreTrainedModel, loading: dict[str, Any], name: str) -> None:
    """UserError where some are missing, for which transformers draws random ones, or are not finite."""
    saved, wanted = model.config.architectures or [], type(model).__name__
    missing = sorted(loading["missing_keys"])
    if missing and saved and wanted not in saved and not any(key in saved[0] for key in ("CausalLM", "LMHead")):
        raise UserError(
            f"{name} is a {saved[0]}, without the head of a {wanted} ({missing[0]} is missing). Give a causal language "
            "model with model.hub_id or model.path."
        )
    reasons = [f"{weight} is missing" for weight in missing]
    reasons += [f"{weight} has another shape" for weight, *_ in sorted(loading["mismatched_keys"])]
    spoilt = (
        f"{weight} holds NaN or infinity"
        for weight, p in model.named_parameters()
        if not is_packed(p) and not p.isfinite().all()
    )
    if reason := next(chain(reasons, spoilt), None):
        raise UserError(f"{name}: its weights are damaged ({reason}); get the model again, or give another model.path")


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """UserError for one that knows no text: without its files transformers makes an empty one."""
    if not set(tokenizer("The quick brown fox", add_special_tokens=False)["input_ids"]) - {tokenizer.unk_token_id}:
        raise UserError(f"{name}: {NO_TOKENIZER}")


def explain_load_error(name: str, part: str, error: Exception, folder: str | None) -> UserError:
    """Turn an error of `from_pretrained` into one sentence with the fix.

    Args:
        name: what the user asked for.
        part: "config", "tokenizer" or "weights".
        folder: the local folder it was read from, None for the hub.
    """
    text = str(error)
    if "trust_remote_code" in text:
        return UserError(
            f"{name}: its {part} needs Python code of its own, which is never run here. Give a model of an "
            "architecture that transformers has, with model.hub_id or model.path."
        )
    if isinstance(error, ImportError):
        return UserError(f"{name}: its {part} needs a package that is not installed ({first_line(error)}).")
    if "does not recognize this architecture" in text and "`None`" not in text:
        return UserError(f"{name}: {first_line(error).split('. ')[0]}. Install a newer transformers, or give another.")
    if folder is None:
        return missing(f"the {part} of {name}", error)
    if part == "tokenizer" and not any((Path(folder) / file).exists() for file in TOKENIZER):
        return UserError(f"{name}: {NO_TOKENIZER}")
    if "model_type" in text or "model type `None`" in text:
        return UserError(f"{name}: its config.json has no model_type. Put the config.json of these weights there.")
    if "no file named" in text:
        return UserError(f"{name}: it has no weights, such as model.safetensors. Put them there, or give another.")
    damaged = isinstance(error, (SafetensorError, json.JSONDecodeError, UnicodeDecodeError, EOFError, OSError))
    again = "copy the folder again, or give" if damaged or part == "tokenizer" else "give"
    return UserError(f"{name}: its {part} cannot be read ({first_line(error)}); {again} another with model.path=")


def missing(name: str, error: Exception) -> UserError:
    """For what the hub does not give."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(
        f"{name}: {reason}\n"
        "Check model.hub_id and model.revision; a gated model needs its terms accepted and `hf auth login`."
    )
