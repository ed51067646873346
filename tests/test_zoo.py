"""Every model file describes the model it names: parameters are counted, tiny models run."""

import pytest
import torch
from conftest import FAMILIES, ZOO, build
from omegaconf import OmegaConf

PARAMETERS = {
    "gpt2_124m": 124_439_808,
    "gpt2_774m": 774_030_080,
    "gpt2_1_5b": 1_557_611_200,
    "smollm2_135m": 134_515_008,
    "mistral_7b": 7_241_732_096,
    "mistral_7b_instruct": 7_241_732_096,
    "qwen2_5_7b": 7_615_616_512,
    "olmo2_7b": 7_298_617_344,
    "gemma2_9b": 9_241_705_984,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
}


def test_every_file_is_tested() -> None:
    assert {path.stem for path in ZOO.glob("*.yaml")} == {*PARAMETERS, *(f"tiny_{family}" for family in FAMILIES)}


@pytest.mark.parametrize("path", sorted(ZOO.glob("*.yaml")), ids=lambda path: path.stem)
def test_file_names_itself_and_its_revision(path) -> None:
    config = OmegaConf.load(path)
    assert config.name == path.stem
    assert ("hub_id" in config) == ("revision" in config) == (not path.stem.startswith("tiny_"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name: str) -> None:
    with torch.device("meta"):
        model = build(name)
    assert model.num_parameters() == PARAMETERS[name]


@pytest.mark.parametrize("name", [*PARAMETERS, *(f"tiny_{family}" for family in FAMILIES)])
def test_config_knows_every_field(name: str) -> None:
    """A misspelt field would only become an unused attribute of the config."""
    with torch.device("meta"):
        model = build(name)
    written = OmegaConf.load(ZOO / f"{name}.yaml").architecture
    known = set(type(model.config)().to_dict())
    assert set(written) <= known, set(written) - known


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_model_runs(tiny_model, family: str, dtype: torch.dtype) -> None:
    tokens = torch.arange(40)[None]
    logits = tiny_model(family, dtype)(tokens).logits
    assert logits.shape == (1, 40, 257) and logits.dtype == dtype and logits.isfinite().all()
    assert torch.equal(logits, tiny_model(family, dtype)(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_windows(tiny_model, family: str) -> None:
    """Two layers with a window of 8 see 14 tokens back; one full layer sees everything."""
    model = tiny_model(family, torch.float64)
    tokens = torch.arange(40)[None]
    changed = tokens.masked_fill(tokens == 0, 200)
    reached = (model(tokens).logits != model(changed).logits).any(-1).nonzero()[:, 1]
    assert reached.max() == (14 if family == "mistral" else 39)


@pytest.mark.parametrize(("family", "sliding"), [("qwen2", 1), ("gemma2", 0), ("gemma3", 0)])
def test_tiny_interleaving(tiny_model, family: str, sliding: int) -> None:
    kinds = tiny_model(family).config.layer_types
    assert [kind == "sliding_attention" for kind in kinds] == [layer == sliding for layer in range(2)]
