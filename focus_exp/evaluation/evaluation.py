"""What a run measures of its model, before anything is attached and after: perplexity rows and benchmark rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from focus_exp.evaluation.benchmarks import Benchmarks
from focus_exp.evaluation.quality import Quality
from focus_exp.records.answers import is_configured
from focus_exp.records.record import Record


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

    def write_into(self, record: Record) -> None:
        record.rows, record.group_shares = self.quality.rows, self.quality.group_shares
        if between := self.quality.between:
            *_, last = self.quality.config.regime.phases
            final = [row for row in record.rows if row.kind == "soft" or is_configured(record, row)]
            record.phases = [*between, *(replace(row, phase=last) for row in final)]
        record.benchmarks = self.benchmarks.rows
