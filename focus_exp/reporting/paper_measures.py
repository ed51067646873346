"""What stands beside a number of the paper: of every column how it is written, and where a record has it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from focus_exp.records.benchmarks import BenchmarkRow, telling
from focus_exp.records.rows import Row
from focus_exp.reporting.formats import ABSENT, NOT_ENGAGED, number_text, perplexity_text
from focus_exp.reporting.paper_places import BASE, Scene
from focus_exp.reporting.speed import by_top_k

NOT_RUN = "not run"
NAMES = {"lambada": "lambada_openai", "gsm8k": "gsm8k_cot"}  # in lm-eval
TASKS = {"hellaswag": "HellaSwag", "arc_easy": "ARC-E", "piqa": "PIQA", "lambada": "LAMBADA"}


@dataclass(frozen=True)
class Value:
    """A number with its 95 % interval or its standard error, where there is one, and what must be said with it."""

    number: float
    low: float | None = None
    high: float | None = None
    stderr: float | None = None
    mark: str = ""


# or, in words, why there is no number
Found = Value | str


@dataclass(frozen=True)
class Measure:
    """heading: of the column; written: a number of its unit; find: in a scene, for the column of that name.

    find is None where nothing here can stand beside the paper's cell.
    """

    heading: str
    written: Callable[[float], str]
    find: Callable[[Scene, str], Found] | None = None
    unit: str = ""

    def printed(self, cell: Any, decimals: int = 0) -> str:
        """A cell of the paper, with as many decimals as its column has."""
        if isinstance(cell, bool):
            return "yes" if cell else "no"
        if cell is None or isinstance(cell, str):
            return cell or ABSENT
        if self.written is signed:
            return self.written(cell) + self.unit
        return f"{cell:,.{decimals}f}"

    def text(self, found: list[Found]) -> str:
        """One seed's number with its interval, or the mean of several with the least and the most of them."""
        values = [value for value in found if isinstance(value, Value)]
        if not values:
            return next((reason for reason in found if isinstance(reason, str)), NOT_RUN)
        numbers, one = [value.number for value in values], values[0]
        text = self.written(fmean(numbers)) + self.unit
        if len(values) > 1:
            spread = [self.written(number) for number in (min(numbers), max(numbers))]
            text += f" ({' to '.join(spread)})" if spread[0] != spread[1] else ""
        elif one.low is not None and one.high is not None:
            text += f" [{self.written(one.low)}, {self.written(one.high)}]"
        elif one.stderr is not None:
            text += f" ± {self.written(one.stderr)}"
        marks = dict.fromkeys(value.mark for value in values if value.mark)
        return text + "".join(f" ({mark})" for mark in marks)


def count(value: float) -> str:
    return f"{value:,.0f}"


def tenths(value: float) -> str:
    return f"{value:.1f}"


def signed(value: float) -> str:
    return f"{value:+.2f}"


def _scored(scene: Scene, column: str) -> Row | str:
    row = scene.row(column)
    if row is not None:
        return row if row.scored else f"failed: {row.error or 'no finite loss'}"
    arm = scene.arm(scene.place.arm_of(column))
    return f"failed: {arm.error}" if arm is not None and arm.error else NOT_RUN


def _perplexity(scene: Scene, column: str) -> Found:
    if "tokens" in scene.paper:
        found = _benchmark(scene, column, f"perplexity@{scene.paper['tokens']}")
        return found if isinstance(found, str) else Value(found.value or math.nan, mark=_mark(found))
    row = _scored(scene, column)
    return row if isinstance(row, str) else Value(row.perplexity or math.nan, row.perplexity_low, row.perplexity_high)


def _before(scene: Scene, column: str) -> Found:
    """The same model's perplexity with full attention and nothing trained, on the same tokens."""
    row = _scored(scene, column)
    if isinstance(row, str):
        return row
    return NOT_RUN if row.nll is None or row.delta_nll is None else Value(math.exp(row.nll - row.delta_nll))


def change(scene: Scene, column: str, origin: str) -> Found:
    """By how much `column` is above full attention's perplexity [%]: the base's, or that of the column `origin`."""
    if "tokens" in scene.paper:
        found = _benchmark(scene, column, f"perplexity@{scene.paper['tokens']}")
        if isinstance(found, str) or found.difference is None:
            return found if isinstance(found, str) else ABSENT
        return _relative(found.difference, found.difference_low, found.difference_high)
    row = _scored(scene, column)
    if isinstance(row, str) or row.kind == BASE:
        return row if isinstance(row, str) else ABSENT
    if origin != "ppl_full":
        return _relative(row.delta_nll, row.delta_low, row.delta_high)
    other = _scored(scene, origin)
    return other if isinstance(other, str) else _between(scene, row, other)


def _between(scene: Scene, row: Row, other: Row) -> Found:
    """Of two arms; paired where one of them is the comparison's first, else without an interval."""
    first = scene.record.arms[0].name
    low, high = row.delta_vs_hard_low, row.delta_vs_hard_high
    if other.arm == first and row.delta_vs_hard is not None:
        return _relative(row.delta_vs_hard, low, high)
    low, high = other.delta_vs_hard_low, other.delta_vs_hard_high
    if row.arm == first and other.delta_vs_hard is not None:
        return _relative(-other.delta_vs_hard, None if high is None else -high, None if low is None else -low)
    return _relative((row.nll or math.nan) - (other.nll or math.nan), None, None)


def _relative(delta: float | None, low: float | None, high: float | None) -> Found:
    if delta is None:
        return ABSENT
    values = [None if value is None else 100 * math.expm1(min(value, 50.0)) for value in (delta, low, high)]
    return Value(values[0] or 0.0, values[1], values[2])


def _parameters(scene: Scene, column: str) -> Found:
    arm = scene.arm(scene.place.arm)
    return Value(arm.trainable_parameters if arm and arm.steps else 0)


def _percent_of_model(scene: Scene, column: str) -> Found:
    arm = scene.arm(scene.place.arm)
    run = scene.runs.own(arm) if arm else None
    total = (run or scene.record).model.get("parameters")
    return Value(100 * arm.trainable_parameters / total) if arm and total else NOT_RUN


def _benchmark(scene: Scene, column: str, task: str) -> BenchmarkRow | str:
    rows = scene.benchmarks(column, task)
    scored = telling([row for row in rows if row.scored])
    if scored:
        return scored[0]
    return next((f"not measured: {row.error}" for row in rows if row.error), NOT_RUN)


def _mark(row: BenchmarkRow) -> str:
    return NOT_ENGAGED if row.engaged is False else ""


def _task(column: str) -> str:
    name = column.removesuffix("_delta").removesuffix("_full").removesuffix("_focus")
    return NAMES.get(name, name)


def _usual(scene: Scene, column: str) -> BenchmarkRow | str:
    """The metric that a task is known by: an accuracy, normalised where there is such a one."""
    rows = [row for row in scene.benchmarks(column, _task(column)) if row.scored and row.is_share]
    ranked = sorted(rows, key=lambda row: "acc_norm" not in row.metric)
    return ranked[0] if ranked else _benchmark(scene, column, _task(column))


def _score(scene: Scene, column: str) -> Found:
    row = _usual(scene, column)
    if isinstance(row, str) or row.value is None:
        return row if isinstance(row, str) else NOT_RUN
    if column.endswith("_full") and row.difference is not None:
        # full attention on the same documents
        return Value(100 * (row.value - row.difference))
    return Value(100 * row.value, stderr=None if row.stderr is None else 100 * row.stderr, mark=_mark(row))


def _score_change(scene: Scene, column: str) -> Found:
    row = _usual(scene, column)
    if isinstance(row, str) or row.difference is None:
        return row if isinstance(row, str) else NOT_RUN
    bounds = [None if bound is None else 100 * bound for bound in (row.difference_low, row.difference_high)]
    return Value(100 * row.difference, bounds[0], bounds[1], mark=_mark(row))


def _dominance(scene: Scene, column: str) -> Found:
    phase = scene.phase(column)
    return Value(100 * phase.probe.dominance) if phase else NOT_RUN


def _stability(scene: Scene, column: str) -> Found:
    phase = scene.phase(column)
    return Value(phase.probe.stability) if phase and phase.probe.stability is not None else NOT_RUN


def _of_groups(scene: Scene, column: str) -> Found:
    report = scene.record.groups
    if report is None:
        return NOT_RUN
    shares = [group.share for layer in report.layers for group in layer.groups]
    purities = [group.purity or 0.0 for _, group in report.punctuation]
    found = {
        "punctuation_purity_percent": 100 * max(purities, default=0.0),
        "mean_confidence": fmean(layer.confidence for layer in report.layers),
        "smallest_group_percent": 100 * min(shares),
        "largest_group_percent": 100 * max(shares),
    }
    return Value(found[scene.paper["quantity"]])


def _affinity(scene: Scene, column: str) -> Found:
    found = (
        [pair.affinity for layer in scene.record.groups.layers for pair in layer.pairs] if scene.record.groups else []
    )
    return Value(max(found)) if found else NOT_RUN


def _speed(scene: Scene, column: str) -> Found:
    """Of one layer with routing included."""
    rows = [row for row in scene.timed if row.groups == int(column.removeprefix("speedup_K"))]
    return next((Value(row.ratio) if row.ratio else f"failed: {row.error}" for row in rows), NOT_RUN)


def _speed_of_k(scene: Scene, column: str) -> Found:
    rows = [
        row for row in by_top_k(scene.record)
        if row.top_k == scene.paper["top_k"] and row.assignment == "trained" and row.ratio
        and (row.top_k == 1 or row.pair_rule == scene.place.rule)
    ]  # fmt: skip
    return next((Value(row.ratio, mark=f"at {row.tokens:,} tokens") for row in rows if row.ratio), "not timed")


def _pairs_kept(scene: Scene, column: str) -> Found:
    row = _scored(scene, column)
    if isinstance(row, str) or row.distant_pairs_kept is None:
        return row if isinstance(row, str) else NOT_RUN
    return Value(100 * row.distant_pairs_kept, mark="full attention" if row.distant_pairs_kept == 1 else "")


MEASURES: dict[str, Measure] = {
    "trainable_params": Measure("parameters", count, _parameters),
    "percent_of_model": Measure("% of the model", number_text, _percent_of_model),
    "ppl": Measure("PPL", perplexity_text, _perplexity),
    "ppl_pretrained": Measure("PPL pretrained", perplexity_text, _before),
    "ppl_focus": Measure("PPL Focus", perplexity_text, _perplexity),
    "ppl_full": Measure("PPL full attention", perplexity_text, _perplexity),
    "ppl_focus_k2": Measure("PPL k=2", perplexity_text, _perplexity),
    "ppl_focus_k3": Measure("PPL k=3", perplexity_text, _perplexity),
    "ppl_centroid": Measure("PPL, router trained", perplexity_text, _perplexity),
    "ppl_finetuned": Measure("PPL, all trained", perplexity_text, _perplexity),
    "dominance_centroid": Measure("largest group [%], router trained", tenths, _dominance),
    "dominance_full_ft": Measure("largest group [%], all trained", tenths, _dominance),
    "stability_centroid": Measure("stability, router trained", number_text, _stability),
    "stability_full_ft": Measure("stability, all trained", number_text, _stability),
    "outcome": Measure("outcome", lambda value: f"largest group {value:.1f} %", _dominance),
    "value": Measure("value", number_text, _of_groups),
    **{name: Measure(name.replace("_", " "), number_text) for name in ("position", "other_position")},
    "affinity": Measure("affinity", number_text, _affinity),
    "claimed_speedup": Measure("speed", number_text, _speed_of_k),
    "pairs_retained_percent": Measure("distant pairs kept [%]", tenths, _pairs_kept),
    "truthfulqa_mc1": Measure("TruthfulQA MC1", tenths, _score),
    "gsm8k_full": Measure("full attention", tenths, _score),
    "gsm8k_focus": Measure("Focus", tenths, _score),
    **{f"blocks_{path}": Measure(f"blocks {path}", str) for path in "ABC"},
    **{f"speedup_K{groups}": Measure(f"K={groups}", number_text, _speed) for groups in (4, 8)},
    **{task: Measure(name, tenths, _score) for task, name in TASKS.items()},
    **{f"{task}_delta": Measure(f"{name}, points", signed, _score_change) for task, name in TASKS.items()},
}
