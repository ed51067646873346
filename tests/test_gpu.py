"""On a CUDA device: the same function as on the CPU, and the main job from end to end."""

import sys

import pytest
import torch
from conftest import FAMILIES
from problems import random_assignment, random_sequence

from focus_exp import __main__, attach, set_routing
from focus_exp.attention.kernels import KERNELS, Demand, choose
from focus_exp.attention.reference import reference_attention
from focus_exp.attention.selection import select
from focus_exp.attention.sparse import sparse_attention
from focus_exp.records.record import Record

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


@pytest.mark.parametrize("regime", ["retrofit", "finetune"])
def test_a_run_on_the_gpu_trains_and_evaluates_there(tmp_path, monkeypatch, regime):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"chapter {number}: the quick brown fox jumps over it. " * 200)
    settings = [
        "model=tiny_gpt2",
        f"regime={regime}",
        "data=files",
        f"data.files={tmp_path}/*.txt",
        "logger.wandb=disabled",
    ]
    sizes = ["data.block_size=64", "eval.window=64", "eval.max_windows=2", "attention.window=16"]
    steps = [f"regime.phases.{phase}.steps=2" for phase in ["router", "everything"][: 1 + (regime == "finetune")]]
    folders = [f"runs_dir={tmp_path}/runs", f"cache_dir={tmp_path}/cache", "trainer.accelerator=gpu"]
    monkeypatch.setattr(sys, "argv", ["focus_exp", *settings, *sizes, *steps, *folders])
    assert __main__.main() == 0
    record = Record.load(next((tmp_path / "runs").rglob("record.json")))
    assert record.status == "finished"
    assert record.device.startswith(torch.cuda.get_device_name())


def tensors_on_gpu(dtype, length, heads=6, kv_heads=2, size=64):
    torch.manual_seed(length)
    return [torch.randn(2, n, length, size).to("cuda", dtype).requires_grad_() for n in (heads, kv_heads, kv_heads)]


def moved(sequence):
    return type(sequence)(**{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in vars(sequence).items()})


@pytest.mark.parametrize("padding", ["plain", "left", "right"])
@pytest.mark.parametrize("kind", ["spread", "giant", "empty", "tied"])
@pytest.mark.parametrize(("top_k", "rule"), [(1, "query_topk"), (2, "query_topk"), (2, "share")])
@pytest.mark.parametrize("name", ["flash-attn", "torch-flash", "flex", "math"])
def test_kernels_on_the_gpu_are_the_oracle_in_outputs_and_gradients(name, top_k, rule, kind, padding):
    dtype = torch.float32 if name == "math" else torch.bfloat16
    if reason := KERNELS[name].refuses(Demand("cuda", dtype, 64)):
        pytest.skip(reason)
    length, options = 333, {"window": 37, "sinks": 3, "scaling": 0.125, "surrogate": 5.0}
    q, k, v = tensors_on_gpu(dtype, length)
    assignment = random_assignment(kind, 2, length, 8).float().cuda()
    sequence = moved(random_sequence(padding, 2, length))
    outputs = []
    for exact in (False, True):
        leaves = [x.detach().double() if exact else x.detach() for x in (q, k, v)] + [assignment.clone()]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        selection = select(leaves[3], top_k, rule)
        if exact:
            out = reference_attention(*leaves[:3], selection, sequence, **options)
        else:
            out = sparse_attention(*leaves[:3], selection, sequence, KERNELS[name], **options)
        if sequence.valid is not None:
            out = out * sequence.valid[:, None, :, None]
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).cuda()
        gradients = torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)
        outputs.append([x.double() for x in (out, *gradients)])
    for ours, truth in zip(*outputs, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - truth).norm() <= (1e-5 if name == "math" else 1e-2) * truth.norm().clamp(min=1e-3)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_every_head_size_is_served_on_the_gpu(size):
    q, k, v = tensors_on_gpu(torch.bfloat16, 200, size=size)
    kernel = choose(Demand("cuda", torch.bfloat16, size))
    selection = select(torch.rand(2, 200, 4, device="cuda"), 1, "share")
    options = {"window": 16, "sinks": 2, "scaling": size**-0.5}
    sequence = moved(random_sequence("plain", 2, 200))
    ours = sparse_attention(q, k, v, selection, sequence, kernel, **options).double()
    truth = reference_attention(q, k, v, selection, sequence, **options)
    assert (ours - truth).norm() <= 1e-2 * truth.norm()


def test_several_groups_a_token_go_to_flex_attention():
    assert choose(Demand("cuda", torch.bfloat16, 64, one_group=False)).name == "flex"
    assert choose(Demand("cuda", torch.float32, 64)).name == "flex"
    assert choose(Demand("cuda", torch.bfloat16, 64)).name in ("flash-attn", "torch-flash")
