"""One score of one attention on one benchmark, with the ledger of what the mask did on that benchmark's requests."""

import math
from dataclasses import dataclass, field
from typing import Literal

from focus_exp.records.rows import acted


@dataclass(kw_only=True)
class BenchmarkRow:
    """One metric of one task under one attention.

    value, stderr: as lm-eval gives them (accuracies 0..1); n: independent documents or
        items; version: of the task, or the suite's hash.
    difference: this row minus full attention, paired per document, with its 95 % interval: in units of the metric, of a
        perplexity the difference of its logarithm. freedom: of that interval, None where it is a normal one.
    requests: inputs of the model, of which `truncated` were cut from the left because the model is too short.
    request_tokens: least, 10 %, median, 90 % and most tokens of a request. Shares are 0..1, counted on these requests:
        distant_share of all causal pairs lie beyond window and sinks, distant_pairs_kept of those are kept,
        pairs_removed of all causal pairs are not; removed_by_layer follows the attached layers.
    memberships: groups of the router that a token is in, of all of which largest_group is the largest one's share.
    A task that could not be had, or a run that failed, is a row with `error` and no numbers.
    """

    attention: str
    kind: Literal["base", "trained", "hard", "control", "missing"]
    task: str
    method: str = "full"
    causal: bool = True
    metric: str = ""
    higher_is_better: bool = True
    value: float | None = None
    stderr: float | None = None
    n: int | None = None
    version: str = ""
    shots: int | None = None
    seed: int | None = None
    source: str = ""
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    freedom: float | None = None
    requests: int = 0
    truncated: int = 0
    request_tokens: list[int] = field(default_factory=list)
    distant_share: float | None = None
    distant_pairs_kept: float | None = None
    pairs_removed: float | None = None
    removed_by_layer: list[float] = field(default_factory=list)
    largest_group: float | None = None
    memberships: int = 1
    seconds: float | None = None
    error: str | None = None

    @property
    def scored(self) -> bool:
        return self.error is None and self.value is not None and math.isfinite(self.value)

    @property
    def engaged(self) -> bool | None:
        """Whether the mask removed at least 5 % of the causal pairs; None where no mask applies."""
        return None if self.kind in ("base", "trained", "missing") else acted(self.method, self.pairs_removed)

    @property
    def scored_as(self) -> str:
        """Task and metric, the metric once."""
        return self.task if self.task.startswith(self.metric) else f"{self.task} {self.metric}"

    @property
    def is_perplexity(self) -> bool:
        return self.metric.endswith("perplexity")
