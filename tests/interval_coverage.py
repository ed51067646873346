"""python tests/interval_coverage.py FILE: how often 95 % intervals hold the truth, by simulation.

Student's t over units is what focus_exp.results.intervals makes. Beside it a percentile bootstrap over windows, which
records had before: its 95 % are fewer.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from focus_exp.results.intervals import Estimate, estimate, over_seeds

DRAWS = 400  # of a bootstrap
WORKS = (28, 40, 22, 26, 20, 14)  # windows of six documents of different lengths
HEAD = """\
# Coverage of the 95 % intervals

Made by `make coverage`: {runs:,} simulated measurements a line, so a share is known to ± {error:.1f} points. Skewed: a
gamma distribution of shape 2 (skewness 1.4). Clustered: windows of a document share {shared:.0%} of their variance.
Text and seeds: every seed scores the same windows; seed SD in units of the error by the text.

| what is measured | Student's t, as in every record | percentile bootstrap over windows, as before |
| --- | --- | --- |
"""
SHARED = 0.3

Draw = Callable[[np.random.Generator, int], np.ndarray]


def normal(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.standard_normal(count)


def skewed(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.gamma(2.0, 1.0, count) - 2.0


@dataclass(frozen=True)
class Case:
    """windows: of each document; seeds: 0, or how many, whose means vary by `seed_deviation` errors of the text."""

    name: str
    draw: Draw
    windows: tuple[int, ...]
    shared: float = 0.0
    seeds: int = 0
    seed_deviation: float = 0.0

    def sample(self, rng: np.random.Generator) -> tuple[np.ndarray, list[int]]:
        """Differences [seeds, windows] of truth 0, and each window's document."""
        documents = np.repeat(np.arange(len(self.windows)), self.windows)
        own, common = self.draw(rng, len(documents)), self.draw(rng, len(self.windows))[documents]
        text = np.sqrt(1 - self.shared) * own + np.sqrt(self.shared) * common
        moved = rng.standard_normal(max(1, self.seeds)) * self.seed_deviation * text.std() / np.sqrt(len(text))
        return text + moved[:, None], documents.tolist()


def cases() -> Iterator[Case]:
    for name, draw in (("normal", normal), ("skewed", skewed)):
        for count in (6, 12, 20, 60):
            yield Case(f"{count} documents of one window, {name}", draw, (1,) * count)
        yield Case(f"6 documents of 6 windows, clustered, {name}", draw, (6,) * 6, SHARED)
        yield Case(f"6 documents of {min(WORKS)} to {max(WORKS)} windows, clustered, {name}", draw, WORKS, SHARED)
    for documents, seeds in ((12, 3), (12, 5), (6, 2), (6, 3)):
        for deviation in (0.5, 1.0, 3.0, 6.0):
            name = f"{documents} documents, {seeds} seeds of SD {deviation}"
            yield Case(name, normal, (1,) * documents, seeds=seeds, seed_deviation=deviation)


def student(found: np.ndarray, documents: list[int]) -> Estimate:
    return over_seeds([estimate(one, None, documents) for one in found])


def bootstrap(found: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """Of the first seed, for it knew of no others."""
    means = found[0][rng.integers(0, found.shape[1], (DRAWS, found.shape[1]))].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def coverage(case: Case, runs: int, old: bool = False) -> float:
    """The share of `runs` intervals that hold 0, the truth."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(runs):
        found, documents = case.sample(rng)
        low, high = bootstrap(found, rng) if old else student(found, documents).bounds
        held += low <= 0 <= high
    return held / runs


def main(path: Path, runs: int = 10_000) -> None:
    lines = [f"| {c.name} | {coverage(c, runs):.1%} | {coverage(c, runs, old=True):.1%} |\n" for c in cases()]
    head = HEAD.format(runs=runs, error=196 * (0.05 * 0.95 / runs) ** 0.5, shared=SHARED)
    path.write_text(head + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
