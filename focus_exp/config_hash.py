"""The name of a configuration: what two runs share that compute the same."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from focus_exp.config import Config, to_dict

# keys that change where or how a run is reported, but not what it computes
NOT_HASHED = (
    *("job", "variant", "overwrite", "runs_dir", "cache_dir", "logger", "adapter"),
    *("report", "plan", "reproduce", "budget"),
)
MODEL_NOT_HASHED = ("dtype", "paper")
TRAINER_NOT_HASHED = (
    *("name", "log_every", "progress", "checkpoint_every", "keep_checkpoints", "probe_every"),
    *("strategy", "devices", "num_nodes", "cpu_offload"),
)
ADAPTER = ("method", "options", "layers")  # of its description, those that decide what it does


def config_hash(config: Config) -> str:
    """Eight hex digits of everything that decides what the run computes.

    What stands at the schema's default is left out, so a key that is new tomorrow leaves the runs of today their names;
    for the same reason a default, once released, must not change its meaning.
    """
    values = {key: value for key, value in chosen(config).items() if decides((key,))}
    for part in ("model", "trainer"):
        values[part] = {key: value for key, value in values[part].items() if decides((part, key))}
    if base_run := values["model"].get("base_run"):  # as written before variants were files
        values["model"]["base_run"] = [re.sub(r"^\+variant=(?:.*/)?", "arm=", override) for override in base_run]
    own_seed = getattr(config.attention, "seed", config.seed)
    values["attention"].pop("seed", None)
    if own_seed != config.seed:  # be it the schema's default or not
        values["attention"]["seed"] = own_seed
    if config.adapter:
        values["adapter"] = content(config.adapter)
    if config.eval.adapters:
        values["eval"]["adapters"] = [content(adapter) for adapter in config.eval.adapters]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def moved_defaults(config: Config, recorded: dict[str, Any]) -> dict[str, Any]:
    """What a run of the same name was given, its settings `recorded`, where this one has a default that is another."""
    now, named = leaves(json.loads(json.dumps(to_dict(config)))), leaves(chosen(config))
    then = leaves(recorded)
    left_out = {key for key in now.keys() & then.keys() if key not in named and decides(key)}
    return {".".join(key): then[key] for key in sorted(left_out) if then[key] != now[key]}


def leaves(values: dict[str, Any], *above: str) -> dict[tuple[str, ...], Any]:
    """The values of nested dicts by the keys that lead to them."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in values.items():
        found |= leaves(value, *above, key) if isinstance(value, dict) else {(*above, key): value}
    return found


def decides(key: tuple[str, ...]) -> bool:
    """Whether it is part of a run's name where it is no default."""
    apart = {"model": MODEL_NOT_HASHED, "trainer": TRAINER_NOT_HASHED, "attention": ("seed",)}
    return key[0] not in NOT_HASHED and not (len(key) > 1 and key[1] in apart.get(key[0], ()))


def content(adapter: str) -> list[Any]:
    """What an adapter holds, of which its place says nothing: its tensors, and with which options they are used."""
    folder = Path(adapter)
    tensors = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safe*"))]
    described = []
    for path in sorted(folder.glob("*.json")):
        with suppress(ValueError):  # whoever loads it says what is wrong with it
            whole = json.loads(path.read_text(encoding="utf-8"))
            described.append({key: whole[key] for key in ADAPTER if key in whole})
    return [*tensors, *described]


def chosen(config: Any) -> dict[str, Any]:
    """The values that differ from their schema's defaults."""
    values = {}
    for item in fields(config):
        value = getattr(config, item.name)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if is_dataclass(value):
            values[item.name] = chosen(value)
        elif isinstance(value, dict):
            values[item.name] = {key: chosen(part) if is_dataclass(part) else part for key, part in value.items()}
        elif value != default:
            values[item.name] = value
    return {key: value for key, value in values.items() if value != {}}
