"""The arms of a comparison, each paired with the first one on the same tokens."""

from __future__ import annotations

from pathlib import Path

from focus_exp.records.answers import answer
from focus_exp.records.comparison import arm_folder, arm_record
from focus_exp.records.losses import LOSSES, TEXT, Losses, read_losses
from focus_exp.records.record import Record
from focus_exp.records.rows import Difference


def compare_arms(record: Record, folder: Path) -> None:
    """Fill in the differences of the comparison in `folder` from the folders of its arms.

    Model and data are those of the first arm that has a base. Arms of another model or text are paired with nothing.
    """
    reference: tuple[Losses, str] | None = None
    for arm in record.arms:
        found = arm_record(folder, arm)
        if found is None:
            continue
        if not record.model and found.base:
            record.model, record.data, record.units = found.model, found.data, found.units
        row = answer(found)
        losses = read_losses(arm_folder(folder, arm) / LOSSES).get(TEXT)
        if row is None or losses is None or row.name not in losses.nll:
            continue
        if arm is record.arms[0]:
            reference = losses, row.name
        elif reference is not None and losses.units == reference[0].units and same_tokens(found, record):
            difference = losses.difference(row.name, *reference)
            low, high = difference.bounds
            record.differences.append(Difference(arm=arm.name, value=difference.value, low=low, high=high))


def same_tokens(arm: Record, record: Record) -> bool:
    """Whether an arm scored the tokens of the first one under the same base model."""
    return scored_by(arm) == scored_by(record)


def scored_by(record: Record) -> list[object]:
    windows = [record.setting("eval", key) for key in ("window", "stride", "max_windows", "split")]
    return [*windows, *((part.get("used"), part.get("fingerprint")) for part in (record.model, record.data))]
