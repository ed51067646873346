"""The arms of a comparison as configurations of their own."""

from __future__ import annotations

from dataclasses import replace

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from focus_exp.checks import parse
from focus_exp.config import Config, phases_of
from focus_exp.errors import UserError
from focus_exp.jobs.adapter import with_adapter
from focus_exp.models.adapter import read_description
from focus_exp.overrides import quote_override

BASE = "base"  # in a comparison's tables the model with nothing attached


def compose_arms(config: Config) -> dict[str, Config]:
    """Those of the command line's comparison: `config.arm` alone where it is given."""
    names = [config.arm] if config.arm else list(config.arms)
    return {name: compose_arm(config, name, HydraConfig.get().overrides.task) for name in names}


def compose_arm(config: Config, name: str | None, command_line: list[str]) -> Config:
    """What the command line says, then what every arm takes, then the arm's own settings; None: what all arms share.

    With an adapter it is measured, not trained. What is wrong with an arm is an error that names it.
    """
    try:
        return composed_arm(config, name, command_line)
    except UserError as error:
        if name is None:
            raise
        raise UserError(f"arm {name}: {error}") from error
    except (HydraException, OmegaConfBaseException) as error:
        if name is not None:
            error.add_note(f"arm {name}")
        raise


def composed_arm(config: Config, name: str | None, command_line: list[str]) -> Config:
    """The same; UserError for an arm that is called base, or is no more, and for another method than the adapter's."""
    if name == BASE:
        raise UserError("what all arms are compared with has that name in the tables; give the arm another")
    own = [quote_override(setting) for setting in (config.arms[name] if name else [])]
    shared = [*command_line, *(quote_override(setting) for setting in config.every_arm)]
    composed = compose_shared(shared, own)
    job = "evaluate" if composed.adapter else "train"
    arm = replace(composed, job=job, arm=name, arms={}, every_arm=[], against=[])
    if name and arm.attention.method == "full" and not phases_of(arm):
        raise UserError(f"it is the base as it is, which every comparison measures; leave it out with ~arms.{name}")
    if not arm.adapter:
        return arm
    held = read_description(arm.adapter)["method"]
    if name and held != arm.attention.method:
        raise UserError(
            f"it asks for attention={arm.attention.name}, but adapter={arm.adapter} holds {held}; leave the arm out "
            f"with ~arms.{name}, or the adapter"
        )
    return with_adapter(arm, [*shared, *own])


def compose_shared(shared: list[str], own: list[str]) -> Config:
    """What several share, and one's own settings. Its attention takes of the shared options those that it has."""
    parser = OverridesParser.create()
    given = {setting.key_or_group for setting in parser.parse_overrides(own)}
    chooses = given & {"attention", "regime"}
    options = [setting for setting in shared if chooses and setting.startswith("attention.")]
    composed = compose("config", [*(setting for setting in shared if setting not in options), *own])
    for option in parser.parse_overrides(options):
        key = option.key_or_group
        if key not in given and key.removeprefix("attention.") in composed.attention:
            OmegaConf.update(composed, key, option.value())
    return parse(composed)
