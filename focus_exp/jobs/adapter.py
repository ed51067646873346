"""Compose a configuration that measures an adapter instead of training one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from focus_exp.checks import drop_file_fields, validate
from focus_exp.config import Config, FocusConfig, ModelConfig, RecipeConfig, build_attention, find_schema
from focus_exp.errors import UserError, first_line
from focus_exp.models.adapter import BASE_HINT, read_description
from focus_exp.results.record import RECORD, Record


def with_adapter(config: Config, typed: list[str] | None = None) -> Config:
    """The configuration with the adapter's own method in place of attention.*, and nothing to train.

    Its base is the adapter's own where neither an experiment nor an override chooses a model. UserError where one that
    was typed, of the command line unless given, asks for what the adapter is not.
    """
    description = read_description(str(config.adapter))
    if typed is None:
        typed = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    settings = {setting.key_or_group: setting for setting in OverridesParser.create().parse_overrides(typed)}
    refuse_ignored(config, description, settings)
    method = description["method"]
    alike = isinstance(config.attention, find_schema(method))
    chosen = {"method": method, "name": config.attention.name if config.attention.method == method else method}
    usual = type(config.attention)()
    for key in free_of(description):
        # what nobody asks for, on the command line or in an experiment, is the adapter's own
        asked = alike and getattr(config.attention, key) != getattr(usual, key)
        if key == "backend" or asked or f"attention.{key}" in settings:
            chosen[key] = getattr(config.attention, key)
    model = config.model
    if config.experiment == Config.experiment and not any(key.partition(".")[0] == "model" for key in settings):
        model = base_of(config, description)
    try:
        attention: Any = OmegaConf.to_object(build_attention(description["options"] | chosen))
        merged = replace(config, model=model, attention=attention, recipe=RecipeConfig(name="none"))
        validate(merged)
    except (OmegaConfBaseException, UserError) as error:
        raise UserError(f"the adapter in {config.adapter} cannot be measured: {first_line(error)}") from error
    return merged


def free_of(description: dict[str, Any]) -> list[str]:
    """Of attention.*, what the adapter may be measured under that is not its own."""
    if issubclass(find_schema(description["method"]), FocusConfig):
        return ["top_k", "pair_rule", "backend"]
    counted = description["method"] == "focus_dual" and description["options"].get("groups_per_layer") is None
    return ["top_k", "backend"] if counted else ["backend"]


def refuse_ignored(config: Config, description: dict[str, Any], typed: dict[str, Override]) -> None:
    """UserError for attention.* that would change nothing: tables of other settings would hold the same numbers."""
    method, free = description["method"], free_of(description)
    known, made = vars(find_schema(method)()), made_with(config, description)
    for name, setting in typed.items():
        group, _, key = name.partition(".")
        if group != "attention" or key in ("", "name", *free) or not hasattr(config.attention, key):
            continue
        asked = setting.value()
        if isinstance(asked, str) and "${" in asked:
            asked = getattr(config.attention, key)
        if key in made and asked == made[key]:
            continue
        kept = "which stays as it is when it is measured; leave it out, or train anew for another"
        if key == "top_k" and made.get("groups_per_layer") is not None:
            why = f"reads as many groups as its budget says, {kept}"
        elif key in made:
            why = f"has {key}={made[key]}, {kept}"
        else:
            why = f"does not say its {key}, {kept}" if key in known else f"is of {method}, which has no {key}"
        raise UserError(
            f"{setting.input_line}: the adapter in {config.adapter} {why}; of attention.* {', '.join(free)} can be "
            "chosen"
        )


def made_with(config: Config, description: dict[str, Any]) -> dict[str, Any]:
    """attention.* under which the adapter was made, as far as it says, or the record of the run that it lies in."""
    told = description["options"] | {"method": description["method"]}
    record = record_beside(config)
    if record is None or record.setting("attention", "method") != description["method"]:
        return told
    return vars(find_schema(description["method"])()) | record.config["attention"] | told


def base_of(config: Config, description: dict[str, Any]) -> ModelConfig:
    """The model that the adapter belongs to, as the run in which it lies says, or else the adapter; where neither does,
    that of `config`. UserError where it is a folder that is gone.

    An adapter goes to other machines, so it names none of their folders; the run has them.
    """
    base, record = description["base_model"], record_beside(config)
    trained = Path(str(config.adapter)).with_name("model")
    found = config.model
    if record and "name" in (kept := record.config.get("model", {})):
        found = ModelConfig(**{key: kept[key] for key in vars(found) if key in kept})
    elif base.get("revision") and "/" in base["name"]:
        found = drop_file_fields("model", replace(found, path=None, hub_id=base["name"], revision=base["revision"]))
    if (trained / "config.json").is_file():
        return drop_file_fields("model", replace(found, path=str(trained)))
    if found.path and not Path(found.path).expanduser().exists():
        raise UserError(f"the adapter in {config.adapter} is of model.path={found.path}, which is gone; {BASE_HINT}")
    return found


def record_beside(config: Config) -> Record | None:
    """Of the run that the adapter lies in, where there is one that can be read."""
    with suppress(UserError):
        return Record.load(Path(str(config.adapter)).with_name(RECORD))
    return None
