"""What a run measures of its model, before anything is attached and after: perplexity rows and benchmark rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from focus_exp.evaluation.benchmarks import Benchmarks
from focus_exp.evaluation.quality import Quality
from focus_exp.records.answers import is_configured
from focus_exp.results.losses import LOSSES, TEXT, write_losses
from focus_exp.results.record import Record
from focus_exp.training.distributed import is_main


@dataclass(frozen=True)
class Evaluation:
    quality: Quality
    benchmarks: Benchmarks

    def measure_base(self) -> None:
        """The rows every other one is compared with, in the same process."""
        self.quality.measure_base()
        self.benchmarks.measure_base()

    def measure_attached(self) -> None:
        self.quality.measure_attached()
        self.benchmarks.measure_attached()

    def write_into(self, record: Record, folder: Path) -> None:
        """The rows into the record of the run in `folder`, and there the losses that their intervals follow from.

        UserError, when all is written, if every one of eval.tasks failed.
        """
        record.rows, record.group_shares = self.quality.rows, self.quality.group_shares
        if between := self.quality.between:
            *_, last = self.quality.config.recipe.phases
            final = [row for row in record.rows if row.kind == "soft" or is_configured(record, row)]
            record.phases = [*between, *(replace(row, phase=last) for row in final)]
        record.benchmarks = self.benchmarks.rows
        text = self.quality.losses
        record.units = text.summary() if text else None
        losses = ({TEXT: text} if text else {}) | self.benchmarks.losses
        if losses and is_main():
            write_losses(folder / LOSSES, losses)
        self.benchmarks.require_score()
