"""Identity of what a configuration computes: equal where the numbers are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from focus_exp.config import Config, shipped
from focus_exp.errors import UserError

ADAPTER = ("method", "options", "layers")  # keys of its description that determine its output

# what is identified -> keys, or groups of keys, that do not change it
IGNORED: dict[str, tuple[str, ...]] = {
    # a run: its measurements
    "run": (
        *("job", "variant", "overwrite", "runs_dir", "cache_dir", "logger", "report", "plan", "reproduce", "budget"),
        *(f"trainer.{key}" for key in ("name", "log_every", "progress", "checkpoint_every", "checkpoint_minutes")),
        *(f"trainer.{key}" for key in ("probe_every", "strategy", "devices", "num_nodes")),
    )
}
# what runs that differ in their seed alone share; the model and text that they used are known by their fingerprints
IGNORED["setup"] = (
    *IGNORED["run"],
    *("experiment", "seed", "attention.seed", "assets", "adapter", "variants", "references", "bench", "analyze.others"),
    *(f"model.{key}" for key in ("name", "hub_id", "revision", "path", "base_run")),
    *(f"data.{key}" for key in ("name", "source", "hub_id", "subset", "revision", "text_column", "files", "parts")),
    *(f"data.{key}" for key in ("max_train_tokens", "max_test_tokens")),
    *(f"attention.{key}" for key in ("name", "backend")),
    *(f"eval.{key}" for key in ("name", "data", "batch_size", "request_batch_size", "controls", "top_k")),
    *(f"eval.{key}" for key in ("adapters", "tasks", "limit", "long_range_limit")),
    *(f"trainer.{key}" for key in ("accelerator", "precision", "gradient_checkpointing")),
)
# scores of the unmodified model; the text is known by its fingerprint
IGNORED["base"] = (
    *IGNORED["run"],
    *("experiment", "seed", "adapter", "check_base", "variants", "shared_variant", "references"),
    *("attention", "recipe", "data", "bench", "generate", "analyze", "trainer"),
    *(f"eval.{key}" for key in ("name", "batch_size", "request_batch_size", "controls", "bounds", "top_k")),
    *(f"eval.{key}" for key in ("data", "adapters", "tasks", "long_range_distance")),
)


def identity(config: Config, of: str = "run") -> str:
    """Return hex digits that are equal for configurations of the same numbers.

    Keys at their defaults are left out, so that a new key keeps earlier identities. Keys that name local files count by
    what the files hold.

    Args:
        of: what is identified, a key of IGNORED.
    """
    values = {".".join(map(str, key)): value for key, value in flatten(changed_values(config)).items()}
    seed = getattr(config.attention, "seed", config.seed)
    values["attention.seed"] = None if seed == config.seed else seed  # also if it is the default
    kept = {key: value for key, value in values.items() if not is_ignored(key, of)}
    for key in PLACES.keys() & kept.keys():
        with suppress(UserError):  # which a run of it raises
            kept[key] = PLACES[key](kept[key])
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def is_ignored(key: str, of: str) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:count]) in IGNORED[of] for count in range(1, len(parts) + 1))


def flatten(values: dict[Any, Any], *prefix: Any) -> dict[tuple[Any, ...], Any]:
    """Return the values of nested dicts by their keys."""
    flat: dict[tuple[Any, ...], Any] = {}
    for key, value in values.items():
        flat |= flatten(value, *prefix, key) if isinstance(value, dict) else {(*prefix, key): value}
    return flat


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
    return values


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


def identify_model(place: str) -> str:
    """Hash the configuration, weights and tokenizer of a local model."""
    from focus_exp.models import files  # imports torch, as only what runs needs

    return files.hash_model(place)


def identify_texts(place: str) -> list[tuple[str, str]]:
    """Return names and hashes of the texts that data.files names."""
    from focus_exp.data.texts import find_texts  # its package imports torch

    return [(text.name, text.digest) for text in find_texts(place)]


# keys that name local files -> what replaces the names
PLACES: dict[str, Callable[[Any], Any]] = {
    "model.path": identify_model,
    "data.files": identify_texts,
    "eval.data": lambda place: place if place in shipped("data") else identify_texts(place),
    "adapter": hash_adapter,
    "eval.adapters": lambda adapters: [hash_adapter(adapter) for adapter in adapters],
}
