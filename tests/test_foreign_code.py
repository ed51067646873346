"""Models whose forwards were replaced, with hooks of others, or with objects that another model shares."""

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from builders import attach_focus, compute_logits, make_tokens
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from focus_exp import UserError, detach, disable_method


def dense_forward(
    self: LlamaAttention, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> tuple[Tensor, None]:
    """Compute attention without the attention interface, as long-context patches do."""
    batch, length, _ = hidden_states.shape
    q, k, v = (
        layer(hidden_states).view(batch, length, -1, self.head_dim).transpose(1, 2)
        for layer in (self.q_proj, self.k_proj, self.v_proj)
    )
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1)), None


class DenseAttention(LlamaAttention):
    forward = dense_forward


def wrap(layer: LlamaAttention, has_bias: bool) -> None:
    """Wrap the forward of a layer, in one that favours near keys if asked (ALiBi)."""
    forward = layer.forward

    @functools.wraps(forward)
    def wrapped(hidden_states: Tensor, **kwargs: Any) -> Any:
        if has_bias:
            position = torch.arange(hidden_states.shape[1])
            bias = (position - position[:, None]).float()[None, None]
            kwargs["attention_mask"] = bias.masked_fill(bias > 0, -torch.inf)
        return forward(hidden_states, **kwargs)

    layer.forward = wrapped


def bind(layer: LlamaAttention, patch: pytest.MonkeyPatch) -> None:
    layer.forward = types.MethodType(dense_forward, layer)


def close_over(layer: LlamaAttention, patch: pytest.MonkeyPatch) -> None:
    layer.forward = functools.wraps(layer.forward)(lambda *args, **kwargs: dense_forward(layer, *args, **kwargs))


def change_class(layer: LlamaAttention, patch: pytest.MonkeyPatch) -> None:
    layer.__class__ = DenseAttention


def patch_class(layer: LlamaAttention, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LlamaAttention, "forward", dense_forward)


@pytest.mark.parametrize("replace", [bind, close_over, change_class, patch_class])
@pytest.mark.parametrize("layers", [[0, 1], [1]])
def test_attach_replaced_forward_raises(tiny_model, monkeypatch, replace, layers):
    attach_focus(tiny_model("llama"), layers=[1])  # of the same architecture, which says nothing of the next model
    model = tiny_model("llama")
    expected = compute_logits(model)
    for index in layers:
        replace(model.model.layers[index].self_attn, monkeypatch)
    with pytest.raises(UserError, match=r"layers \[1\] do not call|layers must be|attention interface"):
        attach_focus(model, layers=[1])
    torch.testing.assert_close(compute_logits(model), expected)


@pytest.mark.parametrize("has_bias", [False, True])
def test_attach_wrapped_forward_is_checked_again(tiny_model, has_bias):
    expected, model = compute_logits(attach_focus(tiny_model("llama"))), tiny_model("llama")
    for layer in model.model.layers:
        wrap(layer.self_attn, has_bias)
    if has_bias:
        with pytest.raises(UserError, match="changes its attention mask"):
            attach_focus(model)
    else:
        assert torch.equal(compute_logits(attach_focus(model)), expected)


def test_attach_same_code_is_compared_once(tiny_model, verified):
    passes = []
    for family in ("llama", "llama", "mistral", "llama"):
        modules: list[torch.nn.Module] = []
        with register_module_forward_pre_hook(lambda module, _, modules=modules: modules.append(module)):
            attach_focus(tiny_model(family))
        passes.append(len(modules))
    assert passes[0] > passes[1] == passes[3] < passes[2] and len(verified) == 2


def shift_inputs(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"hidden_states": kwargs["hidden_states"] + 0.5}


class Shift(ModelHook):
    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return shift_inputs(module, args, kwargs)


HOOKS = {
    "pre": lambda layer: layer.register_forward_pre_hook(shift_inputs, with_kwargs=True),
    "pre, first": lambda layer: layer.register_forward_pre_hook(shift_inputs, with_kwargs=True, prepend=True),
    "forward": lambda layer: layer.register_forward_hook(lambda module, args, output: (2 * output[0], output[1])),
    "accelerate": lambda layer: add_hook_to_module(layer, Shift()),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("before", [True, False], ids=["before attach", "after attach"])
def test_disable_method_keeps_the_order_of_hooks(tiny_model, kind, before):
    model, base = tiny_model("llama"), tiny_model("llama")
    for plain in (model, base) if before else (base,):
        for layer in plain.model.layers:
            HOOKS[kind](layer.self_attn)
    attach_focus(model)
    for layer in () if before else model.model.layers:
        HOOKS[kind](layer.self_attn)
    expected = compute_logits(model)
    for _ in range(2):
        with disable_method(model):
            assert torch.equal(compute_logits(model), compute_logits(base))
        assert torch.equal(compute_logits(model), expected)
    assert not torch.equal(expected, compute_logits(base))
    assert torch.equal(compute_logits(detach(model)), compute_logits(base))


def test_disable_method_keeps_full_backward_hooks(tiny_model):
    model, seen = attach_focus(tiny_model("llama"), hard=False), []
    model.model.layers[0].self_attn.register_full_backward_hook(lambda module, grad_input, grad: seen.append(grad[0]))
    for _ in range(2):
        model(make_tokens(), labels=make_tokens(), use_cache=False).loss.backward()
        with disable_method(model):
            compute_logits(model)
    assert len(seen) == 2 and torch.equal(*seen)


def share_config(tiny_model: Callable[..., PreTrainedModel], family: str) -> list[PreTrainedModel]:
    first = tiny_model(family)
    with torch.random.fork_rng(devices=[]):
        second = type(first)(first.config).eval()
    return [first, second]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_attach_leaves_a_model_of_the_same_config_alone(tiny_model, family):
    first, second = share_config(tiny_model, family)
    config, generation = first.config, first.generation_config.to_dict()
    first.set_attn_implementation("eager")
    expected = second(make_tokens(), output_attentions=True)
    attach_focus(first)
    found = second(make_tokens(), output_attentions=True)
    assert len(found.attentions) == len(expected.attentions) and torch.equal(found.logits, expected.logits)
    attach_focus(second)
    routed, base = compute_logits(second), compute_logits(detach(first))
    assert torch.equal(compute_logits(second), routed) and config._attn_implementation == "eager"
    with disable_method(second):
        assert torch.equal(compute_logits(second), expected.logits)
    assert torch.equal(compute_logits(detach(second)), expected.logits) and torch.equal(compute_logits(first), base)
    assert config._attn_implementation == first.config._attn_implementation == "eager"
    assert first.generation_config.to_dict() == generation


def test_attach_shared_composite_config_is_copied_whole():
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {**text, "image_size": 8, "patch_size": 4}
    parts = {"vision_config": CLIPVisionConfig(**vision), "text_config": LlamaConfig(**text, vocab_size=128)}
    config = LlavaConfig(**parts, image_token_index=1)
    first, second = (LlavaForConditionalGeneration(config).eval() for _ in range(2))
    before = config.text_config._attn_implementation
    attach_focus(first)
    decoder = first.get_decoder()
    assert first.config.text_config is decoder.config is decoder.layers[0].self_attn.config
    assert second.config is config and config.text_config._attn_implementation == before != "focus_exp"
    detach(first)
    assert first.config.to_dict() == config.to_dict() and first.config.text_config._attn_implementation == before


def test_attach_layer_at_two_depths_raises(tiny_model):
    model = tiny_model("llama")
    model.model.layers[1] = model.model.layers[0]
    expected = compute_logits(model)
    with pytest.raises(UserError, match=r"one attention layer at several depths \(layers \[0\]\)"):
        attach_focus(model)
    assert torch.equal(compute_logits(model), expected)
    model = tiny_model("llama")
    model.alias = model.model  # the same layers by another name run once
    attach_focus(model)
