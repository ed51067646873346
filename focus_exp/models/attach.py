"""Put an attention method on a Hugging Face model and take it off; no modelling code is copied.

The method's output replaces the layer's attention through transformers' attention interface; a forward pre-hook on
every attention module shows the method the hidden states and the layer's mask, which a mask function of ours makes; a
pre-hook on the decoder brings the cache by group. All state lives in the per-layer modules, so checkpointing, copies
and nested calls behave.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import logging

from focus_exp.attention.base import LayerShape
from focus_exp.attention.registry import find
from focus_exp.errors import UserError
from focus_exp.models.hf_cache import is_grouped, prepare_cache
from focus_exp.models.hooks import has_values, route_hidden_states
from focus_exp.models.methods import (
    IMPLEMENTATION,
    Attachment,
    active_methods,
    attention_modules,
    check_length,
    execution_device,
    find_decoder,
    get_attachment,
    get_method,
    is_causal,
)
from focus_exp.models.self_check import check_exact

log = logging.get_logger(__name__)

PACKS = "support_avx512bf16_for_cpu"  # what a 4-bit layer of bitsandbytes has set if it repacks
HIDDEN = -1e4  # the largest number by which masks are known to hide a key


def attach(
    model: PreTrainedModel, method: str = "focus", *, layers: list[int] | None = None, **options: Any
) -> PreTrainedModel:
    """Attach `method`, a name or the dotted path of a class, with its options to all layers of `model` or to `layers`.

    The base weights are left as they are; freeze them with `freeze` before training. What is attached is in training
    mode where the layer is; call `model.eval()` for hard groups. With hard groups `generate()` keeps keys and values
    by group (`FocusLayer`). UserError for what is no causal language model of transformers, an
    unknown method, option or layer, a model already attached, and one that would not give its base's logits with every
    pair kept (`check_exact`); then nothing is left.
    """
    if not (isinstance(model, PreTrainedModel) and model.can_generate()):
        within = "; attach first, then get_peft_model, or pass model.get_base_model()"
        raise UserError(
            "attach takes a causal language model, loaded with AutoModelForCausalLM, and this is a "
            f"{type(model).__name__}{within if hasattr(model, 'get_base_model') else ''}"
        )
    if getattr(model, "focus_attachment", None) is not None:
        raise UserError("the model already has an attention method attached; call detach(model) first")
    try:
        declared = find(method)
    except ValueError as error:
        raise UserError(str(error)) from error
    modules = attention_modules(model)
    if isinstance(layers, int | str) or (layers is not None and not list(layers)):
        raise UserError(f"layers={layers!r} is no list of layers; give their numbers, or None for all")
    wanted = list(modules) if layers is None else list(layers)
    if missing := sorted(set(wanted) - set(modules)):
        raise UserError(f"layers {missing} do not exist; the model has layers {min(modules)} to {max(modules)}")

    decoder = find_decoder(model)
    configs: dict[int, Any] = {id(part.config): part.config for part in (decoder, *modules.values())}
    implementations = [(config, config._attn_implementation) for config in configs.values()]
    attachment = Attachment(method, options, wanted, implementations)
    try:
        if isinstance(budget := options.get("groups_per_layer"), list):
            check_length(budget, len(modules))
        added = {index: declared.create(layer_shape(model, modules[index], index), **options) for index in wanted}
    except ValueError as error:
        raise UserError(f"attention method {method!r}: {error}") from None
    for index in wanted:
        if getattr(modules[index], "is_causal", True) is False:
            raise UserError(
                f"{type(modules[index]).__name__} sees later tokens; attention methods here are causal: give a causal "
                "language model"
            )
    names = {index: parameters_of(modules[index]) for index in wanted}
    for index, built in added.items():
        module = modules[index]
        module.focus = built.to(execution_device(module, model)).train(module.training)
        attachment.hooks.append((module, partial(route_hidden_states, names=names[index])))
    attachment.hooks.append((decoder, partial(prepare_decoder, modules={i: modules[i] for i in wanted})))
    if not is_causal(model):
        model.prepare_inputs_for_generation = refuse_generation  # type: ignore[assignment]
    own = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    model.create_masks_for_generate = partial(create_masks, model, own)  # type: ignore[assignment]
    model.get_compiled_call = partial(get_compiled_call, model)  # type: ignore[method-assign]
    model.focus_attachment = attachment  # type: ignore[assignment]
    attachment.unpacked = keep_unpacked(model)
    attachment.switch(True)
    try:
        check_exact(model)
    except UserError:
        detach(model)
        raise
    return model


def keep_unpacked(model: nn.Module) -> list[nn.Module]:
    """Keep 4-bit layers of bitsandbytes from repacking their weights on a CPU, and return those that would have.

    Without it the first pass in eval mode changes the base's weights for good, for a kernel that has no backward.
    """
    if any(getattr(getattr(p, "quant_state", None), "packing_format_for_cpu", False) for p in model.parameters()):
        log.warning("attach: the base's 4-bit weights are packed for inference; load the model again to train on it")
    layers = [module for module in model.modules() if getattr(module, PACKS, False)]
    for layer in layers:
        setattr(layer, PACKS, False)
    return layers


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """Names of what the module's `forward` takes; UserError where nothing can be handed through it to attention."""
    parameters = inspect.signature(type(module).forward).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise UserError(f"{type(module).__name__} hands nothing on to its attention function (no **kwargs)")
    return tuple(parameters)[1:]


def prepare_decoder(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], modules: dict[int, nn.Module]
) -> tuple[Any, dict[str, Any]]:
    """Have the attached layers, `modules` by index, cache keys by group, and check the masks that are given."""
    assert isinstance(decoder, PreTrainedModel)
    if decoder.config._attn_implementation != IMPLEMENTATION:
        raise UserError(
            f"attention was set to {decoder.config._attn_implementation} on a model with a method attached, which is "
            "not called any more; use disable_method(model), or call detach(model) before set_attn_implementation"
        )
    given, wanted = kwargs.get("past_key_values"), kwargs.get("use_cache")
    if wanted is None:
        wanted = getattr(decoder.config.get_text_config(), "use_cache", False)
    if (wanted or given is not None) and not is_grouped(given):
        methods = {i: get_method(module) for i, module in modules.items() if not get_method(module).is_dense()}
        if methods:
            given = prepare_cache(decoder.config, methods, given)
            kwargs["past_key_values"], kwargs["use_cache"] = given, given is not None
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and (given is None or is_grouped(given)):
        tokens = next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
        check_mask(mask, tokens.shape[1], 0 if given is None else given.get_seq_length())
    return args, kwargs


def check_mask(mask: Tensor, tokens: int, past: int) -> None:
    """UserError unless the mask that a model is given, `[B, past + T]` or `[B, 1, T, past + T]`, fits its tokens."""
    if mask.ndim == 2 and mask.shape[1] != past + tokens:
        raise UserError(
            f"attention_mask has {mask.shape[1]} columns for {past} tokens in the cache and {tokens} new ones; "
            "give one for each"
        )
    if mask.ndim == 4 and mask.shape[2] != tokens:
        raise UserError(f"attention_mask has shape {tuple(mask.shape)}; give [batch, T] or [batch, 1, T, T]")
    if mask.ndim == 4 and mask.is_floating_point() and has_values(mask) and bool(((mask != 0) & (mask > HIDDEN)).any()):
        raise UserError("attention_mask adds to scores; attention methods here know only 0 and what hides a key")


def groups_keys(model: PreTrainedModel) -> bool:
    """Return whether acting methods leave out pairs, so that their keys are cached by group."""
    return any(not method.is_dense() for method in active_methods(model).values())


def create_masks(model: PreTrainedModel, own: Callable[..., Any], **inputs: Any) -> Any:
    """Leave it to the decoder to make the masks of `generate()`, once a static cache holds its keys by group."""
    return inputs.get("attention_mask") if groups_keys(model) else own(**inputs)


def get_compiled_call(model: PreTrainedModel, compile_config: Any) -> Any:
    """Return what `generate()` calls for each token with a static cache: compiled unless keys are cached by group."""
    if groups_keys(model):
        log.warning_once("generate() runs without torch.compile: a KV cache by group has no static shapes")
        return model.__call__
    return type(model).get_compiled_call(model, compile_config)


def refuse_generation(*_: Any, **__: Any) -> None:
    raise UserError(
        "this attention reads the future: a token's groups depend on the tokens after it, so no text can be generated "
        "token by token; use a causal one, such as attention=focus (assignment balanced)"
    )


def layer_shape(model: PreTrainedModel, module: nn.Module, index: int) -> LayerShape:
    config = getattr(module, "config", None) or model.config.get_text_config()
    if getattr(config, "per_layer_config", None) is not None:
        config = config.per_layer_config[index]
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if heads is None or width is None:
        raise UserError(f"{type(config).__name__} says neither num_attention_heads nor hidden_size of its layers")
    kv_heads = heads // getattr(module, "num_key_value_groups", 1)
    return LayerShape(width, heads, getattr(module, "head_dim", None) or width // heads, index, kv_heads)


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `attach`: hooks, modules and settings are gone, the base model is as it was."""
    attachment = get_attachment(model)
    if "focus_attachment" not in vars(model):
        raise UserError(f"{type(model).__name__} wraps the model that attach was given; detach that, get_base_model()")
    attachment.switch(False)
    for layer in attachment.unpacked:
        setattr(layer, PACKS, True)
    for module in attention_modules(model).values():
        if hasattr(module, "focus"):
            del module.focus
    for name in ("prepare_inputs_for_generation", "create_masks_for_generate", "get_compiled_call"):
        vars(model).pop(name, None)
    del model.focus_attachment
    return model
