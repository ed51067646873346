"""Variants of a comparison: overlays in conf/variant, each composed as a configuration of its own.

An experiment lists its variants; a name without a folder is in conf/variant/<experiment>. To print one:
`python -m focus_exp +experiment=compare +variant=compare/lora --cfg job`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from focus_exp.attention.options import did_you_mean
from focus_exp.checks import parse
from focus_exp.config import Config
from focus_exp.errors import UserError
from focus_exp.jobs.adapter import with_adapter
from focus_exp.models.adapter import read_description

log = logging.getLogger(__name__)

BASE = "base"  # row of the unmodified model in a comparison's tables
GROUP = "variant"


def compose_variants(config: Config) -> dict[str, Config]:
    """Compose the comparison's variants by name, or only `config.variant` where the command line chose one."""
    names = [config.variant] if config.variant else [variant_name(path) for path in config.variants]
    return {name: compose_variant(config, name, HydraConfig.get().overrides.task) for name in names}


def compose_variant(config: Config, name: str | None, command_line: list[str]) -> Config:
    """Compose one variant of a comparison, or what all of them share (`name` None).

    The variant's own settings take precedence over the command line, which says what all variants share. With an
    adapter the variant is measured, not trained.

    Raises:
        UserError: naming the variant, if it does not exist or its settings are invalid.
    """
    try:
        return compose_checked(config, name, command_line)
    except UserError as error:
        if name is None:
            raise
        raise UserError(f"variant {name}: {error}") from error
    except (HydraException, OmegaConfBaseException) as error:
        if name is not None:
            error.add_note(f"variant {name}")
        raise


def compose_checked(config: Config, name: str | None, command_line: list[str]) -> Config:
    if name == BASE:
        raise UserError(f"variant must not be named {BASE}, the row of the unmodified model. Rename its file.")
    overlays = overlays_of(config, name)
    own = {key for path in overlays for key in settings_of(path)}
    kept = []
    for override in OverridesParser.create().parse_overrides(command_line):
        if override.key_or_group in own:
            log.warning("%s is not applied to variant %s, which sets it", override.input_line, name)
        elif override.key_or_group != GROUP:
            kept.append(str(override.input_line))
    composed = compose_overlays(kept, overlays, own)
    job = "evaluate" if composed.adapter else "train"
    variant = replace(composed, job=job, variant=name, variants=[], shared_variant=None, references=[])
    if name and variant.attention.method == "full" and not variant.phases:
        raise UserError("it is the unmodified base model, which every comparison measures. Leave it out of variants.")
    if not variant.adapter:
        return variant
    held = read_description(variant.adapter)["method"]
    if name and held != variant.attention.method:
        raise UserError(
            f"attention must be {held}, the method of adapter={variant.adapter} (got {variant.attention.name}). "
            "Leave the variant out of variants, or the adapter."
        )
    return with_adapter(variant, [*kept, *variant_settings(config, name)])


def compose_overlays(command_line: list[str], overlays: list[str], own: set[str]) -> Config:
    """Compose the command line with overlays. Options of another attention method than the overlays' are left out."""
    chosen = [f"+{GROUP}=[{','.join(overlays)}]"] if overlays else []
    return compose_shared(command_line, chosen, swaps_method=bool(own & {"attention", "recipe"}))


def compose_shared(command_line: list[str], own: list[str], *, swaps_method: bool = True) -> Config:
    """Compose shared overrides with a variant's own. Its attention takes the shared options that it has."""
    parser = OverridesParser.create()
    options = [override for override in command_line if swaps_method and override.startswith("attention.")]
    composed = compose("config", [*(override for override in command_line if override not in options), *own])
    for option in parser.parse_overrides(options):
        if option.key_or_group.removeprefix("attention.") in composed.attention:
            OmegaConf.update(composed, option.key_or_group, option.value())
    return parse(composed)


def overlays_of(config: Config, name: str | None) -> list[str]:
    """Return the paths below conf/variant that make up a variant, in order of increasing precedence."""
    shared = [config.shared_variant] if config.shared_variant else []
    return shared if name is None else [*shared, variant_path(config, name)]


def variant_name(path: str) -> str:
    return path.rpartition("/")[2]


def variant_path(config: Config, name: str) -> str:
    """Return the path of a variant below conf/variant."""
    listed = next((path for path in config.variants if variant_name(path) == name), name)
    return listed if "/" in listed else f"{config.experiment}/{listed}"


def variant_settings(config: Config, name: str | None) -> list[str]:
    """Return a variant's settings as overrides, shared ones first."""
    return [f"{key}={value}" for path in overlays_of(config, name) for key, value in settings_of(path).items()]


def settings_of(path: str) -> dict[str, Any]:
    """Return what an overlay sets: chosen group files and dotted keys.

    Raises:
        UserError: if there is no such file below conf/variant.
    """
    sources = GlobalHydra.instance().config_loader().get_sources()
    source = next((source for source in sources if source.is_config(f"{GROUP}/{path}.yaml")), None)
    if source is None:
        folder = path.rpartition("/")[0]
        known = GlobalHydra.instance().config_loader().get_group_options(f"{GROUP}/{folder}")
        raise UserError(f"there is no file conf/{GROUP}/{path}.yaml{did_you_mean(variant_name(path), known)}")
    loaded = source.load_config(f"{GROUP}/{path}.yaml").config
    values = OmegaConf.to_container(loaded, resolve=False)
    assert isinstance(values, dict)
    chosen: dict[str, Any] = {}
    for entry in values.pop("defaults", []):
        chosen |= {key.removeprefix("override /"): value for key, value in entry.items()}
    return chosen | flatten(values)


def flatten(values: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" != GROUP:
            flat[f"{prefix}{key}"] = value
    return flat
