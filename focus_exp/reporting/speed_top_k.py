"""Quality beside speed: what each k costs in perplexity and what it was measured to save, the paper's claim beside."""

from __future__ import annotations

from math import isclose
from typing import Any

from focus_exp.records.record import Record
from focus_exp.records.speed import SpeedRow
from focus_exp.reporting.printed import paper_rows
from focus_exp.reporting.speed import by_top_k, quality_row, setting
from focus_exp.reporting.speed_notes import (
    ASSIGNMENTS,
    BOUND,
    CASE_FIELDS,
    MEASURED_FIELDS,
    RATIO,
    notes,
    number_text,
)
from focus_exp.reporting.tables import ABSENT, Table, change_text, identity, perplexity_text, share_text

PAPER_GROUPS = 4  # K of every row of the paper's table 7
QUALITY_FIELDS = ("perplexity", "delta_nll", "delta_low", "delta_high", "distant_pairs_kept")
NOTES = [
    RATIO,
    BOUND,
    "perplexity, distant pairs kept: on the evaluation's own windows, with this model's router, whatever groups were "
    "timed",
    "paper: table 7 of arXiv 2604.03260, GPT-2 124M on PG-19, K = 4, pairs by sharing a group; its speedup is K/k, "
    "computed from k, not timed",
]


def top_k_table(record: Record) -> Table | None:
    """The paper's table 7 with measured times; None where k does not vary."""
    rows = by_top_k(record)
    if not rows:
        return None
    values = [_values(record, row) for row in rows]
    clock = "attention with routing" if rows[0].clock == "attention" else "prefill"
    columns = [
        *("tokens", "K", "groups", "k", "perplexity", "vs base [95 %]", "distant pairs kept"),
        *("pairs kept at this length", f"measured ratio, {clock}", "bound of attention"),
        *("paper: perplexity", "paper: distant pairs kept", 'paper\'s claim K/k ("speedup"), not a measurement'),
    ]
    return Table(
        columns=columns,
        rows=[_cells(row, value) for row, value in zip(rows, values, strict=True)],
        name="speed_top_k",
        title=f"{record.experiment}: quality and speed by k",
        notes=notes(record, rows, NOTES),
        values=values,
    )


def _values(record: Record, row: SpeedRow) -> dict[str, Any]:
    quality = quality_row(record, setting(row))
    wanted = ("gpt2_124m", row.top_k, row.groups)
    printed: list[dict[str, Any]] = paper_rows("table7_topk")
    paper = next((line for line in printed if (line["model"], line["top_k"], PAPER_GROUPS) == wanted), {})
    return {
        "experiment": record.experiment,
        **{name: getattr(row, name) for name in (*CASE_FIELDS, "pairs_kept", "bound", *MEASURED_FIELDS)},
        **{name: getattr(quality, name, None) for name in QUALITY_FIELDS},
        "quality_error": quality.error if quality else None,
        "paper_perplexity": paper.get("ppl"),
        "paper_pairs_retained": retained / 100 if (retained := paper.get("pairs_retained_percent")) else None,
        "paper_claimed_speedup": paper.get("claimed_speedup"),
        "device": record.device,
        **identity(record),
    }


def _cells(row: SpeedRow, values: dict[str, Any]) -> list[str]:
    return [
        f"{row.tokens:,}",
        str(row.groups),
        ASSIGNMENTS[row.assignment],
        str(row.top_k) if row.top_k == 1 else f"{row.top_k} ({row.pair_rule})",
        perplexity_text(values["perplexity"]) if values["quality_error"] is None else "failed",
        change_text(values["delta_nll"], values["delta_low"], values["delta_high"]),
        _kept(values["distant_pairs_kept"]),
        _kept(row.pairs_kept),
        number_text(row.ratio) if row.error is None else "failed",
        number_text(row.bound),
        _printed(values["paper_perplexity"]),
        _kept(values["paper_pairs_retained"]),
        _printed(values["paper_claimed_speedup"]),
    ]


def _printed(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.1f}"


def _kept(share: float | None) -> str:
    return f"{share_text(share)} (full attention)" if isclose(share or 0.0, 1.0) else share_text(share)
