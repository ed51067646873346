"""All that is shown of one record: tables, figures and sentences, from the record alone."""

import base64
import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from focus_exp.errors import UserError
from focus_exp.records.groups import GroupLayer
from focus_exp.records.record import Record
from focus_exp.reporting.figures import write_figures
from focus_exp.reporting.findings import all_findings
from focus_exp.reporting.formats import facts_text
from focus_exp.reporting.lines import grouped
from focus_exp.reporting.notes import caveats, title
from focus_exp.reporting.specs import render
from focus_exp.reporting.table import Table
from focus_exp.reporting.tables import all_tables
from focus_exp.storage import replace_file

__all__ = ["Report", "all_findings", "all_tables", "write_report"]
ADAPTER, CARD = "adapter", "README.md"
UNTOLD = ("name", "backend", "warm_start_blocks", "warm_start_steps", "calibration_blocks", "recluster_every")
CONTINUATIONS, PASSAGE = "continuations.md", "passage.html"
MEASURED = "groups/passage.json"
DATA = re.compile(r'<script type="application/gzip" id="data">(.*?)</script>')  # base64


@dataclass(frozen=True)
class Report:
    """findings: sentences; figures: name -> file."""

    findings: list[str]
    tables: list[Table]
    figures: dict[str, Path]


def table_files(findings: list[str], tables: list[Table]) -> dict[str, str]:
    """Name -> text of table.md, in which the findings stand above the tables, and of a CSV a table."""
    said = "".join(f"- {finding}\n" for finding in findings)
    together = "\n".join([*([said] if said else []), *(table.to_markdown() for table in tables)])
    return {"table.md": together} | {f"{table.name}.csv": table.to_csv() for table in tables}


def write_report(record: Record, metrics: list[dict[str, Any]], folder: Path) -> Report:
    """Write tables, figures and pages into `folder`; `metrics` are the lines of metrics.jsonl, in a comparison those of
    all arms, each with its `arm`."""
    findings, tables = all_findings(record), all_tables(record)
    files = table_files(findings, tables)
    if record.continuations:
        prompts = grouped(record.continuations, "prompt")
        files[CONTINUATIONS] = render(CONTINUATIONS, title=title(record), prompts=prompts)
    if record.groups:
        files[PASSAGE] = passage_page(record, measured_passage(folder))
    if (folder / ADAPTER).is_dir():
        files[f"{ADAPTER}/{CARD}"] = card(record, findings, tables[:1])
    for name, text in files.items():
        replace_file(folder / name, text.encode())
    return Report(findings, tables, write_figures(record, metrics, folder / "figures"))


def card(record: Record, findings: list[str], tables: list[Table]) -> str:
    """What the hub shows of an adapter, and who is handed it reads first."""
    attention = {key: value for key, value in record.config["attention"].items() if key not in UNTOLD}
    trains = [phase["train"] for phase in (record.setting("regime", "phases") or {}).values()]
    facts = {"title": title(record), "record": record, "attention": attention, "trains": trains}
    return render("card.md", **facts, findings=findings, tables=tables)


def measured_passage(folder: Path) -> dict[str, Any]:
    """What the analysis of groups left in the run's folder, or the page itself. UserError if both are missing."""
    try:
        if not (folder / MEASURED).exists() and (found := DATA.search((folder / PASSAGE).read_text(encoding="utf-8"))):
            return unpacked(found[1])
        return dict(json.loads((folder / MEASURED).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / MEASURED}: not readable ({error}); run job=analyze again") from error


def passage_page(record: Record, measured: dict[str, Any]) -> str:
    """A passage coloured by group, layer by layer, with what was cut; one file that needs no network."""
    report = record.groups
    assert report is not None
    rows = {(row.layer, row.head): row for row in report.layers}
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
        "layers": [layer | _legend(rows[layer["layer"], layer.get("head")]) for layer in measured["layers"]],
    }
    return render(PASSAGE, title=title(record), data=packed(data))


def _legend(row: GroupLayer) -> dict[str, Any]:
    return {
        "name": row.name,
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


def packed(content: dict[str, Any]) -> str:
    """JSON as a page holds it: compressed, in base64, so that no text in it ends the script element."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def unpacked(text: str) -> dict[str, Any]:
    return dict(json.loads(gzip.decompress(base64.b64decode(text))))
