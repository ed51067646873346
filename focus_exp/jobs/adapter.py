"""A configuration that measures an adapter instead of training one."""

from __future__ import annotations

from dataclasses import replace

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from focus_exp.checks import validate
from focus_exp.config import AttentionConfig, Config, RegimeConfig
from focus_exp.errors import UserError, first_line
from focus_exp.models.adapter import read_description


def with_adapter(config: Config) -> Config:
    """The configuration with the adapter's own method in place of attention.*, and nothing to train."""
    description = read_description(str(config.adapter))
    options = description["options"]
    chosen = {key: getattr(config.attention, key) for key in ("top_k", "pair_rule", "backend")}
    named = {"name": config.attention.name, "method": description["method"]}
    try:
        # by OmegaConf, which knows the types
        attention = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(AttentionConfig), options, chosen, named))
        assert isinstance(attention, AttentionConfig)
        merged = replace(config, attention=attention, regime=RegimeConfig(name="none"))
        validate(merged)
    except (OmegaConfBaseException, UserError) as error:
        raise UserError(f"the adapter in {config.adapter} cannot be measured: {first_line(error)}") from error
    return merged
