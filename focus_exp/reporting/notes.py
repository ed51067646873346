"""What stands under a table or above a page of one record: what was run on what, what failed, where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.record import Record
from focus_exp.reporting.formats import facts_text


def title(record: Record) -> str:
    """What was measured on what: experiment, model, data, evaluation length T."""
    names = [getattr(record, part).get("name") or record.setting(part, "name", part) for part in ("model", "data")]
    substitute = " (substitute assets)" if substitutions(record) else ""
    return (
        f"{record.experiment}: {' on '.join(map(str, names))}{substitute}, T = {record.setting('eval', 'window', '?')}"
    )


def substitutions(record: Record) -> list[str]:
    """The sentences that say which model or data stood in for the one asked for."""
    return [str(part["substitution"]) for part in (record.model, record.data) if part.get("substitution")]


def identity(record: Record) -> dict[str, Any]:
    """The CSV columns that trace a line back to its run."""
    return {
        "seed": record.seed,
        **{part: getattr(record, part).get("name") or record.setting(part, "name") for part in ("model", "data")},
        "substitution": " ".join(substitutions(record)),
        "commit": record.commit,
        "config_hash": record.config_hash,
    }


def caveats(record: Record) -> list[str]:
    """What stood in for what, what the run warned of, and that it did not finish."""
    notes = [f"SUBSTITUTE: {sentence}" for sentence in substitutions(record)]
    notes += [f"WARNING: {sentence}" for sentence in record.warnings]
    if record.status != "finished":
        notes.append(f"This run {record.status}: {record.error or 'no reason recorded'}")
    return notes


def assets(record: Record) -> list[str]:
    """The model and the data that were used, where there were any."""
    return [f"{name}: {facts_text(part)}" for name, part in (("Model", record.model), ("Data", record.data)) if part]


def origin(record: Record) -> list[str]:
    """Where and how the numbers came about."""
    values = {
        "device": record.device,
        "commit": record.commit or "not in git",
        "seed": record.seed,
        "config": record.config_hash,
        "command": record.command,
    }
    return [f"Origin: {facts_text(values)}"]


def measured(record: Record) -> list[str]:
    """On how many tokens, under which settings of the attention."""
    scored = next((row.tokens for row in record.rows if row.tokens), None)
    # arms differ in the others
    shared = () if record.arms else ("groups", "top_k", "pair_rule", "assignment")
    attention = {key: record.setting("attention", key) for key in ("window", "sinks", *shared)}
    return [f"Measured: {facts_text({'tokens scored': scored, 'T': record.setting('eval', 'window')} | attention)}"]


def paths(record: Record) -> list[str]:
    """What computed which rows, where a method was attached."""
    rows = [row for row in record.rows if row.path]
    names = {path: [row.name for row in rows if row.path == path] for path in dict.fromkeys(row.path for row in rows)}
    return ["Computed by " + "; ".join(f"{path}: {', '.join(of)}" for path, of in names.items())] if names else []


def trained(record: Record) -> list[str]:
    values = {
        "method": record.method.get("name"),
        "trainable parameters": record.method.get("trainable_parameters"),
        "steps": record.steps,
        "tokens seen": record.tokens_seen,
        "train seconds": record.train_seconds,
        "peak memory bytes": record.peak_memory_bytes,
    }
    return [f"Trained: {facts_text(values)}"]


def failed_rows(record: Record) -> list[str]:
    return [f"{row.name} failed: {row.error}" for row in record.rows if row.error is not None]


def failed_arms(record: Record) -> list[str]:
    said = [f"{arm.name} {arm.status}: {arm.error}" for arm in record.arms if arm.status != "finished"]
    return [*said, *(f"{row.arm} failed: {row.error}" for row in record.rows if row.error is not None and row.arm)]


def failed_continuations(record: Record) -> list[str]:
    return [f"{row.attention}, prompt {row.prompt} failed: {row.error}" for row in record.continuations if row.error]


def failed_tasks(record: Record) -> list[str]:
    return failures(record.benchmarks)


def missing_tasks(record: Record) -> list[str]:
    return failures([row for row in record.benchmarks if row.kind == "missing"])


def failures(rows: list[BenchmarkRow]) -> list[str]:
    """A line for every task that could not be had and every run of one that failed."""
    return [
        f"{row.task} was not measured: {row.error}"
        if row.kind == "missing"
        else f"{row.task} under {row.attention} failed: {row.error}"
        for row in rows
        if row.error is not None
    ]


def sources(record: Record) -> list[str]:
    """Where the items of the benchmarks are from."""
    rows = [row for row in record.benchmarks if row.source and row.error is None]
    said: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        said.setdefault((row.source, row.version), {})[row.task] = None
    return [
        f"{', '.join(tasks)}: items of {source}, {f'version {version}' if version else 'no version'}"
        for (source, version), tasks in said.items()
    ]


def untrained_blocks(record: Record) -> list[str]:
    """Text that routers look at beside what they are trained on."""
    before, after = (record.setting("attention", f"{name}_blocks") or 0 for name in ("warm_start", "calibration"))
    if not before + after:
        return []
    return [
        f"tokens: those trained on; routers are fitted to the base's own attention in {before} blocks before, and "
        f"balanced on {after} blocks after that"
    ]


def settings_of_arms(record: Record) -> list[str]:
    return [f"{arm.name}: {' '.join(arm.settings)} ({arm.folder})" for arm in record.arms]


NOTES: dict[str, Callable[[Record], list[str]]] = {
    note.__name__: note
    for note in (
        caveats, assets, origin, measured, paths, trained, failed_rows, failed_arms, failed_continuations,
        failed_tasks, missing_tasks, sources, untrained_blocks, settings_of_arms,
    )
}  # fmt: skip
