"""All records as one tidy table, a line for every run, subject and measure: what is shown across runs starts here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from typing import Any

import pandas as pd

from focus_exp.records.record import Record
from focus_exp.records.rows import Arm
from focus_exp.reporting.gather import Runs, run_of, setup
from focus_exp.reporting.subjects import SUBJECT, Number, subjects_of

RUN = (
    "run", "experiment", "seed", "started", "status", "commit", "command", "config_hash", "counts", "device",
    "number_format", "scale", "is_arm", "first", "first_parameters", "setup", "unit_kind",
)  # fmt: skip
# of the arm's own run, where a line of a comparison is about one
OWN = (
    "arm", "asked", "model", "data", "T", "window", "K", "attention", "gate", "regime", "tokens_seen", "parameters",
    "model_parameters", "own_commit", "arm_setup", "steps", "tries",
)  # fmt: skip
MARKS = (
    "phase", "step", "trains", "against_causal", "answer", "telling", "usual", "turned", "tokens_against",
    "removed_against", "parameters_against", "against_setup",
)  # fmt: skip
COLUMNS = (*RUN, "of", *OWN, *SUBJECT, *MARKS, *Number._fields)
TYPES = {
    "Float64": ["value", "low", "high", "level", "level_against", "before", "stderr", "freedom", "parameters",
                "first_parameters", "parameters_against", "pairs_kept", "pairs_removed", "removed_against",
                "distant_pairs_kept"],
    "Int64": ["seed", "T", "window", "K", "tokens_seen", "tokens_against", "steps", "tries", "model_parameters",
              "top_k", "n", "tokens", "groups", "step", "units"],
    "boolean": ["is_arm", "counts", "engaged", "causal", "against_causal", "answer", "telling", "usual", "turned"],
}  # fmt: skip


@lru_cache(maxsize=2)
def measurements(runs: Runs) -> pd.DataFrame:
    """A line for every run, subject and measure, runs in their order, the arms' own (`is_arm`) after the others.

    `of`: the list of the record. `delta`: a difference of losses [nats a token], ours minus theirs, which between two
    arms stands in both directions, with both perplexities in `level` and `level_against`; `score_delta`: one of scores.
    What failed, or could not be compared, is a line without a value. `setup`, `arm_setup`: what lines of several seeds
    share. `*_against`: of the arm that it is against. `answer`: of the row that stands for its run or arm, of the one
    timing that is quoted of a k; `telling`: of the metric that decides a benchmark; `usual`: of the one that stands for
    it whatever came of it; `causal`: false of who reads the future; `turned`: the other direction, of what stands above
    it.
    """
    found = [line for name, record in runs.named.items() for line in _lines(name, record, runs)]
    known = {column: kind for kind, columns in TYPES.items() for column in columns}
    return pd.DataFrame(found, columns=list(COLUMNS)).astype(dict.fromkeys(COLUMNS, "string") | known)


def _lines(name: str, record: Record, runs: Runs) -> Iterator[dict[str, Any]]:
    first = record.arms[0] if record.arms else None
    shared = {key: getattr(record, key) for key in RUN if hasattr(record, key)} | {
        "run": name,
        "scale": record.setting("scale", "name"),
        "is_arm": bool(record.config.get("arm")),
        "unit_kind": f"{record.units.kind}s" if record.units else "windows",
        "first": first.name if first else None,
        "first_parameters": first.trainable_parameters if first else None,
        "setup": _digest((setup(record), None if first else record.experiment)),
    }
    own: dict[str | None, dict[str, Any]] = {None: {"arm": record.config.get("arm")} | _own(record)}
    own |= {arm.name: _own_of(arm, runs.own(arm), record) for arm in record.arms}
    removed = {row.arm: row.pairs_removed for row in record.rows if row.arm}
    for part, subjects in subjects_of(record, runs).items():
        for subject, numbers in subjects:
            common = {**shared, "of": part, **own.get(subject.get("arm"), own[None]), **subject}
            there = [number for number in numbers if number.value is not None or number.measure == "score_delta"]
            for number in there or numbers[:1]:
                other = own.get(number.against or "", {})
                of_other = {
                    "tokens_against": other.get("tokens_seen"),
                    "removed_against": removed.get(number.against or ""),
                    "parameters_against": other.get("parameters"),
                    "against_setup": other.get("arm_setup"),
                }
                yield common | of_other | number._asdict()


def _own(record: Record) -> dict[str, Any]:
    attention = {key: record.setting("attention", key) for key in ("window", "gate")}
    return attention | {
        "asked": record.setting("model", "name"),
        "model": record.model.get("name") or record.setting("model", "name"),
        "data": record.data.get("name") or record.setting("data", "name"),
        "T": record.setting("eval", "window"),
        "K": record.setting("attention", "groups"),
        "attention": record.setting("attention", "method"),
        "regime": record.setting("regime", "name"),
        "tokens_seen": record.tokens_seen,
        "steps": record.steps,
        "tries": len(record.tries),
        "model_parameters": record.model.get("parameters"),
        "own_commit": record.commit,
    }


def _own_of(arm: Arm, own: Record | None, comparison: Record) -> dict[str, Any]:
    """Of an arm of a comparison, by its own record where that is there."""
    groups = dict(setting.partition("=")[::2] for setting in arm.settings).get("attention.groups")
    known = {"arm": arm.name, "tokens_seen": arm.tokens_seen, "steps": arm.steps, "tries": len(arm.tries)}
    known |= {"parameters": arm.trainable_parameters}
    known |= {"arm_setup": _digest(run_of(arm, own))} | ({"K": int(groups)} if groups else {})
    return _own(own or comparison) | known


def _digest(shared: Any) -> str:
    return sha256(repr(shared).encode()).hexdigest()[:12]
