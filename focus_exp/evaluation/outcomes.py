"""What running a task gives: metrics, each document's part in them, the ledger; on disk, and compared in pairs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.results.intervals import FEWEST, NORMAL, estimate, units_of
from focus_exp.storage import replace_file

# document, offset of the first token in it, scored tokens; of an item 0 and 1
Unit = tuple[str, int, int]
NO_FILTER = "none"
SAMPLES, RESULT = "samples.jsonl", "result.json"


@dataclass
class Metric:
    """One number of a task; under `key` and `filter` the samples have each document's part in it."""

    key: str
    filter: str
    value: float
    stderr: float | None
    higher_is_better: bool

    @property
    def name(self) -> str:
        return self.key if self.filter == NO_FILTER else f"{self.key} ({self.filter})"

    @property
    def sign(self) -> int:
        """Of a document's part: a perplexity's is its log-likelihood, which falls where the perplexity rises."""
        return -1 if self.key.endswith("perplexity") else 1

    def parts(self, samples: list[dict[str, Any]]) -> dict[Unit, float]:
        """Item, or window of a document -> its part in this metric."""
        return {
            (sample["document"], sample.get("offset", 0), sample.get("tokens", 1)): sample["scores"][self.key]
            for sample in samples
            if sample["filter"] == self.filter and self.key in sample["scores"]
        }

    def is_mean_of(self, parts: dict[Unit, float]) -> bool:
        """Whether it is the mean of its parts over all tokens, as that of a group over its tasks, say, is not."""
        if not parts:
            return False
        mean = self.sign * np.average([*parts.values()], weights=[tokens for *_, tokens in parts])
        return math.isclose(mean, np.log(self.value) if self.sign < 0 else self.value, rel_tol=1e-6, abs_tol=1e-6)


@dataclass
class Outcome:
    """A task's result under one attention.

    samples: per item (and filter) what was asked and answered, and `scores`, its part in each metric; of a window its
        document, the `offset` in it and the scored `tokens`.
    ledger: the fields of `BenchmarkRow` that `Ledger.summary` gives. groups: shares of the tokens `[layers][K]`.
    weights: the fingerprint of the base.
    """

    metrics: list[Metric]
    samples: list[dict[str, Any]]
    ledger: dict[str, Any]
    groups: list[list[float]]
    version: str = ""
    shots: int | None = None
    seed: int | None = None
    source: str = ""
    seconds: float = 0.0
    precision: str = ""
    weights: str = ""

    def rows(self, row: BenchmarkRow, base: Outcome | None) -> Iterator[BenchmarkRow]:
        """`row` filled in, once per metric, paired with the same documents under full attention.

        There is no difference of what is no mean of its documents' parts: theirs might be of the other sign.
        """
        facts = {key: getattr(self, key) for key in ("version", "shots", "seed", "source", "seconds")}
        for metric in self.metrics:
            parts = metric.parts(self.samples)
            difference = low = high = freedom = None
            theirs = next((other for other in base.metrics if other.name == metric.name), None) if base else None
            if base and theirs and metric.is_mean_of(parts) and theirs.is_mean_of(others := theirs.parts(base.samples)):
                difference, low, high, freedom = paired_difference(parts, others, metric.sign)
            yield replace(
                row, metric=metric.name, value=metric.value, stderr=metric.stderr,
                n=len(set(units_of([document for document, _, _ in parts]).tolist())) or None,
                higher_is_better=metric.higher_is_better, difference=difference, difference_low=low,
                difference_high=high, freedom=freedom, **facts, **self.ledger,
            )  # fmt: skip


def paired_difference(
    ours: dict[Unit, float], theirs: dict[Unit, float], sign: int = 1
) -> tuple[float | None, float | None, float | None, float | None]:
    """Mean difference over the items in both, its 95 % interval by Student's t over documents, and t's freedom.

    For parts of 0 or 1 one document won and one lost is added before the interval is taken: otherwise ten documents of
    equal score would be proof of no difference at all. Of items without a common document, or of too few documents to
    be the units, it is a normal one then (Bonett and Price, 2012).
    """
    both = sorted(ours.keys() & theirs.keys())
    pairs = np.array([[ours[unit], theirs[unit]] for unit in both], dtype=np.float64).reshape(-1, 2)
    if not len(pairs) or not np.isfinite(pairs).all():
        return None, None, None, None
    differences = sign * (pairs[:, 0] - pairs[:, 1])
    mean, (documents, _, tokens) = float(differences.mean()), zip(*both, strict=True)
    if not np.isin(pairs, (0, 1)).all():
        found = estimate(differences, tokens, documents)
        return (found.value, *found.bounds, found.freedom)
    padded = np.append(differences, [1, -1])
    if FEWEST <= len(set(documents)) < len(documents):
        found = estimate(padded, (*tokens, 1, 1), (*documents, "won", "lost"))
        return (mean, *found.bounds, found.freedom)
    half = NORMAL * padded.std() / len(padded) ** 0.5
    return mean, float(padded.mean() - half), float(padded.mean() + half), None


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """The samples as JSON lines, then the rest: whoever finds the rest finds all of it."""
    lines = [json.dumps(sample, ensure_ascii=False, default=str) + "\n" for sample in outcome.samples]
    replace_file(folder / SAMPLES, "".join(lines).encode())
    rest = asdict(replace(outcome, samples=[])) | {"samples": len(lines)}
    replace_file(folder / RESULT, json.dumps(rest, indent=1).encode())


def read_outcome(folder: Path, precision: str, weights: str) -> Outcome | None:
    """What `write_outcome` wrote; None where there is nothing whole, or of another precision or other weights."""
    try:
        rest = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        samples = [json.loads(line) for line in (folder / SAMPLES).read_text(encoding="utf-8").split("\n") if line]
        if (len(samples), precision, weights) != (rest["samples"], rest["precision"], rest["weights"]):
            return None
        return Outcome(**rest | {"samples": samples, "metrics": [Metric(**metric) for metric in rest["metrics"]]})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def slug(name: str) -> str:
    """`name` as part of a path."""
    return re.sub(r"[^a-z0-9@.]+", "_", name.lower()).strip("_")
