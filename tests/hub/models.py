"""Tiny random models under the ids of conf/model: positions, special tokens and kinds of layers are the real ones."""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GemmaTokenizer,
    GPT2Tokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
)
from transformers.utils import logging

from .texts import sample_texts

logging.disable_progress_bar()
ZOO = Path(__file__).parent.parent.parent / "conf" / "model"
PIECES = 5000  # learned tokens of a vocabulary
HEAD_DIM, LAYERS = 16, 2
# of the weights on the Hub, by the first word of the model's name; of others bfloat16
STORED = {"gpt2": torch.float32, "olmo2": torch.float32, "gemma2": torch.float32, "llama2": torch.float16}
SHARD = "300KB"  # so that weights are in several files, as those of the larger models
END, START_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass(frozen=True)
class Vocabulary:
    """Where a tokenizer's special tokens are, and what the configuration says of them.

    config: bos, eos and pad of config.json. adds_bos: begin a text with it. padded: the model has more rows than that.
    """

    kind: type[PreTrainedTokenizerBase]
    algorithm: str
    first: list[str]
    last: list[str]
    config: tuple[str | None, str, str | None]
    options: dict[str, str | None] = field(default_factory=dict)
    adds_bos: bool = False
    padded: bool = False


LLAMA = Vocabulary(LlamaTokenizer, "pieces", ["<unk>", "<s>", "</s>", *BYTES], [], ("<s>", "</s>", None), adds_bos=True)
GEMMA = Vocabulary(
    GemmaTokenizer, "pieces", ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *BYTES], ["<start_of_turn>"],
    ("<bos>", "<eos>", "<pad>"), adds_bos=True,
)  # fmt: skip
QWEN = Vocabulary(Qwen2Tokenizer, "bytes", [], [END, START_TURN, END_TURN], (END, END, None), padded=True)
# by model_type, or by name where one differs from its family
VOCABULARIES = {
    "gpt2": Vocabulary(GPT2Tokenizer, "bytes", [], [END], (END, END, None)),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": QWEN,
    "qwen2_5_coder_0_5b": Vocabulary(
        Qwen2Tokenizer, "bytes", [], QWEN.last, (END, END_TURN, None), {"eos_token": END_TURN}, padded=True
    ),
    "olmo2": Vocabulary(
        GPT2Tokenizer, "bytes", [], [END, "<|pad|>"], (None, END, "<|pad|>"), {"pad_token": "<|pad|>"}, padded=True
    ),
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "smollm2_135m": Vocabulary(
        GPT2Tokenizer, "bytes", [END, START_TURN, END_TURN], [], (START_TURN, END_TURN, END_TURN),
        {"bos_token": START_TURN, "eos_token": END_TURN, "pad_token": END_TURN},
    ),
}  # fmt: skip


def zoo() -> dict[str, dict[str, Any]]:
    """Return the files of conf/model that name a repository, by its id."""
    entries: list[Any] = [OmegaConf.to_container(OmegaConf.load(path)) for path in sorted(ZOO.glob("*.yaml"))]
    return {entry["hub_id"]: entry for entry in entries if entry.get("hub_id")}


@functools.cache
def train_pieces(algorithm: str, cache: Path | None) -> tuple[list[str], list[tuple[str, str]]]:
    """Train BPE: of bytes as GPT-2's, or of words with their space as SentencePiece's; returns tokens and merges."""
    tokenizer, alphabet = Tokenizer(models.BPE()), list[str]()
    if algorithm == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=PIECES, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sample_texts(cache), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [(left, right) for left, right in model["merges"]]


def make_tokenizer(vocabulary: Vocabulary, cache: Path | None) -> PreTrainedTokenizerBase:
    pieces, merges = train_pieces(vocabulary.algorithm, cache)
    names = dict.fromkeys([*vocabulary.first, *pieces, *vocabulary.last])
    ids = {name: number for number, name in enumerate(names)}
    special = [name for name in (*vocabulary.first, *vocabulary.last) if name not in BYTES]
    tokenizer = vocabulary.kind(vocab=ids, merges=merges, **vocabulary.options)
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    if vocabulary.adds_bos:
        bos = tokenizer.bos_token
        tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, ids[bos])]
        )
        tokenizer.init_kwargs["add_bos_token"] = True
    return tokenizer


def shrink(architecture: dict[str, Any], vocabulary: Vocabulary, tokens: dict[str, int]) -> dict[str, Any]:
    """Make an architecture small: two layers, few heads in the real ratio, the rest as it is."""
    fields = dict(architecture)
    prefix = "n_" if "n_head" in fields else "num_"
    heads = fields.get("num_attention_heads") or fields["n_head"]
    ratio = heads // fields.get("num_key_value_heads", heads)
    heads = ratio * -(-4 // ratio)  # at least four
    small: dict[str, Any] = {"vocab_size": -(-len(tokens) // 128) * 128 if vocabulary.padded else len(tokens)}
    if prefix == "n_":
        small |= {"n_layer": LAYERS, "n_head": heads, "n_embd": heads * HEAD_DIM}
    else:
        small |= {"num_hidden_layers": LAYERS, "num_attention_heads": heads, "num_key_value_heads": heads // ratio}
        small |= {"hidden_size": heads * HEAD_DIM, "intermediate_size": 2 * heads * HEAD_DIM}
    small |= {"head_dim": HEAD_DIM} if "head_dim" in fields else {}
    small |= {"query_pre_attn_scalar": HEAD_DIM} if "query_pre_attn_scalar" in fields else {}
    small |= {"max_window_layers": LAYERS} if "max_window_layers" in fields else {}
    if kinds := fields.get("layer_types"):
        small["layer_types"] = [kinds[0], kinds[-1]]
    names = zip(("bos_token_id", "eos_token_id", "pad_token_id"), vocabulary.config, strict=True)
    return fields | small | {key: tokens[name] if name else None for key, name in names} | {"initializer_range": 0.1}


def write_model(folder: Path, hub_id: str, cache: Path | None) -> None:
    """Write config, tokenizer and weights as save_pretrained does; see `sample_texts` for `cache`."""
    entry = zoo()[hub_id]
    vocabulary = VOCABULARIES.get(entry["name"]) or VOCABULARIES[entry["architecture"]["model_type"]]
    tokenizer = make_tokenizer(vocabulary, cache)
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(**shrink(entry["architecture"], vocabulary, tokenizer.get_vocab()))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(sum(hub_id.encode()))
        dtype = STORED.get(entry["name"].partition("_")[0], torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size=SHARD if config.model_type != "gpt2" else "5GB")
    if config.model_type == "gpt2":  # whose first checkpoint had no head, and so no prefix
        state = {name.removeprefix("transformer."): p.contiguous() for name, p in model.state_dict().items()}
        state.pop("lm_head.weight")
        save_file(state, folder / "model.safetensors", {"format": "pt"})
