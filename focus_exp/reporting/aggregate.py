"""Aggregate measurements over seeds: intervals and required sample sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, geometric_mean
from types import SimpleNamespace
from typing import Any

from focus_exp.results.intervals import Estimate, needed, over_seeds, seed_deviation, student
from focus_exp.results.measurement import MIN_SPARSITY

MIN_SEEDS = 3
SMALL_EFFECT = 0.01  # nats per token, or of a fraction: about 1 %


class Row(SimpleNamespace):
    """One measurement, or one aggregate of several seeds; missing cells are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def replace(self, **cells: Any) -> Row:
        """Return a copy with other cells."""
        return Row(**vars(self) | cells)


# columns that measurements of different seeds share
KEY = [
    *("source", "metric", "setup", "variant_setup", "variant", "reference", "reference_setup", "kind", "num_groups"),
    *("top_k", "pair_rule", "task", "version", "n", "task_metric", "clock", "tokens", "groups", "assignment", "phase"),
]


def aggregate_seeds(rows: Iterable[Row]) -> list[Row]:
    """Combine measurements that differ in the seed only.

    The latest run of a seed counts. The interval covers the variance of the evaluation documents and of the
    seeds (`over_seeds`).

    Returns:
        Rows with their cells and
        seeds: the seeds with a value; members: the row of each seed;
        deviation: standard deviation of a unit (document, window or item); seed_deviation: of a seed.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        clock = (row.method, row.device, row.dtype, row.path) if row.clock else ()
        key = (row.name, *clock, *(getattr(row, column) for column in KEY))
        groups.setdefault(key, []).append(row)
    return [_combine(members) for members in groups.values()]


def _combine(rows: list[Row]) -> Row:
    latest = {row.seed: row for row in rows}
    members = [latest[seed] for seed in sorted(latest, key=lambda seed: seed or 0)]
    first, valued = members[0], [row for row in members if row.value is not None]
    estimates = [Estimate(row.value, row.stderr, row.dof) for row in valued]
    total = over_seeds(estimates) if estimates else Estimate(float("nan"))
    # the interval of a single fraction is not symmetric and is kept as measured
    recompute = len(estimates) > 1 or (total.stderr is not None and first.unit != "fraction")
    low, high = total.bounds if recompute else (first.low, first.high)
    deviations = [row.stderr * row.n_units**0.5 for row in members if row.stderr is not None and row.n_units]
    values: dict[str, Any] = {
        "value": total.value if estimates else None, "low": low, "high": high, "stderr": total.stderr,
        "dof": total.freedom, "seeds": tuple(row.seed for row in valued), "members": members,
        "deviation": root_mean_square(deviations) if deviations else None,
        "seed_deviation": seed_deviation(estimates) if len(estimates) > 1 else None,
    }  # fmt: skip
    for name in ("density", "sparsity", "distant_density"):
        known = [getattr(row, name) for row in members if getattr(row, name) is not None]
        values[name] = fmean(known) if known else None
    masked = [row.sparsity for row in members if row.mask_active is not None and row.sparsity is not None]
    if masked:
        values["mask_active"] = fmean(masked) >= MIN_SPARSITY
    return Row(**vars(first) | values)


def root_mean_square(errors: Sequence[float]) -> float:
    return math.sqrt(fmean(error**2 for error in errors))


def required_sample(row: Row, effect: float | None = None, comparisons: int = 1) -> dict[str, float | None]:
    """Return how many units and seeds would show an effect with 80 % power; None where those at hand are enough.

    Args:
        effect: 1 % by default.
        comparisons: number of simultaneous intervals (Bonferroni).
    """
    size = abs(effect) if effect else SMALL_EFFECT
    units = needed(row.deviation, size, comparisons) if row.deviation else 0
    if row.seed_deviation:
        seeds = needed(row.seed_deviation, size, comparisons)
    else:
        seeds = MIN_SEEDS if len(row.seeds) < 2 else 0
    return {
        "effect": size,
        "required_units": units if units > (row.n_units or 0) else None,
        "required_seeds": seeds if seeds > len(row.seeds) else None,
    }


def is_worse(row: Row, comparisons: int = 1, limit: float = 0.0) -> bool:
    """Return whether a score drops by more than `limit`, significantly after Bonferroni correction."""
    if row.low is None:
        return False
    dof = row.dof or math.inf
    half = student(dof, comparisons) / student(dof) * (row.high - row.low) / 2
    center = (row.low + row.high) / 2
    return bool(center - half > limit if row.unit == "nats" else center + half < -limit)


def mean_of(values: Iterable[float], percent: bool = False, perplexity: bool = False) -> float:
    """Return the mean over seeds: of perplexities and changes [%] in log space."""
    values = list(values)
    if percent:
        return 100 * (geometric_mean(1 + value / 100 for value in values) - 1)
    return geometric_mean(values) if perplexity else fmean(values)
