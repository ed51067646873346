"""The tidy measurement: one row of a run's `measurements.csv`.

A run writes one row a measured number. The columns are

    variant    what was measured: `base` (frozen model, full attention), `trained` (full attention, trained weights),
               `lora_r<rank>`, `dora_r<rank>`, `<method>_soft` (soft routing), `<method>_hard` (top-1),
               `<method>_hard_k<k>_<pair rule>`,
               `causal_counterpart_soft` and `causal_counterpart_hard...` (a non-causal router made causal),
               `window_only`, `window_density_matched`, `random_size_matched` (controls), or the name of a method.
               `router`: the routing itself (probes, group sizes).
               `full`: full attention of a benchmark. `text`: the held-out text itself.
    metric     see below
    value      empty where the measurement failed; then `settings.error` says why
    low, high  95 % confidence interval; of a change it is paired with `reference`
    reference  the variant that a change, a speedup or a paired difference refers to
    n          independent units of the interval (documents or windows), or items of a benchmark
    unit       nats (per token), %, fraction (0..1), ms, s, bytes, tokens, groups, nats^2, x (ratio), or empty
    seed       seed of the run
    density    fraction of the causal query-key pairs that the variant keeps; empty where it is not known
    settings   JSON object, keys sorted: what tells apart rows of one variant and metric

Metrics
    quality    perplexity, nll, nll_change [nats, paired with `reference`; the change of perplexity is its expm1],
               distant_density (of the pairs beyond window and sinks), largest_group_fraction (of the tokens; of the
               layer where it is largest), eval_tokens, eval_seconds,
               training_tokens and fit_seconds of an adapter in another method's table
    benchmarks <metric>:<task> with lm-eval's names (acc:hellaswag, acc_norm:piqa, perplexity:lambada_openai) and
               perplexity@<tokens>; their paired changes from `base`: acc_change:hellaswag,
               nll_change:lambada_openai, nll_change@8192; what the mask did on the requests of a task:
               requests:<task>, distant_density:<task>, eval_seconds:<task>
    speed      latency_ms, speedup [x, reference full], peak_memory_bytes;
               settings: clock (kernels, attention, prefill, attention step, decode model), seq_len
    routing    group_fraction [layer, group], dominance (largest group, mean over layers), dead_groups, confidence,
               assignment_overlap (same group as at the probe before); settings: phase, step
    fits       importance, importance_lost_fraction, distant_density_fit,
               groups_per_query [head]; settings: layer
    analysis   group_fraction, group_purity, class_fraction (of a group's tokens), word_class_fraction (of all),
               passage_groups (text and group of each token of a passage),
               purity, ami, router_agreement, passage_distant_density, pair_affinity, class_nll, class_nll_change
    generation continuation_nll, repetition (of runs of four tokens), agreeing_tokens, generated_tokens,
               generation_seconds, keys_read, cache_bytes
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from focus_exp.errors import UserError, first_line

MEASUREMENTS = "measurements.csv"
COLUMNS = ("variant", "metric", "value", "low", "high", "reference", "n", "unit", "seed", "density", "settings")
TYPES = {**dict.fromkeys(("value", "low", "high", "density"), "float"), "n": "Int64", "seed": "Int64"}
MAX_NATS = 700.0  # beyond it exp overflows
MIN_SPARSITY = 0.05  # of an active mask: below it an equal score says nothing
WITHOUT_MASK = ("performer",)  # methods that reweigh every pair and prune none


def exp(nats: float) -> float:
    """Return exp(nats), infinity where it would overflow."""
    return math.exp(nats) if nats <= MAX_NATS else math.inf


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured number; see the module for the columns and their units."""

    variant: str
    metric: str
    value: float | None
    low: float | None = None
    high: float | None = None
    reference: str = ""
    n: int | None = None
    unit: str = ""
    seed: int | None = None
    density: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def soft_variant(method: str) -> str:
    """Return the soft routing of a method, a name or the dotted path of a class: `focus_soft`."""
    return f"{method.rpartition('.')[2]}_soft"


def hard_variant(method: str, top_k: int | None, pair_rule: str | None) -> str:
    """Return a method's hard routing: `focus_hard` or `focus_hard_k2_query_topk`.

    With one group a token both pair rules keep the same pairs.
    """
    name = f"{method.rpartition('.')[2]}_hard"
    return name if (top_k or 1) == 1 else f"{name}_k{top_k}_{pair_rule}"


def format_measurements(measurements: Iterable[Measurement]) -> str:
    """Return the text of a `measurements.csv`, floats with 12 significant digits."""
    return to_frame(measurements).to_csv(index=False, float_format="%.12g", lineterminator="\n")


def to_frame(measurements: Iterable[Measurement]) -> pd.DataFrame:
    """Return a row for each measurement, with the settings as JSON."""
    table = pd.DataFrame([vars(measurement) for measurement in measurements], columns=COLUMNS)
    table["settings"] = [_format_settings(settings) for settings in table.settings]
    return table.astype(TYPES)


def from_frame(table: pd.DataFrame) -> list[Measurement]:
    """Return the measurements of `to_frame`."""
    cells = table[[*COLUMNS]].astype(object).where(table[[*COLUMNS]].notna(), None)
    cells["settings"] = [json.loads(text) if text else {} for text in table.settings]
    return [Measurement(**row) for row in cells.to_dict("records")]


def _format_settings(settings: dict[str, Any]) -> str:
    present = {key: value for key, value in settings.items() if value is not None}
    return json.dumps(present, sort_keys=True, ensure_ascii=False, separators=(",", ":")) if present else ""


def read_measurements(path: str | Path) -> list[Measurement]:
    """Read a `measurements.csv`; [] if there is none.

    Raises:
        UserError: it is damaged.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        if not text.endswith("\n"):
            raise ValueError("its last row is cut off")
        table = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)
        numbers = table[[*TYPES]].replace("", None).astype(TYPES)
        return from_frame(table.assign(**numbers))
    except (ValueError, KeyError) as error:
        raise UserError(f"{path} is damaged ({first_line(error)}). Remove its folder, or restore it.") from error
