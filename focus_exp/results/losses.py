"""The losses that intervals follow from: of every scored window and benchmark item, under every attention, as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from focus_exp.errors import UserError
from focus_exp.records.rows import Row, Units
from focus_exp.results.intervals import FEWEST, Estimate, estimate, units_of
from focus_exp.results.record import Record
from focus_exp.storage import replace_file

LOSSES, TEXT = "losses.csv", "text"
KEY = ("of", "document", "offset", "tokens")
DIGITS = 1e-5  # nats: what nine digits of the losses leave of a bound by few units


@dataclass
class Losses:
    """Of the held-out text (`TEXT`) or of a benchmark's metric: what was scored, and what it came to.

    units: document, offset of the first token in it, scored tokens, one each for a window or an item. nll: by
    attention, mean nats per token `[units]`, of an item its score; NaN where it was not scored.
    """

    units: list[tuple[str, int, int]]
    nll: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def documents(self) -> list[str]:
        return [document for document, _, _ in self.units]

    def summary(self) -> Units:
        """What the intervals are over."""
        units = units_of(self.documents)
        kind: Literal["document", "window"] = "document" if len(set(self.documents)) >= FEWEST else "window"
        freedom = self._estimate(np.arange(len(units))).freedom
        return Units(kind=kind, count=int(units.max()) + 1, windows=len(units), freedom=freedom)

    def estimate(self, name: str) -> Estimate:
        """Of an attention's mean."""
        return self._estimate(self.nll[name])

    def difference(self, name: str, other: Losses, against: str) -> Estimate:
        """Of the mean difference from `against` in `other`, paired. ValueError where it has other windows."""
        if self.units != other.units:
            raise ValueError(f"{name} and {against} were not scored on the same windows")
        return self._estimate(self.nll[name] - other.nll[against])

    def _estimate(self, values: np.ndarray) -> Estimate:
        return estimate(values, [tokens for _, _, tokens in self.units], self.documents)


def write_losses(path: Path, found: dict[str, Losses]) -> None:
    """A line a unit, a column an attention; nine digits of every loss."""
    names = list(dict.fromkeys(name for losses in found.values() for name in losses.nll))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*KEY, *names])
    for of, losses in found.items():
        columns = [losses.nll.get(name) for name in names]
        for number, unit in enumerate(losses.units):
            writer.writerow([of, *unit, *_cells(None if one is None else one[number] for one in columns)])
    replace_file(path, text.getvalue().encode())


def _cells(values: Iterable[float | None]) -> Sequence[str]:
    return ["" if value is None or np.isnan(value) else f"{value:.9g}" for value in values]


def read_losses(path: Path) -> dict[str, Losses]:
    """What `write_losses` wrote; {} where there is none, as beside older records. UserError for a damaged one."""
    if not path.exists():
        return {}
    found: dict[str, list[list[str]]] = {}
    try:
        head, *lines = csv.reader(path.read_text(encoding="utf-8").splitlines())
        for of, *line in lines:
            found.setdefault(of, []).append(line)
        return {of: _losses(head[len(KEY) :], lines) for of, lines in found.items()}
    except (ValueError, IndexError) as error:
        raise UserError(f"{path}: not readable as losses ({error}); run the job again") from error


def remade(record: Record, found: dict[str, Losses]) -> list[str]:
    """The perplexities and differences from full attention in a record, with their intervals, that do not follow from
    these losses."""
    base = record.base.name if record.base else ""
    bases = {one.scored_as: one.attention for one in record.benchmarks if one.kind == "base"}
    said = [(TEXT, row.name, base, (row.delta_nll, row.delta_low, row.delta_high)) for row in record.rows if row.scored]
    said += [
        (one.scored_as, one.attention, bases[one.scored_as], (one.difference, one.difference_low, one.difference_high))
        for one in record.benchmarks
        if one.is_perplexity and one.difference is not None
    ]
    wrong = [f"{name} on {of}" for of, name, other, bounds in said if not _follows(found.get(of), name, other, bounds)]
    return wrong + [f"perplexity of {row.name}" for row in record.rows if row.scored and not _is_mean(row, found)]


def _is_mean(row: Row, found: dict[str, Losses]) -> bool:
    """Whether a row's loss is that of its windows, and its perplexity that of its loss."""
    losses = found.get(TEXT)
    if row.nll is None or row.perplexity is None or losses is None or row.name not in losses.nll:
        return False
    mean = math.isclose(row.nll, losses.estimate(row.name).value, abs_tol=DIGITS)
    return mean and (row.nll >= 700 or math.isclose(row.perplexity, math.exp(row.nll), rel_tol=1e-9))


def _follows(losses: Losses | None, name: str, base: str, said: tuple[float | None, ...]) -> bool:
    if losses is None or not {name, base} <= losses.nll.keys():
        return False
    difference = losses.difference(name, losses, base)
    again = (difference.value, *difference.bounds)
    return all(math.isclose(a or 0.0, b or 0.0, abs_tol=DIGITS) for a, b in zip(said, again, strict=True))


def _losses(names: list[str], lines: list[list[str]]) -> Losses:
    units = [(document, int(offset), int(tokens)) for document, offset, tokens, *_ in lines]
    columns = zip(*(line[3:] for line in lines), strict=True)
    scored = [(name, cells) for name, cells in zip(names, columns, strict=True) if any(cells)]
    return Losses(units, {name: np.array([float(cell or "nan") for cell in cells]) for name, cells in scored})
