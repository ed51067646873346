"""The losses of a model's head in chunks against those of whole logits."""

import pytest
import torch
import torch.nn.functional as F
from builders import make_tokens
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp.models import head
from focus_exp.models.head import Head


def gradients(model: PreTrainedModel, loss: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize(
    ("family", "is_plain"), [("llama", True), ("gpt2", True), ("gemma2", False)], ids=["free", "tied", "softcapped"]
)
def test_sum_cross_entropy_equals_whole_logits(tiny_model, monkeypatch, family, is_plain):
    monkeypatch.setattr(head, "ROWS", 16)
    model, tokens = tiny_model(family), make_tokens(2, 20)
    targets, seen = tokens[:, 1:].flatten(), []
    model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, output: seen.append(output.numel()))
    whole = F.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), targets, reduction="sum")
    expected = gradients(model, whole)
    chunked = Head(model)
    assert (chunked.module is not None) == is_plain
    seen.clear()
    loss = chunked.sum_cross_entropy(chunked.inputs(input_ids=tokens)[:, :-1].flatten(0, 1), targets)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(gradients(model, loss), expected, rtol=1e-4, atol=1e-5)
    assert not is_plain or max(seen) == 16 * model.config.vocab_size


def test_head_of_a_model_that_scales_its_logits_in_place_is_not_taken_apart(tiny_model):
    model = tiny_model("llama")
    forward = model.forward

    def scale(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits.mul_(0.5)
        return output

    model.forward = scale
    assert Head(model).module is None


def test_finding_the_head_leaves_random_numbers_alone(tiny_model):
    model = tiny_model("gpt2", attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5).train()
    state = torch.get_rng_state()
    Head(model)
    assert torch.equal(torch.get_rng_state(), state)
