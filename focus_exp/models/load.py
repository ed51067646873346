"""Load a model and its tokenizer: local, from the hub, embedded or random, and say which."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import model_info, try_to_load_from_cache
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from focus_exp.assets import Provenance, choose_source, why_embedded
from focus_exp.config import ModelConfig
from focus_exp.errors import UserError
from focus_exp.models import embedded
from focus_exp.models.files import BESIDE_TOKENIZER, TOKENIZER, check_tokenizer, check_weights, missing, unreadable
from focus_exp.models.random import architecture_config, byte_tokenizer, random_model
from focus_exp.shipped import is_shipped

FINGERPRINT_SAMPLES = 64
# of parameters' names: what attaching and PEFT add, and what PEFT puts into those of the base
ADDED = re.compile(r"\.(focus|lora_\w+|modules_to_save)\.")
OF_PEFT = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)|\.original_module(?=\.)")
NO_ARITHMETIC = {
    *("_name_or_path", "architectures", "dtype", "id2label", "initializer_range", "label2id", "output_attentions"),
    *("output_hidden_states", "problem_type", "return_dict", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
PAGE, MEBIBYTE = 4096, 2**20
PARTS = {AutoConfig: "config", AutoTokenizer: "tokenizer", AutoModelForCausalLM: "weights"}


@dataclass
class LoadedModel:
    """A model in eval mode, its tokenizer, and where both came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    provenance: Provenance


@dataclass(frozen=True)
class Place:
    """What `from_pretrained` is given, and how it is described."""

    folder: str
    options: dict[str, Any]
    provenance: Provenance


def load_model(
    cfg: ModelConfig, *, assets: str, cache: Path, seed: int, dtype: torch.dtype, from_scratch: bool = False
) -> LoadedModel:
    """Load `cfg.path`, or `cfg.hub_id` under the policy `assets` (auto, hub or embedded), or random weights.

    Weights are random, drawn from `seed`, when there is neither path nor hub_id, or with `from_scratch`. Raises
    UserError for a model that does not exist, is gated, or cannot be had under the policy.
    """
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    place = _locate(cfg, assets, cache)
    if place is None:
        tokenizer: PreTrainedTokenizerBase = byte_tokenizer()
    else:
        tokenizer = _pretrained(AutoTokenizer, place)
        check_tokenizer(tokenizer, place.provenance.requested)
    if place is not None and not from_scratch:
        config = _with_dropout_of(_pretrained(AutoConfig, place), cfg)
        options = {"config": config, "dtype": dtype, **quantized(cfg, dtype)}
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # for a sentence of our own
        model, loading = _pretrained(AutoModelForCausalLM, place, **options)
        check_weights(model.eval(), loading, place.provenance.requested)
        vocabulary = config.get_text_config().vocab_size
        if len(tokenizer) > vocabulary:
            raise UserError(
                f"{place.provenance.requested}: its tokenizer has {len(tokenizer)} tokens and the model {vocabulary}; "
                "put the tokenizer of these weights beside them, or call resize_token_embeddings before saving them"
            )
        provenance = place.provenance
    else:
        config = architecture_config(cfg) if cfg.architecture or place is None else _pretrained(AutoConfig, place)
        substitution = place.provenance.substitution if place else None
        if substitution and cfg.architecture:
            substitution = f"tokenizer only: {substitution}"
        vocabulary = config.get_text_config().vocab_size
        if len(tokenizer) > vocabulary and place is not None:
            substitution = (
                f"bytes stand in for the tokenizer of {cfg.hub_id or cfg.path}: it has {len(tokenizer)} tokens"
            )
            tokenizer = byte_tokenizer()
        if len(tokenizer) > vocabulary:
            raise UserError(f"model {cfg.name}: architecture.vocab_size={vocabulary} is too small: bytes need 257.")
        if tokenizer.eos_token_id != config.eos_token_id:
            config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        if cfg.quantization != "none":
            raise UserError(
                f"model.quantization={cfg.quantization} is for pretrained weights, and {cfg.name} has random ones; "
                "give model.hub_id or model.path, or use model.quantization=none"
            )
        model = random_model(config, seed, dtype)
        shape = cfg.name if cfg.architecture or place is None else place.provenance.used
        used = f"random weights of {shape} (seed {seed}), vocabulary of {len(tokenizer)}"
        provenance = Provenance(cfg.hub_id or cfg.path or cfg.name, used, "random", substitution=substitution)
    return LoadedModel(model, tokenizer, replace(provenance, fingerprint=fingerprint(model)))


def fingerprint(model: PreTrainedModel) -> str:
    """sha256 over the base model's parameter names, shapes and 64 elements of each, rounded to bfloat16.

    The same for float32 and bfloat16 loads, with or without a method attached (names with ".focus." are skipped), and
    with or without the adapters of PEFT, which have names of their own and change those of the base.
    """
    digest, found = hashlib.sha256(), model.named_parameters()
    kept = [(OF_PEFT.sub("", name), parameter) for name, parameter in found if not ADDED.search(name)]
    for name, parameter in sorted(kept, key=itemgetter(0)):
        flat = whole(parameter.detach()).reshape(-1)
        places = torch.linspace(0, flat.numel() - 1, FINGERPRINT_SAMPLES, dtype=torch.float64).long()
        sample = flat[places.to(flat.device)].to(torch.bfloat16).cpu()
        digest.update(f"{name} {tuple(parameter.shape)} ".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def arithmetic_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The part of a configuration that decides what given weights compute, as JSON gives it back."""
    found: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return without_names(found)


def without_names(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: without_names(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if name not in NO_ARITHMETIC
    }


def revision_of_weights(path: str) -> str:
    """Twelve hex digits of a folder's configuration and weights; of a large file, of a page of every mebibyte."""
    folder = Path(path).expanduser()
    return _revision_of(sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]))


def revision_of_tokenizer(path: str) -> str | None:
    """Twelve hex digits of those files of a folder that decide how text becomes tokens; None where there are none."""
    files = [Path(path).expanduser() / name for name in (*TOKENIZER, *BESIDE_TOKENIZER)]
    there = [file for file in files if file.is_file()]
    return _revision_of(there) if there else None


def _revision_of(files: list[Path]) -> str:
    held = [f"{file.name} {_sampled(file, (of := file.stat()).st_size, of.st_mtime_ns)}" for file in files]
    return hashlib.sha256(" ".join(held).encode()).hexdigest()[:12]


@cache
def _sampled(path: Path, size: int, modified: int) -> str:
    """The sha256 of its size and pages; read again where `size` or the time `modified` changed."""
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as content:
        for begin in range(0, size, PAGE if size < 64 * MEBIBYTE else MEBIBYTE):
            content.seek(begin)
            digest.update(content.read(PAGE))
    return digest.hexdigest()


def quantized(cfg: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` is told of `cfg.quantization`: by bitsandbytes, onto this process's GPU.

    int8: vector-wise with outliers in 16 bit (arXiv 2208.07339). nf4: 4-bit NormalFloat, doubly quantised, computed in
    `dtype` (arXiv 2305.14314).
    """
    if cfg.quantization == "none":
        return {}
    if not torch.cuda.is_available():
        raise UserError(f"model.quantization={cfg.quantization} needs a CUDA GPU; use model.quantization=none")
    if find_spec("bitsandbytes") is None:
        raise UserError(f"model.quantization={cfg.quantization} needs bitsandbytes; pip install bitsandbytes")
    options: dict[str, Any] = {"load_in_8bit": True}
    if cfg.quantization == "nf4":
        options = {
            "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": dtype,
        }  # fmt: skip
    return {"quantization_config": BitsAndBytesConfig(**options), "device_map": {"": torch.cuda.current_device()}}


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is sharded over processes, gathered; all of them must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _locate(cfg: ModelConfig, assets: str, cache: Path) -> Place | None:
    if cfg.path:
        if not (Path(cfg.path).expanduser() / "config.json").is_file():
            raise UserError(
                f"model.path={cfg.path}: no such folder, or it has no config.json; "
                "give the folder that save_pretrained wrote."
            )
        local = Provenance(cfg.path, cfg.path, "local", revision_of_weights(cfg.path))
        return Place(str(Path(cfg.path).expanduser()), {}, local)
    if not cfg.hub_id:
        return None
    commit = _cached_revision(cfg.hub_id, cfg.revision)
    origin = choose_source(assets, cfg.hub_id, lambda: commit is not None, is_shipped("model", cfg.hub_id))
    if origin == "embedded":
        provenance = Provenance(
            cfg.hub_id,
            embedded.NAME,
            "embedded",
            embedded.REVISION,
            licence=embedded.LICENCE,
            substitution=why_embedded(assets, embedded.NAME, cfg.hub_id),
        )
        return Place(str(embedded.embedded_folder(cache)), {}, provenance)
    if origin == "hub_cache":
        revision, licence = commit, None
    else:
        try:
            info = model_info(cfg.hub_id, revision=cfg.revision)
        except (OSError, ValueError) as error:
            raise missing(cfg.hub_id, error) from error
        revision, licence = info.sha, getattr(info.card_data, "license", None)
    options = {"revision": revision, "local_files_only": origin == "hub_cache"}
    return Place(cfg.hub_id, options, Provenance(cfg.hub_id, cfg.hub_id, origin, revision, licence=licence))


def _cached_revision(hub_id: str, revision: str | None) -> str | None:
    """The commit of a complete copy in the hub's local cache, if there is one."""

    def cached(file: str) -> Path | None:
        path = try_to_load_from_cache(hub_id, file, revision=revision)
        return Path(path) if isinstance(path, str) else None

    def complete(weights: str) -> bool:
        index = cached(f"{weights}.index.json")
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index else [weights]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # half an index is no copy
            return False
        return all(cached(shard) for shard in set(shards))

    config = cached("config.json")
    found = config and (complete("model.safetensors") or complete("pytorch_model.bin"))
    return config.parent.name if config and found else None  # .../snapshots/<commit>/config.json


def _pretrained(auto: Any, place: Place, **options: Any) -> Any:
    try:
        return auto.from_pretrained(place.folder, **place.options, **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a damaged file every reader says something else
        if "Unrecognized configuration class" in str(error):
            raise UserError(
                f"{place.provenance.requested} is a {options['config'].model_type} and does not predict the next "
                "token; give a causal language model with model.hub_id or model.path"
            ) from error
        if place.provenance.source != "local":
            raise missing(f"the {PARTS[auto]} of {place.provenance.requested}", error) from error
        raise unreadable(place.folder, PARTS[auto], error) from error


def _with_dropout_of(config: PreTrainedConfig, cfg: ModelConfig) -> PreTrainedConfig:
    """Dropout is no part of the weights: what `cfg.architecture` says of it counts."""
    for name, rate in cfg.architecture.items():
        if "drop" in name and hasattr(config, name):
            setattr(config, name, rate)
    return config
