"""The arms of a comparison as configurations of their own."""

from __future__ import annotations

from dataclasses import replace

from hydra import compose
from hydra.core.hydra_config import HydraConfig

from focus_exp.checks import parse
from focus_exp.config import Config


def compose_arms(config: Config) -> dict[str, Config]:
    """Those of the command line's comparison: `config.arm` alone where it is given."""
    names = [config.arm] if config.arm else list(config.arms)
    return {name: compose_arm(config, name, HydraConfig.get().overrides.task) for name in names}


def compose_arm(config: Config, name: str | None, command_line: list[str]) -> Config:
    """What the command line says, then what every arm takes, then the arm's own settings; None: what all arms share."""
    settings = [*config.every_arm, *(config.arms[name] if name else [])]
    composed = compose("config", [*command_line, *settings])
    return replace(parse(composed), job="train", arm=name, arms={}, every_arm=[])
