"""Measurements of training: group load of a router by step, and the fit of two encoders by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from focus_exp.config import PhaseConfig
from focus_exp.results.measurement import Measurement

PROBED = {  # key of a line of probe.jsonl -> metric and unit
    "dominance": ("dominance", "fraction"),
    "dominance_worst": ("dominance_worst", "fraction"),
    "dead_groups": ("dead_groups", "groups"),
    "dead_groups_worst": ("dead_groups_worst", "groups"),
    "confidence": ("confidence", "fraction"),
    "entropy": ("assignment_entropy", "nats"),
    "stability": ("assignment_overlap", "fraction"),
    "stability_renamed": ("assignment_overlap_renamed", "fraction"),
}


@dataclass(kw_only=True)
class FitRow:
    """Fit of a layer's two encoders, measured on validation sequences; fractions are 0..1.

    Args:
        reads: groups that a query of each head reads.
        pairs: density of the distant pairs.
        lost: fraction of the importance that pruning the pairs of other groups loses.
        importance: squared first-order change of the loss without distant pairs [nats^2].
    """

    layer: int
    reads: list[int]
    pairs: float
    lost: float
    importance: float


def fit_measurements(rows: Iterable[FitRow]) -> Iterator[Measurement]:
    for row in rows:
        for metric, value, unit in (
            ("distant_density_fit", row.pairs, "fraction"),
            ("importance_lost_fraction", row.lost, "fraction"),
            ("importance", row.importance, "nats^2"),
        ):
            yield Measurement(
                variant="focus_dual", metric=metric, value=value, unit=unit, settings={"layer": row.layer}
            )
        for head, groups in enumerate(row.reads):
            settings = {"layer": row.layer, "head": head}
            yield Measurement(
                variant="focus_dual", metric="groups_per_query", value=groups, unit="groups", settings=settings
            )


def probe_measurements(lines: Iterable[dict[str, Any]], phases: Mapping[str, PhaseConfig]) -> Iterator[Measurement]:
    """Yield what the lines of probe.jsonl hold; see `Probe` for their keys."""
    for line in lines:
        settings = {name: line[name] for name in ("phase", "step")}
        settings["trainable"] = phases[line["phase"]].trainable
        for key, (metric, unit) in PROBED.items():
            if line.get(key) is not None:
                yield Measurement(variant="router", metric=metric, value=line[key], unit=unit, settings=settings)
