"""On a CUDA device: the same function as on the CPU, and the main job from end to end."""

import pytest
import torch
from conftest import FAMILIES
from gpu_checks import CASES
from running import record_of, router_steps, run, tiny

from focus_exp import attach, set_routing

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_on_the_gpu_are_those_on_the_cpu(tiny_model, family, hard):
    torch.manual_seed(0)
    model = set_routing(attach(tiny_model(family), "focus", window=8, sinks=2), hard=hard)
    tokens = torch.randint(256, (2, 48))
    with torch.no_grad():
        on_cpu = model(tokens).logits
        on_gpu = model.cuda()(tokens.cuda()).logits.cpu()
    torch.testing.assert_close(on_gpu, on_cpu, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("hard", [False, True])
def test_the_past_does_not_see_the_future_in_bf16(tiny_model, hard):
    torch.manual_seed(0)
    model = tiny_model("llama", dtype=torch.bfloat16).cuda()
    set_routing(attach(model, "focus", window=8, sinks=2), hard=hard)
    tokens = torch.randint(256, (1, 48), device="cuda")
    changed = torch.cat([tokens[:, :32], torch.randint(256, (1, 16), device="cuda")], dim=1)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits[:, :32], model(changed).logits[:, :32])


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_from_a_cache_on_the_gpu_give_the_logits_of_the_whole(tiny_model, family):
    torch.manual_seed(0)
    model = set_routing(attach(tiny_model(family), "focus", window=8, sinks=2), hard=True).cuda()
    tokens, found, cache = torch.randint(256, (2, 48), device="cuda"), [], None
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        for part in tokens.split([20, 7, *[1] * 21], dim=1):
            out = model(part, past_key_values=cache, use_cache=True)
            found.append(out.logits)
            cache = out.past_key_values
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=1e-3, rtol=1e-3)
    assert cache.bytes > 0


@pytest.mark.parametrize("recipe", ["retrofit", "finetune"])
def test_a_run_on_the_gpu_trains_and_evaluates_there(tmp_path, recipe):
    steps = [router_steps(2)] + ["recipe.phases.everything.steps=2"] * (recipe == "finetune")
    where = ["trainer.accelerator=gpu", "trainer.precision=auto"]
    assert run(*tiny(tmp_path), "model=tiny_gpt2", f"recipe={recipe}", *steps, *where).code == 0
    record = record_of(tmp_path)
    assert record.status == "finished"
    assert record.device.startswith(torch.cuda.get_device_name())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_on_the_gpu_are_the_oracle_in_outputs_and_gradients(case):
    assert case.errors() == {}
