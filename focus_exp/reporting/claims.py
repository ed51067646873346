"""Evaluate the paper's claims (claims.yaml): a comparator and a verdict for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import pandas as pd

from focus_exp.reporting.frame import Row, aggregate_seeds, filter_rows, is_worse, read_yaml, required_sample
from focus_exp.reporting.load import Results

REPRODUCED, SAME_DIRECTION, NOT_REPRODUCED = "reproduced", "same direction", "not reproduced"
INCONCLUSIVE, DIFFERENT_ROUTER, MASK_INACTIVE = "inconclusive", "different router", "mask inactive"
NON_CAUSAL, OUT_OF_SCOPE, NOT_RUN = "non-causal", "out of scope", "not run"
VERDICTS: dict[str, str] = read_yaml("tables")["verdicts"]  # in the order of the legend
INTEGERS = ["seeds", "models", "n_units", "tokens", "steps", "required_units", "required_seeds"]
SHOWN, REFUTED, OPEN = 1, -1, 0
TOLERANCE = 0.05  # of a lower limit, relative
REDUCED = 1 / 4  # of the paper's training steps; fewer are a reduced budget


@dataclass(frozen=True)
class Judgement:
    """The outcome of a comparator.

    row: the measurement that decides; rows: all that were compared; effect, comparisons: for the required sample size.
    """

    verdict: str
    rows: list[Any] = field(default_factory=list)
    row: Any = field(default_factory=Row)
    effect: float | None = None
    comparisons: int = 1


@dataclass(frozen=True)
class Claim:
    """An entry of claims.yaml, which documents the keys."""

    id: str
    claim: str
    paper: str
    experiments: list[str]
    select: dict[str, Any]
    compare: Callable[[list[Any]], Judgement]
    pick: Literal["", "steps", "tokens"] = ""
    own: dict[str, Any] = field(default_factory=dict)
    steps: int = 4000
    needs: str = ""

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Claim:
        """Read an entry, whose comparison is named by its function."""
        (name,) = COMPARISONS.keys() & entry.keys()
        fields = {key: value for key, value in entry.items() if key != name}
        return cls(**fields, compare=partial(COMPARISONS[name], **entry[name]))

    @property
    def table(self) -> str:
        """Return the table of the paper."""
        name = self.id.partition(".")[0]
        return {"DG": "d_g", "S5": "section 5", "LC": "long context"}.get(name, name)

    def judge(self, rows: list[Any]) -> Judgement:
        """Compare rows aggregated over seeds with the claim."""
        if not rows:
            return Judgement(OUT_OF_SCOPE if self.needs else NOT_RUN)
        if self.pick:
            most = max(getattr(row, self.pick) or 0 for row in rows)
            rows = [row for row in rows if (getattr(row, self.pick) or 0) == most]
        return self.compare(rows)

    def is_reduced(self, judgement: Judgement) -> bool:
        """Return whether what was compared was trained for under a quarter of the paper's steps."""
        trained = [row for row in judgement.rows if row.metric != "speedup"]
        return any((row.steps or 0) < REDUCED * self.steps for row in trained)


def evaluate_claims(results: Results) -> pd.DataFrame:
    """Return the claims table: one row for each claim, with unrounded numbers.

    Columns:
        value, low, high: what decides, as a difference in nats per token, a ratio or a fraction (`unit`);
        reduced_budget: trained for under a quarter of the paper's steps;
        own_value, own_low, own_high, own_verdict, own_reduced_budget: of this project's router, where the claim is
            about the paper's;
        models: how many the verdict rests on;
        effect, required_units, required_seeds: where the verdict is inconclusive;
        minutes: wall time of the runs behind it; runs: their folders.
    `attrs["rows"]`: the measurement that decides each claim, by its id.
    """
    rows = results.complete
    emulated = (rows["dtype"] == "bfloat16") & rows.device.str.contains("no native bfloat16", na=False).astype(bool)
    rows = rows[~emulated]
    judged = [_evaluate(Claim.read(entry), rows, results) for entry in read_yaml("claims")]
    frame = pd.DataFrame([cells for cells, _ in judged]).astype(dict.fromkeys(INTEGERS, "Int64"))
    frame.attrs["rows"] = {cells["id"]: row for cells, row in judged}
    return frame


def _evaluate(claim: Claim, frame: pd.DataFrame, results: Results) -> tuple[dict[str, Any], Any]:
    candidates = filter_rows(frame, {"experiment": claim.experiments, "error": None})
    paper, own = (
        aggregate_seeds(filter_rows(candidates, cells)) if cells else []
        for cells in (claim.select, claim.own and claim.select | claim.own)
    )
    judgement, other = claim.judge(paper), claim.judge(own)
    if results.is_quick:
        judgement, other = (replace(j, verdict=INCONCLUSIVE) if j.rows else j for j in (judgement, other))
    if own and not paper:
        judgement = replace(other, verdict=DIFFERENT_ROUTER)
    rows = paper or own
    row = judgement.row
    shown = rows if claim.pick else judgement.rows
    runs = list(dict.fromkeys(member.run for aggregated in shown for member in aggregated.members))
    seconds = results.runs.total_seconds.reindex(runs) if runs else None
    required: dict[str, float | None] = {}
    if judgement.verdict == INCONCLUSIVE and row.reference is not None:
        required = required_sample(row, judgement.effect, judgement.comparisons)
    return {
        **{name: getattr(claim, name) for name in ("id", "table", "claim", "paper")},
        **{name: getattr(row, name) for name in ("value", "low", "high", "unit")},
        "verdict": judgement.verdict,
        "reduced_budget": claim.is_reduced(judgement),
        **{f"own_{name}": getattr(other.row, name) for name in ("value", "low", "high")},
        "own_verdict": other.verdict if own else None,
        "own_reduced_budget": claim.is_reduced(other) if own else None,
        "sparsity": row.sparsity,
        "seeds": len(row.seeds or ()) or None,
        "models": len({compared.model for compared in judgement.rows}) or None,
        **{
            name: getattr(row, name)
            for name in ("experiment", "variant", "reference", "causal", "n_units", "tokens", "steps")
        },
        **{name: required.get(name) for name in ("effect", "required_units", "required_seeds")},
        "minutes": None if seconds is None or seconds.isna().any() else round(float(seconds.sum()) / 60, 1),
        "runs": " ".join(runs),
    }, row


def below(
    rows: list[Any],
    limit: float = 0.0,
    limit_ratio: list[float] | None = None,
    paper_ratio: list[float] | None = None,
) -> Judgement:
    """Compare differences of losses with a limit: every interval must lie below it.

    A side that alone is non-causal has an advantage: it can lose, but cannot support the claim. Rows with an inactive
    mask are left out. The paper's difference is reproduced if the interval contains it and not twice its effect.

    Args:
        limit: in nats per token; or as the ratio of two perplexities, `limit_ratio`.
        paper_ratio: the paper's two perplexities.
    """
    limit = _log_ratio(limit_ratio) if limit_ratio else limit
    sides = [_side(row, limit) for row in rows]
    if refuted := [row for row, side in zip(rows, sides, strict=True) if side == REFUTED]:
        most = max(refuted, key=lambda row: (len(row.seeds), row.n_units or 0))
        return Judgement(NOT_REPRODUCED, rows, most)
    unproven = [row for row, side in zip(rows, sides, strict=True) if side != SHOWN]
    active = [row for row in rows if row.mask_active is not False]
    if not active:
        return Judgement(MASK_INACTIVE, rows, _highest(rows))
    if any((row.causal is False) != (row.reference_causal is False) for row in unproven):
        return Judgement(NON_CAUSAL, rows, _highest(rows))
    worst, size = _highest(active), _log_ratio(paper_ratio) if paper_ratio else None
    if any(row in active for row in unproven):
        return Judgement(INCONCLUSIVE, active, worst, effect=limit if size is None else size - limit)
    if size is None:
        return Judgement(REPRODUCED, active, worst)
    twice = limit + 2 * (size - limit)
    agrees = worst.low <= size <= worst.high and not worst.low <= twice <= worst.high
    return Judgement(REPRODUCED if agrees else SAME_DIRECTION, active, worst)


def _log_ratio(pair: list[float]) -> float:
    return math.log(pair[0] / pair[1])


def _highest(rows: list[Any]) -> Any:
    return max(rows, key=lambda row: (row.value is None, row.high is None, row.high or row.value or 0.0))


def _side(row: Any, limit: float) -> int:
    is_causal, is_reference_causal = row.causal is not False, row.reference_causal is not False
    if row.high is not None and row.high < limit:
        return SHOWN if is_causal or not is_reference_causal else OPEN
    if row.low is not None and row.low > limit:
        return REFUTED if is_reference_causal or not is_causal else OPEN
    return OPEN


def at_least(
    rows: list[Any], limit: float | Mapping[int, float], gpu: bool = False, most: float = math.inf
) -> Judgement:
    """Compare values with a lower limit, by length [tokens] if `limit` is a mapping.

    gpu: the paper's device is a GPU, whose timings are preferred. Slower than the limit but faster than full attention,
    timed on a CPU, or above `most`: same direction.
    """
    if gpu:
        rows = [row for row in rows if row.device_kind != "cpu"] or rows
    limits = limit if isinstance(limit, Mapping) else {row.tokens: limit for row in rows}
    compared = sorted((row for row in rows if row.tokens in limits), key=lambda row: row.tokens or 0)
    sides: dict[int | None, set[int]] = {}
    for row in compared:
        wanted = limits[row.tokens] * (1 - TOLERANCE)
        side = SHOWN if _low(row) >= wanted else REFUTED if _high(row) < wanted else OPEN
        sides.setdefault(row.tokens, set()).add(side)
    if lost := [row for row in compared if sides[row.tokens] == {REFUTED}]:
        faster = all(row.metric == "speedup" and row.value > 1 for row in lost)
        return Judgement(SAME_DIRECTION if faster else NOT_REPRODUCED, compared, lost[-1])
    if limits.keys() - sides.keys() or any(side != {SHOWN} for side in sides.values()):
        return Judgement(INCONCLUSIVE, compared or rows, (compared or rows)[-1])
    other_size = any(_low(row) > most or (gpu and row.device_kind == "cpu") for row in compared)
    return Judgement(SAME_DIRECTION if other_size else REPRODUCED, compared, compared[-1])


def collapses(rows: list[Any], limit: float, dead: float, steps: int, claimed: bool = True) -> Judgement:
    """Test whether a group holds `limit` of the tokens, or `dead` of the groups are empty: the maxima over a phase.

    All setups must agree, and training must last `steps` unless the router collapses before. claimed: whether the
    paper says that it collapses.
    """
    setups: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        setups.setdefault((row.setup, row.variant, row.variant_setup, row.phase), {})[row.metric] = row
    sides = set()
    for metrics in setups.values():
        largest, empty = metrics["dominance_most"], metrics["dead_groups_most"]
        if _low(largest) >= limit or _low(empty) / empty.num_groups >= dead:
            sides.add(SHOWN)
        else:
            sides.add(REFUTED if _high(largest) < limit and _high(empty) / empty.num_groups < dead else OPEN)
    widest = max((row for row in rows if row.metric == "dominance_most"), key=lambda row: row.value)
    too_short = SHOWN not in sides and min(row.step or 0 for row in rows) < steps
    if too_short or sides not in ({SHOWN}, {REFUTED}):
        return Judgement(INCONCLUSIVE, rows, widest)
    return Judgement(REPRODUCED if (sides == {SHOWN}) is claimed else NOT_REPRODUCED, rows, widest)


def drops(rows: list[Any], claimed: bool, effect: float | None = None) -> Judgement:
    """Test whether a score drops (Bonferroni).

    claimed: whether the paper says so; if not, where the mask is active. effect: the paper's largest drop.
    """
    compared = rows if claimed else [row for row in rows if row.mask_active]
    if not compared:
        return Judgement(MASK_INACTIVE, rows, rows[0])
    if lost := [row for row in compared if is_worse(row, len(compared))]:
        return Judgement(REPRODUCED if claimed else NOT_REPRODUCED, compared, lost[0])
    hardest = max(compared, key=lambda row: row.deviation or 0.0)
    return Judgement(INCONCLUSIVE, compared, hardest, effect=effect, comparisons=len(compared))


def keeps(rows: list[Any], limit: float, by: str, count: int) -> Judgement:
    """Test whether scores drop by at most `limit` for every value of a column, of which the paper has `count`.

    Rows with an inactive mask are left out. A drop beyond the limit refutes (Bonferroni).

    Args:
        limit: as a fraction, 0.01 for a point.
        by: a column of the rows: model, architecture.
    """
    active = [row for row in rows if row.mask_active]
    if not active:
        return Judgement(MASK_INACTIVE, rows, rows[0])
    lowest = min(active, key=_low)
    if lost := [row for row in active if is_worse(row, len(active), limit)]:
        return Judgement(NOT_REPRODUCED, active, min(lost, key=_high))
    is_whole = len({getattr(row, by) for row in active}) >= count
    return Judgement(REPRODUCED if is_whole and _low(lowest) > -limit else INCONCLUSIVE, active, lowest, effect=limit)


def _low(row: Any) -> float:
    return float(row.value if row.low is None else row.low)


def _high(row: Any) -> float:
    return float(row.value if row.high is None else row.high)


COMPARISONS: dict[str, Callable[..., Judgement]] = {
    compare.__name__: compare for compare in (below, at_least, collapses, drops, keeps)
}
