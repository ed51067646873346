"""Write a tiny model as a GGUF file, as llama.cpp's converter does."""

from pathlib import Path
from typing import Any

import gguf
import torch
from conftest import build
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

FULL = ["full_attention", "full_attention"]


def plain_qwen2() -> PreTrainedModel:
    """Build the model that `write_gguf` writes: no sliding window, a vocabulary of 256 bytes, end of text and "th"."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(
            "tiny_qwen2", vocab_size=258, use_sliding_window=False, sliding_window=None, layer_types=FULL
        ).eval()


def write_gguf(model: PreTrainedModel, path: Path, quantization: str = "F32", arch: str = "qwen2") -> Path:
    """Write a Qwen2 model with a byte-level tokenizer; matrices as `quantization`, the rest as float32."""
    config: Any = model.config
    kind = gguf.GGMLQuantizationType[quantization]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    letters = sorted(bytes_to_unicode().values())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*letters, "<|endoftext|>", "th"])
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(256)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for parameter, tensor in model.named_parameters():
        array, name = tensor.detach().float().numpy(), names.get_name(parameter, (".weight", ".bias"))
        if array.ndim == 2 and quantization != "F32":
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
