"""--cfg job: print what a command runs; nothing runs.

The YAML is that of config.yaml in the run folder: parsed, and with the settings of variants and adapters, which take
precedence over the command line.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from focus_exp.config import Config
from focus_exp.errors import UserError

NAMES = ("job", "variant", "variants", "shared_variant", "references")  # of the command, not of what a variant runs


def show(config: Config, package: str | None = None) -> None:
    """Print the configuration of a command, then that of its variants where it differs, each as a YAML document.

    Args:
        package: dotted key of the part to print; None prints all.
    """
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        settings = HydraConfig.get()
        print(f"--- # job {settings.job.num}: {shlex.join(settings.overrides.task)}")
    main, variants = resolve(config)
    if (text := to_yaml(asdict(main), package)) is None:
        raise UserError(f"--package must be a key of the configuration (got {package}).")
    print(text, end="")
    for name, variant in variants.items():
        changes = to_yaml(changed(asdict(variant), asdict(main)), package)
        print(f"--- # variant {name}, where it differs\n{changes or ''}", end="")


def resolve(config: Config) -> tuple[Config, dict[str, Config]]:
    """Return the configuration that runs, and by name those of the variants that it compares."""
    if not (config.job == "compare" or config.adapter):
        return config, {}
    # imports torch, which takes seconds
    from focus_exp.runs.compose import (
        command_overrides,
        compose_adapter,
        compose_variant,
        compose_variants,
        runs_alone,
    )

    if config.job == "compare":
        variants = compose_variants(config)
        if runs_alone(config):
            return next(iter(variants.values())), {}
        shared = compose_variant(config, None, command_overrides())
        names = {name: getattr(config, name) for name in NAMES}
        return replace(shared, **names), variants
    return compose_adapter(config), {}


def changed(values: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Return the values that differ from `reference`; of another attention method all of its options."""
    if values.get("method") != reference.get("method"):
        return values
    different = {key: x for key, x in values.items() if key not in NAMES and x != reference.get(key)}
    return {
        key: changed(x, reference[key]) if isinstance(x, dict) and reference.get(key) else x
        for key, x in different.items()
    }


def to_yaml(values: dict[str, Any], package: str | None) -> str | None:
    """Return `values` or their part at a dotted key, None if there is none."""
    part = OmegaConf.select(OmegaConf.create({"all": values}), f"all.{package}" if package else "all")
    return OmegaConf.to_yaml(part) if OmegaConf.is_config(part) else None if part is None else f"{part}\n"
