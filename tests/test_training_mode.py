"""Training mode of attached methods; running statistics change in training steps alone."""

import copy

import pytest
import torch
from builders import make_tokens
from peft import LoraConfig, get_peft_model
from test_contract import copy_buffers
from tiny_architectures import tiny_model as tiny_architecture

from focus_exp import attach, freeze, load_adapter, save_adapter, set_routing, update_balance
from focus_exp.attention.base import METHODS
from focus_exp.models import methods as methods_module
from focus_exp.models.methods import attached_methods

OPTIONS = {"groups": 4, "window": 4, "sinks": 1}
MODES = [torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize(("mode", "training"), [(MODES[0], True), (MODES[1], False)])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_forward_without_gradients_moves_no_buffer(tiny_model, method, training, mode):
    model = attach(tiny_model("llama"), method).train(training)
    before = copy_buffers(model)
    with mode():
        model(make_tokens(), use_cache=False)
    update_balance(model)
    assert all(torch.equal(now, x) for now, x in zip(copy_buffers(model), before, strict=True))


def test_update_balance_moves_towards_the_mean_of_the_batches(tiny_model):
    model = attach(tiny_model("llama"), **OPTIONS, balance_momentum=0.75).train()
    method, potentials = attached_methods(model)[0], []
    for seed in (0, 1):  # forward passes change no bias, so that each starts from the same one
        model(make_tokens(seed=seed))
        alone = copy.deepcopy(method.statistics)
        potentials.append(alone[0] - sum(potentials))
        assert alone[1].tolist() == [seed + 1] * 4 and not method.router.potential.any()
    update_balance(model)
    torch.testing.assert_close(method.router.potential, 0.25 * torch.stack(potentials).mean(0))
    assert not method.statistics.any()


def test_frozen_router_in_training_mode_routes_as_in_eval_mode(tiny_model):
    model = set_routing(attach(tiny_model("llama"), **OPTIONS), hard=True)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    expected = wrapped.eval()(make_tokens()).logits
    assert torch.equal(wrapped.train()(make_tokens()).logits, expected)
    update_balance(model)
    assert torch.equal(wrapped(make_tokens()).logits, expected)
    freeze(model)
    assert not torch.equal(wrapped(make_tokens()).logits, expected)


@pytest.mark.parametrize("options", [{}, {"train_with": "hard"}, {"centroid_update": "ema"}])
def test_forward_in_eval_mode_with_gradients_moves_no_buffer(tiny_model, options):
    model = attach(tiny_model("llama"), **OPTIONS, **options).eval()
    before = copy_buffers(model)
    model(make_tokens(), labels=make_tokens()).loss.backward()
    assert all(torch.equal(now, x) for now, x in zip(copy_buffers(model), before, strict=True))


def test_load_adapter_sets_eval_mode_and_hard_routing(tiny_model, tmp_path):
    save_adapter(attach(tiny_model("llama"), **OPTIONS), tmp_path)
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    load_adapter(model, tmp_path)
    methods = attached_methods(model).values()
    mine = {module for method in methods for module in method.modules()}
    assert [module.training for module in model.modules() if module not in mine] == modes
    assert not any(module.training for module in mine)
    model(make_tokens())
    assert {method.path for method in methods} == {"masked"}


@pytest.mark.parametrize(
    ("training", "hard", "train_with", "count"),
    [(True, True, "soft", 1), (True, True, "hard", 0), (True, False, "soft", 0), (False, True, "soft", 0)],
)
def test_set_routing_warns_of_hard_routing_in_training_mode(tiny_model, monkeypatch, training, hard, train_with, count):
    warned: list[str] = []
    monkeypatch.setattr(methods_module.log, "warning_once", warned.append)
    set_routing(attach(tiny_model("llama").train(training), train_with=train_with, **OPTIONS), hard=hard)
    assert len(warned) == count


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "jamba"])
def test_attach_takes_experts_that_return_router_logits(verified, name):
    model = tiny_architecture(name)
    model.config.output_router_logits = True
    attach(model, **OPTIONS)
    assert len(verified) == 1 and model.config.output_router_logits
    out = model(make_tokens(length=12), labels=make_tokens(length=12))
    assert out.aux_loss.isfinite() and out.loss.isfinite()


def test_peft_modules_to_save_router_gets_gradients(tiny_model):
    model = set_routing(attach(tiny_model("llama"), **OPTIONS), hard=True)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["router"]))
    wrapped.train()(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
    names = [name for name, p in wrapped.named_parameters() if "router.modules_to_save" in name and p.grad is not None]
    assert len(names) == 4
    before = copy_buffers(model)
    update_balance(model)
    moved = [not torch.equal(now, x) for now, x in zip(copy_buffers(model), before, strict=True)]
    assert moved == 2 * [False, True]  # in each layer the copy that is trained


def test_attach_in_training_mode_is_checked_without_dropout(tiny_model, verified):
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    attach(model, **OPTIONS)
    assert all(module.training for module in model.modules())
