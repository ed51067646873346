"""Write what a finished run shows: tables, figures, texts and card."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd

from focus_exp.reporting.figures import loss_curves, save_figures
from focus_exp.reporting.format import (
    ABSENT,
    format_change,
    format_number,
    format_percent,
    format_significant,
    to_markdown,
)
from focus_exp.reporting.frame import BASE, FULL, filter_rows, read_yaml, to_rows
from focus_exp.reporting.groups import describe_groups, draw_passages, groups_table, list_pairs, pairs_table
from focus_exp.reporting.load import Results, load_run, read_log
from focus_exp.results.record import RECORD, Record
from focus_exp.storage import replace_file

TABLE = "table.md"


def write_run_report(run_dir: Path) -> tuple[Results, dict[str, pd.DataFrame]]:
    """Write what a run shows; return its rows and tables.

    That is table.md, figures, continuations.md, and the README of an adapter.
    """
    record, results = Record.load(run_dir / RECORD), load_run(run_dir)
    title, tables = make_title(results), run_tables(results.rows)
    replace_file(run_dir / TABLE, render_run(results, tables).encode())
    save_figures({"loss_curve": loss_curves(read_log(run_dir), title)}, run_dir / "figures")
    for name, drawing in draw_passages(results.rows).items():
        replace_file(run_dir / "figures" / f"{name}.svg", drawing.encode())
    if record.continuations:
        replace_file(run_dir / "continuations.md", render_continuations(record.continuations, title).encode())
    if (run_dir / "adapter").is_dir():
        card = render_card(results, record.config, tables)
        replace_file(run_dir / "adapter" / "README.md", card.encode())
    return results, tables


def make_title(results: Results) -> str:
    """Return experiment, model, data and sequence length of a run."""
    run = results.runs.iloc[-1]
    return f"{run.experiment}: {run.model} on {run.data}, {run.seq_len} tokens"


def render_run(results: Results, tables: dict[str, pd.DataFrame]) -> str:
    """Return the tables of a run as Markdown, provenance once below."""
    run = results.runs.iloc[-1]
    own = results.rows[results.rows.own_tokens.notna()]
    tokens = {name: f"{name} {count}" for name, count in zip(own["name"], own.train_tokens, strict=True)}
    facts = {"model": run.model, "data": run.data, "training text": run.training_text}
    facts |= {"device": run.device, "seed": run.seed}
    if run.train_tokens or tokens:  # not of a comparison, whose variants have theirs
        facts |= {"steps": run.steps, "training tokens": ", ".join([str(run.train_tokens), *tokens.values()])}
    facts |= {"commit": run.commit, "config": run.config_hash}
    facts |= {"status": run.status if pd.isna(run.error) else f"{run.status}, {run.error}"}
    parts = [f"# {make_title(results)}"]
    substituted = [part for part in ("model", "data") if run[f"is_{part}_substituted"]]
    if substituted:
        used, requested = (
            " and ".join(run[f"{part}_{kind}"] for part in substituted) for kind in ("used", "requested")
        )
        parts.append(f"Substitute: {used}, in place of {requested}.")
    parts += [] if run.is_causal else ["Non-causal router: its perplexity cannot be compared with a causal model's."]
    parts += [f"Warnings: {run.warnings}"] if run.warnings else []
    for name, table in tables.items():
        parts += [f"## {name}", to_markdown(table).strip()]
    parts.append("; ".join(f"{name}: {value}" for name, value in facts.items() if not pd.isna(value)))
    parts.append(f"`{run.command}`")
    return "\n\n".join(parts) + "\n"


def run_tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the tables of a run as text by name."""
    tables = {name: make(rows) for name, make in RUN_TABLES.items()}
    return {name: table for name, table in tables.items() if not table.empty}


def quality_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Perplexity and its paired changes; one row for each routing, control or variant."""
    scored = to_rows(filter_rows(rows, {"source": "rows", "metric": "perplexity"}))
    reference = next((row.variant or row.name for row in scored if row.primary), BASE)
    changes = format_changes(filter_rows(rows, {"source": "rows", "metric": "nll_change"}))
    shown = [
        {
            "variant": BASE if row.kind == BASE else row.variant or row.name,
            "routing": row.name,
            "perplexity": "failed" if row.error else format_number(row.value),
            "ΔPPL [%], base": changes.get((row.subject, row.variant, BASE), ABSENT),
            f"ΔPPL [%], {reference}"[:25]: changes.get((row.subject, row.variant, reference), ABSENT),
            "sparsity [%]": format_percent(row.sparsity),
            "distant density [%]": format_percent(row.distant_density),
            "largest group [%]": format_percent(row.largest_group),
            "causal": "no" if row.causal is False else "yes",
        }
        for row in scored
    ]
    frame = pd.DataFrame(shown)
    frame = frame.drop(columns=[name for name in frame if (frame[name] == ABSENT).all()])  # the reference's own
    return without_repeated_routing(frame)


def without_repeated_routing(frame: pd.DataFrame) -> pd.DataFrame:
    """Drop the column `routing` where it only repeats the variant."""
    return frame.drop(columns="routing") if len(frame) and (frame.routing == frame.variant).all() else frame


def format_changes(rows: pd.DataFrame) -> dict[tuple[Any, ...], str]:
    """Return paired changes as text by subject, variant and reference; of repeated ones the first."""
    changed = to_rows(rows[::-1])
    return {(r.subject, r.variant, r.reference): format_change(r.value, r.low, r.high, r.unit) for r in changed}


def benchmark_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return scores and paired changes from full attention, in per cent and points."""
    changes = format_changes(filter_rows(rows, {"source": "benchmarks", "metric": "score_change"}))
    shown = []
    for row in to_rows(filter_rows(rows, {"source": "benchmarks", "metric": "score"})):
        failure = row.error and ("left out" if row.left_out else "failed")
        shown.append(
            {
                "task": row.task,
                "metric": row.task_metric or ABSENT,
                "variant": BASE if row.kind == BASE or row.variant is None else row.variant,
                "routing": row.subject.partition(f" {row.task} ")[0],
                "score": failure or (format_percent if row.unit == "fraction" else format_number)(row.value),
                "change": changes.get((row.subject, row.variant, FULL), ABSENT),
                "sparsity [%]": format_percent(row.sparsity) + (" †" if row.mask_active is False else ""),
                "items": format_number(row.n, 0),
            }
        )
    return without_repeated_routing(pd.DataFrame(shown))


def speed_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return times next to full attention."""
    shown = [
        {
            "clock": row.clock,
            "method": row.method or "focus",
            "tokens": format_number(row.tokens, 0),
            "K": format_number(row.groups, 0),
            "k": format_number(row.top_k, 0),
            "groups": row.assignment or ABSENT,
            "full [ms]": format_significant(_milliseconds(row.reference_level)),
            "ours [ms]": "failed" if row.error else format_significant(_milliseconds(row.level)),
            "speedup": format_significant(row.value),
            "path": row.path or ABSENT,
        }
        for row in to_rows(filter_rows(rows, {"metric": "speedup"}))
    ]
    return pd.DataFrame(shown)


def pivot_table(rows: pd.DataFrame, source: str, index: list[str]) -> pd.DataFrame:
    """Return a row for each `index`, a column for each metric; means over prompts."""
    frame = filter_rows(rows, {"source": source})[[*index, "metric", "value"]].astype({"value": float})
    if frame.empty:
        return pd.DataFrame()
    frame[index] = frame[index].map(lambda cell: ABSENT if cell is None else str(cell))
    wide = frame.pivot_table(index=index, columns="metric", values="value", sort=False).reset_index()
    wide = wide.drop(columns=[name for name in index if (wide[name] == ABSENT).all()]).rename(columns=label_metric)
    return wide.map(lambda cell: cell if isinstance(cell, str) else format_significant(cell))


def label_metric(name: str) -> str:
    """Return a metric, and what follows it in the column's name, in words."""
    metric, _, rest = name.partition(" ")
    return f"{read_yaml('tables')['labels'].get(metric, metric.replace('_', ' '))} {rest}".strip()


RUN_TABLES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "Quality": quality_table,
    "Benchmarks": benchmark_table,
    "Speed": speed_table,
    "Routing": partial(pivot_table, source="probes", index=["variant", "phase", "step"]),
    "Groups": partial(pivot_table, source="analysis", index=["layer", "head"]),
    "Groups by word class": lambda rows: groups_table(describe_groups(rows)),
    "Pairs": lambda rows: pairs_table(list_pairs(rows)),
    "Cost by word class": partial(pivot_table, source="costs", index=["variant"]),
    "Generation": partial(pivot_table, source="generation", index=["variant"]),
}


def _milliseconds(seconds: Any) -> float | None:
    return None if pd.isna(seconds) else 1e3 * float(seconds)


def render_continuations(rows: list[dict[str, Any]], title: str) -> str:
    """Return generated continuations as Markdown, by prompt."""
    parts, prompt = [f"# {title}"], None
    for row in rows:
        if row["prompt"] != prompt:
            prompt = row["prompt"]
            end = " ".join(row["prompt_text"].split()[-60:])
            parts += [f"## Prompt {prompt}, {row['prompt_tokens']:,} tokens", f"> ... {end}"]
        loss = "" if row["base_nll"] is None else f" ({row['base_nll']:.2f} nats per token under the base)"
        text = f"failed: {row['error']}" if row["error"] else " ".join(row["text"].split())
        parts.append(f"**{row['variant']}**{loss}: {text}")
    return "\n\n".join(parts) + "\n"


def render_card(results: Results, config: dict[str, Any], tables: dict[str, pd.DataFrame]) -> str:
    """Return the README of an adapter, as the Hub shows it."""
    run = results.runs.iloc[-1]
    hub_id = run.model_requested if run.model_source in ("hub", "hub_cache") else None
    template = Template((files("focus_exp.reporting") / "card.md").read_text(encoding="utf-8"))
    words = {"title": make_title(results), "model": run.model, "data": run.data, "base": hub_id or "<base model>"}
    words |= {"base_model": f"base_model: {hub_id}\n" if hub_id else ""}
    words |= {"causality": "" if run.is_causal else " It is non-causal."}
    words |= {"attention": json.dumps(config.get("attention", {}), default=str)}
    return template.substitute(words, table=to_markdown(next(iter(tables.values()))) if tables else "")
