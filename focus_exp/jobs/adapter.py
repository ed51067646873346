"""A configuration that measures an adapter instead of training one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from focus_exp.checks import validate
from focus_exp.config import Config, RegimeConfig
from focus_exp.config_attention import FocusConfig, attention_of, schema_of
from focus_exp.errors import UserError, first_line
from focus_exp.models.adapter import read_description


def with_adapter(config: Config) -> Config:
    """The configuration with the adapter's own method in place of attention.*, and nothing to train."""
    description = read_description(str(config.adapter))
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
