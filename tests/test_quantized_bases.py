"""Quantized bases: unchanged by attach, trainable routers, adapters."""

import pytest
import torch
from builders import attach_focus, compute_logits, make_tokens
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from focus_exp import UserError, attach, detach, freeze, load_adapter, save_adapter, set_routing
from focus_exp.models import self_check
from focus_exp.models.attach import REPACKS
from focus_exp.models.load import fingerprint
from focus_exp.models.methods import find_device

OPTIONS = {"groups": 4, "window": 4, "sinks": 1}


pytestmark = pytest.mark.usefixtures("verified")


def quantize(model: PreTrainedModel, kind: str, folder, **options) -> PreTrainedModel:
    if kind == "none":
        return model
    if kind == "dynamic":
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    model.save_pretrained(folder)
    if kind == "torchao":
        quantization = pytest.importorskip("torchao.quantization")
        config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    else:
        pytest.importorskip("bitsandbytes")
        config = BitsAndBytesConfig(
            load_in_4bit=kind == "nf4", load_in_8bit=kind == "int8", bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
        )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu", **options)


def force_repacking(model: PreTrainedModel) -> list[nn.Module]:
    """Have 4-bit layers repack their weights as on a CPU with AVX512-BF16; returns them."""
    layers = [module for module in model.modules() if hasattr(module, REPACKS)]
    for layer in layers:
        setattr(layer, REPACKS, True)
    return layers


def collect_state(model: PreTrainedModel) -> dict[str, object]:
    """Collect the state that attach must not change."""
    state: dict[str, object] = {
        name: value for name, value in model.state_dict().items() if ".focus." not in name and type(value) is Tensor
    }
    for name, module in model.named_modules():
        if ".focus" not in name:
            state[f"{name}.training"] = module.training
            state[f"{name}.hooks"] = len(module._forward_hooks)
    for name, parameter in model.named_parameters():
        if ".focus." not in name:
            quant_state = getattr(parameter, "quant_state", None)
            packed = getattr(quant_state, "packing_format_for_cpu", False)
            state[f"{name}.meta"] = (parameter.dtype, parameter.requires_grad, parameter.grad is None, packed)
    state["generation_config"] = model.generation_config.to_dict()
    state["config"] = model.config.to_dict()
    state["rng"] = torch.get_rng_state()
    return state


def assert_same_state(now: dict[str, object], before: dict[str, object]) -> None:
    assert now.keys() == before.keys()
    changed = [
        name
        for name, value in before.items()
        if not (torch.equal(now[name], value) if isinstance(value, Tensor) else now[name] == value)
    ]
    assert not changed


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "none") for family in ("gpt2", "llama", "gemma2", "gemma3", "olmo2")),
        *((family, kind) for family in ("gpt2", "llama") for kind in ("nf4", "int8", "torchao", "dynamic")),
    ],
)
def test_attach_and_detach_leave_the_state_of_the_base(tiny_model, tmp_path, family, kind, training):
    model = quantize(tiny_model(family), kind, tmp_path).train(training)
    model.get_input_embeddings().eval()  # modules may be in different modes
    force_repacking(model)
    before = {name: x.clone() if isinstance(x, Tensor) else x for name, x in collect_state(model).items()}
    attach(model, "window", window=4)
    assert len(self_check.VERIFIED) == 1
    assert_same_state(collect_state(model), before)
    assert_same_state(collect_state(detach(model)), before)


def test_router_on_an_nf4_base_trains_and_its_adapter_loads_again(tiny_model, tmp_path):
    model = quantize(tiny_model("llama"), "nf4", tmp_path / "base")
    layers = force_repacking(model)
    before = fingerprint(model)
    attach(model, **OPTIONS)
    parameters = [model.get_parameter(name) for name in freeze(model)]
    start = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(2):
        with torch.no_grad():
            model.eval()(make_tokens())
        model.train()(make_tokens(), labels=make_tokens()).loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in parameters)
        optimizer.step()
        optimizer.zero_grad()
    assert not any(torch.equal(p, x) for p, x in zip(parameters, start, strict=True))
    assert fingerprint(model) == before
    save_adapter(model, tmp_path / "adapter")
    set_routing(model.eval(), hard=True)
    assert layers and not any(getattr(layer, REPACKS) for layer in layers)
    expected = compute_logits(model)
    fresh = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=model.config.quantization_config, device_map="cpu"
    )
    loaded = load_adapter(fresh, tmp_path / "adapter")
    torch.testing.assert_close(compute_logits(loaded), expected, atol=1e-5, rtol=1e-5)
    detach(model)
    assert all(getattr(layer, REPACKS) for layer in layers)


@pytest.mark.parametrize("kind", ["int8", "nf4", "torchao"])
def test_load_adapter_quantized_base_and_back(tiny_model, tmp_path, kind):
    def quantized() -> PreTrainedModel:
        return quantize(tiny_model("llama"), kind, tmp_path / "base", dtype=torch.bfloat16).eval()

    saved = save_adapter(attach_focus(tiny_model("llama")), tmp_path / "adapter")
    with pytest.raises(UserError, match="check_base"):
        load_adapter(quantized(), saved)
    model = load_adapter(quantized(), saved, check_base=False)
    compute_logits(model)  # bitsandbytes repacks for the kernel that it finds
    again = load_adapter(quantized(), save_adapter(model, tmp_path / "again"))
    assert torch.equal(compute_logits(again), compute_logits(model))
    load_adapter(tiny_model("llama"), tmp_path / "again", check_base=False)


def test_attach_keeps_layers_from_repacking_until_detach(tiny_model):
    """Layers with the attribute of bitsandbytes' 4-bit ones, which need not be installed."""
    model = tiny_model("llama")
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for layer in layers:
        setattr(layer, REPACKS, True)
    attach_focus(model)
    assert not any(getattr(layer, REPACKS) for layer in layers)
    detach(model)
    assert layers and all(getattr(layer, REPACKS) for layer in layers)


def test_find_device_is_that_of_buffers_where_a_layer_has_no_parameters():
    packed = nn.Module()
    packed.register_buffer("qweight", torch.zeros(1, device="meta"))
    assert find_device(packed, nn.Linear(1, 1)).type == "meta"
    assert find_device(nn.Module(), nn.Linear(1, 1)).type == "cpu"


def test_attach_finds_the_device_of_layers_with_buffers_alone(tiny_model):
    """As GPTQ and AWQ keep their packed weights."""

    class Buffered(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.register_buffer("qweight", linear.weight.detach())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.qweight.T

    model = tiny_model("llama")
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Buffered(getattr(layer.self_attn, name)))
        assert not list(layer.self_attn.parameters())
    assert compute_logits(attach_focus(model)).isfinite().all()
