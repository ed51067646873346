"""A configuration that measures an adapter instead of training one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from focus_exp.checks import validate
from focus_exp.config import Config, RegimeConfig
from focus_exp.config_attention import FocusConfig, attention_of, schema_of
from focus_exp.errors import UserError, first_line
from focus_exp.models.adapter import read_description

FREE = ("top_k", "pair_rule", "backend")  # of attention.*, what an adapter may be measured under that is not its own


def with_adapter(config: Config, typed: list[str] | None = None) -> Config:
    """The configuration with the adapter's own method in place of attention.*, and nothing to train.

    UserError where an override that was typed, of the command line unless given, asks for what the adapter is not.
    """
    description = read_description(str(config.adapter))
    if typed is None:
        typed = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    refuse_ignored(config, description, typed)
    method = description["method"]
    name = config.attention.name if config.attention.method == method else method
    chosen = {"name": name, "method": method, "backend": config.attention.backend}
    try:
        if config.has_router and issubclass(schema_of(method), FocusConfig):
            chosen |= {"top_k": config.focus.top_k, "pair_rule": config.focus.pair_rule}
        if config.dual and method == "focus_dual":
            chosen["top_k"] = config.dual.top_k
        attention: Any = OmegaConf.to_object(attention_of(description["options"] | chosen))
        merged = replace(config, attention=attention, regime=RegimeConfig(name="none"))
        validate(merged)
    except (OmegaConfBaseException, UserError) as error:
        raise UserError(f"the adapter in {config.adapter} cannot be measured: {first_line(error)}") from error
    return merged


def refuse_ignored(config: Config, description: dict[str, Any], typed: list[str]) -> None:
    """UserError for attention.* that would change nothing: tables of other settings would hold the same numbers."""
    own = {**description["options"], "method": description["method"]}
    free = {*FREE} if own.get("budget") is None else {*FREE} - {"top_k"}
    settings = {setting.key_or_group: setting for setting in OverridesParser.create().parse_overrides(typed)}
    for name, setting in settings.items():
        group, _, key = name.partition(".")
        if group == "attention" and key in own and key not in free and setting.value() != own[key]:
            has = "reads as many groups as its budget says" if key == "top_k" else f"has {key}={own[key]}"
            raise UserError(
                f"{setting.input_line}: the adapter in {config.adapter} {has}, which cannot be changed when it is "
                f"measured; of attention.* {', '.join(FREE)} can"
            )
