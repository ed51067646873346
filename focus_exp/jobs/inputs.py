"""Check that a resumed or finished run still has the same data and weights, and take over its state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from focus_exp.assets import find_adapter
from focus_exp.config import Config
from focus_exp.config_hash import hash_adapter
from focus_exp.data.texts import find_texts, hash_texts
from focus_exp.errors import UserError
from focus_exp.models.adapter import read_description
from focus_exp.models.load import hash_tokenizer, hash_weights
from focus_exp.results.record import Record
from focus_exp.results.run_dir import NOT_ENDED, run_folder
from focus_exp.training.phases import CHECKPOINTS


def refuse_other_inputs(config: Config, record: Record) -> None:
    """UserError where files have changed since the run began; what is gone has not changed what it found."""
    texts = config.data.files if config.data.source == "files" else None
    looked_at: list[tuple[str, str, str | None, str | None, Callable[[str], str | None]]] = [
        ("data.files", "text", texts, record.data.get("revision"), lambda place: hash_texts(find_texts(place))),
        ("model.path", "model", config.model.path, record.model.get("revision"), hash_weights),
        ("model.path", "tokenizer", config.model.path, record.model.get("tokenizer"), hash_tokenizer),
        *(
            ("analyze.others", "adapter", other, then, digest_of)
            for other, then in zip(config.analyze.others, record.method.get("others", []), strict=False)
        ),
    ]
    for key, what, place, then, look in looked_at:
        if place is None or then is None:
            continue
        try:
            now = look(place)
        except (UserError, OSError):
            continue
        if now not in (None, then):
            raise UserError(
                f"{key}={place} holds another {what} than when {run_folder(config)} was made ({now}, then "
                f"{then}); overwrite=true makes it anew, another runs_dir leaves it alone"
            )


def tokenizer_of(config: Config) -> dict[str, str | None]:
    """What the record of a model in a folder of the user's says of the tokenizer there, beside the weights."""
    return {"tokenizer": hash_tokenizer(config.model.path)} if config.model.path else {}


def digest_of(adapter: str) -> str:
    """Twelve hex digits of what an adapter holds, in whatever place. UserError where there is none."""
    read_description(adapter)
    return hashlib.sha256(json.dumps(hash_adapter(str(find_adapter(adapter)))).encode()).hexdigest()[:12]


def refuse_another(part: str, then: dict[str, Any], fingerprint: str, folder: Path) -> None:
    """UserError where the run in `folder` began with another model or text, of which its checkpoints and scores are."""
    if then.get("fingerprint") not in (None, fingerprint):
        what = {"model": "the weights have", "data": "the text, or the tokenizer, has"}[part]
        raise UserError(
            f"{what} changed since {folder} was begun (fingerprint {fingerprint[:12]}, then "
            f"{then['fingerprint'][:12]}); overwrite=true makes it anew, another runs_dir leaves it alone"
        )


def take_over(record: Record, earlier: Record, folder: Path) -> list[str]:
    """Give `record` what an earlier part of its run has read and spent; how that was made otherwise, and what of it is
    not known."""
    record.data, record.model = earlier.data, earlier.model  # until they are read again
    if earlier.status == "finished":
        return []
    record.wall_seconds, record.train_seconds = earlier.wall_seconds, earlier.train_seconds
    record.peak_memory_bytes = earlier.peak_memory_bytes
    record.warnings = list(dict.fromkeys([*earlier.warnings, *record.warnings]))
    parts = (CHECKPOINTS, "evaluation", "benchmarks", "continuations", "groups", "speed")
    kept = [part for part in parts if (folder / part).exists()]
    if not kept:
        return []
    made = {
        "commit": (earlier.commit, record.commit),
        "processor": (earlier.machine.get("cpu"), record.machine.get("cpu")),
        "device": (earlier.device, record.device),
        "torch": (earlier.versions.get("torch"), record.versions.get("torch")),
    }
    changed = [f"{name} {then} (now {now})" for name, (then, now) in made.items() if then != now]
    # times that were made otherwise are measured anew
    said = [f"begun with {', '.join(changed)}: its numbers are of both"] if changed and kept != ["speed"] else []
    if earlier.error == NOT_ENDED:
        said.append("an earlier part of it was killed: its seconds and its memory are those of the others alone")
    return said
