"""The arms of a comparison, each paired with the first one, and with others, on the same tokens."""

from __future__ import annotations

from pathlib import Path

from focus_exp.records.answers import answer
from focus_exp.records.comparison import arm_folder, arm_record
from focus_exp.records.losses import LOSSES, TEXT, Losses, read_losses
from focus_exp.records.record import Record
from focus_exp.records.rows import Difference


def compare_arms(record: Record, folder: Path, against: list[str]) -> None:
    """Fill in the differences of the comparison in `folder` from the folders of its arms: from the first, and from
    those named in `against`.

    Model and data are those of the first arm that has a base. Arms of another model or text are paired with nothing.
    """
    scored: dict[str, tuple[Losses, str]] = {}
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
        if arm is record.arms[0] or same_tokens(found, record):
            scored[arm.name] = losses, row.name
    first = record.arms[0].name
    for other in dict.fromkeys([first, *against]):
        for name, (losses, row_name) in scored.items():
            if name == other or other not in scored or losses.units != scored[other][0].units:
                continue
            difference = losses.difference(row_name, *scored[other])
            low, high = difference.bounds
            named = None if other == first else other
            record.differences.append(Difference(arm=name, value=difference.value, low=low, high=high, against=named))


def same_tokens(arm: Record, record: Record) -> bool:
    """Whether an arm scored the tokens of the first one under the same base model."""
    return scored_by(arm) == scored_by(record)


def scored_by(record: Record) -> list[object]:
    windows = [record.setting("eval", key) for key in ("window", "stride", "max_windows", "split")]
    return [*windows, *((part.get("used"), part.get("fingerprint")) for part in (record.model, record.data))]
