"""What tests of transformers and PEFT expect of a model, on models with Focus attached."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import compute_logits, make_tokens
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from focus_exp.models.attach import attach
from focus_exp.models.methods import disable_method, set_routing

MODES = {"kept": 4, "hard": 1}  # top_k of 4 groups


def attach_focus(model: PreTrainedModel, mode: str) -> PreTrainedModel:
    torch.manual_seed(0)
    attach(model, "focus", groups=4, top_k=MODES[mode], window=2, sinks=1)
    return set_routing(model, hard=True)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(tiny_model: Callable[..., PreTrainedModel], mode: str) -> PreTrainedModel:
    return attach_focus(tiny_model("llama"), mode)


@pytest.fixture
def tokens() -> Tensor:
    return make_tokens(2, 9, seed=1)


def generate(model: PreTrainedModel, tokens: Tensor, new: int = 6, **kwargs: object) -> Tensor:
    kwargs.setdefault("attention_mask", torch.ones(tokens.shape[:2], dtype=torch.long))
    lengths = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
    return model.generate(tokens, do_sample=False, **lengths, **kwargs)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_generate_with_cache_equals_without_cache(model, tokens, strategy) -> None:
    expected = generate(model, tokens, use_cache=False, **strategy)
    assert torch.equal(generate(model, tokens, **strategy), expected)


def test_generate_with_assistant_equals_greedy(model, tokens) -> None:
    assistant = copy.deepcopy(model)
    assert torch.equal(generate(model, tokens[:1], assistant_model=assistant), generate(model, tokens[:1]))


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_generate_with_prompt_lookup_equals_greedy(tiny_model, mode, tokens, family) -> None:
    model = attach_focus(tiny_model("llama") if family == "llama" else build_lfm2(), mode)
    prompt = torch.cat([tokens, tokens[:, :5]], 1)[:1]
    assert torch.equal(generate(model, prompt, prompt_lookup_num_tokens=2), generate(model, prompt))


def test_generate_from_inputs_embeds_equals_input_ids(model, tokens) -> None:
    embeds = model.get_input_embeddings()(tokens)
    lengths = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    found = model.generate(inputs_embeds=embeds, do_sample=False, **lengths)
    assert torch.equal(found, generate(model, tokens)[:, tokens.shape[1] :])


def test_forward_output_attentions_equals_sdpa(model, tokens) -> None:
    with disable_method(model):
        expected = model(tokens, output_attentions=True).attentions
    found = model(tokens, output_attentions=True).attentions
    assert type(found) is type(expected)
    assert len(found or ()) == len(expected or ())


def test_resize_token_embeddings_keeps_logits(model, tokens) -> None:
    expected = compute_logits(model, tokens)
    model.resize_token_embeddings(expected.shape[-1] + 7)
    assert_close(compute_logits(model, tokens)[..., : expected.shape[-1]], expected)


def test_save_pretrained_adds_router_keys_alone(tiny_model, model, tokens, tmp_path: Path) -> None:
    added = set(model.state_dict()) - set(tiny_model("llama").state_dict())
    assert added and all(".focus." in key for key in added)
    with disable_method(model):
        expected = compute_logits(model, tokens)
        model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["unexpected_keys"]) == added
    assert not report["missing_keys"]
    assert torch.equal(compute_logits(loaded.eval(), tokens), expected)


def test_tied_weights_stay_tied(tiny_model, mode) -> None:
    model = attach_focus(tiny_model("gpt2"), mode)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.resize_token_embeddings(300)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False),
    ],
    ids=["lora", "ia3"],
)
def test_peft_merge_keeps_logits(model, tokens, config) -> None:
    base = compute_logits(model, tokens)
    peft_model = get_peft_model(model, config).eval()
    expected = compute_logits(peft_model, tokens)
    assert not torch.allclose(expected, base)
    assert_close(compute_logits(peft_model.merge_and_unload(), tokens), expected)


def build_lfm2() -> PreTrainedModel:
    """A convolution hybrid: its cache holds states that are no keys and values."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 257}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("lfm2", **sizes, **heads)).eval()
