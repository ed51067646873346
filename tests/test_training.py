"""Phases: trainable parameters, batches, schedule and precision."""

import json
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_architectures import tiny_model as tiny_architecture

from focus_exp import attach
from focus_exp import config as schema
from focus_exp.config import FocusConfig
from focus_exp.data import SequenceDataset, TokenStream
from focus_exp.errors import UserError
from focus_exp.models.lora import add_lora
from focus_exp.models.methods import attached_methods, observe_selections
from focus_exp.results.metrics import METRICS, read_metrics
from focus_exp.training import precision as precisions
from focus_exp.training.checkpoints import read_checkpoint
from focus_exp.training.module import LanguageModelTask, learning_rate_scale
from focus_exp.training.phases import CHECKPOINTS, train_phases
from focus_exp.training.precision import choose_precision

T = 32
FLOAT32 = choose_precision("float32", "cpu", trains_base=False)
ROUTER, ALL = (
    schema.PhaseConfig(trainable=train, steps=4, learning_rate=rate, warmup_steps=0)
    for train, rate in (("router", 1e-2), ("all", 1e-3))
)


def focus(model, **options):
    torch.manual_seed(1)
    return attach(model, "focus", **{"groups": 4, "window": 4, "sinks": 1} | options)


def blocks_of(seed: int) -> SequenceDataset:
    """Random tokens in eight sequences."""
    tokens = np.random.default_rng(seed).integers(0, 256, 8 * T, dtype=np.int32)
    return SequenceDataset(TokenStream("random", tokens, np.array([0, len(tokens)]), ["text"]), T, cross_documents=True)


def train(
    model, phase: schema.PhaseConfig, folder: Path, options: dict | None = None, probed=None, **trainer
) -> list[float]:
    """Train `model` on random tokens; returns the loss of every optimizer step.

    Args:
        options: of attention.* and recipe.router.
    """
    attention, router = dict(options or {}), {}
    for item in fields(schema.RouterConfig):
        if item.name in attention:
            router[item.name] = attention.pop(item.name)
    phases = {"phase": phase}
    config = schema.Config(
        model=schema.ModelConfig(name="tiny"),
        attention=FocusConfig(name="focus", method="focus", **attention),
        recipe=schema.RecipeConfig(name="recipe", phases=phases, router=schema.RouterConfig(**router)),
        data=schema.DataConfig(name="random", source="files", seq_len=T),
        eval=schema.EvalConfig(name="eval"),
        trainer=schema.TrainerConfig(name="trainer", accelerator="cpu", progress=False, **trainer),
        logger=schema.LoggerConfig(name="logger"),
    )
    train_phases(model, blocks_of(0), config, FLOAT32, folder, [], probed=probed)
    return [line["loss"] for line in read_metrics(folder / METRICS)]


def routers(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for method in attached_methods(model).values() for p in method.parameters()])


@pytest.mark.parametrize("family", ["gpt2", "olmo2"])  # tied and untied embeddings, biases, norms
@pytest.mark.parametrize("phase", [ROUTER, ALL], ids=["router", "all"])
def test_phase_trains_exactly_the_named_parameters(tiny_model, tmp_path, family, phase):
    model = focus(tiny_model(family))
    named = {name for name, _ in model.named_parameters() if phase.trainable == "all" or ".focus.router." in name}
    task = LanguageModelTask(model, phase, "phase")
    (optimizer,), _ = task.configure_optimizers()
    optimized = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert set(task.trainable_names) == named
    assert sorted(optimized) == sorted(id(p) for name, p in model.named_parameters() if name in named)

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, phase, tmp_path)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    untied = changed & {name for name, _ in model.named_parameters()}
    assert untied == named
    assert {name for name in changed if name.endswith("potential")} == {n for n in before if n.endswith("potential")}
    if phase is ROUTER:
        assert all(".focus.router." in name for name in changed)


def test_checkpoint_of_a_phase_holds_what_it_trains_and_the_buffers_of_methods(tiny_model, tmp_path):
    model = add_lora(attach(tiny_model("llama"), "routing_transformer", groups=2), schema.LoraConfig(), budget=0)
    train(model, schema.PhaseConfig(trainable="lora", steps=1, learning_rate=1e-3), tmp_path)
    saved = read_checkpoint(tmp_path / CHECKPOINTS / "phase.ckpt")["model"]
    state = model.state_dict()
    assert saved.keys() == {name for name in state if ".lora_" in name or name.endswith(".focus.centroids")}
    assert all(torch.equal(tensor, state[name]) for name, tensor in saved.items())


def test_optimizer_decays_matrices_only(tiny_model):
    phase = schema.PhaseConfig(trainable="all", steps=1, learning_rate=1e-3, weight_decay=0.1)
    (optimizer,), _ = LanguageModelTask(focus(tiny_model("gpt2")), phase, "phase").configure_optimizers()
    assert {(p.ndim >= 2, group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]} == {
        (True, 0.1),
        (False, 0.0),
    }


def test_router_phase_without_a_router_is_refused(tiny_model):
    with pytest.raises(UserError, match="attach"):
        LanguageModelTask(tiny_model("llama"), ROUTER, "first")
    with pytest.raises(UserError, match="recipe.phases.first.trainable=router"):
        LanguageModelTask(attach(tiny_model("llama"), "window", window=4), ROUTER, "first")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_router_of_a_bf16_base_is_float32_with_finite_gradients(tiny_model, family):
    model = focus(tiny_model(family, dtype=torch.bfloat16)).train()
    task = LanguageModelTask(model, ROUTER, "phase")
    tokens = torch.randint(256, (2, T), generator=torch.Generator().manual_seed(0))
    task.loss(tokens).backward()
    trained = task.trainable_parameters()
    assert len(trained) == 4 and all(p.dtype == torch.float32 for p in trained)
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().max() > 0 for p in trained)
    others = [p for p in model.parameters() if not p.requires_grad]
    assert all(p.grad is None and p.dtype == torch.bfloat16 for p in others) and len(others) > 4


@pytest.mark.parametrize("assignment", ["softmax", "sinkhorn"])
def test_accumulation_equals_a_larger_batch(tiny_model, tmp_path, assignment):
    # "balanced" is left out by design: its potential balances the tokens of one batch, and two halves balance apart
    results = []
    for name, sizes in {"batch": {"batch_size": 2}, "accumulated": {"batch_size": 1, "accumulate": 2}}.items():
        model = focus(tiny_model("llama"), assignment=assignment, temperature=0.1)
        before = routers(model)
        losses = train(model, ROUTER, tmp_path / name, **sizes)
        assert len(losses) == ROUTER.steps and (routers(model) - before).abs().max() > 1e-3
        results.append((torch.tensor(losses), routers(model)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)  # rounding differs by processor


@pytest.mark.parametrize(("phase", "family"), [(ROUTER, "gpt2"), (ALL, "llama")])
def test_gradient_checkpointing_equals_training_without(tiny_model, tmp_path, family, phase):
    results, runs = [], []
    for checkpointing in (False, True):
        model, seen = focus(tiny_model(family)), []
        with observe_selections(model, lambda layer, method, *_, seen=seen: seen.append(method)):
            losses = train(model, phase, tmp_path / str(checkpointing), gradient_checkpointing=checkpointing)
        potentials = [method.router.potential for method in attached_methods(model).values()]
        results.append((torch.tensor(losses), torch.stack(potentials), routers(model)))
        runs.append(len(seen))
        assert not model.is_gradient_checkpointing
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)
    assert runs == [2 * phase.steps, 2 * 2 * phase.steps]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_frozen_base_has_no_dropout_under_checkpointing(tmp_path, checkpointing):
    def losses(dropout):
        model = focus(tiny_architecture("opt"))
        for layer in model.model.decoder.layers:
            layer.dropout = dropout
        folders = ((phase, tmp_path / f"{phase.trainable} {dropout}") for phase in (ROUTER, ALL))
        return [train(model, phase, folder, gradient_checkpointing=checkpointing) for phase, folder in folders]

    (router, everything), (router_again, everything_again) = losses(0.0), losses(0.5)
    assert router == router_again and everything != everything_again


@pytest.mark.parametrize(("start", "expected"), [(2.0, [2, 4, 6, 8]), (None, [8] * 4), (12.0, [12, 32 / 3, 28 / 3, 8])])
def test_gate_annealing_is_linear_in_steps(tiny_model, tmp_path, start, expected):
    model, seen = focus(tiny_model("llama"), gate_steepness=8.0), []
    steepness = lambda layer, method, *_: seen.append(method.gate_steepness)  # noqa: E731
    with observe_selections(model, steepness):
        train(model, ROUTER, tmp_path, {"gate_steepness": 8.0, "gate_steepness_start": start}, accumulate=2)
    assert seen == pytest.approx([value for value in expected for _ in range(2 * 2)])  # two layers, two batches
    assert [method.gate_steepness for method in attached_methods(model).values()] == [8.0, 8.0]


@given(warmup=st.integers(0, 40), steps=st.integers(1, 200))
def test_learning_rate_warms_up_and_decays_to_a_tenth(warmup, steps):
    phase = schema.PhaseConfig(steps=warmup + steps, learning_rate=1.0, warmup_steps=warmup)
    scales = [learning_rate_scale(step, phase) for step in range(phase.steps + 1)]
    assert scales[warmup] == pytest.approx(1) and scales[-1] == pytest.approx(0.1)
    assert all(low < high for low, high in pairwise([0.0, *scales[: warmup + 1]]))
    assert all(high > low for high, low in pairwise(scales[warmup:]))
    np.testing.assert_allclose(np.diff([0.0, *scales[: warmup + 1]]), 1 / (warmup + 1))
    assert (scales[warmup] + scales[-1]) / 2 == pytest.approx(scales[warmup + steps // 2]) or steps % 2
    assert learning_rate_scale(phase.steps + 99, phase) == pytest.approx(0.1)


def test_metrics_hold_the_learning_rate_of_their_step(tiny_model, tmp_path):
    phase = schema.PhaseConfig(steps=5, learning_rate=0.02, warmup_steps=2)
    train(focus(tiny_model("llama")), phase, tmp_path, accumulate=2)
    logged = [line["learning_rate"] for line in read_metrics(tmp_path / METRICS)]
    assert logged == pytest.approx([0.02 * learning_rate_scale(step, phase) for step in range(5)])


@pytest.mark.parametrize(
    ("requested", "native", "trains_base", "weights", "autocast"),
    [
        ("auto", True, False, torch.bfloat16, False),
        ("auto", True, True, torch.float32, True),
        ("auto", False, False, torch.float32, False),
        ("auto", False, True, torch.float32, False),
        ("bf16", False, False, torch.bfloat16, False),
        ("bf16", False, True, torch.float32, True),
        ("float32", True, False, torch.float32, False),
        ("float32", True, True, torch.float32, False),
    ],
)
def test_choose_precision_by_request_hardware_and_training(
    monkeypatch, requested, native, trains_base, weights, autocast
):
    monkeypatch.setattr(precisions, "has_native_bf16", lambda device: native)
    chosen = choose_precision(requested, "cpu", trains_base)
    assert (chosen.device.type, chosen.weights, chosen.autocast) == ("cpu", weights, autocast)
    assert chosen.lightning == ("bf16-mixed" if autocast else "32-true")
    with chosen.context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (torch.bfloat16 if autocast else torch.float32)


@pytest.mark.parametrize(("float32", "bfloat16"), [(1.0, 2.0), (2.0, 1.0)])
def test_choose_precision_auto_takes_the_faster_product_once_measured(monkeypatch, tmp_path, float32, bfloat16):
    monkeypatch.setattr(precisions, "has_native_bf16", lambda device: True)
    measured = precisions.measure_products(64, tmp_path)
    path = tmp_path / "matrix_products.json"
    (key,) = json.loads(path.read_text())
    assert json.loads(path.read_text())[key] == measured and measured.keys() == {"float32", "bfloat16"}
    path.write_text(json.dumps({key: {"float32": float32, "bfloat16": bfloat16}}))
    chosen = choose_precision("auto", "cpu", trains_base=False, width=64, cache=tmp_path)
    assert chosen.weights == (torch.bfloat16 if bfloat16 < float32 else torch.float32) and "2.0" in chosen.reason
    device = f"cpu, 1 threads, {chosen}, FSDP over 2 processes"
    path.write_text(json.dumps({key: {"float32": bfloat16, "bfloat16": float32}}))
    assert choose_precision("auto", "cpu", trains_base=False, width=64, cache=tmp_path, earlier=device) == chosen


def test_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="trainer.accelerator=gpu"):
        choose_precision("auto", "gpu", trains_base=False)
    assert choose_precision("auto", "auto", trains_base=False).device.type == "cpu"


@pytest.mark.parametrize("feature", ["avx512_bf16", "amx_bf16", "avx2", None])
def test_a_cpu_has_has_native_bf16_if_it_says_so(monkeypatch, feature):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True, "other": True}, raising=False)
    assert precisions.has_native_bf16(torch.device("cpu")) is (feature in ("avx512_bf16", "amx_bf16"))
