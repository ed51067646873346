"""Bases with weights loaded by forward hooks: accelerate's offload, FSDP2."""

from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from builders import compute_logits, make_tokens
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from focus_exp import attach, freeze, save_adapter, set_routing
from focus_exp.attention.base import METHODS
from focus_exp.models import self_check
from focus_exp.models.adapter import DESCRIPTION, WEIGHTS
from focus_exp.models.methods import attached_methods, attention_modules

CPU = torch.device("cpu")
NEAR = {"window": 4, "sinks": 1}
GROUPED = ("focus", "focus_dual", "random_groups", "routing_transformer")
OPTIONS = {"token_indexer": NEAR} | {method: NEAR | {"groups": 4} for method in GROUPED}


def dispatch(model: PreTrainedModel, folder: Path) -> None:
    """Put the second attention layer on disk, as `device_map="auto"` does with little memory."""
    layers = attention_modules(model)
    second = next(name for name, module in model.named_modules() if module is layers[1]).rpartition(".")[0]
    owners = {name.rpartition(".")[0] for name in model.state_dict()}
    device_map = dict.fromkeys(sorted(x for x in owners if not x.startswith(f"{second}.")), "cpu") | {second: "disk"}
    dispatch_model(model, device_map, main_device="cpu", offload_dir=folder, force_hooks=True)


OFFLOADS = {
    "cpu": lambda model, folder: cpu_offload(model, execution_device=CPU),
    "cpu with buffers": lambda model, folder: cpu_offload(model, execution_device=CPU, offload_buffers=True),
    "disk": lambda model, folder: disk_offload(model, folder, execution_device=CPU),
    "device_map": dispatch,
}


def attach_method(model: PreTrainedModel, method: str = "focus") -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return set_routing(attach(model, method, **OPTIONS.get(method, {})), hard=True)


@pytest.mark.parametrize(
    ("method", "offload"),
    [*((method, "cpu") for method in sorted(METHODS)), *(("focus", kind) for kind in OFFLOADS if kind != "cpu")],
)
def test_offload_after_attach_keeps_logits(tiny_model, tmp_path, method, offload):
    model = attach_method(tiny_model("llama"), method)
    expected = compute_logits(model)
    OFFLOADS[offload](model, tmp_path)
    assert any(p.is_meta for p in model.parameters())
    torch.testing.assert_close(compute_logits(model), expected, atol=0, rtol=0)


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_offload_before_attach_keeps_logits_and_is_checked(tiny_model, tmp_path, monkeypatch, family, offload):
    expected = compute_logits(attach_method(tiny_model(family)))
    monkeypatch.setattr(self_check, "VERIFIED", set())
    model = tiny_model(family)
    OFFLOADS[offload](model, tmp_path)
    attach_method(model)
    assert len(self_check.VERIFIED) == 1
    assert {p.device for m in attached_methods(model).values() for p in m.parameters()} == {CPU}
    torch.testing.assert_close(compute_logits(model), expected, atol=0, rtol=0)


@pytest.mark.parametrize("first", [True, False], ids=["attach first", "offload first"])
def test_generate_on_an_offloaded_base_gives_the_same_tokens(tiny_model, tmp_path, first):
    options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 256}
    expected = attach_method(tiny_model("llama")).generate(make_tokens(), **options)
    model = tiny_model("llama")
    if first:
        OFFLOADS["disk"](attach_method(model), tmp_path)
    else:
        OFFLOADS["disk"](model, tmp_path)
        attach_method(model)
    assert torch.equal(model.generate(make_tokens(), **options), expected)


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield torch.distributed.init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def select_parts(model: PreTrainedModel, what: str) -> list[nn.Module]:
    methods = attached_methods(model)
    if what == "router":
        return [method.router for method in methods.values()]
    if what == "method":
        return list(methods.values())
    return [module for _, module in attention_modules(model).items()]


@pytest.mark.parametrize("what", ["router", "method", "attention"])
@pytest.mark.parametrize("hard", [False, True])
def test_sharded_router_has_the_same_logits_and_gradients(tiny_model, one_process, what, hard):
    results = []
    for shard in (False, True):
        model = set_routing(attach_method(tiny_model("llama")), hard=hard)
        freeze(model)
        for part in select_parts(model, what) if shard else ():
            fully_shard(part, mesh=one_process)
        model(make_tokens(), labels=make_tokens(), use_cache=False).loss.backward()
        grads = [p.grad for method in attached_methods(model).values() for p in method.parameters()]
        assert all(isinstance(grad, DTensor) == shard for grad in grads)
        grads = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
        results.append([compute_logits(model), *grads])
    for plain, sharded in zip(*results, strict=True):
        torch.testing.assert_close(sharded, plain, atol=1e-6, rtol=1e-5)


def test_save_adapter_of_a_sharded_model_writes_whole_tensors(tiny_model, one_process, tmp_path):
    model = attach_method(tiny_model("llama"))
    whole = save_adapter(model, tmp_path / "whole")
    for part in (*select_parts(model, "router"), *model.model.layers, model):
        fully_shard(part, mesh=one_process)
    sharded = save_adapter(model, tmp_path / "sharded")
    assert all((sharded / name).read_bytes() == (whole / name).read_bytes() for name in (WEIGHTS, DESCRIPTION))


def test_fully_shard_before_attach_warns_that_exactness_is_not_checked(tiny_model, one_process, monkeypatch):
    warned = []
    monkeypatch.setattr(self_check.log, "warning_once", warned.append)
    monkeypatch.setattr(self_check, "VERIFIED", set())
    model = tiny_model("llama")
    expected = compute_logits(attach_method(tiny_model("llama")))
    monkeypatch.setattr(self_check, "VERIFIED", set())
    fully_shard(model, mesh=one_process)
    attach_method(model)
    assert len(warned) == 1 and not self_check.VERIFIED
    torch.testing.assert_close(compute_logits(model), expected, atol=0, rtol=0)
