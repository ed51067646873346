"""A tiny random model of any causal language model that the installed transformers maps, by rules on field names.

The class's defaults say what an architecture is; the rules say how small each number may be by what its name means.
Of the layers of the default one of every kind is kept, whatever lists or numbers of the configuration say the kind.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 257
WIDTH, HEADS, HEAD_DIM = 64, 4, 16
LAYERS = 2

DEPTH = r"(num_hidden|num|n|decoder|encoder|num_decoder|num_encoder|conf_num_hidden)_layers?|num_blocks|depth"
# the first pattern that a field's name matches says how large it may be; 0 and negative numbers mean "none" and stay
SIZES = [
    (r".*divisible_by|.*multiple_of|.*vocab_offset", sys.maxsize),
    (r".*vocab.*", VOCABULARY),
    (r".*max_position.*|.*max_seq.*|n_positions|n_ctx|context_length|model_max_length|max_.*_positions", 512),
    (r".*max_distance|rel_extent|.*_buckets", 32),
    (r"floor_scale|log_scaling_n_floor", 16),
    (DEPTH + r"|num_layers_per_stack", LAYERS),
    (r".*layer_offset|max_window_layers|first_k_dense_replace|num_dense_layers|.*_start_index|num_nextn.*", 1),
    (r".*(layer_period|layer_interval|_pattern|_every_n_layers|layer_group_size|per_attn_res_block)", 2),
    (r"local_attention", 16),
    (r".*window.*|.*chunk_size|.*chunk_length|seq_len", 8),
    (r"index_block_size|index_topk_blocks", 4),
    (r"index_topk", 8),
    (r"attention_types|num_codebooks", 1),
    (r"qk_head_dim", 24),
    (r".*linear.*_key_heads|.*(kv|key_value)_?(n_)?heads|num_query_groups", 2),
    (r".*heads", HEADS),
    (r"n_head", HEADS),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r".*head_?dim|.*d_head|dim_head|.*head_size|kv_channels|d_kv|query_pre_attn_scalar", HEAD_DIM),
    (r"mamba_expand|expand", 1),
    (r".*(d_state|state_size)", 8),
    (r".*n_?groups?|num_expert_group|topk_group|o_groups", 1),
    (r".*(per_tok|per_token|top_?k|moe_k)", 2),
    (r".*experts|zero_expert_num", 4),
    (r".*rank|d_rel|router_hidden_size|ple_embed_dim", 16),
    (r".*(intermediate|ffn|feed_forward|mlp)_(size|dim)(_mlp)?|.*ffn_hidden_size|d_inner|dff|d_ff|dim_ff", 96),
    (r".*(hidden_size|d_model|d_ssm|width|_dim|embedding_size|_input_size|proj_size|hidden_dimension)|n_embd", WIDTH),
    (r".*hidden_size.*|.*channels|prompt_.*", WIDTH),
]
INDICES = r".*(_layers|_ids|_idxs|_indices|_indexes)"
# fields that some classes leave at None though their models need them
MISSING = [
    (r"(swa_|indexer_)?head_dim", HEAD_DIM),
    (r"num_key_value_heads|num_experts_per_tok", 2),
    (r"n_routed_experts|indexer_n_heads|indexer_compress_ratio", 4),
    (r"indexer_kv_heads", 1),
    (r"indexer_budget", 8),
    (r"clip_qkv", 8.0),
    (r"n_shared_experts", 1),
    (r"attn_layer_indices", [1]),
]
FLAGS = {"is_decoder": True, "add_cross_attention": False, "use_cache": True, "use_sliding_window": True}
SPECIAL = r".*_(token_id|token_index)"
LATENT = "kv_lora_rank"  # of attention whose keys and values are one low-rank state


def names() -> list[str]:
    """All causal language models that transformers maps."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A seeded random model in float32 and eval mode; the error of its first try where it cannot be built."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]]
    source = inspect.getsource(inspect.getmodule(kind))
    named = [layer for layer in ALLOWED_ATTN_LAYER_TYPES if f'"{layer}"' in source]
    errors = []
    for repeats, kinds in product((1, 2), (named, *([layer] for layer in named), [])):
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = kind._from_config(tiny_config(name, kinds, repeats), dtype=torch.float32)
                redraw(model)
            return model.eval()
        except Exception as error:
            errors.append(error)
    raise errors[0]


def tiny_config(name: str, kinds: list[str], repeats: int) -> PreTrainedConfig:
    """With every kind of layer that the default has; where that is one alone, with those of `kinds`, too. Each
    `repeats` times, which weights that layers share ask for."""
    config = Shrinking(kinds, repeats).shrunk(CONFIG_MAPPING[name])
    wanted = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]].config_class
    # a model may be of a part of what its entry maps to
    parts = [part for part in (config, *vars(config).values()) if isinstance(part, wanted)]
    return parts[0] if parts else config


@dataclass(frozen=True)
class Shrinking:
    kinds: list[str]
    repeats: int

    def shrunk(self, kind: type[PreTrainedConfig], **known: Any) -> PreTrainedConfig:
        default = kind()
        written = default.to_dict()
        known_as = {
            field.name: default.attribute_map.get(field.name, field.name) for field in fields(kind) if field.init
        }
        values = {name: written.get(name, written.get(alias)) for name, alias in known_as.items()}
        changes = {name: smaller(name, value) for name, value in values.items()} | self.layers(values, written)
        changes |= {name: flag for name, flag in FLAGS.items() if isinstance(values.get(name), bool)}
        changes |= {name: i % 8 for i, name in enumerate(values) if re.fullmatch(SPECIAL, name)}
        changes = {name: value for name, value in changes.items() if value != values.get(name)} | consistent(values)
        for name, value in vars(default).items():
            if isinstance(value, PreTrainedConfig):
                # some parts lack the base of rotary positions, which the whole has
                changes[name] = self.shrunk(type(value), **{} if hasattr(value, "vocab_size") else {"rope_theta": 1e4})
        if not values.get("sliding_window", True) and "sliding" in str(changes.get("layer_types")):
            changes["sliding_window"] = smaller("sliding_window", sys.maxsize)
        if values.get("rope_parameters") == {}:
            kinds = set(changes.get("layer_types", ()))
            changes["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in kinds}
        return kind(**known | changes)

    def layers(self, values: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
        """The first layer of every kind that the lists with an entry per layer, or of layers' numbers, tell apart."""
        counter = next((name for name in values if re.fullmatch(DEPTH, name)), None)
        if counter is None:
            return {}
        depth = values[counter]
        if "layer_types" in values:
            values = values | {"layer_types": self.with_other_kinds(values["layer_types"], depth)}
        lists = {key: list(value) for key, value in values.items() if isinstance(value, list | tuple)}
        indices = {
            key: x
            for key, x in lists.items()
            if re.fullmatch(INDICES, key) and {*map(type, x)} <= {int} and x == sorted({*x})
        }
        entries = {key: [*map(str, x)] for key, x in lists.items() if len(x) == depth and key not in indices}
        entries |= {key: [str(i in x) for i in range(depth)] for key, x in indices.items()}
        overrides = {int(key): value for key, value in (written.get("per_layer_config") or {}).items()}
        entries["per_layer_config"] = [str(overrides.get(i)) for i in range(depth)]
        reused = depth - (values.get("num_kv_shared_layers") or 0)
        entries["num_kv_shared_layers"] = [str(i >= reused) for i in range(depth)]
        cycle = max(
            (
                len(x)
                for x in lists.values()
                if 1 < len(x) < depth
                and len({*map(str, x)} - {"1.0"}) > 1
                and all(isinstance(entry, str) for entry in x)
            ),
            default=1,
        )
        entries["cycle"] = [str(min(i, cycle - 1)) for i in range(depth)]

        first: dict[tuple[str, ...], int] = {}
        for i in range(depth):
            first.setdefault(tuple(entry[i] for entry in entries.values()), i)
        kept = list(first.values()) * self.repeats
        kept = (kept * LAYERS)[: max(LAYERS, len(kept))]
        changes: dict[str, Any] = {counter: len(kept)}
        for key, value in lists.items():
            if key in indices:
                changes[key] = [new for new, old in enumerate(kept) if old in value]
            elif key in entries:
                changes[key] = [smaller(key.removesuffix("_per_layer"), value[i]) for i in kept]
        if "num_kv_shared_layers" in values:
            changes["num_kv_shared_layers"] = sum(i >= reused for i in kept)
        if overrides:
            small = {key: smaller(key, value) for key, value in written.items()} | consistent(written)
            changes["per_layer_config"] = {
                new: {key: small[key] * value // written[key] for key, value in overrides[old].items()}
                for new, old in enumerate(kept)
                if old in overrides
            }
        return changes

    def with_other_kinds(self, kinds: list[str] | None, depth: int) -> list[str] | None:
        """Of an architecture whose default has layers of one kind alone, the others in its last layers."""
        if len(set(kinds or ())) > 1:
            return kinds
        others = [kind for kind in self.kinds if kind not in (kinds or ())]
        kept = kinds or others[-1:] * depth
        return [*kept[: depth - len(others)], *others] if kept else None


def smaller(name: str, value: Any) -> Any:
    """A field's value made small, numbers within lists and dictionaries likewise."""
    if isinstance(value, dict):
        return {key: smaller(str(key), entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [smaller(name, entry) for entry in value]
    if value is None:
        return next((size for pattern, size in MISSING if re.fullmatch(pattern, name)), None)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    return min(value, next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), value))


def consistent(values: dict[str, Any]) -> dict[str, Any]:
    """Fields whose sizes follow from others."""
    changes: dict[str, Any] = {}
    if values.get(LATENT):
        changes["num_key_value_heads"] = HEADS
        if values.get("head_dim"):
            changes["head_dim"] = values["head_dim"] * smaller("qk_rope_head_dim", 64) // values["qk_rope_head_dim"]
    width = values.get("hidden_size")
    if values.get("attention_hidden_size"):
        changes["attention_hidden_size"] = values["attention_hidden_size"] * WIDTH // width
        changes["attention_head_dim"] = changes["attention_hidden_size"] // HEADS
    for name, value in values.items():
        if isinstance(value, list | tuple) and {*map(type, value)} == {int} and sum(value) == width:
            changes[name] = [entry * WIDTH // width for entry in value]
        if re.fullmatch(r"default_.*", name) and value is None and values.get(name.removeprefix("default_") + "s"):
            changes[name] = values[name.removeprefix("default_") + "s"][0]
    return {name: value for name, value in changes.items() if name in values}


def redraw(model: nn.Module) -> None:
    """Weights so large that attention is far from uniform; constants, such as biases of 0, drawn at random."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parameter in model.parameters():
        if not parameter.requires_grad or not parameter.is_floating_point():
            continue
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=1.0 if id(parameter) in embeddings else parameter.shape[-1] ** -0.5)
        elif parameter.numel() and bool((parameter == parameter[0]).all()):
            parameter.data += 0.2 * torch.randn_like(parameter)
