"""Attach an attention method to a Hugging Face model, and detach it.

The method replaces the layers' attention through transformers' attention interface. A forward pre-hook on every
attention module routes its hidden states; a mask function keeps masks small; a pre-hook on the decoder lets the KV
cache keep groups. All state is in the model's own modules and configs, so that checkpointing, copies and nested calls
work.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from focus_exp.attention.base import LayerShape
from focus_exp.attention.registry import find
from focus_exp.errors import LeftOut, UserError
from focus_exp.models.hf_cache import is_grouped, prepare_cache
from focus_exp.models.hooks import route_hidden_states
from focus_exp.models.masks import has_values, unpadded
from focus_exp.models.methods import (
    IMPLEMENTATION,
    Attachment,
    attention_modules,
    find_device,
    get_attachment,
    get_method,
    is_causal,
)
from focus_exp.models.self_check import check_exact

log = logging.get_logger(__name__)

REPACKS = "support_avx512bf16_for_cpu"  # attribute of 4-bit layers of bitsandbytes that repack their weights
HIDDEN = -1e4  # largest value by which masks are known to hide a key


def attach(
    model: PreTrainedModel, method: str = "focus", *, layers: list[int] | None = None, **options: Any
) -> PreTrainedModel:
    """Attach an attention method to all layers of a causal language model, or to some.

    The base weights stay as they are; call `freeze` before training. A method takes the training mode of its layer;
    call `model.eval()` for hard routing, with which `generate()` reads its KV cache by group.

    Args:
        method: a name, or the dotted path of a class.
        layers: layer indices; None for all.
        options: of the method, as in its YAML file.

    Raises:
        UserError: the model, the method, an option or a layer does not fit, a method is attached already, or the model
            would not give its base's logits with nothing pruned (`check_exact`). The model is then unchanged.
    """
    if not (isinstance(model, PreTrainedModel) and model.can_generate()):
        is_peft = hasattr(model, "get_base_model")
        hint = "; attach first, then get_peft_model, or pass model.get_base_model()" if is_peft else ""
        raise UserError(
            "attach takes a causal language model, loaded with AutoModelForCausalLM, and this is a "
            f"{type(model).__name__}{hint}"
        )
    if any(p.is_meta for p in model.parameters()) and any(hasattr(part, "_hf_hook") for part in model.modules()):
        raise UserError(
            f"{type(model).__name__} is offloaded by accelerate, which attached methods do not support. Load it "
            "without offloading, for example quantized."
        )
    if getattr(model, "focus_attachment", None) is not None:
        raise UserError("the model already has an attention method attached. Call detach(model) first.")
    modules = attention_modules(model)
    if isinstance(layers, int | str) or (layers is not None and not list(layers)):
        raise UserError(f"layers must be a list of layer indices, or None for all (got {layers!r}).")
    indices = list(modules) if layers is None else list(layers)
    if missing := sorted(set(indices) - set(modules)):
        raise UserError(f"layers must be in {min(modules)} to {max(modules)} (got {missing}).")
    try:
        method_class = find(method)
    except ValueError as error:
        raise UserError(str(error)) from error
    try:
        method_class.options.create(**options).check_layers(len(modules))
        built = {index: method_class.create(layer_shape(model, modules[index], index), **options) for index in indices}
    except ValueError as error:
        raise UserError(f"attention method {method!r}: {error}") from None
    check_unshared(model, modules)
    names = {index: check_forward(modules[index]) for index in indices}

    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # ModernBERT calls its head so
        decoder = model.base_model
    copy_configs(model)
    configs: dict[int, Any] = {id(part.config): part.config for part in (decoder, *modules.values())}
    attachment = Attachment(
        method, options, indices, [(config, config._attn_implementation) for config in configs.values()]
    )
    for index in indices:
        module = modules[index]
        module.focus = built[index].to(find_device(module, model)).train(module.training)
        attachment.register(module, route_hidden_states, names=names[index])
    attachment.register(decoder, prepare_decoder, modules={i: modules[i] for i in indices})
    if not is_causal(model):
        model.prepare_inputs_for_generation = refuse_generation  # type: ignore[assignment]
    model.focus_attachment = attachment  # type: ignore[assignment]
    attachment.unpacked = prevent_repacking(model)
    attachment.set_active(True)
    try:
        check_exact(model)
    except UserError:
        detach(model)
        raise
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `attach`: remove hooks, modules and settings."""
    attachment = get_attachment(model)
    if "focus_attachment" not in vars(model):
        raise UserError(f"{type(model).__name__} wraps the attached model. Detach get_base_model().")
    attachment.set_active(False)
    for handle in attachment.handles:
        handle.remove()
    for layer in attachment.unpacked:
        setattr(layer, REPACKS, True)
    for module in attention_modules(model).values():
        if hasattr(module, "focus"):
            del module.focus
    vars(model).pop("prepare_inputs_for_generation", None)
    del model.focus_attachment
    return model


def copy_configs(model: PreTrainedModel) -> None:
    """Give the model its own configurations: they name the attention function, and another model may share them."""
    copies: dict[int, Any] = {}  # of those within others, too
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = copy.deepcopy(value, copies)


def layer_shape(model: PreTrainedModel, module: nn.Module, index: int) -> LayerShape:
    """Read width, heads and head size of an attention layer from its config."""
    config = getattr(module, "config", None) or model.config.get_text_config()
    if getattr(config, "per_layer_config", None) is not None:
        config = config.per_layer_config[index]
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if heads is None or width is None:
        raise UserError(f"{type(config).__name__} has no num_attention_heads or no hidden_size")
    kv_heads = heads // getattr(module, "num_key_value_groups", 1)
    return LayerShape(width, heads, getattr(module, "head_dim", None) or width // heads, index, kv_heads)


def check_unshared(model: nn.Module, modules: dict[int, nn.Module]) -> None:
    """Raise UserError for a layer that the model runs at several depths."""
    numbers = {module: index for index, module in modules.items()}
    places = [
        (number, re.sub(r"\d+", "", name))
        for name, module in model.named_modules(remove_duplicate=False)
        if (number := numbers.get(module)) is not None
    ]
    if shared := sorted(number for (number, _), count in Counter(places).items() if count > 1):
        raise UserError(
            f"{type(model).__name__} runs one attention layer at several depths (layers {shared}), which attached "
            "methods do not support. Copy the layer for each."
        )


def check_forward(module: nn.Module) -> tuple[str, ...]:
    """Return the parameters of `forward`; UserError unless causal, with **kwargs."""
    if getattr(module, "is_causal", True) is False:
        raise UserError(f"{type(module).__name__} sees later tokens. Give a causal language model.")
    parameters = inspect.signature(module.forward).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise UserError(f"{type(module).__name__} passes no arguments on to its attention function (no **kwargs)")
    return tuple(parameters)


def prevent_repacking(model: nn.Module) -> list[nn.Module]:
    """Keep 4-bit layers from repacking their weights on a CPU; returns them.

    Otherwise the first pass in eval mode changes the base's weights for good, for a kernel without backward.
    """
    if any(getattr(getattr(p, "quant_state", None), "packing_format_for_cpu", False) for p in model.parameters()):
        log.warning("attach: the base's 4-bit weights are packed for inference; load the model again to train on it")
    layers = [module for module in model.modules() if getattr(module, REPACKS, False)]
    for layer in layers:
        setattr(layer, REPACKS, False)
    return layers


def prepare_decoder(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], modules: dict[int, nn.Module]
) -> tuple[Any, dict[str, Any]]:
    """Let the KV cache keep the groups of its keys and check the mask: the decoder's pre-hook.

    modules: attached layers by index.
    """
    assert isinstance(decoder, PreTrainedModel)
    if decoder.config._attn_implementation != IMPLEMENTATION:
        raise UserError(
            f"attention was set to {decoder.config._attn_implementation} on a model with a method attached. Use "
            "disable_method(model), or call detach(model) before set_attn_implementation."
        )
    cache, use_cache = kwargs.get("past_key_values"), kwargs.get("use_cache")
    if use_cache is None:
        use_cache = getattr(decoder.config.get_text_config(), "use_cache", False)
    if use_cache or cache is not None:
        cache = prepare_cache(decoder.config, {i: get_method(module) for i, module in modules.items()}, cache)
        kwargs["past_key_values"], kwargs["use_cache"] = cache, cache is not None
    mask = kwargs.get("attention_mask")
    tokens = next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
    past: int | Tensor = 0 if cache is None else cache.get_seq_length()
    # of a preallocated cache, whose past is a tensor, the mask may be as wide as the cache
    if isinstance(mask, Tensor) and (cache is None or is_grouped(cache)) and not isinstance(past, Tensor):
        check_mask(mask, tokens.shape[1], past)
    if mask is None and cache is None and kwargs.get("position_ids") is None and torch.compiler.is_compiling():
        kwargs["attention_mask"] = unpadded(tokens)
    return args, kwargs


def check_mask(mask: Tensor, tokens: int, past: int) -> None:
    """Raise UserError unless the mask is `[B, past + T]` or `[B, 1, T, past + T]`."""
    if mask.ndim == 2 and mask.shape[1] != past + tokens:
        raise UserError(f"attention_mask must have {past} + {tokens} columns, past and new (got {mask.shape[1]}).")
    if mask.ndim == 4:
        if mask.shape[2] != tokens:
            raise UserError(f"attention_mask must be [batch, T] or [batch, 1, T, T] (got shape {tuple(mask.shape)}).")
        if mask.is_floating_point() and has_values(mask) and bool(((mask != 0) & (mask > HIDDEN)).any()):
            raise UserError("attention_mask must only hide keys: 0 or a large negative value; no biases are supported.")


def refuse_generation(*args: Any, **kwargs: Any) -> None:  # transformers looks for the name kwargs
    raise LeftOut(
        "this attention is non-causal: the groups of a token depend on later tokens, so no text can be generated. Use "
        "a causal method, such as attention=focus (assignment balanced)."
    )
