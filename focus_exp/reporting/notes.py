"""What is said of any record: what was measured on what, what stood in for what, where a line comes from."""

from typing import Any

from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.record import Record
from focus_exp.reporting.formats import commit_text


def title(record: Record) -> str:
    """What was measured on what: experiment, model, data, evaluation length T."""
    names = [getattr(record, part).get("name") or record.setting(part, "name", part) for part in ("model", "data")]
    substitute = " (substitute assets)" if substitutions(record) else ""
    others = " and others, by arm" if texts_differ(record) else ""
    on, length = f"{names[1]}{others}{substitute}", record.setting("eval", "window", "?")
    return f"{record.experiment}: {names[0]} on {on}, T = {length}"


def texts_differ(record: Record) -> bool:
    """Whether the arms of a comparison are of several texts, of which the record describes the first one's."""
    asked = {tuple(one for one in arm.settings if one.startswith(("data=", "data.files="))) for arm in record.arms}
    return len(asked) > 1


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


def failures(rows: list[BenchmarkRow]) -> list[str]:
    """A line for every task that could not be had and every run of one that failed."""
    return [
        f"{row.task} was not measured: {row.error}"
        if row.kind == "missing"
        else f"{row.task} under {row.attention} failed: {row.error}"
        for row in rows
        if row.error is not None
    ]


def where(record: Record, model: str = "") -> str:
    """The model, which may stand in for `model`, and the text that were used, the length and the window."""
    parts = []
    for section in ("model", "data"):
        used, asked = getattr(record, section), record.setting(section, "name", section)
        path, other = used.get("source") == "local", model not in ("", asked)
        name = asked if section == "model" and path else used.get("name") or asked
        parts.append(f"{name} (SUBSTITUTE)" if used.get("substitution") or (section == "model" and other) else name)
    shape = f"T = {record.setting('eval', 'window', 0):,}, w = {record.setting('attention', 'window')}"
    device = f", {record.device_kind}" if record.is_timed else ""
    return f"{' on '.join(parts)}, {shape}{device}"


def command_of(record: Record) -> str:
    """What made a record, and at which commit."""
    name = record.config.get("arm") or ""
    alone = f" arm={name}" if name and f"arm={name}" not in record.command.split() else ""
    return f"{record.command}{alone}, {commit_text(record.commit)}"


def intervals_text(record: Record) -> str:
    """What the 95 % of a record's rows mean."""
    units = record.units
    if units is not None:
        of = "" if units.count == units.windows else f" of {units.windows} windows"
        kept = ", from losses.csv" if record.rows else ""
        alone = " (too few documents: they speak of this text alone)" if units.kind == "window" else ""
        first = " of the first arm's text, of others over theirs" if texts_differ(record) else ""
        return f"95 %: Student's t over {units.count} {units.kind}s{of}{first}{alone}, paired{kept}"
    return ""
