"""On a CUDA device: the same function as on the CPU, and the main job from end to end."""

import pytest
import torch
from builders import attach_focus, compute_logits, make_tokens
from conftest import FAMILIES
from gpu_checks import CASES
from running import record_of, router_steps, run, tiny

from focus_exp.models.hf_cache import is_grouped

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_on_the_gpu_are_those_on_the_cpu(tiny_model, family, hard):
    model, tokens = attach_focus(tiny_model(family), hard=hard), make_tokens()
    on_cpu = compute_logits(model, tokens)
    torch.testing.assert_close(compute_logits(model.cuda(), tokens.cuda()).cpu(), on_cpu, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("hard", [False, True])
def test_the_past_does_not_see_the_future_in_bf16(tiny_model, hard):
    model = attach_focus(tiny_model("llama", dtype=torch.bfloat16).cuda(), hard=hard)
    changed = torch.cat([make_tokens()[:, :32], make_tokens(seed=1)[:, 32:]], dim=1)
    before, after = (compute_logits(model, tokens.cuda()) for tokens in (make_tokens(), changed))
    assert torch.equal(before[:, :32], after[:, :32])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_steps_from_a_cache_on_the_gpu_give_the_logits_of_the_whole(tiny_model, family):
    model, tokens, found, cache = attach_focus(tiny_model(family)).cuda(), make_tokens().cuda(), [], None
    for part in tokens.split([20, 7, *[1] * 13], dim=1):
        out = model(part, past_key_values=cache, use_cache=True)
        found.append(out.logits)
        cache = out.past_key_values
    torch.testing.assert_close(torch.cat(found, 1), compute_logits(model, tokens), atol=1e-3, rtol=1e-3)
    assert is_grouped(cache)


@pytest.mark.parametrize("more", [["recipe=retrofit"], ["recipe=finetune", "recipe.phases.everything.steps=2"]])
def test_a_run_on_the_gpu_trains_and_evaluates_there(tmp_path, more):
    where = ["trainer.accelerator=gpu", "trainer.precision=auto"]
    assert run(*tiny(tmp_path), "model=tiny_gpt2", router_steps(2), *more, *where).code == 0
    record = record_of(tmp_path)
    assert record.status == "finished"
    assert record.device.startswith(torch.cuda.get_device_name())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_on_the_gpu_are_the_oracle_in_outputs_and_gradients(case):
    assert case.errors() == {}
