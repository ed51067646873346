"""Setup of a run: what runs share that differ in their seed only."""

from __future__ import annotations

import json
from hashlib import sha256

from focus_exp.config_hash import flatten, is_hashed
from focus_exp.results.record import Record

# settings in which runs of several seeds may differ: what else is measured, precision, and where model and text (known
# by their fingerprints) were read from
IGNORED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("experiment", "seed", "assets", "variants", "references", "bench"), ()),
    "model": ("name", "hub_id", "revision", "path", "base_run"),
    "data": (
        *("name", "source", "hub_id", "subset", "revision", "text_column", "files", "parts"),
        *("max_train_tokens", "max_test_tokens"),
    ),
    "attention": ("name", "backend"),
    "eval": (
        *("name", "batch_size", "request_batch_size", "controls", "top_k"),
        *("adapters", "tasks", "limit", "long_range_limit"),
    ),
    "trainer": ("accelerator", "precision", "gradient_checkpointing"),
    "analyze": ("others",),
}


def setup_key(record: Record) -> str:
    """Hash settings, model, text, kind of device and training of a run; of a run in tables as it was recorded."""
    if record.setup:
        return record.setup
    # random weights are drawn from the seed
    weights = None if record.model.get("source") == "random" else record.model.get("fingerprint")
    fixed = {key: value for key, value in flatten(record.config).items() if _is_fixed(key)}
    parts = [
        {".".join(key): value for key, value in fixed.items() if value not in (None, [], "")},
        [record.model.get("name"), weights, record.data.get("name"), record.data.get("fingerprint")],
        record.device.partition(",")[0],  # cpu or cuda
        [record.steps, record.tokens_seen],
    ]
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _is_fixed(key: tuple[str, ...]) -> bool:
    section, *below = key
    return is_hashed(key) and not (section in IGNORED and (not IGNORED[section] or below[0] in IGNORED[section]))
