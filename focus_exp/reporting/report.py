"""All that is shown of one record: tables, figures and sentences, from the record alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from focus_exp.errors import UserError
from focus_exp.records.groups import GroupLayer
from focus_exp.records.record import Record
from focus_exp.reporting.figures import write_figures
from focus_exp.reporting.findings import all_findings
from focus_exp.reporting.formats import facts_text
from focus_exp.reporting.lines import grouped
from focus_exp.reporting.notes import caveats, title
from focus_exp.reporting.specs import render
from focus_exp.reporting.tables import Table, all_tables
from focus_exp.storage import replace_file

__all__ = ["Report", "all_findings", "all_tables", "write_report"]
CONTINUATIONS, PASSAGE = "continuations.md", "passage.html"
MEASURED = "groups/passage.json"


@dataclass(frozen=True)
class Report:
    """figures: name -> file."""

    tables: list[Table]
    figures: dict[str, Path]


def table_files(tables: list[Table]) -> dict[str, str]:
    """Name -> text of table.md and of a CSV a table."""
    together = "\n".join(table.to_markdown() for table in tables)
    return {"table.md": together} | {f"{table.name}.csv": table.to_csv() for table in tables}


def write_report(record: Record, metrics: list[dict[str, Any]], folder: Path) -> Report:
    """Write tables, figures and pages into `folder`; `metrics` are the lines of metrics.jsonl, in a comparison those of
    all arms, each with its `arm`."""
    tables = all_tables(record)
    files = table_files(tables)
    if record.continuations:
        prompts = grouped(record.continuations, "prompt")
        files[CONTINUATIONS] = render(CONTINUATIONS, title=title(record), prompts=prompts)
    if record.groups:
        files[PASSAGE] = passage_page(record, measured_passage(folder))
    for name, text in files.items():
        replace_file(folder / name, text.encode())
    return Report(tables, write_figures(record, metrics, folder / "figures"))


def measured_passage(folder: Path) -> dict[str, Any]:
    """What the analysis of groups left in the run's folder. UserError if it is missing."""
    try:
        measured: dict[str, Any] = json.loads((folder / MEASURED).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / MEASURED}: not readable ({error}); run job=analyze again") from error
    return measured


def passage_page(record: Record, measured: dict[str, Any]) -> str:
    """A passage coloured by group, layer by layer, with what was cut; one file that needs no network."""
    report = record.groups
    assert report is not None
    rows = {row.layer: row for row in report.layers}
    data = measured | {
        "title": title(record),
        "from": report.passage_from,
        "caveats": caveats(record),
        "tagger": report.tagger,
        "class_shares": report.class_shares,
        "window": record.setting("attention", "window"),
        "sinks": record.setting("attention", "sinks"),
        "findings": all_findings(record),
        "origin": facts_text({"commit": record.commit, "seed": record.seed, "config": record.config_hash}),
        "layers": [layer | _legend(rows[layer["layer"]]) for layer in measured["layers"]],
    }
    return render(PASSAGE, title=title(record), data=data, script=script_json)


def _legend(row: GroupLayer) -> dict[str, Any]:
    return {
        "nmi": row.fit("trained").nmi,
        "cut_mass": row.cut_mass,
        "pairs_kept": row.distant_pairs_kept,
        "mass_kept": row.distant_mass_kept,
        "legend": [
            {
                "name": group.name, "share": group.share, "class": group.word_class, "purity": group.purity,
                "class_share": group.class_share, "confidence": group.confidence, "tokens": group.tokens,
            }
            for group in row.groups
        ],
    }  # fmt: skip


def script_json(content: Any) -> Markup:
    """JSON that no text in it can end early, whatever the tokens are, as a script element holds it."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
