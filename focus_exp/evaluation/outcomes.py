"""What running a task gives: metrics, each document's part in them, the ledger; on disk, and compared in pairs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.storage import replace_file

NO_FILTER = "none"
# of the normal distribution, for 95 %
Z = 1.959964
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

    def parts(self, samples: list[dict[str, Any]]) -> dict[str, float]:
        """Document -> its part in this metric."""
        return {
            sample["document"]: sample["scores"][self.key]
            for sample in samples
            if sample["filter"] == self.filter and self.key in sample["scores"]
        }


@dataclass
class Outcome:
    """A task's result under one attention.

    samples: per document (and filter) what was asked and answered, and `scores`, its part in each metric.
    ledger: the fields of `BenchmarkRow` that `Ledger.summary` gives. groups: shares of the tokens `[layers][K]`.
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

    def rows(self, row: BenchmarkRow, base: Outcome | None) -> Iterator[BenchmarkRow]:
        """`row` filled in, once per metric, paired with the same documents under full attention."""
        facts = {key: getattr(self, key) for key in ("version", "shots", "seed", "source", "seconds")}
        for metric in self.metrics:
            parts = metric.parts(self.samples)
            low = high = difference = None
            if base is not None:
                difference, low, high = paired_difference(parts, metric.parts(base.samples), metric.sign)
            yield replace(
                row, metric=metric.name, value=metric.value, stderr=metric.stderr, n=len(parts) or None,
                higher_is_better=metric.higher_is_better, difference=difference, difference_low=low,
                difference_high=high, **facts, **self.ledger,
            )  # fmt: skip


def paired_difference(
    ours: dict[str, float], theirs: dict[str, float], sign: int = 1
) -> tuple[float, float, float] | tuple[None, None, None]:
    """Mean difference over the documents in both, and its 95 % interval by Student's t; of under three nothing is said.

    For parts of 0 or 1 one document won and one lost is added before the interval is taken (Bonett and Price, 2012):
    otherwise ten documents of equal score would be proof of no difference at all.
    """
    both = sorted(ours.keys() & theirs.keys())
    pairs = np.array([[ours[document], theirs[document]] for document in both], dtype=np.float64).reshape(-1, 2)
    if len(pairs) < 3 or not np.isfinite(pairs).all():
        return None, None, None
    differences = sign * (pairs[:, 0] - pairs[:, 1])
    mean = float(differences.mean())
    if np.isin(pairs, (0, 1)).all():
        padded = np.append(differences, [1, -1])
        centre, half = padded.mean(), Z * padded.std() / len(padded) ** 0.5
    else:
        centre, half = mean, student(len(pairs) - 1) * differences.std(ddof=1) / len(pairs) ** 0.5
    return mean, float(centre - half), float(centre + half)


def student(freedom: int) -> float:
    """The factor in place of Z for few degrees of freedom, 2 or more (Abramowitz and Stegun, 26.7.5)."""
    terms = (Z**3 + Z) / 4, (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96, (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """The samples as JSON lines, then the rest: whoever finds the rest finds all of it."""
    lines = [json.dumps(sample, ensure_ascii=False, default=str) + "\n" for sample in outcome.samples]
    replace_file(folder / SAMPLES, "".join(lines).encode())
    rest = asdict(replace(outcome, samples=[])) | {"samples": len(lines)}
    replace_file(folder / RESULT, json.dumps(rest, indent=1).encode())


def read_outcome(folder: Path) -> Outcome | None:
    """What `write_outcome` wrote; None where there is nothing whole."""
    try:
        rest = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        samples = [json.loads(line) for line in (folder / SAMPLES).read_text(encoding="utf-8").split("\n") if line]
        if len(samples) != rest["samples"]:
            return None
        return Outcome(**rest | {"samples": samples, "metrics": [Metric(**metric) for metric in rest["metrics"]]})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def slug(name: str) -> str:
    """`name` as part of a path."""
    return re.sub(r"[^a-z0-9@.]+", "_", name.lower()).strip("_")
