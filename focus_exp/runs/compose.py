"""Compose other configurations than the command's: variants, adapters to measure, and base weights to train.

A variant is an overlay: an entry of conf/variant/<experiment>.yaml, or a file variant/<experiment>/<name>.yaml of a
--config-dir. A name alone is one of the experiment's. To print one:
`python -m focus_exp +experiment=compare +variant=compare/lora --cfg job`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from focus_exp.attention.options import did_you_mean
from focus_exp.checks import drop_file_fields, parse, validate
from focus_exp.cli import explain_error, quote
from focus_exp.config import Config, ModelConfig, RecipeConfig, build_attention, find_schema, is_fitted
from focus_exp.errors import UserError, first_line
from focus_exp.identity import flatten, identity
from focus_exp.models.adapter import BASE_HINT, read_description
from focus_exp.results.record import RECORD, Record

BASE = "base"  # row of the unmodified model in a comparison's tables
GROUP = "variant"


def compose_overrides(overrides: list[str], others: Sequence[str] = (), *, changes_method: bool = False) -> Config:
    """Compose overrides, then others.

    Args:
        changes_method: `others` choose another method, which takes those of attention.* in `overrides` that it has.
    """
    options = [override for override in overrides if changes_method and override.startswith("attention.")]
    composed = compose("config", [*(override for override in overrides if override not in options), *others])
    for option in parse_overrides(options):
        if option.key_or_group.removeprefix("attention.") in composed.attention:
            OmegaConf.update(composed, option.key_or_group, option.value())
    return parse(composed)


def parse_overrides(overrides: list[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(overrides)


def command_overrides() -> list[str]:
    """Return the overrides of the running command, for a job of a sweep its own."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def runs_alone(config: Config) -> bool:
    """Return whether the command chooses one variant, or with attention= a method, which all variants would have."""
    return bool(config.variant) or "attention" in {o.key_or_group for o in parse_overrides(command_overrides())}


def compose_variants(config: Config) -> dict[str, Config]:
    """Compose the comparison's variants by name, or the one run that the command line chose.

    Raises:
        UserError: if two of them are the same run, by a setting that was typed for all.
    """
    chosen: list[str | None] = [*map(variant_name, config.variants)]
    if runs_alone(config):
        chosen = [config.variant]
    runs = [compose_variant(config, name, command_overrides()) for name in chosen]
    variants = {run.variant or run.attention.name: run for run in runs}
    names_by_run: dict[str, list[str]] = {}
    for name, variant in variants.items():
        names_by_run.setdefault(identity(variant), []).append(name)
    if same := next((names for names in names_by_run.values() if len(names) > 1), None):
        raise UserError(
            f"variants must differ (got {', '.join(same)}, which are the same run). Leave out the setting that was "
            f"typed for all variants, or choose some, as in variants=[{same[0]}]."
        )
    return variants


def compose_variant(config: Config, name: str | None, overrides: list[str]) -> Config:
    """Compose one variant of a comparison, or what all of them share (`name` None).

    The command's overrides take precedence over the variant's settings. With an adapter it is measured, not trained.

    Raises:
        UserError: naming the variant, if it does not exist or its settings are invalid.
    """
    try:
        return compose_checked(config, name, overrides)
    except (UserError, HydraException, OmegaConfBaseException) as error:
        reason = str(error) if isinstance(error, UserError) else explain_error(error)
        raise UserError(f"variant {name}: {reason}" if name else reason) from error


def compose_checked(config: Config, name: str | None, overrides: list[str]) -> Config:
    if name == BASE:
        raise UserError(f"its name must not be {BASE}, the row of the unmodified model. Rename its file.")
    paths = variant_paths(config, name)
    settings = {key for path in paths for key in read_settings(path)}
    typed = [str(o.input_line) for o in parse_overrides(overrides) if o.key_or_group != GROUP]
    overlays = [f"+{GROUP}=[{','.join(paths)}]"] if paths else []
    composed = compose_overrides(typed, overlays, changes_method=bool(settings & {"attention", "recipe"}))
    job = "evaluate" if composed.adapter else "train"
    variant = replace(composed, job=job, variant=name, variants=[], shared_variant=None, references=[])
    if name and variant.attention.method == "full" and not variant.phases:
        raise UserError("it is the unmodified base model, which every comparison measures. Leave it out of variants.")
    if not variant.adapter:
        validate(variant)  # as job=train
        return variant
    method = read_description(variant.adapter)["method"]
    if name and method != variant.attention.method:
        raise UserError(
            f"attention must be {method}, the method of adapter={variant.adapter} (got {variant.attention.name}). "
            "Leave the variant out of variants, or the adapter."
        )
    return compose_adapter(variant, [*variant_settings(config, name), *typed])


def variant_name(path: str) -> str:
    return path.rpartition("/")[2]


def variant_paths(config: Config, name: str | None) -> list[str]:
    """Return the names <experiment>/<name> that make up a variant, in order of increasing precedence."""
    shared = [config.shared_variant] if config.shared_variant else []
    if name is None:
        return shared
    path = next((path for path in config.variants if variant_name(path) == name), name)
    return [*shared, path if "/" in path else f"{config.experiment}/{path}"]


def variant_settings(config: Config, name: str | None) -> list[str]:
    """Return a variant's settings as overrides, shared ones first."""
    return [f"{key}={value}" for path in variant_paths(config, name) for key, value in read_settings(path).items()]


def read_settings(path: str) -> dict[str, Any]:
    """Return what an overlay sets: group files that it chooses, and dotted keys.

    Raises:
        UserError: if there is no such variant.
    """
    loader = GlobalHydra.instance().config_loader()
    source = next((s for s in loader.get_sources() if s.is_config(f"{GROUP}/{path}.yaml")), None)
    if source is None:
        names = loader.get_group_options(f"{GROUP}/{path.rpartition('/')[0]}")
        raise UserError(f"{GROUP}={path} does not exist{did_you_mean(variant_name(path), names)}")
    values = OmegaConf.to_container(source.load_config(f"{GROUP}/{path}.yaml").config, resolve=False)
    assert isinstance(values, dict)
    settings: dict[str, Any] = {}
    for entry in values.pop("defaults", []):
        if isinstance(entry, dict):
            settings |= {key.removeprefix("override /"): value for key, value in entry.items()}
        elif entry.startswith(f"/{GROUP}/"):  # another variant that it includes, not _self_
            settings |= read_settings(entry.removeprefix(f"/{GROUP}/"))
    return settings | {".".join(map(str, key)): value for key, value in flatten(values).items() if key != (GROUP,)}


def compose_adapter(config: Config, overrides: list[str] | None = None) -> Config:
    """Return the configuration that measures `config.adapter`: its method in place of attention.*, nothing to train.

    The model is the adapter's base unless an experiment or an override chooses one.

    Raises:
        UserError: if an override, by default of the running command, asks for what the adapter is not.
    """
    description = read_description(str(config.adapter))
    settings = {o.key_or_group: o for o in parse_overrides(command_overrides() if overrides is None else overrides)}
    refuse_ignored_options(config, description, settings)
    method = description["method"]
    is_same = isinstance(config.attention, find_schema(method))
    options = {"method": method, "name": config.attention.name if config.attention.method == method else method}
    defaults = type(config.attention)()
    for key in free_options(description):
        is_set = is_same and getattr(config.attention, key) != getattr(defaults, key)  # maybe by an experiment
        if key == "backend" or is_set or f"attention.{key}" in settings:
            options[key] = getattr(config.attention, key)
    model = config.model
    if config.experiment == Config.experiment and not any(key.partition(".")[0] == "model" for key in settings):
        model = find_base_model(config, description)
    try:
        attention = build_attention(description["options"] | options)
        merged = replace(config, model=model, attention=attention, recipe=RecipeConfig(name="none"))
        validate(merged)
    except (OmegaConfBaseException, UserError) as error:
        raise UserError(f"the adapter in {config.adapter} cannot be measured: {first_line(error)}") from error
    return merged


def compose_router(config: Config) -> Config:
    """Return the configuration of a job that needs a router: the adapter's, if there is one.

    Raises:
        UserError: if the attention has no router.
    """
    config = compose_adapter(config) if config.adapter else config
    attention = config.attention
    if not (attention.is_trainable or (is_fitted(attention.method) and config.job != "analyze")):  # of groups
        raise UserError(
            f"attention must have a router with job={config.job} (got {attention.name}). Type attention=focus or "
            "attention=focus_dual."
        )
    return config


def free_options(description: dict[str, Any]) -> list[str]:
    """Return the options of attention.* that may differ from the adapter's."""
    schema, options = find_schema(description["method"]), description["options"]
    adapted = schema(**{item.name: options[item.name] for item in fields(schema) if item.name in options})
    return [*adapted.routing, "backend"]


def refuse_ignored_options(config: Config, description: dict[str, Any], settings: dict[str, Override]) -> None:
    """Raise UserError for settings that would be ignored: runs of other settings would have the same numbers."""
    method, free, made = description["method"], free_options(description), description["options"]
    for name, setting in settings.items():
        group, _, key = name.partition(".")
        if name.startswith("recipe") and setting.value() != "none":
            raise UserError(
                f"{name} must be left out with adapter={config.adapter}, which is not trained (got {setting.value()})."
            )
        if group != "attention" or key in ("", "name", "method", *free) or not hasattr(config.attention, key):
            continue
        if key == "top_k" or key not in made or setting.value() != made[key]:
            required = f"{made[key]}, that of the adapter" if key in made and key != "top_k" else "left out"
            raise UserError(
                f"{name} must be {required} (got {setting.value()}). Train another adapter, or set {', '.join(free)} "
                f"of attention.* (adapter={config.adapter}, method {method})."
            )


def find_base_model(config: Config, description: dict[str, Any]) -> ModelConfig:
    """Return the model that the adapter was trained on: of its run, else of its description, else `config.model`.

    Raises:
        UserError: if it is a folder that no longer exists.
    """
    base, recorded = description["base_model"], dict[str, Any]()
    trained = Path(str(config.adapter)).with_name("model")
    model = config.model
    with suppress(UserError):  # an adapter outside of its run
        recorded = Record.load(Path(str(config.adapter)).with_name(RECORD)).config.get("model", {})
    if "name" in recorded:
        model = ModelConfig(**{key: recorded[key] for key in vars(model) if key in recorded})
    elif base.get("revision") and "/" in base["name"]:
        model = drop_file_fields("model", replace(model, path=None, hub_id=base["name"], revision=base["revision"]))
    if (trained / "config.json").is_file():
        return drop_file_fields("model", replace(model, path=str(trained)))
    if model.path and not Path(model.path).expanduser().exists():
        raise UserError(f"model.path of adapter={config.adapter} must exist (got {model.path}); {BASE_HINT}")
    return model


def needs_base(config: Config) -> bool:
    """Return whether the model's weights are trained by the command model.base_run."""
    return bool(config.model.base_run) and config.model.path is None and not config.recipe.from_scratch


def base_overrides(config: Config) -> list[str]:
    """Return the overrides of the command that trains the base, in the same folders and budget, untuned by default."""
    return ["recipe.tune.factors=[]", *config.model.base_run, *shared_overrides(config)]


def shared_overrides(config: Config) -> list[str]:
    """Return the overrides that commands started by this one share with it: budget and places."""
    cache = quote(config.cache_dir) if config.cache_dir else "null"
    places = [f"runs_dir={quote(config.runs_dir)}", f"cache_dir={cache}", f"logger.wandb={config.logger.wandb}"]
    return [f"budget={config.budget['name']}", f"assets={config.assets}", *places]


def describe_budget(config: Config) -> str:
    """Return the budget with its part of the paper's steps, and what to type for another one.

    A variant has the budget of its comparison, which has said so.
    """
    budget = str(config.budget["name"])
    overrides = [o for o in parse_overrides(command_overrides()) if o.key_or_group != "budget"]
    is_compared = config.variant and GROUP not in {o.key_or_group for o in overrides}
    if is_compared or not HydraConfig.initialized():
        return f"budget={budget}"
    other = "embedded" if budget == "paper" else "paper"

    def count_steps(name: str) -> int:
        theirs = compose_overrides([*(str(o.input_line) for o in overrides), f"budget={name}"])
        return sum(phase.steps for _, phase in theirs.phases)

    steps, other_steps = sum(phase.steps for _, phase in config.phases), count_steps(other)
    if config.adapter or steps == other_steps:
        what = "the paper's" if other == "paper" else "a small one"
        return f"budget={budget}; type budget={other} for {what}"
    if budget == "paper":
        return f"budget=paper: the paper's {steps:,} steps; type budget=embedded for {other_steps:,}"
    longer = f"budget=embedded for {count_steps('embedded'):,} and all rows, " if budget == "first" else ""
    return f"budget={budget}: {steps:,} of the paper's {other_steps:,} steps; type {longer}budget=paper for all"


def compose_base(config: Config) -> Config:
    """Return the configuration of the run that trains the base; of a comparison, that of the variant it names."""
    base = compose_overrides(base_overrides(config))
    return base if base.variant is None else compose_variant(base, base.variant, base_overrides(config))
