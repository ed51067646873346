"""The benchmark table: every task under every attention, paired with full attention, beside what the mask removed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.record import Record
from focus_exp.records.rows import ENGAGED
from focus_exp.reporting.tables import (
    ABSENT,
    Table,
    assets,
    caveats,
    change_text,
    identity,
    origin,
    perplexity_text,
    share_text,
    title,
)

COLUMNS = [
    "task",
    "metric",
    "attention",
    "score ± s.e.",
    "vs full attention [95 %]",
    "pairs removed",
    "distant pairs kept",
    "request tokens",
    "n",
    "shots",
]
NOT_ENGAGED = "not engaged"
# metrics that are shares of the documents, printed in per cent
SHARES = ("acc", "exact_match", "em", "f1")
# from where on a perplexity is written with an exponent
MANY = 100_000
MEANINGS = [
    "vs full attention: paired per document; a share in points, a perplexity in per cent, or in nats of its logarithm",
    "pairs removed, distant pairs kept: counted on that task's own requests; request tokens: median (least to most)",
    f"{NOT_ENGAGED}: under {100 * ENGAGED:.0f} % of the pairs were removed, so the score is close to full attention's "
    "by construction and says nothing of degradation",
]


def benchmark_table(record: Record, rows: list[BenchmarkRow]) -> Table:
    """One line per task, metric and attention, tasks together, full attention first."""
    tasks, metrics = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("task", "metric"))
    ordered = sorted(rows, key=lambda row: (tasks.index(row.task), metrics.index(row.metric)))
    return Table(
        columns=list(COLUMNS),
        rows=[_cells(row) for row in ordered],
        name="benchmarks",
        title=title(record),
        notes=[*caveats(record), *failures(rows), *_sources(rows), *assets(record), *MEANINGS, origin(record)],
        values=[_values(record, row) for row in ordered],
    )


def failures(rows: list[BenchmarkRow]) -> list[str]:
    """A line for every task that could not be had and every run of one that failed."""
    return [
        f"{row.task} was not measured: {row.error}" if row.kind == "missing" else f"{named(row)} failed: {row.error}"
        for row in rows
        if row.error is not None
    ]


def named(row: BenchmarkRow) -> str:
    return f"{row.task} under {row.attention}"


def score_text(row: BenchmarkRow) -> str:
    """The score with its standard error, shares in per cent."""
    if row.error is not None:
        return "not measured" if row.kind == "missing" else "failed"
    if row.value is None:
        return ABSENT
    if is_share(row):
        error = "" if row.stderr is None else f" ± {100 * row.stderr:.1f}"
        return f"{100 * row.value:.1f}{error} %"
    return _number(row.value) + ("" if row.stderr is None else f" ± {_number(row.stderr)}")


def _number(value: float) -> str:
    return perplexity_text(value) if abs(value) < MANY else f"{value:.1e}"


def difference_text(row: BenchmarkRow) -> str:
    """The paired difference with its interval."""
    if row.difference is None:
        return ABSENT
    low, high = row.difference_low, row.difference_high
    if row.is_perplexity and max(abs(row.difference), abs(low or 0), abs(high or 0)) < 1:
        return change_text(row.difference, low, high)
    factor, unit = (100, " points") if is_share(row) else (1, " nats" if row.is_perplexity else "")
    interval = "" if low is None or high is None else f" [{factor * low:+.1f}, {factor * high:+.1f}]"
    return f"{factor * row.difference:+.1f}{interval}{unit}"


def is_share(row: BenchmarkRow) -> bool:
    return row.metric.split(" ")[0].split("_norm")[0] in SHARES


def lengths_text(row: BenchmarkRow) -> str:
    """Tokens of the median request, of the shortest and of the longest; how many were cut."""
    if not row.request_tokens:
        return ABSENT
    least, _, median, _, most = row.request_tokens
    text = f"{median:,} ({least:,} to {most:,})" if least < most else f"{most:,}"
    return f"{text}, {row.truncated:,} of {row.requests:,} CUT" if row.truncated else text


def _cells(row: BenchmarkRow) -> list[str]:
    removed = share_text(row.pairs_removed)
    if row.engaged is False:
        removed = f"{removed} ({NOT_ENGAGED})"
    return [
        row.task,
        row.metric or ABSENT,
        (row.attention or ABSENT) + ("" if row.causal else " (reads the future)"),
        score_text(row),
        difference_text(row),
        removed,
        share_text(row.distant_pairs_kept),
        lengths_text(row),
        ABSENT if row.n is None else f"{row.n:,}",
        ABSENT if row.shots is None else str(row.shots),
    ]


def _values(record: Record, row: BenchmarkRow) -> dict[str, Any]:
    values = asdict(row)
    for key in ("request_tokens", "removed_by_layer"):
        values[key] = " ".join(map(str, values[key]))
    # the run's seed is another one
    values["fewshot_seed"] = values.pop("seed")
    return {"experiment": record.experiment, **values, "engaged": row.engaged, **identity(record)}


def _sources(rows: list[BenchmarkRow]) -> list[str]:
    tasks: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.source and row.error is None:
            version = f"version {row.version}" if row.version else "no version"
            tasks.setdefault((row.source, version), {})[row.task] = None
    return [f"{', '.join(names)}: items of {source}, {version}" for (source, version), names in tasks.items()]
