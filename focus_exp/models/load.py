"""Load a model and its tokenizer from a path, the Hub, or random weights."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, model_info, snapshot_download
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

from focus_exp.assets import Provenance, explain_substitution, hub_reachable, uses_embedded
from focus_exp.config import ModelConfig, is_shipped
from focus_exp.errors import UserError
from focus_exp.models import gguf
from focus_exp.models.files import (
    check_head,
    check_tokenizer,
    check_weights,
    explain_load_error,
    find_local_model,
    hash_files,
    hash_model,
    is_gguf,
    is_packed,
)
from focus_exp.models.random import architecture_config, byte_tokenizer, random_model

FINGERPRINT_SAMPLES = 64
# parameters that `attach` and PEFT add, and what PEFT inserts into the names of the others
ADDED_PARAMETERS = re.compile(r"\.(focus|lora_\w+|modules_to_save)\.")
PEFT_INFIX = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)|\.original_module(?=\.)")
NON_NUMERIC_FIELDS = {
    *("_name_or_path", "architectures", "dtype", "id2label", "initializer_range", "label2id", "output_attentions"),
    *("output_hidden_states", "problem_type", "return_dict", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}


@dataclass
class LoadedModel:
    """A model in eval mode, its tokenizer, and where both came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    provenance: Provenance


@dataclass(frozen=True)
class WeightSource:
    """Arguments of `from_pretrained`.

    weights: the one weights file of the folder to read; None for the usual names.
    """

    folder: str
    options: dict[str, Any]
    provenance: Provenance
    weights: str | None = None


def load_model(
    cfg: ModelConfig, *, assets: str, cache: Path, seed: int, dtype: torch.dtype, from_scratch: bool = False
) -> LoadedModel:
    """Load `cfg.path`, `cfg.hub_id` under the policy `assets`, or random weights.

    Weights are drawn from `seed` when there is neither path nor hub_id, or with `from_scratch`.

    Raises:
        UserError: the model does not exist, is gated, damaged, or unavailable under the policy.
    """
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    source, config = find_weights(cfg, assets, cache), None
    tokenizer: PreTrainedTokenizerBase = byte_tokenizer()
    if source is not None:
        # first the config: what it says of the model explains later errors
        config = from_pretrained(AutoConfig, source)
        tokenizer = from_pretrained(AutoTokenizer, source)
        check_tokenizer(tokenizer, source.provenance.requested)
    if source is not None and config is not None and not from_scratch:
        check_vocabulary(tokenizer, config, source.provenance.requested)
        model = load_weights(cfg, source, config, dtype)
        provenance = source.provenance
    else:
        model, provenance = draw_weights(cfg, source, config, tokenizer, seed, dtype)
    return LoadedModel(model, tokenizer, replace(provenance, fingerprint=fingerprint(model)))


def load_weights(
    cfg: ModelConfig, source: WeightSource, config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    check_head(config, source.provenance.requested)
    for name, rate in cfg.architecture.items():  # dropout is no property of the weights
        if "drop" in name and hasattr(config, name):
            setattr(config, name, rate)
    config.transformers_weights = source.weights
    options = {"config": config, "dtype": dtype, **quantization_options(cfg, dtype)}
    # mismatches are reported by check_weights, with the name of the model
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model: PreTrainedModel
    model, loading = from_pretrained(AutoModelForCausalLM, source, **options)
    model.config.__dict__.pop("transformers_weights", None)
    check_weights(model.eval(), loading, source.provenance.requested)
    return model


def draw_weights(
    cfg: ModelConfig,
    source: WeightSource | None,
    stored: PreTrainedConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    dtype: torch.dtype,
) -> tuple[PreTrainedModel, Provenance]:
    """Build a model with random weights for a tokenizer."""
    if cfg.quantization != "none":
        raise UserError(
            f"model.quantization={cfg.quantization} needs pretrained weights, and {cfg.name} has random ones. Give "
            "model.hub_id or model.path, or use model.quantization=none."
        )
    config = architecture_config(cfg) if cfg.architecture or stored is None else stored
    substitution = source.provenance.substitution if source else None
    if substitution and cfg.architecture:
        substitution = f"tokenizer only: {substitution}"
    check_vocabulary(tokenizer, config, f"model {cfg.name}")
    if tokenizer.eos_token_id != config.eos_token_id:
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    shape = cfg.name if cfg.architecture or source is None else source.provenance.name
    used = f"random weights of {shape} (seed {seed}), vocabulary of {len(tokenizer)}"
    provenance = Provenance(cfg.hub_id or cfg.path or cfg.name, used, "random", substitution=substitution)
    return random_model(config, seed, dtype), provenance


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, name: str) -> None:
    vocabulary = config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise UserError(
            f"{name}: vocab_size must be >= {len(tokenizer)}, the tokens of its tokenizer (got {vocabulary}). Correct "
            "it, or put the tokenizer of these weights in their folder."
        )


def quantization_options(cfg: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for `cfg.quantization`.

    int8: vector-wise with outliers in 16 bit (arXiv 2208.07339). nf4: 4-bit NormalFloat, doubly quantized, computed in
    `dtype` (arXiv 2305.14314).
    """
    if cfg.quantization == "none":
        return {}
    if not torch.cuda.is_available():
        raise UserError(f"model.quantization={cfg.quantization} needs a CUDA GPU. Use model.quantization=none.")
    options: dict[str, Any] = {"load_in_8bit": True}
    if cfg.quantization == "nf4":
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        options["bnb_4bit_compute_dtype"] = dtype
    return {"quantization_config": BitsAndBytesConfig(**options), "device_map": {"": torch.cuda.current_device()}}


def from_pretrained(auto: Any, source: WeightSource, **options: Any) -> Any:
    """Call `auto.from_pretrained` without remote code; errors become UserError."""
    name = source.provenance.requested
    try:
        return auto.from_pretrained(source.folder, trust_remote_code=False, **source.options, **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # each reader fails in its own way on a damaged file
        part = {AutoConfig: "config", AutoTokenizer: "tokenizer (tokenizer.json or similar)"}.get(auto, "weights")
        raise explain_load_error(name, part, error, source.provenance.source == "local") from error


def find_weights(cfg: ModelConfig, assets: str, cache: Path) -> WeightSource | None:
    """Find the pretrained model that `cfg` names; None if it names none."""
    if cfg.path:
        folder, file = find_local_model(cfg.path)
        revision = hash_model(cfg.path)
        if is_gguf(file):
            folder, file = gguf.convert_once(file, revision, cache), None
        return WeightSource(
            str(folder), {}, Provenance(cfg.path, cfg.path, "local", revision), file.name if file else None
        )
    return find_hub_source(cfg.hub_id, cfg.revision, assets, cache) if cfg.hub_id else None


def find_hub_source(hub_id: str, revision: str | None, assets: str, cache: Path) -> WeightSource:
    """Find `hub_id`: owner/name, or owner/name:file of a GGUF repository."""
    if uses_embedded(assets, "models", hub_id, is_shipped("model", hub_id)):
        substitution = explain_substitution(assets, gguf.EMBEDDED_NAME, hub_id)
        used = f"{gguf.EMBEDDED_NAME} (4-bit weights)"
        provenance = Provenance(
            hub_id, used, "embedded", gguf.EMBEDDED_REVISION, "", gguf.EMBEDDED_LICENCE, substitution
        )
        return WeightSource(str(gguf.embedded_folder(cache)), {}, provenance)
    repo_id, _, variant = hub_id.partition(":")
    options: dict[str, Any] = {"local_files_only": not hub_reachable()}
    try:
        if options["local_files_only"]:
            snapshot = Path(snapshot_download(repo_id, revision=revision, **options))
            files, commit = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*")], snapshot.name
        else:
            info = model_info(repo_id, revision=revision)
            files, commit = [file.rfilename for file in info.siblings or []], str(info.sha)
        options["revision"] = commit
        provenance = Provenance(hub_id, hub_id, "hub", commit)
        if not variant and ("config.json" in files or not any(name.endswith(".gguf") for name in files)):
            return WeightSource(repo_id, options, provenance)
        name = gguf.choose_file(files, repo_id, variant)
        file = Path(str(hf_hub_download(repo_id, name, **options)))
    except (OSError, ValueError) as error:
        if options["local_files_only"]:
            reason = "the Hugging Face Hub cannot be reached and its cache has no complete copy. Type assets=embedded."
            raise UserError(f"{hub_id}: {reason}") from error
        raise explain_load_error(hub_id, "files", error, is_local=False) from error
    folder = gguf.convert_once(file, hash_files([file]), cache)
    return WeightSource(str(folder), {}, replace(provenance, used=f"{repo_id}/{name}"))


def fingerprint(model: PreTrainedModel) -> str:
    """Hash the base's parameter names, shapes and 64 elements of each.

    The hash is the same for float32 and bfloat16, with or without an attached method or PEFT adapters. A weight packed
    by a quantization library counts by its name alone, because its layout depends on device, version and use: int8 and
    nf4 copies of a model share a fingerprint, which is not the model's.
    """
    return hash_samples(sample_parameters(model))


def sample_parameters(model: PreTrainedModel) -> dict[str, Tensor | None]:
    """Return 64 elements of each of the base's parameters, by name and shape; None of packed ones."""
    samples: dict[str, Tensor | None] = {}
    base = [(PEFT_INFIX.sub("", name), name, p) for name, p in model.named_parameters()]
    for base_name, name, parameter in sorted(base, key=itemgetter(0)):
        if ADDED_PARAMETERS.search(name):
            continue
        if parameter.is_meta:
            raise UserError(
                f"{type(model).__name__} has no data for {base_name} (meta device). Load its weights first, without "
                "offloading."
            )
        if is_packed(parameter):
            samples[f"{base_name} "] = None
            continue
        flat = gather_tensor(parameter.detach()).reshape(-1)
        idx = torch.linspace(0, flat.numel() - 1, FINGERPRINT_SAMPLES, dtype=torch.float64).long()
        samples[f"{base_name} {tuple(parameter.shape)} "] = flat[idx.to(flat.device)].cpu()
    return samples


def hash_samples(samples: dict[str, Tensor | None]) -> str:
    digest = hashlib.sha256()
    for name, sample in samples.items():
        digest.update(name.encode())
        if sample is not None:
            digest.update(sample.to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def count_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions of a model; None where its config names none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def join_samples(samples: dict[str, Tensor | None]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.bfloat16), *(x for x in samples.values() if x is not None)])


def are_casts(x: Tensor, y: Tensor) -> bool:
    """Return whether x and y may be casts of the same numbers to bfloat16, float16 or wider types."""
    if x.shape != y.shape:
        return False
    x, y = x.double(), y.double()
    (x_brain, x_half), (y_brain, y_half) = ([z.bfloat16().double(), z.half().double()] for z in (x, y))
    # numbers that were rounded to bfloat16 here and to float16 there
    both = ((x == x_brain) & (y == y_half)) | ((y == y_brain) & (x == x_half))
    both &= torch.isclose(x, y, rtol=2**-8, atol=2**-24)
    return bool((both | (x_brain == y_brain) | (x_half == y) | (x == y_half)).all())


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded one; all processes must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def select_numerics(config: PreTrainedConfig) -> dict[str, Any]:
    """Select the config fields that decide what given weights compute."""

    def select(values: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in values.items() if name not in NON_NUMERIC_FIELDS}
        return {name: select(value) if isinstance(value, dict) else value for name, value in kept.items()}

    return select(json.loads(json.dumps(config.to_dict(), default=str)))
