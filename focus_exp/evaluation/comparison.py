"""The arms of a comparison, each paired with the first one, and with others, on the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from focus_exp.evaluation.outcomes import slug
from focus_exp.evaluation.quality import read_scores
from focus_exp.evaluation.statistics import Bootstrap, paired
from focus_exp.records.answers import answer
from focus_exp.records.comparison import arm_folder, arm_record
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm, Difference


def compare_arms(record: Record, folder: Path, against: list[str]) -> None:
    """Fill in the differences of the comparison in `folder` from the folders of its arms: from the first, and from
    those named in `against`.

    Model and data are those of the first arm that has a base. Arms of another model or text are paired with nothing.
    """
    losses: dict[str, np.ndarray] = {}
    for arm in record.arms:
        found = arm_record(folder, arm)
        if found is None:
            continue
        if not record.model and found.base:
            record.model, record.data = found.model, found.data
        scored = losses_of(found, folder, arm)
        if scored is not None and (arm is record.arms[0] or same_tokens(found, record)):
            losses[arm.name] = scored
    first = record.arms[0].name
    for other in dict.fromkeys([first, *against]):
        if other not in losses:
            continue
        bootstrap = Bootstrap(len(losses[other]), record.config["eval"]["bootstrap_samples"], record.seed or 0)
        for name in [name for name in losses if name != other]:
            value, low, high = paired(losses[name], losses[other], bootstrap)
            named = None if other == first else other
            record.differences.append(Difference(arm=name, value=value, low=low, high=high, against=named))


def losses_of(found: Record, folder: Path, arm: Arm) -> np.ndarray | None:
    """The losses `[windows, T]` of what stands for an arm, if they are there."""
    row = answer(found)
    scores = read_scores(arm_folder(folder, arm) / "evaluation" / f"{slug(row.name)}.npz") if row else None
    return scores.nll if scores else None


def same_tokens(arm: Record, record: Record) -> bool:
    """Whether an arm scored the tokens of the first one under the same base model."""
    return scored_by(arm) == scored_by(record)


def scored_by(record: Record) -> list[object]:
    windows = [record.setting("eval", key) for key in ("window", "stride", "max_windows", "split")]
    return [*windows, *((part.get("used"), part.get("fingerprint")) for part in (record.model, record.data))]
