"""Losses of scored sequences and scores of benchmark items, by variant."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from focus_exp.errors import UserError
from focus_exp.results.intervals import Estimate, assign_units, estimate
from focus_exp.storage import replace_file

LOSSES, TEXT = "losses.csv", "text"
KEY = ("of", "document", "offset", "tokens")


@dataclass
class Losses:
    """Losses on the held-out text (`TEXT`), or scores of a benchmark's metric.

    units: document, offset of the first token in it, and scored tokens of each sequence or item. nll: by variant, mean
    nats per token (units,), or the scores of items; NaN where it was not scored.
    """

    units: list[tuple[str, int, int]]
    nll: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def documents(self) -> list[str]:
        return [document for document, _, _ in self.units]

    @property
    def unit_count(self) -> int:
        """Return the number of independent units that intervals are over."""
        return int(assign_units(self.documents).max()) + 1

    def estimate(self, name: str) -> Estimate:
        """Return the mean of a variant."""
        return self._estimate(self.nll[name])

    def difference(self, name: str, other: Losses, against: str) -> Estimate:
        """Return the mean paired difference from `against` in `other`."""
        if self.units != other.units:
            raise ValueError(f"{name} and {against} were not scored on the same sequences")
        return self._estimate(self.nll[name] - other.nll[against])

    def _estimate(self, values: np.ndarray) -> Estimate:
        return estimate(values, [tokens for _, _, tokens in self.units], self.documents)


def write_losses(path: Path, by_task: dict[str, Losses]) -> None:
    """Write a row for each unit and a column for each variant, nine digits."""
    frames = []
    for task, losses in by_task.items():
        units = pd.DataFrame(losses.units, columns=KEY[1:])
        frames.append(units.assign(of=task, **losses.nll))
    table = pd.concat(frames)
    names = [name for name in table if name not in KEY]
    replace_file(path, table[[*KEY, *names]].to_csv(index=False, float_format="%.9g", lineterminator="\n").encode())


def read_losses(path: Path) -> dict[str, Losses]:
    """Read a losses.csv; {} without a file. Raises UserError for a damaged one."""
    if not path.exists():
        return {}
    try:
        types = {"of": str, "document": str, "offset": int, "tokens": int}
        table = pd.read_csv(path, dtype=types, keep_default_na=False, na_values=[""])
        tasks = {}
        for task, rows in table.groupby("of", sort=False):
            units = rows[[*KEY[1:]]].itertuples(index=False, name=None)
            scored = rows.drop(columns=[*KEY]).dropna(axis="columns", how="all")
            tasks[str(task)] = Losses([*units], {name: scored[name].to_numpy(float) for name in scored})
        return tasks
    except (ValueError, KeyError) as error:
        raise UserError(f"{path} must hold losses ({error}). Run the job again.") from error


def benchmark_name(settings: dict[str, Any]) -> str:
    """Return the name that the losses have for a task and its metric."""
    task, metric = settings.get("task"), settings.get("lm_eval_metric") or ""
    return TEXT if task is None else task if task.startswith(metric) else f"{task} {metric}"
