"""One thread, no network, and one small random model per family."""

import gc
import os
import pickle

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
# kernels run in Triton's interpreter and everything else on the CPU, whatever is installed; `make gpu` sets 0
if os.environ.get("TRITON_INTERPRET") != "0":
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")  # read when triton and torch are imported

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.default_element import ResultDefault
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hypothesis import Phase, settings
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

torch.set_num_threads(1)
settings.register_profile("untimed", deadline=None, max_examples=50)
# of a fault that is sought nobody reads the smallest example
settings.register_profile("unshrunk", deadline=None, max_examples=50, phases=set(Phase) - {Phase.shrink, Phase.explain})
settings.load_profile("untimed")

# every command composes forty files, which the tests hardly ever change
Plugins.instance()
FILES = SourcesRegistry.instance().resolve("file")
load_config, compose = FILES.load_config, ConfigLoaderImpl._compose_config_from_defaults_list
remembered: dict[tuple, bytes] = {}


def remember(key: tuple, compute: Callable[[], Any]) -> Any:
    """Return a copy of what was computed for this key, which has the times of all files that were read."""
    if key in remembered:
        return pickle.loads(remembered[key])  # quicker than a deep copy
    result = compute()
    with suppress(pickle.PicklingError):  # of a method whose schema is made from its options
        remembered[key] = pickle.dumps(result)
    return result


def load_once(self: ConfigSource, config_path: str) -> ConfigResult:
    """Load a configuration file with hydra."""
    file = Path(self.path, f"{config_path.removesuffix('.yaml')}.yaml")  # names such as tau_0.05 hold a dot
    return remember((str(file), file.stat().st_mtime_ns), lambda: load_config(self, config_path))


def compose_once(self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
    """Compose hydra's list of files, before the command line's own values."""
    folders = [Path(source.path) for source in repo.get_sources() if source.scheme() == "file"]
    names = [(default.config_path, default.package) for default in defaults]
    files = [(folder / f"{name}.yaml") for name, _ in names for folder in folders]
    key = (*names, *((str(file), file.stat().st_mtime_ns) for file in files if file.exists()))
    return remember(key, lambda: compose(self, defaults, repo))


FILES.load_config = load_once
ConfigLoaderImpl._compose_config_from_defaults_list = compose_once

RECORDS = Path(__file__).parent.parent / "runs" / "records"
ZOO = Path(__file__).parent.parent / "conf" / "model"
FAMILIES = ["gpt2", "llama", "mistral", "qwen2", "olmo2", "gemma2", "gemma3"]


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """The architecture in conf/model/<name>.yaml with fresh weights, `changes` laid over its fields."""
    architecture = OmegaConf.to_container(OmegaConf.load(ZOO / f"{name}.yaml").architecture)
    config = AutoConfig.for_model(**architecture | changes)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.fixture
def tiny_model() -> Callable[..., PreTrainedModel]:
    """tiny_model(family, dtype=torch.float32, seed=0, **changes): a seeded random model in eval mode."""

    def factory(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build(f"tiny_{family}", dtype, **changes)

    return factory


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What attach has compared with the base in this test; without it, in this process."""
    from focus_exp.models import self_check

    monkeypatch.setattr(self_check, "VERIFIED", compared := set())
    return compared


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs_dir of one finished retrofit of four steps; tests that change it copy it."""
    from running import run, tiny

    folder = tmp_path_factory.mktemp("finished")
    result = run(*tiny(folder), "recipe.steps=4")
    assert result.code == 0, result.err
    return folder / "runs"


@pytest.fixture(scope="session")
def published() -> Any:
    """The rows of the published report."""
    from focus_exp.reporting.load import load_results

    return load_results(RECORDS)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def pytest_collection_finish() -> None:
    """What was imported stays to the end: collections need not look at a million of its objects each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
