"""Evaluate the paper's claims (claims.yaml): a comparator and a verdict for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import pandas as pd

from focus_exp.errors import UserError
from focus_exp.reporting.aggregate import Row, aggregate_seeds, is_worse, required_sample
from focus_exp.reporting.load import Results, matches, read_yaml, select

REPRODUCED, SAME_DIRECTION, NOT_REPRODUCED = "reproduced", "same direction", "not reproduced"
INCONCLUSIVE, DIFFERENT_ROUTER, MASK_INACTIVE = "inconclusive", "different router", "mask inactive"
OUT_OF_SCOPE, NOT_RUN = "out of scope", "not run"
VERDICTS = {
    REPRODUCED: "the interval is on the claim's side and contains the paper's value, but not twice its effect",
    SAME_DIRECTION: "the interval is on the claim's side; the size differs, or the device does",
    NOT_REPRODUCED: "the interval is on the other side",
    INCONCLUSIVE: "the interval contains the limit, or training was too short",
    DIFFERENT_ROUTER: "measured with this project's causal router, not with the paper's",
    MASK_INACTIVE: "under 5 % of the QK pairs were pruned",
    OUT_OF_SCOPE: "model, data or device are not available, or the router is non-causal",
    NOT_RUN: "no run yet",
}
INTEGERS = ["seeds", "n_units", "tokens", "steps", "required_units", "required_seeds"]
SHOWN, REFUTED, OPEN = 1, -1, 0
BALANCED = 0.5  # largest group up to which a single run counts as balanced


@dataclass(frozen=True)
class Judgement:
    """The outcome of a comparator.

    row: the measurement that decides; rows: all that were compared; effect, comparisons: for the required sample size.
    """

    verdict: str
    rows: list[Row] = field(default_factory=list)
    row: Row | None = None
    effect: float | None = None
    comparisons: int = 1


@dataclass(frozen=True)
class Claim:
    """An entry of claims.yaml, which documents the keys."""

    id: str
    table: str
    claim: str
    paper: str
    experiments: list[str]
    select: dict[str, Any]
    comparison: str
    arguments: dict[str, Any]
    query: str = ""
    pick: Literal["", "steps", "tokens"] = ""
    matched: dict[str, Any] = field(default_factory=dict)
    router: Literal["", "own"] = ""
    needs: str = ""

    def judge(self, rows: list[Row]) -> Judgement:
        """Compare rows aggregated over seeds with the claim."""
        matched = [row for row in rows if all(matches(getattr(row, key), want) for key, want in self.matched.items())]
        picked = matched or rows
        if self.pick:
            most = max(getattr(row, self.pick) or 0 for row in picked)
            picked = [row for row in picked if (getattr(row, self.pick) or 0) == most]
        judgement = COMPARISONS[self.comparison](picked, **self.arguments)
        return replace(judgement, verdict=DIFFERENT_ROUTER) if self.router or not matched else judgement


@cache
def load_claims() -> list[Claim]:
    """Return the claims in the paper's order; raises UserError for an invalid one."""
    keys = Claim.__dataclass_fields__.keys() - {"arguments"}
    claims = []
    for entry in read_yaml("claims"):
        arguments = {key: value for key, value in entry.items() if key not in keys}
        for name, ratio in (("limit", "limit_ratio"), ("size", "paper_ratio")):
            if ratio in arguments:
                above, below = arguments.pop(ratio)
                arguments[name] = math.log(above / below)
        try:
            claims.append(Claim(**{key: entry[key] for key in keys & entry.keys()}, arguments=arguments))
        except TypeError as error:
            raise UserError(f"claims.yaml: {entry.get('id')}: {error}.") from error
    return claims


def evaluate_claims(results: Results) -> pd.DataFrame:
    """Return the claims table: one row for each claim, with unrounded numbers.

    Columns:
        value, low, high: what decides, as a difference in nats per token, a ratio or a fraction (`unit`);
        effect, required_units, required_seeds: where the verdict is inconclusive;
        minutes: wall time of the runs behind it; runs: their folders.
    `attrs["rows"]`: the measurement that decides each claim, by its id.
    """
    rows = [row for row in results.complete if row.dtype != "bfloat16" or "no native bfloat16" not in row.device]
    judged = [_evaluate(claim, rows, results) for claim in load_claims()]
    frame = pd.DataFrame([cells for cells, _ in judged]).astype(dict.fromkeys(INTEGERS, "Int64"))
    frame.attrs["rows"] = {cells["id"]: row for cells, row in judged if row is not None}
    return frame


def _evaluate(claim: Claim, rows: list[Row], results: Results) -> tuple[dict[str, Any], Row | None]:
    candidates = [row for row in rows if row.experiment in claim.experiments]
    selected = select((row for row in candidates if row.error is None), claim.select, claim.query)
    rows = aggregate_seeds(selected)
    judgement = claim.judge(rows) if rows else Judgement(OUT_OF_SCOPE if claim.needs else NOT_RUN)
    if results.is_quick and judgement.rows:
        judgement = replace(judgement, verdict=INCONCLUSIVE)
    row = judgement.row
    shown = rows if claim.pick or claim.matched else judgement.rows
    runs = list(dict.fromkeys(member.run for aggregated in shown for member in aggregated.members))
    needed: dict[str, float | None] = {}
    if judgement.verdict == INCONCLUSIVE and row is not None and row.reference is not None:
        needed = required_sample(row, judgement.effect, judgement.comparisons)

    def cell(name: str) -> Any:
        return getattr(row, name) if row is not None else None

    return {
        **{name: getattr(claim, name) for name in ("id", "table", "claim", "paper")},
        **{name: cell(name) for name in ("value", "low", "high", "unit")},
        "verdict": judgement.verdict,
        "sparsity": 1 - cell("density") if cell("density") is not None else cell("sparsity"),
        "seeds": len(row.seeds) if row is not None else len({results.runs.seed[run] for run in runs}) or None,
        **{name: cell(name) for name in ("experiment", "variant", "reference", "causal", "n_units", "tokens", "steps")},
        **{name: needed.get(name) for name in ("effect", "required_units", "required_seeds")},
        "minutes": results.minutes(runs),
        "runs": " ".join(runs),
    }, row


# --- comparators: rows aggregated over seeds -> Judgement ---


def below(rows: list[Row], limit: float, size: float | None = None) -> Judgement:
    """Compare differences of losses with a limit: every interval must lie below it.

    A non-causal side has an advantage: it can lose, but cannot support the claim. Rows with an inactive mask are left
    out. `size`: the paper's difference; it is reproduced if the interval contains it and not twice its effect.
    """
    sides = [_side(row, limit) for row in rows]
    if refuted := [row for row, side in zip(rows, sides, strict=True) if side == REFUTED]:
        most = max(refuted, key=lambda row: (len(row.seeds), row.n_units or 0))
        return Judgement(NOT_REPRODUCED, rows, most)
    worst = max(rows, key=lambda row: (row.value is None, row.high is None, row.high or row.value or 0.0))
    unproven = [row for row, side in zip(rows, sides, strict=True) if side != SHOWN]
    if any(False in (row.causal, row.reference_causal) for row in unproven):
        return Judgement(OUT_OF_SCOPE, rows, worst)
    if active := [row for row in rows if row.mask_active is not False]:
        if len(active) < len(rows):
            return below(active, limit, size)
    else:
        return Judgement(MASK_INACTIVE, rows, worst)
    if OPEN in sides:
        return Judgement(INCONCLUSIVE, rows, worst, effect=limit if size is None else size - limit)
    if size is None:
        return Judgement(REPRODUCED, rows, worst)
    twice = limit + 2 * (size - limit)
    agrees = worst.low <= size <= worst.high and not worst.low <= twice <= worst.high
    return Judgement(REPRODUCED if agrees else SAME_DIRECTION, rows, worst)


def _side(row: Row, limit: float) -> int:
    if row.high is not None and row.high < limit:
        return OPEN if row.causal is False else SHOWN
    if row.low is not None and row.low > limit:
        return OPEN if row.reference_causal is False else REFUTED
    return OPEN


def at_least(
    rows: list[Row],
    limit: float | Mapping[int, float],
    tolerance: float = 1.0,
    margin: float = 0.0,
    gpu: bool = False,
    most: float = math.inf,
) -> Judgement:
    """Compare values with a lower limit, by length [tokens] if `limit` is a mapping.

    Limits are scaled by `tolerance` and lowered by `margin`. gpu: the paper's device is an H100; timings of an H100, or
    else of any GPU, are preferred. Slower than the limit but faster than full attention, timed on a CPU, or above
    `most`: same direction. Lengths at which the paper is slower than full attention, but not at others, are left out.
    """
    if gpu:
        papers = [row for row in rows if "H100" in row.device_kind]
        rows = papers or [row for row in rows if row.device_kind != "cpu"] or rows
    limits = limit if isinstance(limit, Mapping) else {row.tokens: limit for row in rows}
    compared = sorted((row for row in rows if row.tokens in limits), key=lambda row: row.tokens or 0)
    slow = {tokens for tokens, wanted in limits.items() if wanted < 1 < max(limits.values())}
    sides: dict[int | None, set[int]] = {}
    for row in compared:
        if row.tokens in slow:
            continue
        wanted = tolerance * limits[row.tokens] - margin
        side = SHOWN if _low(row) >= wanted else REFUTED if _high(row) < wanted else OPEN
        sides.setdefault(row.tokens, set()).add(side)
    if lost := [row for row in compared if sides.get(row.tokens) == {REFUTED}]:
        faster = all(row.metric == "speedup" and row.value > 1 for row in lost)
        return Judgement(SAME_DIRECTION if faster else NOT_REPRODUCED, compared, lost[-1])
    if limits.keys() - {row.tokens for row in compared} or any(side != {SHOWN} for side in sides.values()):
        return Judgement(INCONCLUSIVE, compared or rows, (compared or rows)[-1])
    other_size = any(_low(row) > most or (gpu and row.device_kind == "cpu") for row in compared)
    return Judgement(SAME_DIRECTION if other_size else REPRODUCED, compared, compared[-1])


def within(rows: list[Row], limit: list[float], margin: float) -> Judgement:
    """Compare values with a range, plus or minus the margin: all intervals inside."""
    low, high = limit[0] - margin, limit[1] + margin
    worst = max(rows, key=lambda row: max(low - _low(row), _high(row) - high))
    if all(_low(row) >= low and _high(row) <= high for row in rows):
        return Judgement(REPRODUCED, rows, worst)
    outside = any(_high(row) < low or _low(row) > high for row in rows)
    return Judgement(NOT_REPRODUCED if outside else INCONCLUSIVE, rows, worst)


def router_collapses(rows: list[Row], limit: float, dead: float, steps: int) -> Judgement:
    """Test whether a group holds `limit` of the tokens, or `dead` groups are empty.

    Of several seeds by the whole interval; of a single run by its value, and balanced means at most half of both.
    """

    def side(largest: Row, empty: Row) -> int:
        if _low(largest) >= limit or _low(empty) / empty.num_groups >= dead:
            return SHOWN
        if largest.high is None or empty.high is None:
            return REFUTED if max(largest.value, empty.value / empty.num_groups) <= BALANCED else OPEN
        return REFUTED if largest.high < limit and empty.high / empty.num_groups < dead else OPEN

    return _judge_router(rows, side, steps, event=SHOWN)


def router_stays_balanced(rows: list[Row], limit: float, steps: int, paper_value: float, margin: float) -> Judgement:
    """Test whether the largest group stays below `limit` and under one is empty.

    Less balanced than the paper's router by more than the margin: same direction.
    """

    def side(largest: Row, empty: Row) -> int:
        if _low(largest) > limit:
            return REFUTED
        return SHOWN if _high(largest) < limit and _high(empty) < 1 else OPEN

    judgement = _judge_router(rows, side, steps, event=REFUTED)
    row = judgement.row
    differs = judgement.verdict == REPRODUCED and row is not None and _low(row) > paper_value + margin
    return replace(judgement, verdict=SAME_DIRECTION) if differs else judgement


def _judge_router(rows: list[Row], side: Callable[[Row, Row], int], steps: int, event: int) -> Judgement:
    """Judge by the maximum over a phase; all setups must agree."""
    phases: dict[tuple[str, ...], dict[str, dict[str, Row]]] = {}
    for row in rows:
        setup = (row.setup, row.variant, row.variant_setup)
        phases.setdefault(setup, {}).setdefault(row.phase, {})[row.metric] = row
    outcomes = [
        {side(phase["dominance_most"], phase["dead_groups_most"]) for phase in setup_phases.values()}
        for setup_phases in phases.values()
    ]
    sides = {next(s for s in (event, OPEN, -event) if s in outcome) for outcome in outcomes}
    widest = max((row for row in rows if row.metric == "dominance_most"), key=lambda row: row.value)
    too_short = sides != {event} and min(row.step or 0 for row in rows) < steps
    if too_short or sides not in ({SHOWN}, {REFUTED}):
        return Judgement(INCONCLUSIVE, rows, widest)
    return Judgement(REPRODUCED if sides == {SHOWN} else NOT_REPRODUCED, rows, widest)


def no_degradation(rows: list[Row]) -> Judgement:
    """Test whether no score drops where the mask is active."""
    active = [row for row in rows if row.mask_active]
    if not active:
        return Judgement(MASK_INACTIVE, rows, rows[0])
    if lost := [row for row in active if is_worse(row, len(active))]:
        return Judgement(NOT_REPRODUCED, active, lost[0])
    return Judgement(INCONCLUSIVE, active, active[0], comparisons=len(active))


def degrades(rows: list[Row], effect: float) -> Judgement:
    """Test whether a score drops (Bonferroni). effect: the paper's largest drop."""
    if lost := [row for row in rows if is_worse(row, len(rows))]:
        return Judgement(REPRODUCED, lost, lost[0])
    hardest = max(rows, key=lambda row: row.deviation or 0.0)
    return Judgement(INCONCLUSIVE, rows, hardest, effect=effect, comparisons=len(rows))


def _low(row: Row) -> float:
    return float(row.value if row.low is None else row.low)


def _high(row: Row) -> float:
    return float(row.value if row.high is None else row.high)


COMPARISONS: dict[str, Callable[..., Judgement]] = {
    function.__name__: function
    for function in (below, at_least, within, router_collapses, router_stays_balanced, no_degradation, degrades)
}
