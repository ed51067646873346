"""The arms of a comparison side by side: one row of each, paired with the first arm's on the same tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from focus_exp.evaluation.outcomes import slug
from focus_exp.evaluation.quality import read_scores
from focus_exp.evaluation.statistics import Bootstrap, paired
from focus_exp.records.answers import answer
from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.record import Record
from focus_exp.records.rows import Row


def compare_arms(record: Record) -> None:
    """Fill in a comparison's rows, benchmarks and probes from the folders of its arms.

    Model and data are those of the first arm that has them; so is the base, which all arms measured alike where they
    are of one model and text. Others are paired with their own base alone.
    """
    bootstrap: Bootstrap | None = None
    reference: np.ndarray | None = None
    for arm in record.arms:
        folder = Path(arm.folder)
        if not (folder / "record.json").exists():
            continue
        found = Record.load(folder / "record.json")
        if not record.rows and found.base:
            record.model, record.data = found.model, found.data
            record.rows.append(found.base)
            record.benchmarks += [row for row in found.benchmarks if row.kind in ("base", "missing")]
        record.phases += [replace(row, arm=arm.name) for row in found.phases]
        record.probes += [replace(probe, arm=arm.name) for probe in found.probes]
        row = answer(found)
        if row is None:
            continue
        scores = read_scores(folder / "evaluation" / f"{slug(row.name)}.npz")
        row = replace(row, arm=arm.name, delta_vs_hard=None, delta_vs_hard_low=None, delta_vs_hard_high=None)
        if scores is not None:
            if arm is record.arms[0]:
                reference = scores.nll
                settings = record.config["eval"]
                bootstrap = Bootstrap(len(reference), settings["bootstrap_samples"], record.seed or 0)
            elif bootstrap is not None and reference is not None and same_tokens(found, record):
                difference = paired(scores.nll, reference, bootstrap)
                row.delta_vs_hard, row.delta_vs_hard_low, row.delta_vs_hard_high = difference
        record.rows.append(row)
        record.benchmarks += [replace(b, attention=arm.name) for b in found.benchmarks if stands_beside(b, row)]


def same_tokens(arm: Record, record: Record) -> bool:
    """Whether an arm scored the tokens of the first one under the same base model."""
    return scored_by(arm) == scored_by(record)


def scored_by(record: Record) -> list[object]:
    windows = [record.setting("eval", key) for key in ("window", "stride", "max_windows", "split")]
    return [*windows, *((part.get("used"), part.get("fingerprint")) for part in (record.model, record.data))]


def stands_beside(benchmark: BenchmarkRow, row: Row) -> bool:
    """Whether a benchmark was run under what the quality row `row` was."""
    return benchmark.kind == row.kind and (row.kind != "control" or benchmark.method == row.method)
