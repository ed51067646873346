"""Bases sharded by FSDP2; those offloaded by accelerate are refused."""

import pytest
import torch
from accelerate import cpu_offload
from builders import attach_focus, compute_logits, make_tokens
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from focus_exp import UserError, attach, freeze, save_adapter, set_routing
from focus_exp.models import self_check
from focus_exp.models.adapter import DESCRIPTION, WEIGHTS
from focus_exp.models.methods import attached_methods, attention_modules


def test_attach_offloaded_base_raises(tiny_model):
    model = tiny_model("llama")
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(UserError, match="offloaded by accelerate"):
        attach(model)


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
        model = set_routing(attach_focus(tiny_model("llama")), hard=hard)
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
    model = attach_focus(tiny_model("llama"))
    whole = save_adapter(model, tmp_path / "whole")
    for part in (*select_parts(model, "router"), *model.model.layers, model):
        fully_shard(part, mesh=one_process)
    sharded = save_adapter(model, tmp_path / "sharded")
    assert all((sharded / name).read_bytes() == (whole / name).read_bytes() for name in (WEIGHTS, DESCRIPTION))


def test_fully_shard_before_attach_warns_that_exactness_is_not_checked(tiny_model, one_process, monkeypatch, verified):
    warned = []
    monkeypatch.setattr(self_check.log, "warning_once", warned.append)
    model = tiny_model("llama")
    expected = compute_logits(attach_focus(tiny_model("llama")))
    verified.clear()
    fully_shard(model, mesh=one_process)
    attach_focus(model)
    assert len(warned) == 1 and not verified
    torch.testing.assert_close(compute_logits(model), expected, atol=0, rtol=0)
