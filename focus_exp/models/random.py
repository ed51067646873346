"""Random weights of a configured architecture, and the tokenizer that needs no file."""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from focus_exp.config import ModelConfig
from focus_exp.errors import UserError

END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, its id the byte, and `<|endoftext|>` (256) as eos; gives any text back unchanged."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    # the characters by which the byte-level pre-tokenizer spells bytes
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {END_OF_TEXT: 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def architecture_config(cfg: ModelConfig) -> PreTrainedConfig:
    """The transformers config that `cfg.architecture` describes; raises UserError for an unknown type or field."""
    fields: dict[str, Any] = dict(OmegaConf.to_container(OmegaConf.create(cfg.architecture), resolve=True))  # type: ignore
    kind = fields.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise UserError(
            f"model {cfg.name}: architecture.model_type={kind} is not one that transformers knows; "
            "set e.g. gpt2 or llama, or give model.hub_id or model.path."
        )
    defaults = CONFIG_MAPPING[kind]()
    unknown = set(fields) - set(defaults.to_dict()) - set(defaults.attribute_map) - {"tie_word_embeddings"}
    if unknown:
        raise UserError(
            f"model {cfg.name}: architecture has {', '.join(sorted(unknown))}, which a {kind} config does not know; "
            "check the spelling."
        )
    try:
        return AutoConfig.for_model(kind, **fields)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise UserError(f"model {cfg.name}: architecture: {str(error).strip().splitlines()[-1].strip()}") from error


def random_model(config: PreTrainedConfig, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """A model with weights drawn from `seed`; the same ones, rounded, for every dtype. Global RNG is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _build(config)
    # parameters only: rotary frequencies are buffers and stay float32, as from_pretrained has it
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def model_on_meta(cfg: ModelConfig) -> PreTrainedModel:
    """The model of `cfg.architecture` on the meta device: shapes without weights, at any size."""
    with torch.device("meta"):
        return _build(architecture_config(cfg))


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except (AssertionError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"transformers cannot build a {config.model_type} model of model.architecture: {error}"
        ) from error
