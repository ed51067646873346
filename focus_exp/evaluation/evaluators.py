"""Perplexity and benchmarks of a run, before and after a method is attached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from focus_exp.evaluation.benchmarks import BenchmarkEvaluator
from focus_exp.evaluation.perplexity import PerplexityEvaluator
from focus_exp.results.losses import LOSSES, TEXT, write_losses
from focus_exp.results.record import Record
from focus_exp.training.distributed import is_main


@dataclass(frozen=True)
class Evaluators:
    perplexity: PerplexityEvaluator
    benchmarks: BenchmarkEvaluator

    def measure_base(self) -> None:
        """Score the unmodified model; of perplexity the first round, unless its weights will be trained."""
        self.perplexity.measure_base()
        self.benchmarks.measure_base()

    def measure_attached(
        self,
        before_last: Callable[[], None] = lambda: None,
        on_round: Callable[[int, int], None] | None = None,
    ) -> None:
        """Score what is attached or trained; see `PerplexityEvaluator`."""
        self.perplexity.measure_attached(before_last, on_round)
        self.benchmarks.measure_attached()

    def write(self, record: Record, folder: Path) -> None:
        """Add the measurements to the record, and write their losses; UserError where all of eval.tasks failed."""
        record.measurements = [
            *record.measurements, *self.perplexity.measurements(), *self.benchmarks.measurements
        ]  # fmt: skip
        text = self.perplexity.losses
        losses = ({TEXT: text} if text.nll else {}) | self.benchmarks.losses
        if losses and is_main():
            write_losses(folder / LOSSES, losses)
        self.benchmarks.require_score()
