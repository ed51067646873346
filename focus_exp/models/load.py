"""Load a model and its tokenizer: local, from the hub, embedded or random, and say which."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device, has_offloaded_params
from huggingface_hub import hf_hub_download, model_info, snapshot_download, try_to_load_from_cache
from torch import Tensor, nn
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
from focus_exp.models.files import (
    BESIDE_TOKENIZER,
    TOKENIZER,
    check_head,
    check_tokenizer,
    check_weights,
    explain_load_error,
    find_local_model,
    is_packed,
    missing,
)
from focus_exp.models.gguf import choose_gguf, converted_gguf, gguf_config
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
    """What `from_pretrained` is given, and how it is described.

    weights: the one file of the folder to read, None for the usual names.
    """

    folder: str
    options: dict[str, Any]
    provenance: Provenance
    weights: str | None = None


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
        stored = _pretrained(AutoConfig, place)  # first: what it says of the model explains the rest
        tokenizer = _pretrained(AutoTokenizer, place)
        check_tokenizer(tokenizer, place.provenance.requested)
    if place is not None and not from_scratch:
        check_head(stored, place.provenance.requested)
        config = _with_dropout_of(stored, cfg)
        config.transformers_weights = place.weights
        options = {"config": config, "dtype": dtype, **quantization_options(cfg, dtype)}
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # for a sentence of our own
        model, loading = _pretrained(AutoModelForCausalLM, place, **options)
        model.config.__dict__.pop("transformers_weights", None)
        check_weights(model.eval(), loading, place.provenance.requested)
        vocabulary = config.get_text_config().vocab_size
        if len(tokenizer) > vocabulary:
            raise UserError(
                f"{place.provenance.requested}: its tokenizer has {len(tokenizer)} tokens and the model {vocabulary}; "
                "put the tokenizer of these weights beside them, or call resize_token_embeddings before saving them"
            )
        provenance = place.provenance
    else:
        config = architecture_config(cfg) if cfg.architecture or place is None else stored
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

    Equal for float32 and bfloat16 loads, with or without a method attached (names with ".focus." are skipped), with
    or without PEFT's adapters, and for layers that accelerate offloads. A weight that a quantization library packs
    counts by its name alone: how it is packed depends on device, version and use, so int8 and nf4 copies of a model
    share a fingerprint, which is not that of the model.
    """
    digest, tied = hashlib.sha256(), getattr(model, "all_tied_weights_keys", {})
    kept = [(OF_PEFT.sub("", name), name, p) for name, p in model.named_parameters() if not ADDED.search(name)]
    for base_name, name, parameter in sorted(kept, key=itemgetter(0)):
        if parameter.is_meta and base_name in tied:  # offloaded copies of a tied weight are no longer one parameter
            continue
        if is_packed(parameter):
            digest.update(f"{base_name} ".encode())
            continue
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        with materialize(model, module) if parameter.is_meta else nullcontext():
            flat = gather_tensor(getattr(module, leaf).detach()).reshape(-1)
            places = torch.linspace(0, flat.numel() - 1, FINGERPRINT_SAMPLES, dtype=torch.float64).long()
            sample = flat[places.to(flat.device)].to(torch.bfloat16).cpu()
        digest.update(f"{base_name} {tuple(parameter.shape)} ".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def materialize(model: nn.Module, module: nn.Module) -> Iterator[None]:
    """Within the block `module`, a part of `model`, has its data, also where accelerate offloads it.

    Raises:
        UserError: the data is nowhere, as in a model built on the meta device.
    """
    inside = set(module.modules())
    offloaded = [m for m in model.modules() if has_offloaded_params(m) and (m in inside or module in set(m.modules()))]
    with ExitStack() as stack:
        for part in offloaded:
            stack.enter_context(align_module_device(part))
        if name := next((name for name, tensor in module.state_dict().items() if tensor.is_meta), None):
            raise UserError(
                f"{type(model).__name__} has no data for {name} of {type(module).__name__} (meta device); load its "
                "weights first"
            )
        yield


def select_numerics(config: PreTrainedConfig) -> dict[str, Any]:
    """The part of a configuration that decides what given weights compute, as JSON gives it back."""
    found: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return without_names(found)


def without_names(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: without_names(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if name not in NO_ARITHMETIC
    }


def hash_weights(path: str) -> str:
    """Twelve hex digits of a model's configuration and weights; of a large file, of a page of every mebibyte.

    Raises:
        UserError: `path` is no local model, see `find_local_model`.
    """
    return _revision_of(find_local_model(path).hashed_files)


def hash_tokenizer(path: str) -> str | None:
    """Twelve hex digits of the files that decide how text becomes tokens; None without such files, as of a GGUF."""
    local = find_local_model(path)
    files = [] if local.gguf else [local.folder / name for name in (*TOKENIZER, *BESIDE_TOKENIZER)]
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


def quantization_options(cfg: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
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


def gather_tensor(tensor: Tensor) -> Tensor:
    """A tensor that is sharded over processes, gathered; all of them must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _locate(cfg: ModelConfig, assets: str, cache: Path) -> Place | None:
    if cfg.path:
        found = find_local_model(cfg.path)
        revision = hash_weights(cfg.path)
        local = Provenance(cfg.path, cfg.path, "local", revision)
        folder = converted_gguf(found.gguf, revision, cache) if found.gguf else found.folder
        return Place(str(folder), {}, local, found.weights)
    return _locate_hub(cfg.hub_id, cfg.revision, assets, cache) if cfg.hub_id else None


def read_local_config(path: str) -> PreTrainedConfig:
    """Read the configuration of a local model without its weights; UserError as of `find_local_model`."""
    found = find_local_model(path)
    if found.gguf:
        return gguf_config(found.gguf)
    config: PreTrainedConfig = _pretrained(AutoConfig, Place(str(found.folder), {}, Provenance(path, path, "local")))
    return config


def _locate_hub(hub_id: str, wanted: str | None, assets: str, cache: Path) -> Place:
    """Find `hub_id`: owner/name, or owner/name:file of a GGUF repository."""
    repo_id, _, variant = hub_id.partition(":")
    commit = None if variant else _cached_revision(repo_id, wanted)
    snapshot = None if commit else _cached_ggufs(repo_id, wanted, variant)
    origin = choose_source(assets, hub_id, lambda: bool(commit or snapshot), is_shipped("model", hub_id))
    if origin == "embedded":
        provenance = Provenance(
            hub_id,
            embedded.NAME,
            "embedded",
            embedded.REVISION,
            licence=embedded.LICENCE,
            substitution=why_embedded(assets, embedded.NAME, hub_id),
        )
        return Place(str(embedded.embedded_folder(cache)), {}, provenance)
    licence, names = None, []
    if origin == "hub":
        try:
            info = model_info(repo_id, revision=wanted)
        except (OSError, ValueError) as error:
            raise missing(hub_id, error) from error
        commit, licence = info.sha, getattr(info.card_data, "license", None)
        names = [file.rfilename for file in info.siblings or []]
    elif snapshot:
        commit, names = snapshot.name, [str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf")]
    provenance = Provenance(hub_id, hub_id, origin, commit, licence=licence)
    options: dict[str, Any] = {"revision": commit, "local_files_only": origin == "hub_cache"}
    if not variant and ("config.json" in names or not any(name.endswith(".gguf") for name in names)):
        return Place(repo_id, options, provenance)
    name = choose_gguf(names, repo_id, variant)
    try:
        file = Path(str(hf_hub_download(repo_id, name, **options)))
    except (OSError, ValueError) as error:
        raise missing(hub_id, error) from error
    folder = converted_gguf(file, _revision_of([file]), cache)
    return Place(str(folder), {}, replace(provenance, used=f"{repo_id}/{name}"))


def _cached_ggufs(repo_id: str, revision: str | None, variant: str) -> Path | None:
    """The snapshot in the hub's local cache that has the GGUF file that is meant, if there is one."""
    try:
        snapshot = Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
        choose_gguf((str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf")), repo_id, variant)
    except (OSError, ValueError, UserError):
        return None
    return snapshot


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
    """Call `auto.from_pretrained`, never with code of the model's own, and explain what goes wrong."""
    requested = place.provenance.requested
    try:
        return auto.from_pretrained(place.folder, trust_remote_code=False, **place.options, **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a damaged file every reader says something else
        if "Unrecognized configuration class" in str(error):
            raise UserError(
                f"{requested} is a {options['config'].model_type} and does not predict the next "
                "token; give a causal language model with model.hub_id or model.path"
            ) from error
        folder = place.folder if place.provenance.source == "local" else None
        raise explain_load_error(requested, PARTS[auto], error, folder) from error


def _with_dropout_of(config: PreTrainedConfig, cfg: ModelConfig) -> PreTrainedConfig:
    """Dropout is no part of the weights: what `cfg.architecture` says of it counts."""
    for name, rate in cfg.architecture.items():
        if "drop" in name and hasattr(config, name):
            setattr(config, name, rate)
    return config
