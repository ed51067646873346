"""Tables made from records: Markdown to read, CSV to compute with, the console to look at."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from focus_exp.records.record import Record
from focus_exp.records.rows import Row

ABSENT = "-"
COLUMNS = [
    "attention",
    "perplexity [95 %]",
    "vs base [95 %]",
    "distant pairs kept",
    "pairs removed",
    "PPL beyond window",
    "largest group",
    "causal",
]


@dataclass
class Table:
    """Cells as read by people in `rows`; the same numbers unrounded in `values`, one dict per row, for CSV.

    `name` tells the tables of one record apart, for instance as files.
    """

    columns: list[str]
    rows: list[list[str]]
    name: str = "table"
    title: str = ""
    notes: list[str] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)

    def to_markdown(self) -> str:
        """Title, pipe table, notes as a list."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        table = "\n".join("| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines)
        heading = f"### {_plain(self.title)}\n\n" if self.title else ""
        notes = "".join(f"- {_plain(note)}\n" for note in self.notes)
        return f"{heading}{table}\n" + (f"\n{notes}" if notes else "")

    def to_csv(self) -> str:
        """Header and one line per row with full-precision numbers; an absent number is an empty cell."""
        values = self.values or [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        columns = list(values[0]) if values else self.columns
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(values)
        return text.getvalue()

    def to_console(self) -> Group:
        """A rich renderable: `Console().print(table.to_console())`."""
        table = RichTable(title=Text(self.title), title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(Text(column), justify="right" if index else "left", no_wrap=index == 0)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return Group(table, *(Text(f"  {note}", style="dim") for note in self.notes))


def quality_table(record: Record) -> Table:
    """One line per row of the record, in its order, with what was really run in the notes."""
    return Table(
        columns=list(COLUMNS),
        rows=[_cells(row) for row in record.rows],
        name="quality",
        title=title(record),
        notes=_notes(record),
        values=[_values(record, row) for row in record.rows],
    )


def title(record: Record) -> str:
    """What was measured on what: experiment, model, data, evaluation length T."""
    model = record.model.get("name") or record.setting("model", "name", "model")
    data = record.data.get("name") or record.setting("data", "name", "data")
    substitute = " (substitute assets)" if substitutions(record) else ""
    return f"{record.experiment}: {model} on {data}{substitute}, T = {record.setting('eval', 'window', '?')}"


def substitutions(record: Record) -> list[str]:
    """The sentences that say which model or data stood in for the one asked for."""
    return [str(part["substitution"]) for part in (record.model, record.data) if part.get("substitution")]


def perplexity_text(value: float | None) -> str:
    """Two decimals below 1000, none above."""
    return ABSENT if value is None else f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def share_text(share: float | None) -> str:
    """A share 0..1 in per cent."""
    return ABSENT if share is None else f"{100 * share:.1f} %"


def change_text(delta: float | None, low: float | None = None, high: float | None = None) -> str:
    """A difference of losses [nats per token] as a change of perplexity in per cent, with its interval."""
    if delta is None:
        return ABSENT
    text = f"{_percent(delta)} %"
    return text if low is None or high is None else f"{text} [{_percent(low)}, {_percent(high)}]"


def _percent(delta: float) -> str:
    return f"{100 * math.expm1(min(delta, 700.0)):+.2f}"


def _cells(row: Row) -> list[str]:
    if row.error is not None:
        perplexity = "failed"
    else:
        perplexity = perplexity_text(row.perplexity)
        if row.perplexity_low is not None and row.perplexity_high is not None:
            perplexity += f" [{perplexity_text(row.perplexity_low)}, {perplexity_text(row.perplexity_high)}]"
    removed = share_text(row.pairs_removed)
    if row.soft and row.error is None:
        removed = f"{removed} (soft gate)"
    elif row.engaged is False:
        removed = f"{removed} (not engaged)"
    return [
        row.name,
        perplexity,
        ABSENT if row.kind == "base" else change_text(row.delta_nll, row.delta_low, row.delta_high),
        share_text(row.distant_pairs_kept),
        removed,
        perplexity_text(row.perplexity_beyond_window),
        share_text(row.largest_group),
        "yes" if row.causal else "no: reads the future",
    ]


def _values(record: Record, row: Row) -> dict[str, Any]:
    values = asdict(row)
    del values["by_position"]
    return {
        "experiment": record.experiment,
        **values,
        "engaged": row.engaged,
        **identity(record),
    }


def identity(record: Record) -> dict[str, Any]:
    """The CSV columns that trace a line back to its run."""
    return {
        "seed": record.seed,
        "model": record.model.get("name") or record.setting("model", "name"),
        "data": record.data.get("name") or record.setting("data", "name"),
        "substitution": " ".join(substitutions(record)),
        "commit": record.commit,
        "config_hash": record.config_hash,
    }


def caveats(record: Record) -> list[str]:
    """Notes on what stood in for what, on what the run warned of, and on a run that did not finish."""
    notes = [f"SUBSTITUTE: {sentence}" for sentence in substitutions(record)]
    notes += [f"WARNING: {sentence}" for sentence in record.warnings]
    if record.status != "finished":
        notes.append(f"This run {record.status}: {record.error or 'no reason recorded'}")
    return notes


def assets(record: Record) -> list[str]:
    """Notes on the model and the data that were used, where there were any."""
    return [f"{name}: {facts(part)}" for name, part in (("Model", record.model), ("Data", record.data)) if part]


def origin(record: Record) -> str:
    """The note that says where and how the numbers came about."""
    values = {
        "device": record.device,
        "commit": record.commit or "not in git",
        "seed": record.seed,
        "config": record.config_hash,
        "command": record.command,
    }
    return f"Origin: {facts(values)}"


def facts(values: dict[str, Any]) -> str:
    """The pairs in a line; without what is empty, and without the substitution, which has its own note."""
    known = {key: value for key, value in values.items() if value not in (None, "") and key != "substitution"}
    return ", ".join(f"{key} {_number(value)}" for key, value in known.items())


def _notes(record: Record) -> list[str]:
    failed = [f"{row.name} failed: {row.error}" for row in record.rows if row.error is not None]
    scored = next((row.tokens for row in record.rows if row.tokens), None)
    attention = record.config.get("attention") or {}
    measured = {
        "tokens scored": scored,
        "T": record.setting("eval", "window"),
        **{key: attention.get(key) for key in ("window", "sinks", "groups", "top_k", "pair_rule", "assignment")},
    }
    trained = {
        "method": record.method.get("name"),
        "trainable parameters": record.method.get("trainable_parameters"),
        "steps": record.steps,
        "tokens seen": record.tokens_seen,
        "train seconds": record.train_seconds,
        "peak memory bytes": record.peak_memory_bytes,
    }
    return [
        *caveats(record),
        *failed,
        *assets(record),
        f"Measured: {facts(measured)}",
        *_paths(record),
        f"Trained: {facts(trained)}",
        origin(record),
        "vs base: change of perplexity, paired on the same tokens; intervals: bootstrap over windows",
    ]


def _paths(record: Record) -> list[str]:
    """What computed which rows, where a method was attached."""
    paths: dict[str, list[str]] = {}
    for row in record.rows:
        if row.path:
            paths.setdefault(row.path, []).append(row.name)
    return ["Computed by " + "; ".join(f"{path}: {', '.join(names)}" for path, names in paths.items())] if paths else []


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _plain(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")
