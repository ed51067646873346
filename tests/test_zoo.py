"""The files in conf/model: parameter counts, tiny models."""

import re

import pytest
import torch
from conftest import FAMILIES, ZOO, build
from omegaconf import OmegaConf
from transformers import AutoConfig, PreTrainedModel

from focus_exp.models.attach import attach
from focus_exp.models.methods import attached_methods, is_trainable

# parameters of the model; of its routers with K = 4 and R = 16: layers (16 E + 16 K), paper section 1
PARAMETERS = {
    "gpt2_124m": (124_439_808, 148_224),
    "gpt2_774m": (774_030_080, 739_584),
    "gpt2_1_5b": (1_557_611_200, 1_231_872),
    "smollm2_135m": (134_515_008, 278_400),
    "mistral_7b": (7_241_732_096, 2_099_200),
    "mistral_7b_instruct": (7_241_732_096, 2_099_200),
    "qwen2_5_7b": (7_615_616_512, 1_607_424),
    "olmo2_7b": (7_298_617_344, 2_099_200),
    "gemma2_9b": (9_241_705_984, 2_411_136),
    "llama2_13b": (13_015_864_320, 3_279_360),
    "llama2_70b": (68_976_648_192, 10_490_880),
    "gemma3_270m": (268_098_176, 185_472),
    "qwen2_5_coder_0_5b": (494_032_768, 345_600),
}
# with random weights
OWN = {"books_6m", *(f"tiny_{family}" for family in FAMILIES)}


def build_on_meta(name: str) -> PreTrainedModel:
    with torch.device("meta"):
        return build(name)


def count_routers(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if is_trainable(name, "router"))


FILES = sorted(path for path in ZOO.glob("*.yaml") if path.stem != "base")


def test_zoo_every_file_is_counted() -> None:
    assert {path.stem for path in FILES} == {*PARAMETERS, *OWN}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_zoo_file_has_name_and_revision(path) -> None:
    config = OmegaConf.load(path)
    assert config.name == path.stem
    assert ("hub_id" in config) == ("revision" in config) == (path.stem not in OWN)
    assert re.fullmatch("[0-9a-f]{40}", config.get("revision", "0" * 40))


@pytest.mark.parametrize("name", PARAMETERS)
def test_zoo_parameters_of_model_and_router_equal_the_papers(name: str) -> None:
    model = build_on_meta(name)
    expected, routers = PARAMETERS[name]
    assert model.num_parameters() == expected
    attach(model, "focus", groups=4)
    assert len(attached_methods(model)) == model.config.num_hidden_layers
    assert count_routers(model) == routers
    assert sum(p.numel() for p in model.parameters()) == expected + routers


@pytest.mark.parametrize(
    ("name", "groups", "routing_dim", "count"),
    [
        ("gpt2_124m", 4, 32, 296_448),
        ("gpt2_124m", 4, 128, 1_185_792),
        ("gpt2_124m", 4, 768, 7_114_752),
        ("mistral_7b_instruct", 2, 16, 2_098_176),
    ],
)
def test_router_sizes_equal_the_papers(name: str, groups: int, routing_dim: int, count: int) -> None:
    assert count_routers(attach(build_on_meta(name), "focus", groups=groups, routing_dim=routing_dim)) == count


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_zoo_architecture_fields_exist(path) -> None:
    written = OmegaConf.load(path).architecture
    assert set(written) <= set(AutoConfig.for_model(written.model_type).to_dict())
