"""All that is shown of a record: tables, figures and sentences, from the record alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from focus_exp.records.record import Record
from focus_exp.reporting.benchmarks import benchmark_table
from focus_exp.reporting.comparison import comparison_tables
from focus_exp.reporting.continuations import continuation_table, write_continuations
from focus_exp.reporting.figures import write_figures
from focus_exp.reporting.findings import all_findings
from focus_exp.reporting.groups import group_tables
from focus_exp.reporting.passage import write_page
from focus_exp.reporting.speed_methods import method_table
from focus_exp.reporting.speed_tables import speed_tables
from focus_exp.reporting.stability import stability_table
from focus_exp.reporting.tables import Table, quality_table
from focus_exp.storage import replace_file

__all__ = ["Report", "all_findings", "all_tables", "write_report"]


@dataclass(frozen=True)
class Report:
    """figures: name -> file."""

    tables: list[Table]
    figures: dict[str, Path]


def all_tables(record: Record) -> list[Table]:
    if record.arms:
        tables = [*comparison_tables(record), *([stability_table(record)] if record.probes else [])]
    elif record.continuations:
        tables = [continuation_table(record)]
    elif record.groups:
        tables = group_tables(record)
    else:
        tables = [quality_table(record)] if record.rows or not record.speed else []
    if record.benchmarks:
        tables.append(benchmark_table(record, record.benchmarks))
    return [*tables, *speed_tables(record), *([method_table(record)] if record.method_speed else [])]


def write_report(record: Record, metrics: list[dict[str, Any]], folder: Path) -> Report:
    """Write table.md, one CSV a table and the figures into `folder`; `metrics` are the lines of metrics.jsonl,
    in a comparison those of all arms, each with its `arm`."""
    tables = all_tables(record)
    replace_file(folder / "table.md", "\n".join(table.to_markdown() for table in tables).encode())
    for table in tables:
        replace_file(folder / f"{table.name}.csv", table.to_csv().encode())
    if record.continuations:
        write_continuations(record, folder)
    if record.groups:
        write_page(record, folder)
    return Report(tables, write_figures(record, metrics, folder / "figures"))
