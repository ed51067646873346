"""Arms of a comparison in two tables, perplexity and benchmarks, and in words."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from focus_exp.records.answers import row_of
from focus_exp.records.benchmarks import BenchmarkRow, telling
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm, Row
from focus_exp.reporting.benchmarks import NOT_ENGAGED, difference_text, failures, score_text
from focus_exp.reporting.tables import (
    ABSENT,
    Table,
    assets,
    caveats,
    change_text,
    facts,
    identity,
    origin,
    perplexity_text,
    share_text,
    title,
)

NON_CAUSAL = "reads the future"


def comparison_tables(record: Record) -> list[Table]:
    """One line an arm: perplexity against the base and the first arm; scores on benchmarks, if there are any."""
    first = record.arms[0].name
    columns = [
        *("arm", "trained parameters", "learning rate", "tokens", "perplexity [95 %]", "vs base [95 %]"),
        *(f"vs {first} [95 %]", "distant pairs kept", "pairs removed", "largest group", "training [s]"),
        "what was measured",
    ]
    lines = [(arm, row_of(record, arm.name)) for arm in record.arms]
    base = ["base", "0", ABSENT, "0", *_perplexity(record.base), ABSENT, "100.0 %", "0.0 %", ABSENT, ABSENT]
    table = Table(
        columns=columns,
        rows=[[*base, "full attention"], *(_cells(arm, row) for arm, row in lines)],
        name="comparison",
        title=title(record),
        notes=_notes(record),
        values=[_values(record, arm, row) for arm, row in lines],
    )
    return [table, _benchmarks(record)] if record.benchmarks else [table]


def _perplexity(row: Row | None) -> list[str]:
    """Perplexity with its interval, and the change from the base."""
    if row is None or not row.scored:
        return ["failed", ABSENT]
    interval = ""
    if row.perplexity_low is not None and row.perplexity_high is not None:
        interval = f" [{perplexity_text(row.perplexity_low)}, {perplexity_text(row.perplexity_high)}]"
    return [perplexity_text(row.perplexity) + interval, change_text(row.delta_nll, row.delta_low, row.delta_high)]


def _cells(arm: Arm, row: Row | None) -> list[str]:
    trained = [
        f"{arm.trainable_parameters:,}" if arm.steps else "0",
        ABSENT if arm.learning_rate is None else f"{arm.learning_rate:g}",
        f"{arm.tokens_seen:,}",
    ]
    if row is None:
        return [arm.name, *trained, *_perplexity(None), *[ABSENT] * 6]
    removed = share_text(row.pairs_removed) + (f" ({NOT_ENGAGED})" if row.engaged is False else "")
    return [
        arm.name + ("" if row.causal else f" ({NON_CAUSAL})"),
        *trained,
        *_perplexity(row),
        change_text(row.delta_vs_hard, row.delta_vs_hard_low, row.delta_vs_hard_high),
        share_text(row.distant_pairs_kept),
        removed,
        share_text(row.largest_group),
        ABSENT if arm.train_seconds is None or not arm.steps else f"{arm.train_seconds:,.0f}",
        row.name,
    ]


def _values(record: Record, arm: Arm, row: Row | None) -> dict[str, Any]:
    values = asdict(row or Row(name="", kind="control", method="", causal=True))
    del values["by_position"], values["arm"], values["error"]
    run = asdict(arm) | {"settings": " ".join(arm.settings)}
    return {
        "experiment": record.experiment,
        **{("arm" if key == "name" else f"arm_{key}"): value for key, value in run.items()},
        **values,
        **identity(record),
    }


def _failed(record: Record) -> list[str]:
    said = [f"{arm.name} {arm.status}: {arm.error}" for arm in record.arms if arm.status != "finished"]
    return [*said, *(f"{row.arm} failed: {row.error}" for row in record.rows if row.error is not None and row.arm)]


def _notes(record: Record) -> list[str]:
    first = record.arms[0].name
    scored = next((row.tokens for row in record.rows if row.tokens), None)
    measured = {"tokens scored": scored, "T": record.setting("eval", "window")}
    shared = record.config.get("attention") or {}
    return [
        *caveats(record),
        *_failed(record),
        *assets(record),
        f"Measured: {facts(measured | {key: shared.get(key) for key in ('window', 'sinks')})}",
        f"vs base, vs {first}: change of perplexity, paired on the same tokens; intervals: bootstrap over windows",
        "distant pairs lie beyond an arm's own window and sinks; compare pairs removed",
        *_untrained_blocks(shared),
        origin(record),
        *(f"{arm.name}: {' '.join(arm.settings)} ({arm.folder})" for arm in record.arms),
    ]


def _untrained_blocks(attention: dict[str, Any]) -> list[str]:
    """Text that routers look at beside what they are trained on."""
    before, after = (attention.get(f"{name}_blocks") or 0 for name in ("warm_start", "calibration"))
    if not before + after:
        return []
    return [
        f"tokens: those trained on; routers are fitted to the base's own attention in {before} blocks before, and "
        f"balanced on {after} blocks after that"
    ]


def _benchmarks(record: Record) -> Table:
    """One column a task; of a task's metrics the one in which an arm lost, if it did."""
    rows = telling([row for row in record.benchmarks if row.kind != "missing"])
    tasks = list(dict.fromkeys(row.task for row in rows))
    names = list(dict.fromkeys(row.attention for row in rows))
    found = {(row.attention, row.task): row for row in rows}
    return Table(
        columns=["arm", *tasks],
        rows=[[name, *(_benchmark(found.get((name, task))) for task in tasks)] for name in names],
        name="benchmark_changes",
        title=f"{title(record)}: benchmarks and their change from full attention [95 %]",
        notes=[
            *failures([row for row in record.benchmarks if row.kind == "missing"]),
            "change: paired per document, accuracies in points; of several metrics the one in which the arm lost",
            f"{NOT_ENGAGED}: the mask removed under 5 % of the pairs of that task's requests, so nothing is shown",
            origin(record),
        ],
    )


def _benchmark(row: BenchmarkRow | None) -> str:
    if row is None:
        return ABSENT
    if not row.scored:
        return "failed"
    change = "" if row.difference is None else f", {difference_text(row)}"
    idle = f" ({NOT_ENGAGED})" if row.engaged is False else ""
    reads = "" if row.causal else f" ({NON_CAUSAL})"
    metric = "perplexity " if row.is_perplexity else ""
    return f"{metric}{score_text(row)}{change}{idle}{reads}"
