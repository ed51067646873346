"""Hash of a configuration: equal for runs that compute the same."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from focus_exp.config import Config

# keys that do not change what a run computes
NOT_HASHED = (
    *("job", "variant", "overwrite", "runs_dir", "cache_dir", "logger", "adapter"),
    *("report", "plan", "reproduce", "budget"),
)
TRAINER_NOT_HASHED = (
    *("name", "log_every", "progress", "checkpoint_every", "checkpoint_minutes", "probe_every"),
    *("strategy", "devices", "num_nodes"),
)
ADAPTER = ("method", "options", "layers")  # keys of its description that determine its output


def config_hash(config: Config) -> str:
    """Return eight hex digits of the configuration.

    Defaults are left out, so that a new key keeps the hashes of earlier runs.
    """
    values = {key: value for key, value in changed_values(config).items() if is_hashed((key,))}
    values["trainer"] = {key: value for key, value in values["trainer"].items() if is_hashed(("trainer", key))}
    attention_seed = getattr(config.attention, "seed", config.seed)
    values["attention"].pop("seed", None)
    if attention_seed != config.seed:  # also if it is the default
        values["attention"]["seed"] = attention_seed
    if config.adapter:
        values["adapter"] = hash_adapter(config.adapter)
    if config.eval.adapters:
        values["eval"]["adapters"] = [hash_adapter(adapter) for adapter in config.eval.adapters]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def flatten(values: dict[Any, Any], *prefix: Any) -> dict[tuple[Any, ...], Any]:
    """Return the values of nested dicts by their keys."""
    flat: dict[tuple[Any, ...], Any] = {}
    for key, value in values.items():
        flat |= flatten(value, *prefix, key) if isinstance(value, dict) else {(*prefix, key): value}
    return flat


def is_hashed(key: tuple[str, ...]) -> bool:
    """Return whether a key is part of the hash where it is not at its default."""
    excluded = {"trainer": TRAINER_NOT_HASHED, "attention": ("seed",)}
    return key[0] not in NOT_HASHED and not (len(key) > 1 and key[1] in excluded.get(key[0], ()))


def hash_adapter(adapter: str) -> list[Any]:
    """Return the hashes of an adapter's tensors and the options of its description, wherever it is."""
    folder = Path(adapter)
    tensors = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safe*"))]
    descriptions = []
    for path in sorted(folder.glob("*.json")):
        with suppress(ValueError):  # loading it raises
            values = json.loads(path.read_text(encoding="utf-8"))
            descriptions.append({key: values[key] for key in ADAPTER if key in values})
    return [*tensors, *descriptions]


def changed_values(config: Any) -> dict[str, Any]:
    """Return the values that differ from their schema's defaults."""
    values = {}
    for item in fields(config):
        value = getattr(config, item.name)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if is_dataclass(value):
            values[item.name] = changed_values(value)
        elif isinstance(value, dict):
            values[item.name] = {key: changed_values(v) if is_dataclass(v) else v for key, v in value.items()}
        elif value != default:
            values[item.name] = value
    return {key: value for key, value in values.items() if value != {}}
