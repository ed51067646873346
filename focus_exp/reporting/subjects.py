"""What every part of a record has measured: its subjects, each with its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from statistics import fmean, median
from typing import Any, NamedTuple

from focus_exp.records.answers import answer, by_phase, configured_row, phases, row_of
from focus_exp.records.benchmarks import telling, usual
from focus_exp.records.losses import Losses
from focus_exp.records.record import Record
from focus_exp.records.rows import Row
from focus_exp.records.uncertainty import error_of, error_of_score
from focus_exp.reporting.gather import Runs
from focus_exp.reporting.speed import speed_of_k

BASE, SOFT_GATE, FULL = "base", "soft gate", "full attention"
ITSELF = "itself, reading the future"
LONG_TEXT = "perplexity@"  # a task at so many tokens
SUBJECT = (
    "name", "kind", "method", "top_k", "pair_rule", "task", "version", "metric", "n", "clock", "tokens", "groups",
    "assignment", "pairs_kept", "dtype", "path", "distant_pairs_kept", "pairs_removed", "engaged", "outcome", "causal",
    "error",
)  # fmt: skip


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


Subjects = Iterator[tuple[dict[str, Any], list[Number]]]


def subjects_of(record: Record, runs: Runs) -> dict[str, Subjects]:
    """By the list of the record that they are of."""
    return {
        "rows": chain(_quality(record, record.rows, runs), _between(record, runs)),
        "phases": _quality(record, record.phases, runs), "probes": _probes(record),
        "benchmarks": _benchmarks(record), "speed": _speed(record), "method_speed": _method_speed(record),
        "groups": _groups(record), "arms": _arms(record),
    }  # fmt: skip


def _of(row: Any, arm: str | None, **marks: Any) -> dict[str, Any]:
    subject = {key: getattr(row, key) for key in SUBJECT if hasattr(row, key)}
    return subject | marks | ({"arm": arm} if arm else {})


def _quality(record: Record, rows: list[Row], runs: Runs) -> Subjects:
    stands, hard = answer(record), configured_row(record)
    soft = {row.phase: row for row in reversed(rows) if row.kind == "soft" and row.scored and not record.arms}
    losses = runs.losses(record) if soft else None
    trained = record.setting("regime", "phases") or {}
    last: dict[str, Any] = next(reversed(trained.values()), {})
    for row in rows:
        subject = _of(
            row, row.arm, phase=row.phase, trains=trained.get(row.phase, last).get("train", row.phase),
            answer=row_of(record, row.arm) is row if row.arm else row is stands,
        )  # fmt: skip
        scored = _scored(record, row, runs)
        reference = None if record.arms else ITSELF if row.kind == "twin" else hard.name if hard else None
        versus = (row.delta_vs_hard, row.delta_vs_hard_low, row.delta_vs_hard_high)
        gates = soft.get(row.phase) if row.kind == "hard" else None
        gap = None if row.nll is None or gates is None or gates.nll is None else row.nll - gates.nll
        apart = _bounds(losses, row, gates) if gates and row.scored else (None, None)
        yield (
            subject,
            [
                Number("perplexity", row.perplexity, row.perplexity_low, row.perplexity_high),
                Number("nll", row.nll, unit="nats"),
                Number("largest_group", row.largest_share, unit="share"),
                Number("parameters", 0 if row.kind == BASE else None),
                _delta(scored, row, BASE, None if row.kind == "base" else row.delta_nll, row.delta_low, row.delta_high),
                _delta(scored, row, SOFT_GATE, gap, *apart),
                *([_delta(scored, row, reference, *versus)] if reference else []),
            ],
        )


def _bounds(losses: Losses | None, row: Row, other: Row) -> tuple[float | None, float | None]:
    """The interval of the difference of two rows of a run."""
    if losses is None or not {row.losses, other.losses} <= losses.nll.keys():
        return None, None
    return losses.difference(row.losses, losses, other.losses).bounds


def _between(record: Record, runs: Runs) -> Subjects:
    """Of two arms, in both directions; of two that were paired with each other, once."""
    rows = {row.arm: row for row in record.rows if row.arm}
    told: set[frozenset[str]] = set()
    for each in record.differences:
        against = each.against or record.arms[0].name
        if (pair := frozenset((each.arm, against))) in told or not pair <= rows.keys():
            continue
        told.add(pair)
        own, other = rows[each.arm], rows[against]
        delta = _delta(_scored(record, own, runs), own, against, each.value, each.low, each.high)
        yield _of(own, own.arm, against_causal=other.causal), [delta]
        yield _of(other, other.arm, against_causal=own.causal, turned=True), [_turned(delta, own.arm)]


def _scored(record: Record, row: Row, runs: Runs) -> Record:
    """The record that says on how much text a row was scored: of an arm its own, where that is there."""
    arm = next((arm for arm in record.arms if arm.name == row.arm), None)
    return (arm and runs.own(arm)) or record


def _delta(
    record: Record,
    row: Row,
    against: str | None,
    value: float | None,
    low: float | None = None,
    high: float | None = None,
) -> Number:
    other = None if row.nll is None or value is None else math.exp(min(row.nll - value, 700.0))
    return Number("delta", value, low, high, "nats", against, row.perplexity, other, None, *error_of(record, low, high))


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
    """The last of every phase of every arm, and after the first step the most of what can grow and recede again."""
    before: dict[tuple[str, str], float | None] = {}
    units = {"dominance": "share", "dominance_worst": "share", "dead_groups": "groups", "stability": "share"}
    units |= {"confidence": "share"}
    found = [({"arm": p.arm.name, "phase": p.name, "trains": p.trains}, p.probes) for p in phases(record)]
    own = by_phase(record.probes if not record.arms else [])
    found += [({"phase": name, "trains": name}, probes) for name, probes in own.items()]
    for subject, probes in found:
        probe, trained = probes[-1], [one for one in probes if one.step] or probes
        arm, values = subject.get("arm", ""), {name: getattr(probe, name) for name in units}
        numbers = [Number(name, values[name], unit=units[name], before=before.get((arm, name))) for name in units]
        before |= {(arm, name): value for name, value in values.items()}
        most = {f"{name}_most": max(getattr(one, name) for one in trained) for name in ("dominance", "dead_groups")}
        numbers += [Number(name, value, unit=units[name.removesuffix("_most")]) for name, value in most.items()]
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
