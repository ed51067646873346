"""A configuration that measures an adapter instead of training one."""

from __future__ import annotations

from dataclasses import replace

from focus_exp.checks import validate
from focus_exp.config import AttentionConfig, Config, RegimeConfig
from focus_exp.models.adapter import read_description


def with_adapter(config: Config) -> Config:
    """The configuration with the adapter's own method in place of attention.*, and nothing to train."""
    description = read_description(str(config.adapter))
    options = description["options"]
    chosen = {key: getattr(config.attention, key) for key in ("top_k", "pair_rule", "backend")}
    attention = AttentionConfig(name=config.attention.name, method=description["method"], **{**options, **chosen})
    merged = replace(config, attention=attention, regime=RegimeConfig(name="none"))
    validate(merged)
    return merged
