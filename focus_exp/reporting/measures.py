"""All records as one tidy table, a line for every run, subject and measure: what is shown across runs follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from focus_exp.records.answers import answer, configured_row, phases, row_of
from focus_exp.records.benchmarks import telling
from focus_exp.records.groups import GroupReport
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm, Row
from focus_exp.reporting.gather import Runs, run_of, setup
from focus_exp.reporting.speed import speed_of_k

BASE, SOFT_GATE, FULL = "base", "soft gate", "full attention"
ITSELF = "itself, reading the future"
PUNCTUATION = "punctuation"
LONG_TEXT = "perplexity@"  # a task at so many tokens

RUN = (
    "run", "experiment", "seed", "started", "commit", "command", "config_hash", "status", "device", "number_format",
    "scale", "is_arm", "first", "first_parameters", "setup",
)  # fmt: skip
# of the arm's own run, where a line of a comparison is about one
OWN = (
    "arm", "asked", "model", "data", "T", "window", "K", "attention", "gate", "regime", "tokens_seen", "parameters",
    "model_parameters", "own_commit", "arm_setup",
)  # fmt: skip
SUBJECT = (
    "name", "kind", "method", "top_k", "pair_rule", "task", "metric", "n", "clock", "tokens", "groups", "assignment",
    "pairs_kept", "dtype", "path", "distant_pairs_kept", "pairs_removed", "engaged", "outcome", "causal", "error",
)  # fmt: skip
MARKS = ("phase", "trains", "reads_future", "answer", "telling")
NUMBER = ("measure", "value", "low", "high", "stderr", "unit", "against", "level", "level_against", "before")
COLUMNS = (*RUN, "of", *OWN, *SUBJECT, *MARKS, *NUMBER)


class Number(NamedTuple):
    measure: str
    value: float | None
    low: float | None = None
    high: float | None = None
    stderr: float | None = None
    unit: str = ""
    against: str | None = None
    level: float | None = None
    level_against: float | None = None
    before: float | None = None


Subjects = Iterator[tuple[dict[str, Any], list[Number]]]


@lru_cache(maxsize=2)
def measurements(runs: Runs) -> pd.DataFrame:
    """A line for every run, subject and measure, runs in their order, the arms' own (`is_arm`) after the others.

    `of`: the list of the record. `delta`: a difference of losses [nats a token], ours minus theirs, which between two
    arms stands in both directions, with both perplexities in `level` and `level_against`; `score_delta`: one of scores.
    What failed, or could not be compared, is a line without a value. `setup`, `arm_setup`: what lines of several seeds
    share. `answer`: of the row that stands for its run or arm, of the one timing that is quoted of a k; `telling`: of
    the metric that decides a benchmark; `reads_future`: who of the two does; `before`: the value a phase before.
    """
    found = [line for name, record in runs.named.items() for line in _lines(name, record, runs)]
    table = pd.DataFrame(found, columns=list(COLUMNS)).convert_dtypes()
    floats = ("value", "low", "high", "stderr", "level", "level_against", "before", "parameters", "first_parameters")
    return table.astype(dict.fromkeys(floats, "Float64"))


def _lines(name: str, record: Record, runs: Runs) -> Iterator[dict[str, Any]]:
    first = record.arms[0] if record.arms else None
    shared = {key: getattr(record, key) for key in RUN if hasattr(record, key)} | {
        "run": name,
        "scale": record.setting("scale", "name"),
        "is_arm": bool(record.config.get("arm")),
        "first": first.name if first else None,
        "first_parameters": first.trainable_parameters if first else None,
        "setup": _digest((setup(record), run_of(first) if first else record.experiment)),
    }
    own = {None: _own(record, record.config.get("arm"))}
    own |= {arm.name: _own_of(record, arm, runs.own(arm)) for arm in record.arms}
    parts = {
        "rows": _quality(record, record.rows), "phases": _quality(record, record.phases),
        "benchmarks": _benchmarks(record), "speed": _speed(record), "method_speed": _method_speed(record),
        "probes": _probes(record), "groups": _groups(record.groups), "arms": _arms(record),
    }  # fmt: skip
    for part, subjects in parts.items():
        for subject, numbers in subjects:
            common = {**shared, "of": part, **own.get(subject.get("arm"), own[None]), **subject}
            there = [number for number in numbers if number.value is not None or number.measure == "score_delta"]
            yield from ({**common, **number._asdict()} for number in there or numbers[:1])


def _own(record: Record, arm: str | None) -> dict[str, Any]:
    return {
        "arm": arm,
        "asked": record.setting("model", "name"),
        "model": record.model.get("name") or record.setting("model", "name"),
        "data": record.data.get("name") or record.setting("data", "name"),
        "T": record.setting("eval", "window"),
        **{key: record.setting("attention", key) for key in ("window", "gate")},
        "K": record.setting("attention", "groups"),
        "attention": record.setting("attention", "method"),
        "regime": record.setting("regime", "name"),
        "tokens_seen": record.tokens_seen,
        "model_parameters": record.model.get("parameters"),
        "own_commit": record.commit,
    }


def _own_of(record: Record, arm: Arm, own: Record | None) -> dict[str, Any]:
    """Of an arm of a comparison, by its own record where that is there."""
    said = _own(own or record, arm.name)
    groups = [
        value for setting in arm.settings for key, _, value in [setting.partition("=")] if key == "attention.groups"
    ]
    known = {"tokens_seen": arm.tokens_seen, "parameters": arm.trainable_parameters, "arm_setup": _digest(run_of(arm))}
    return said | known | ({"K": int(groups[-1])} if groups else {})


def _digest(shared: Any) -> str:
    return sha256(repr(shared).encode()).hexdigest()[:12]


def _of(row: Any, arm: str | None) -> dict[str, Any]:
    return {"arm": arm, **{key: getattr(row, key) for key in SUBJECT if hasattr(row, key)}}


def _quality(record: Record, rows: list[Row]) -> Subjects:
    stands, hard = answer(record), configured_row(record)
    soft = next((row for row in rows if row.kind == "soft" and row.scored and not record.arms), None)
    first = row_of(record, record.arms[0].name) if record.arms else None
    trained = record.setting("regime", "phases") or {}
    last: dict[str, Any] = next(reversed(trained.values()), {})
    for row in rows:
        subject = _of(row, row.arm) | {
            "phase": row.phase,
            "trains": trained.get(row.phase, last).get("train", row.phase),
            "answer": row_of(record, row.arm) is row if row.arm else row is stands,
            "reads_future": None if row.causal else row.arm or row.name,
        }
        numbers = [
            Number("perplexity", row.perplexity, row.perplexity_low, row.perplexity_high),
            Number("nll", row.nll, unit="nats"),
            Number("largest_group", row.largest_group, unit="share"),
        ]
        if row.kind == BASE:
            numbers.append(Number("parameters", 0, unit="parameters"))
        else:
            numbers.append(_delta(row, BASE, row.delta_nll, row.delta_low, row.delta_high))
        reference = record.arms[0].name if first else ITSELF if row.kind == "twin" else hard.name if hard else None
        versus = _delta(row, reference, row.delta_vs_hard, row.delta_vs_hard_low, row.delta_vs_hard_high)
        if reference:
            numbers.append(versus)
        if soft and soft.nll is not None and row.kind == "hard" and row.nll is not None:
            numbers.append(_delta(row, SOFT_GATE, row.nll - soft.nll, None, None))
        yield subject, numbers
        if first is not None and first is not row and versus.value is not None:
            turned = versus._replace(
                value=-versus.value, low=None if versus.high is None else -versus.high,
                high=None if versus.low is None else -versus.low, against=row.arm,
                level=versus.level_against, level_against=versus.level,
            )  # fmt: skip
            future = next((arm.arm for arm in (row, first) if not arm.causal), None)
            yield _of(first, first.arm) | {"reads_future": future}, [turned]


def _delta(row: Row, against: str | None, value: float | None, low: float | None, high: float | None) -> Number:
    other = None if row.nll is None or value is None else math.exp(min(row.nll - value, 700.0))
    return Number("delta", value, low, high, None, "nats", against, row.perplexity, other)


def _benchmarks(record: Record) -> Subjects:
    told = {id(row) for row in telling([row for row in record.benchmarks if row.scored])}
    for row in record.benchmarks:
        unit = "share" if row.is_share else "nats" if row.is_perplexity else row.metric
        numbers = [Number("score", row.value, stderr=row.stderr, unit=row.metric if row.is_perplexity else unit)]
        if row.scored and row.kind != "base":
            bounds = (row.difference, row.difference_low, row.difference_high)
            level, full = row.value, None if row.difference is None else (row.value or 0.0) - row.difference
            numbers.append(Number("score_delta", *bounds, None, unit, FULL, level, full))
        length = int(row.task.removeprefix(LONG_TEXT)) if row.task.startswith(LONG_TEXT) else None
        future = None if row.causal else row.attention
        yield _of(row, row.attention) | {"telling": id(row) in told, "tokens": length, "reads_future": future}, numbers


def _speed(record: Record) -> Subjects:
    for row in record.speed:
        numbers = [
            Number("ratio", row.ratio, unit="times", against=FULL),
            Number("seconds", row.focus_seconds, unit="seconds"),
            Number("full_seconds", row.full_seconds, unit="seconds"),
            Number("peak", row.focus_peak_bytes, unit="bytes"),
            Number("full_peak", row.full_peak_bytes, unit="bytes"),
        ]
        yield _of(row, None) | {"answer": speed_of_k(record, row.top_k, row.pair_rule) is row}, numbers


def _method_speed(record: Record) -> Subjects:
    for row in record.method_speed:
        numbers = [
            Number("ratio", row.ratio, unit="times", against=FULL),
            Number("seconds", row.seconds, unit="seconds"),
            Number("full_seconds", row.full_seconds, unit="seconds"),
        ]
        yield _of(row, None) | {"clock": "attention"}, numbers


def _probes(record: Record) -> Subjects:
    """The last of every phase of every arm."""
    before: dict[tuple[str, str], float | None] = {}
    units = {"dominance": "share", "dominance_worst": "share", "dead_groups": "groups", "stability": "share"}
    for phase in phases(record):
        arm, numbers = phase.arm.name, []
        for name, unit in units.items():
            value = getattr(phase.probe, name)
            numbers.append(Number(name, value, unit=unit, before=before.get((arm, name))))
            before[arm, name] = value
        yield {"arm": arm, "phase": phase.name, "trains": phase.trains}, numbers


def _groups(report: GroupReport | None) -> Subjects:
    """Of all layers together."""
    if report is None or not report.layers:
        return
    groups = [group for layer in report.layers for group in layer.groups]
    pure = [group.purity or 0.0 for group in groups if group.word_class == PUNCTUATION]
    yield (
        {},
        [
            Number("punctuation_purity", max(pure, default=0.0), unit="share"),
            Number("punctuation_purity_mean", fmean(pure) if pure else None, unit="share"),
            Number("group_confidence", fmean(layer.confidence for layer in report.layers), unit="share"),
            Number("smallest_group", min(group.share for group in groups), unit="share"),
            Number("largest_group", max(group.share for group in groups), unit="share"),
            Number("affinity", max((pair.affinity for layer in report.layers for pair in layer.pairs), default=None)),
        ],
    )


def _arms(record: Record) -> Subjects:
    for arm in record.arms:
        parameters = arm.trainable_parameters if arm.steps else 0
        yield {"arm": arm.name, "error": arm.error}, [Number("parameters", parameters, unit="parameters")]
