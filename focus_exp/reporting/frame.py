"""The frame of measurements: its columns, rows, selections, and aggregates over seeds."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import yaml

from focus_exp.results.intervals import Estimate, combine_seeds, required_size, seed_deviation, student
from focus_exp.results.measurement import MIN_SPARSITY

# what a change is from: full attention, of a perplexity and of a score or a time; of hard routing its counterparts
BASE, FULL = "base", "full attention"
SOFT, COUNTERPART = "soft", "non-causal counterpart"
MIN_SEEDS = 3
SMALL_EFFECT = 0.01  # nats per token, or of a fraction: about 1 %

# facts of the run, of a comparison those of the comparison
RUN_FACTS = (
    *("run", "experiment", "seed", "started", "status", "device", "device_kind", "setup", "is_variant", "is_causal"),
)
# facts of the run that measured, in a comparison the variant's
VARIANT_FACTS = (
    *("requested_model", "model", "data", "seq_len", "window", "num_groups", "attention", "train_tokens"),
    *("steps", "model_params", "commit", "lora_rank", "architecture"),
)
# what was measured, and what tells apart rows of one variant and metric: settings of the measurement
SETTINGS = (
    *("kind", "method", "causal", "top_k", "pair_rule", "phase", "step", "trainable", "layer", "head", "group"),
    *("word_class", "task", "task_metric", "version", "primary", "deciding", "clock", "groups"),
    *("assignment", "path", "dtype", "tokens", "token_counts", "token_totals", "token_texts", "token_groups"),
    *("query", "key", "query_word", "key_word", "router", "prompt", "dof", "error", "left_out"),
)
# source: rows, phases (quality), benchmarks, probes, speed, method_speed, groups, analysis, pairs, ...
# metric: perplexity, nll, nll_change, score, score_change, speedup, peak_memory, dominance, ...
# level, reference_level: both sides of a difference; reversed: of a change that is recorded the other way round
# primary: the row that represents its run, variant or task; sparsity, density: of the causal QK pairs
# setup, variant_setup: equal for runs that differ in the seed only
MEASURED = (
    *("source", "subject", "name", "variant", "metric", "value", "low", "high", "unit", "reference", "n", "n_units"),
    *("stderr", "level", "reference_level", "density", "sparsity", "distant_density", "largest_group", "mask_active"),
    *("case", "own_tokens", "trainable_params"),
    *("variant_setup", "first_variant", "reversed", "reference_causal", "reference_setup"),
    *("size_ratio", "same_prefix"),
)
AGGREGATED = ("seeds", "members", "deviation", "seed_deviation")  # of an aggregate

COLUMNS = [*RUN_FACTS, *VARIANT_FACTS, *MEASURED, *SETTINGS, *AGGREGATED]
# one measurement, or one aggregate of several seeds; missing cells are None, another name raises
_make_type: Any = namedtuple  # of names that are not literals
Row: Any = _make_type("Row", COLUMNS, defaults=[None] * len(COLUMNS))


def to_frame(rows: Iterable[Any]) -> pd.DataFrame:
    """Return a frame of rows, of which a missing cell is None."""
    return pd.DataFrame([*rows], columns=COLUMNS, dtype=object)


def to_rows(frame: pd.DataFrame) -> list[Any]:
    """Return the rows of a frame as named tuples."""
    cells = frame if frame.columns.tolist() == COLUMNS else frame[COLUMNS]
    return [*map(Row._make, cells.to_numpy(object).tolist())]


def filter_rows(frame: pd.DataFrame, cells: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows with these cells: a value, a pattern with *, a list of these, or {most: limit}."""
    for column, wanted in cells.items():
        values = [str(cell) if isinstance(cell, list) else cell for cell in frame[column]]
        verdicts = {cell: matches(cell, wanted) for cell in dict.fromkeys(values)}
        frame = frame[np.array([verdicts[cell] for cell in values], bool)]
    return frame


def matches(cell: Any, wanted: Any) -> bool:
    """Return whether a cell matches what `filter_rows` takes."""
    if isinstance(wanted, list):
        return any(matches(cell, one) for one in wanted)
    if isinstance(wanted, dict):
        return isinstance(cell, int | float) and cell <= wanted["most"]
    return bool(cell == wanted) or (isinstance(cell, str) and isinstance(wanted, str) and fnmatchcase(cell, wanted))


@cache
def read_yaml(name: str) -> Any:
    """Return the content of a YAML file of this package."""
    return yaml.safe_load((files("focus_exp.reporting") / f"{name}.yaml").read_text(encoding="utf-8"))


# columns that measurements of different seeds share
KEY = [
    *("name", "source", "metric", "setup", "variant_setup", "variant", "reference", "reference_setup", "kind"),
    *("num_groups", "top_k", "pair_rule", "task", "version", "n", "task_metric", "clock", "tokens", "groups"),
    *("assignment", "phase"),
]
TIMED = ["method", "device", "dtype", "path"]  # and timings


def aggregate_seeds(frame: pd.DataFrame) -> list[Any]:
    """Combine measurements that differ in the seed only.

    The latest run of a seed counts. The interval covers the variance of the evaluation documents and of the
    seeds (`combine_seeds`).

    Returns:
        Rows with their cells and
        seeds: the seeds with a value; members: the row of each seed;
        deviation: standard deviation of a unit (document, window or item); seed_deviation: of a seed.
    """
    groups: dict[tuple[object, ...], list[Any]] = {}
    for row in to_rows(frame):
        names = [*KEY, *TIMED] if row.clock else KEY
        groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return [_combine(members) for members in groups.values()]


def _combine(rows: list[Any]) -> Any:
    latest = {row.seed: row for row in rows}
    members = [latest[seed] for seed in sorted(latest, key=lambda seed: seed or 0)]
    first, valued = members[0], [row for row in members if row.value is not None]
    estimates = [Estimate(row.value, row.stderr, row.dof) for row in valued]
    total = combine_seeds(estimates) if estimates else Estimate(float("nan"))
    # the interval of a single fraction is not symmetric and is kept as measured
    recompute = len(estimates) > 1 or (total.stderr is not None and first.unit != "fraction")
    low, high = total.bounds if recompute else (first.low, first.high)
    deviations = [row.stderr * row.n_units**0.5 for row in members if row.stderr is not None and row.n_units]
    values: dict[str, Any] = {"value": total.value if estimates else None, "low": low, "high": high}
    values |= {"stderr": total.stderr, "dof": total.freedom, "members": members}
    values |= {"seeds": tuple(row.seed for row in valued)}
    values |= {"deviation": root_mean_square(deviations) if deviations else None}
    values |= {"seed_deviation": seed_deviation(estimates) if len(estimates) > 1 else None}
    for name in ("density", "distant_density"):
        numbers = [getattr(row, name) for row in members if getattr(row, name) is not None]
        values[name] = fmean(numbers) if numbers else None
    values["sparsity"] = None if values["density"] is None else 1 - values["density"]
    masked = [row.sparsity for row in members if row.mask_active is not None and row.sparsity is not None]
    if masked:
        values["mask_active"] = fmean(masked) >= MIN_SPARSITY
    return first._replace(**values)


def root_mean_square(errors: Sequence[float]) -> float:
    return math.sqrt(fmean(error**2 for error in errors))


def required_sample(row: Any, effect: float | None = None, comparisons: int = 1) -> dict[str, float | None]:
    """Return how many units and seeds would show an effect with 80 % power; None where those at hand are enough.

    Args:
        effect: 1 % by default.
        comparisons: number of simultaneous intervals (Bonferroni).
    """
    size = abs(effect) if effect else SMALL_EFFECT
    units = required_size(row.deviation, size, comparisons) if row.deviation else 0
    if row.seed_deviation:
        seeds = required_size(row.seed_deviation, size, comparisons)
    else:
        seeds = MIN_SEEDS if len(row.seeds) < 2 else 0
    return {
        "effect": size,
        "required_units": units if units > (row.n_units or 0) else None,
        "required_seeds": seeds if seeds > len(row.seeds) else None,
    }


def is_worse(row: Any, comparisons: int = 1, limit: float = 0.0) -> bool:
    """Return whether a score drops by more than `limit`, significantly after Bonferroni correction."""
    if row.low is None:
        return False
    dof = row.dof or math.inf
    half = student(dof, comparisons) / student(dof) * (row.high - row.low) / 2
    center = (row.low + row.high) / 2
    return bool(center - half > limit if row.unit == "nats" else center + half < -limit)
