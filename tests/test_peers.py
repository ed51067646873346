"""What tests of transformers and PEFT expect of a model, on models with Focus attached."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import attach_focus, compute_logits, make_tokens
from peft import IA3Config, LoraConfig, get_peft_model
from tiny_architectures import tiny_model as tiny_architecture
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from focus_exp.models.methods import disable_method

NEAR = {"window": 2, "sinks": 1}


@pytest.fixture(params=[4, 1], ids=["all groups", "one group"])
def top_k(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def model(tiny_model: Callable[..., PreTrainedModel], top_k: int) -> PreTrainedModel:
    return attach_focus(tiny_model("llama"), top_k, **NEAR)


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


@pytest.mark.parametrize("name", ["llama", "lfm2"])  # of the latter, convolutions: no keys and values in its cache
def test_generate_with_prompt_lookup_equals_greedy(top_k, tokens, name) -> None:
    model = attach_focus(tiny_architecture(name), top_k, **NEAR)
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


def test_tied_weights_stay_tied(tiny_model, top_k) -> None:
    model = attach_focus(tiny_model("gpt2"), top_k)
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
