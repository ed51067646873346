"""The arms of a comparison, each paired with the first one on the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from focus_exp.evaluation.outcomes import slug
from focus_exp.evaluation.quality import read_scores
from focus_exp.evaluation.statistics import Bootstrap, paired
from focus_exp.records.answers import answer
from focus_exp.records.comparison import arm_folder, arm_record
from focus_exp.records.record import Record
from focus_exp.records.rows import Difference


def compare_arms(record: Record, folder: Path) -> None:
    """Fill in the differences of the comparison in `folder` from the folders of its arms.

    Model and data are those of the first arm that has a base. Arms of another model or text are paired with nothing.
    """
    bootstrap: Bootstrap | None = None
    reference: np.ndarray | None = None
    for arm in record.arms:
        found = arm_record(folder, arm)
        if found is None:
            continue
        if not record.model and found.base:
            record.model, record.data = found.model, found.data
        row = answer(found)
        scores = read_scores(arm_folder(folder, arm) / "evaluation" / f"{slug(row.name)}.npz") if row else None
        if scores is None:
            continue
        if arm is record.arms[0]:
            reference = scores.nll
            bootstrap = Bootstrap(len(reference), record.config["eval"]["bootstrap_samples"], record.seed or 0)
        elif bootstrap is not None and reference is not None and same_tokens(found, record):
            value, low, high = paired(scores.nll, reference, bootstrap)
            record.differences.append(Difference(arm=arm.name, value=value, low=low, high=high))


def same_tokens(arm: Record, record: Record) -> bool:
    """Whether an arm scored the tokens of the first one under the same base model."""
    return scored_by(arm) == scored_by(record)


def scored_by(record: Record) -> list[object]:
    windows = [record.setting("eval", key) for key in ("window", "stride", "max_windows", "split")]
    return [*windows, *((part.get("used"), part.get("fingerprint")) for part in (record.model, record.data))]
