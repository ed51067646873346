"""Schemas of attention.*: what every method has, and the options that the chosen one declares."""

from __future__ import annotations

from dataclasses import dataclass, fields, make_dataclass
from functools import cache
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import MISSING, OmegaConf

from focus_exp.attention.options import EncoderTraining, FocusDualOptions, FocusOptions, Options, RouterTraining, option
from focus_exp.errors import UserError

BACKENDS = (
    *("auto", "masked", "triton", "flash-attn", "torch-flash", "torch-fa3", "torch-fa4", "cpu", "cpu-flash", "math"),
)


@dataclass
class AttentionConfig(Options):
    """Full attention's, and the part of it that every method has."""

    name: str = MISSING
    method: str = MISSING
    window: int = option(128, least=0)
    backend: str = option("auto", choices=BACKENDS)


@dataclass
class FocusConfig(FocusOptions, RouterTraining, AttentionConfig):
    """Known without its method, because jobs read it by name, and --help shows it without waiting for torch."""


@dataclass
class DualConfig(FocusDualOptions, EncoderTraining, AttentionConfig):
    """Likewise."""

    @property
    def budgeted(self) -> bool:
        """Whether a budget says how many groups each head reads, rather than `top_k`."""
        return self.groups_per_layer is not None or self.density is not None


KNOWN: dict[str, type[AttentionConfig]] = {"full": AttentionConfig, "focus": FocusConfig, "focus_dual": DualConfig}


@cache
def schema_of(method: str) -> type[AttentionConfig]:
    """The schema of attention.* under `method`: a name, or the dotted path of a class. UserError for neither."""
    if method in KNOWN:
        return KNOWN[method]
    from focus_exp.attention.registry import find

    try:
        found = find(method)
    except ValueError as error:
        raise UserError(str(error)) from error
    bases = (found.options, *filter(None, [found.fit_options]), AttentionConfig)
    return make_dataclass(f"{found.__name__}Config", [], bases=bases)


def attention_of(values: Any) -> Any:
    """attention.* of the method that `values` name, as OmegaConf's structured config; it refuses what that has not."""
    return OmegaConf.merge(OmegaConf.structured(schema_of(values["method"])), values)


def method_options(attention: AttentionConfig) -> dict[str, Any]:
    """The options of attention.* that the method itself takes."""
    from focus_exp.attention.registry import find

    return {item.name: getattr(attention, item.name) for item in fields(find(attention.method).options)}


class MethodSource(ConfigSource):
    """Where a file of conf/attention finds the schema of its method: base_<name>, or a class by its dotted path.

    A method is imported when a command chooses it, so that commands without it do not wait for torch.
    """

    @staticmethod
    def scheme() -> str:
        return "methods"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        return self._method(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        method = self._method(config_path)
        assert method is not None
        schema = OmegaConf.structured(schema_of(method))
        schema.method = method
        return ConfigResult(provider=self.provider, path=self.full_path(), config=schema, header={"package": None})

    @staticmethod
    def _method(config_path: str) -> str | None:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        if group != "attention":
            return None
        return name.removeprefix("base_") if "." in name or name.startswith("base_") else None
