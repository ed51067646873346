"""All records as one tidy table, a line for every run, subject and measure: what is shown across runs starts here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from statistics import fmean, median
from typing import Any, NamedTuple

import pandas as pd

from focus_exp.records.answers import answer, configured_row, phases, row_of
from focus_exp.records.benchmarks import telling, usual
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm, Row
from focus_exp.records.uncertainty import error_of, error_of_score
from focus_exp.reporting.gather import Runs, run_of, setup
from focus_exp.reporting.speed import speed_of_k

BASE, SOFT_GATE, FULL = "base", "soft gate", "full attention"
ITSELF = "itself, reading the future"
LONG_TEXT = "perplexity@"  # a task at so many tokens
RUN = (
    "run", "experiment", "seed", "started", "commit", "command", "config_hash", "status", "device", "number_format",
    "scale", "is_arm", "first", "first_parameters", "setup", "unit_kind",
)  # fmt: skip
# of the arm's own run, where a line of a comparison is about one
OWN = (
    "arm", "asked", "model", "data", "T", "window", "K", "attention", "gate", "regime", "tokens_seen", "parameters",
    "model_parameters", "own_commit", "arm_setup", "steps",
)  # fmt: skip
SUBJECT = (
    "name", "kind", "method", "top_k", "pair_rule", "task", "metric", "n", "clock", "tokens", "groups", "assignment",
    "pairs_kept", "dtype", "path", "distant_pairs_kept", "pairs_removed", "engaged", "outcome", "causal", "error",
)  # fmt: skip
MARKS = ("phase", "step", "trains", "reads_future", "answer", "telling", "usual", "tokens_against", "removed_against")


class Number(NamedTuple):
    """A measure of a subject. level, level_against: the two sides of a difference; before: its value a phase before.

    stderr: by the text, of `units` documents or windows, with `freedom` degrees.
    """

    measure: str
    value: float | None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    against: str | None = None
    level: float | None = None
    level_against: float | None = None
    before: float | None = None
    stderr: float | None = None
    freedom: float | None = None
    units: int | None = None


COLUMNS = (*RUN, "of", *OWN, *SUBJECT, *MARKS, *Number._fields)
TYPES = {
    "Float64": ["value", "low", "high", "level", "level_against", "before", "stderr", "freedom", "parameters",
                "first_parameters", "pairs_kept", "pairs_removed", "removed_against", "distant_pairs_kept"],
    "Int64": ["seed", "T", "window", "K", "tokens_seen", "tokens_against", "steps", "model_parameters", "top_k", "n",
              "tokens", "groups", "step", "units"],
    "boolean": ["is_arm", "engaged", "causal", "answer", "telling", "usual"],
}  # fmt: skip
Subjects = Iterator[tuple[dict[str, Any], list[Number]]]


@lru_cache(maxsize=2)
def measurements(runs: Runs) -> pd.DataFrame:
    """A line for every run, subject and measure, runs in their order, the arms' own (`is_arm`) after the others.

    `of`: the list of the record. `delta`: a difference of losses [nats a token], ours minus theirs, which between two
    arms stands in both directions, with both perplexities in `level` and `level_against`; `score_delta`: one of scores.
    What failed, or could not be compared, is a line without a value. `setup`, `arm_setup`: what lines of several seeds
    share. `*_against`: of the arm that it is against. `answer`: of the row that stands for its run or arm, of the one
    timing that is quoted of a k; `telling`: of the metric that decides a benchmark; `usual`: of the one that stands for
    it whatever came of it; `reads_future`: who of both does.
    """
    found = [line for name, record in runs.named.items() for line in _lines(name, record, runs)]
    known = {column: kind for kind, columns in TYPES.items() for column in columns}
    return pd.DataFrame(found, columns=list(COLUMNS)).astype(dict.fromkeys(COLUMNS, "string") | known)


def _lines(name: str, record: Record, runs: Runs) -> Iterator[dict[str, Any]]:
    first = record.arms[0] if record.arms else None
    shared = {key: getattr(record, key) for key in RUN if hasattr(record, key)} | {
        "run": name,
        "scale": record.setting("scale", "name"),
        "is_arm": bool(record.config.get("arm")),
        "unit_kind": f"{record.units.kind}s" if record.units else "windows",
        "first": first.name if first else None,
        "first_parameters": first.trainable_parameters if first else None,
        "setup": _digest((setup(record), run_of(first, runs.own(first)) if first else record.experiment)),
    }
    own: dict[str | None, dict[str, Any]] = {None: {"arm": record.config.get("arm")} | _own(record)}
    own |= {arm.name: _own_of(arm, runs.own(arm), record) for arm in record.arms}
    removed = {row.arm: row.pairs_removed for row in record.rows if row.arm}
    parts = {
        "rows": _quality(record, record.rows), "phases": _quality(record, record.phases), "probes": _probes(record),
        "benchmarks": _benchmarks(record), "speed": _speed(record), "method_speed": _method_speed(record),
        "groups": _groups(record), "arms": _arms(record),
    }  # fmt: skip
    for part, subjects in parts.items():
        for subject, numbers in subjects:
            common = {**shared, "of": part, **own.get(subject.get("arm"), own[None]), **subject}
            there = [number for number in numbers if number.value is not None or number.measure == "score_delta"]
            for number in there or numbers[:1]:
                other = own.get(number.against or "", {})
                of_other = {
                    "tokens_against": other.get("tokens_seen"),
                    "removed_against": removed.get(number.against or ""),
                }
                yield common | of_other | number._asdict()


def _own(record: Record) -> dict[str, Any]:
    attention = {key: record.setting("attention", key) for key in ("window", "gate")}
    return attention | {
        "asked": record.setting("model", "name"),
        "model": record.model.get("name") or record.setting("model", "name"),
        "data": record.data.get("name") or record.setting("data", "name"),
        "T": record.setting("eval", "window"),
        "K": record.setting("attention", "groups"),
        "attention": record.setting("attention", "method"),
        "regime": record.setting("regime", "name"),
        "tokens_seen": record.tokens_seen,
        "steps": record.steps,
        "model_parameters": record.model.get("parameters"),
        "own_commit": record.commit,
    }


def _own_of(arm: Arm, own: Record | None, comparison: Record) -> dict[str, Any]:
    """Of an arm of a comparison, by its own record where that is there."""
    groups = dict(setting.partition("=")[::2] for setting in arm.settings).get("attention.groups")
    known = {"arm": arm.name, "tokens_seen": arm.tokens_seen, "steps": arm.steps}
    known |= {"parameters": arm.trainable_parameters}
    known |= {"arm_setup": _digest(run_of(arm, own))} | ({"K": int(groups)} if groups else {})
    return _own(own or comparison) | known


def _digest(shared: Any) -> str:
    return sha256(repr(shared).encode()).hexdigest()[:12]


def _of(row: Any, arm: str | None, **marks: Any) -> dict[str, Any]:
    subject = {key: getattr(row, key) for key in SUBJECT if hasattr(row, key)}
    return subject | marks | ({"arm": arm} if arm else {})


def _quality(record: Record, rows: list[Row]) -> Subjects:
    stands, hard = answer(record), configured_row(record)
    first = row_of(record, record.arms[0].name) if record.arms else None
    soft = next((row for row in rows if row.kind == "soft" and row.scored and not record.arms), None)
    trained = record.setting("regime", "phases") or {}
    last: dict[str, Any] = next(reversed(trained.values()), {})
    for row in rows:
        subject = _of(
            row, row.arm, phase=row.phase, trains=trained.get(row.phase, last).get("train", row.phase),
            answer=row_of(record, row.arm) is row if row.arm else row is stands,
            reads_future=None if row.causal else row.arm or row.name,
        )  # fmt: skip
        reference = first.arm if first else ITSELF if row.kind == "twin" else hard.name if hard else None
        versus = _delta(record, row, reference, row.delta_vs_hard, row.delta_vs_hard_low, row.delta_vs_hard_high)
        gap = None if soft is None or row.kind != "hard" or row.nll is None else row.nll - (soft.nll or 0.0)
        yield (
            subject,
            [
                Number("perplexity", row.perplexity, row.perplexity_low, row.perplexity_high),
                Number("nll", row.nll, unit="nats"),
                Number("largest_group", row.largest_group, unit="share"),
                Number("parameters", 0 if row.kind == BASE else None),
                _delta(record, row, BASE, None if row.kind == "base" else row.delta_nll, row.delta_low, row.delta_high),
                _delta(record, row, SOFT_GATE, gap),
                *([versus] if reference and not first else []),
            ],
        )
        if first and first is not row and versus.value is not None:
            future = next((arm.arm for arm in (row, first) if not arm.causal), None)
            yield subject | {"reads_future": future}, [versus]
            yield _of(first, first.arm, reads_future=future), [_turned(versus, row.arm)]


def _delta(
    record: Record,
    row: Row,
    against: str | None,
    value: float | None,
    low: float | None = None,
    high: float | None = None,
) -> Number:
    other = None if row.nll is None or value is None else math.exp(min(row.nll - value, 700.0))
    return Number(
        "delta", value, low, high, "nats", against, row.perplexity, other, None, *error_of(record, row, low, high)
    )


def _turned(delta: Number, against: str | None) -> Number:
    """Theirs minus ours."""
    value, low, high = (None if bound is None else -bound for bound in (delta.value, delta.high, delta.low))
    delta = delta._replace(value=value, low=low, high=high, against=against)
    return delta._replace(level=delta.level_against, level_against=delta.level)


def _benchmarks(record: Record) -> Subjects:
    scored = [row for row in record.benchmarks if row.scored]
    told, stand = ({id(row) for row in rows} for rows in (telling(scored), usual(scored)))
    for row in record.benchmarks:
        unit = "share" if row.is_share else "nats" if row.is_perplexity else row.metric
        bounds = row.difference, row.difference_low, row.difference_high
        full = None
        if row.value is not None and row.difference is not None:
            full = row.value * math.exp(-row.difference) if row.is_perplexity else row.value - row.difference
        yield _of(
            row, row.attention, telling=id(row) in told, usual=id(row) in stand,
            reads_future=None if row.causal else row.attention,
            tokens=int(row.task.removeprefix(LONG_TEXT)) if row.task.startswith(LONG_TEXT) else None,
        ), [
            Number("score", row.value, unit="" if row.is_perplexity else unit, stderr=row.stderr),
            *([Number("score_delta", *bounds, unit, FULL, row.value, full, None, *error_of_score(row))]
              if row.scored and row.kind != BASE else []),
        ]  # fmt: skip


def _speed(record: Record) -> Subjects:
    for row in record.speed:
        yield (
            _of(row, None, answer=speed_of_k(record, row.top_k, row.pair_rule) is row),
            [
                Number("ratio", row.ratio, unit="times", against=FULL),
                Number("seconds", row.focus_seconds, unit="seconds", against=FULL, level_against=row.full_seconds),
                Number("peak", row.focus_peak_bytes, unit="bytes", against=FULL, level_against=row.full_peak_bytes),
            ],
        )


def _method_speed(record: Record) -> Subjects:
    for row in record.method_speed:
        yield (
            _of(row, None),
            [
                Number("ratio", row.ratio, unit="times", against=FULL),
                Number("attention_ratio", row.attention_ratio, unit="times", against=FULL),
                Number("seconds", row.seconds, unit="seconds", against=FULL, level_against=row.full_seconds),
            ],
        )


def _probes(record: Record) -> Subjects:
    """The last of every phase of every arm."""
    before: dict[tuple[str, str], float | None] = {}
    units = {"dominance": "share", "dominance_worst": "share", "dead_groups": "groups", "stability": "share"}
    units |= {"confidence": "share"}
    found = [({"arm": p.arm.name, "phase": p.name, "trains": p.trains}, p.probe) for p in phases(record)]
    last = {probe.phase: probe for probe in record.probes if not record.arms}
    found += [({"phase": name, "trains": name}, probe) for name, probe in last.items()]
    for subject, probe in found:
        arm, values = subject.get("arm", ""), {name: getattr(probe, name) for name in units}
        numbers = [Number(name, values[name], unit=units[name], before=before.get((arm, name))) for name in units]
        before |= {(arm, name): value for name, value in values.items()}
        yield subject | {"step": probe.step}, numbers


def _groups(record: Record) -> Subjects:
    """Of the layer in the middle: the paper does not name its layers, and of many some are anything."""
    layers = record.groups.layers if record.groups else []
    if layers:
        purest = [
            max((group.purity or 0.0 for group in layer.groups if group.word_class == "punctuation"), default=0.0)
            for layer in layers
        ]
        sizes = [sorted(group.share for group in layer.groups) for layer in layers]
        yield (
            {},
            [
                Number("punctuation_purity", median(purest), unit="share"),
                Number("punctuation_purity_best", max(purest), unit="share"),
                Number("group_confidence", fmean(layer.confidence for layer in layers), unit="share"),
                Number("smallest_group", median(size[0] for size in sizes), unit="share"),
                Number("largest_group", median(size[-1] for size in sizes), unit="share"),
                Number("affinity", max((pair.affinity for layer in layers for pair in layer.pairs), default=None)),
            ],
        )


def _arms(record: Record) -> Subjects:
    for arm in record.arms:
        yield (
            {"arm": arm.name, "error": arm.error},
            [Number("parameters", arm.trainable_parameters if arm.tokens_seen else 0)],
        )
