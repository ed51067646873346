"""Random weights of a configured architecture, and a byte tokenizer."""

from __future__ import annotations

import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from focus_exp.config import ModelConfig
from focus_exp.errors import UserError

END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of bytes 0 to 255; 256 is `<|endoftext|>` (eos)."""
    # the byte-level pre-tokenizer writes bytes as these characters
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {END_OF_TEXT: 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def architecture_config(cfg: ModelConfig) -> PreTrainedConfig:
    """Build the config that `cfg.architecture` describes."""
    fields = dict(cfg.architecture)
    kind = fields.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise UserError(
            f"model {cfg.name}: architecture.model_type must be a type of transformers, such as gpt2 (got {kind}). "
            "Set it, or give model.hub_id or model.path."
        )
    defaults = CONFIG_MAPPING[kind]()
    unknown = set(fields) - set(defaults.to_dict()) - set(defaults.attribute_map) - {"tie_word_embeddings"}
    if unknown:
        raise UserError(
            f"model {cfg.name}: a {kind} config has no field {', '.join(sorted(unknown))}. Check the spelling."
        )
    try:
        return AutoConfig.for_model(kind, **fields)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise UserError(f"model {cfg.name}: architecture: {str(error).strip().splitlines()[-1].strip()}") from error


def random_model(config: PreTrainedConfig, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model with weights drawn from `seed`; the global RNG is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        except (AssertionError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
            raise UserError(
                f"transformers cannot build a {config.model_type} model of model.architecture: {error}"
            ) from error
    # parameters only: rotary frequencies are buffers and stay float32, as in from_pretrained
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model
