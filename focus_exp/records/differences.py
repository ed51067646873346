"""The arms of a comparison, each paired with the first one of its text and model, and with others."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from math import isclose
from pathlib import Path

from focus_exp.records.answers import answer
from focus_exp.records.comparison import arm_folder, arm_record
from focus_exp.records.rows import Difference
from focus_exp.results.losses import DIGITS, LOSSES, TEXT, Losses, read_losses
from focus_exp.results.record import Record


def compare_arms(record: Record, folder: Path, against: list[str]) -> None:
    """Fill in the differences of the comparison in `folder` from the folders of its arms.

    Each from the first one that scored the same tokens under the same base model, and from those of `against` that did.
    Model and data are those of the first arm that has a base.
    """
    scored: dict[str, tuple[Losses, str, Hashable]] = {}
    for arm in record.arms:
        found = arm_record(folder, arm)
        if found is None:
            continue
        if not record.model and found.base:
            record.model, record.data, record.units = found.model, found.data, found.units
        row = answer(found)
        losses = read_losses(arm_folder(folder, arm) / LOSSES).get(TEXT)
        if row is not None and losses is not None and row.name in losses.nll:
            scored[arm.name] = losses, row.name, scored_by(found)
    firsts: dict[Hashable, str] = {}
    for name, (_, _, tokens) in scored.items():
        firsts.setdefault(tokens, name)
    for other in dict.fromkeys([*firsts.values(), *(name for name in against if name in scored)]):
        theirs, their_row, tokens = scored[other]
        for name, (losses, row_name, own) in scored.items():
            if name == other or own != tokens or losses.units != theirs.units:
                continue
            difference = losses.difference(row_name, theirs, their_row)
            low, high = difference.bounds
            named = None if other == record.arms[0].name else other
            record.differences.append(Difference(arm=name, value=difference.value, low=low, high=high, against=named))


def remade_between(record: Record, folder: Path) -> list[str]:
    """The differences between arms in the record of a comparison in `folder` that do not follow from their losses."""
    again = replace(record, differences=[])
    compare_arms(again, folder, record.config.get("references", record.config.get("against", [])))
    made = {(one.arm, one.against): one for one in again.differences}
    return [
        f"{one.arm} against {one.against or record.arms[0].name}"
        for one in record.differences
        if (other := made.get((one.arm, one.against))) is None or not _alike(one, other)
    ]


def _alike(one: Difference, other: Difference) -> bool:
    pairs = ((one.value, other.value), (one.low, other.low), (one.high, other.high))
    return all(a == b or (a is not None and b is not None and isclose(a, b, abs_tol=DIGITS)) for a, b in pairs)


def scored_by(record: Record) -> Hashable:
    """What arms have to have in common for their losses to be of the same tokens under the same base model."""
    windows = (record.setting("eval", key) for key in ("seq_len", "stride", "max_sequences", "split"))
    return (*windows, *((part.get("used"), part.get("fingerprint")) for part in (record.model, record.data)))
