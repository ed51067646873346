"""passage.html: a passage coloured by group, layer by layer, with what was cut; one file that needs no network."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from focus_exp.errors import UserError
from focus_exp.records.groups import GroupLayer
from focus_exp.records.record import Record
from focus_exp.reporting.tables import caveats, facts, title
from focus_exp.storage import replace_file

NAME = "passage.html"
MEASURED = "groups/passage.json"


def write_page(record: Record, folder: Path) -> Path:
    """Write it from the record and from what the analysis left in `folder`; UserError if that is missing."""
    try:
        measured = json.loads((folder / MEASURED).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / MEASURED}: not readable ({error}); run job=analyze again") from error
    replace_file(folder / NAME, page(record, measured).encode())
    return folder / NAME


def page(record: Record, measured: dict[str, Any]) -> str:
    template = (files("focus_exp.reporting") / "passage_template.html").read_text(encoding="utf-8")
    content = {**measured, **described(record), "layers": layers(record, measured["layers"])}
    return template.replace("{title}", html.escape(title(record))).replace("{data}", script_json(content))


def described(record: Record) -> dict[str, Any]:
    report = record.groups
    assert report is not None
    return {
        "title": title(record),
        "from": report.passage_from,
        "caveats": caveats(record),
        "tagger": report.tagger,
        "class_shares": report.class_shares,
        "window": record.setting("attention", "window"),
        "sinks": record.setting("attention", "sinks"),
        "findings": record.findings,
        "origin": facts({"commit": record.commit, "seed": record.seed, "config": record.config_hash}),
    }


def layers(record: Record, measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert record.groups is not None
    rows = {row.layer: row for row in record.groups.layers}
    return [{**layer, **legend(rows[layer["layer"]])} for layer in measured]


def legend(row: GroupLayer) -> dict[str, Any]:
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


def script_json(content: Any) -> str:
    """JSON that no text in it can end early, whatever the tokens are, as a script element holds it."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
