"""Write what a finished run shows: table.md, figures, continuations, a coloured passage and the adapter's card."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from focus_exp.reporting.figures import COLORS, plot_measurements, save_figures
from focus_exp.reporting.format import (
    ABSENT,
    format_interval,
    format_number,
    format_significant,
    is_missing,
    to_markdown,
    to_percent,
)
from focus_exp.reporting.load import Results, load_run, read_log, select
from focus_exp.reporting.paper_tables import BASE
from focus_exp.results.load import read_record
from focus_exp.storage import replace_file

TABLE = "table.md"


def write_run_table(run_dir: Path) -> dict[str, pd.DataFrame]:
    """Write table.md from the measurements of a run or comparison; return its tables as text by name."""
    results = load_run(run_dir)
    tables = run_tables(results.measurements)
    replace_file(run_dir / TABLE, render_run(results, tables).encode())
    return tables


def write_run_figures(run_dir: Path) -> dict[str, Path]:
    """Write the figures of a run; return the PNG of each."""
    results = load_run(run_dir)
    figures = plot_measurements(results.measurements, read_log(run_dir), title_of(results))
    return save_figures(figures, run_dir / "figures")


def title_of(results: Results) -> str:
    """Return experiment, model, data and sequence length of a run."""
    run = results.runs.iloc[-1]
    return f"{run.experiment}: {run.model} on {run.data}, {run.seq_len} tokens"


def render_run(results: Results, tables: dict[str, pd.DataFrame]) -> str:
    """Return the tables of a run as Markdown, provenance once below."""
    run = results.runs.iloc[-1]
    facts = {
        "model": run.model, "data": run.data, "device": run.device, "seed": run.seed, "steps": run.steps,
        "training tokens": run.train_tokens, "commit": run.commit, "config": run.config_hash,
    }  # fmt: skip
    parts = [f"# {title_of(results)}"]
    if run.is_model_substituted or run.is_data_substituted:
        parts.append(
            f"Substitute: {run.model_used} and {run.data_used}, in place of {run.model_requested} and {run.data_requested}."
        )
    parts += [f"Warnings: {run.warnings}"] if run.warnings else []
    for name, table in tables.items():
        parts += [f"## {name}", to_markdown(table).strip()]
    parts.append("; ".join(f"{name}: {value}" for name, value in facts.items() if not is_missing(value)))
    parts.append(f"`{run.command}`")
    return "\n\n".join(parts) + "\n"


def run_tables(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the tables of a run as text: quality, benchmarks, speed, routing, groups, generation."""
    made = {
        "Quality": quality_table(table),
        "Benchmarks": benchmark_table(table),
        "Speed": speed_table(table),
        "Routing": routing_table(table),
        "Groups": group_table(table),
        "Generation": generation_table(table),
    }
    return {name: frame for name, frame in made.items() if not frame.empty}


def quality_table(table: pd.DataFrame) -> pd.DataFrame:
    """Perplexity and its paired changes; one row for each routing, control or variant."""
    rows = select(table, {"source": ["rows", "variants"]})
    changes = select(rows, {"metric": "nll_change"})
    primary = select(rows, {"primary": True})
    first = primary.variant.dropna().iloc[0] if primary.variant.notna().any() else None
    reference = first or (primary.name.iloc[0] if len(primary) else "")
    shown = []
    for row in select(rows, {"metric": "perplexity"}).itertuples():
        own = changes[(changes.subject == row.subject)]

        def change(reference: Any, own: pd.DataFrame = own) -> str:
            cells = own[own.reference == reference]
            values = () if cells.empty else map(to_percent, cells.iloc[0][["value", "low", "high"]])
            return format_interval(*values, sign=True) if len(cells) else ABSENT

        shown.append(
            {
                "variant": row.variant if row.kind != BASE and isinstance(row.variant, str) else row.name,
                "routing": row.name,
                "perplexity": "failed" if isinstance(row.error, str) else format_number(row.value),
                "ΔPPL [%], base": change(BASE),
                f"ΔPPL [%], {reference}"[:25]: change(reference),
                "sparsity [%]": _percent(row.sparsity),
                "distant density [%]": _percent(row.distant_density),
                "largest group [%]": _percent(row.largest_group),
                "parameters": format_number(row.trainable_params if row.train_tokens else 0, 0),
                "causal": "no" if row.causal is False else "yes",
            }
        )
    return _drop_constant(pd.DataFrame(shown), "routing", "variant")


def benchmark_table(table: pd.DataFrame) -> pd.DataFrame:
    """Scores and their paired changes from full attention."""
    rows = select(table, {"source": "benchmarks"})
    scores, changes = (select(rows, {"metric": name}) for name in ("score", "score_change"))
    shown = []
    for row in scores.itertuples():
        own = changes[changes.subject == row.subject]
        scale = to_percent if row.unit != "fraction" else (lambda value: None if is_missing(value) else 100 * value)
        interval = [scale(value) for value in own.iloc[0][["value", "low", "high"]]] if len(own) else [None] * 3
        shown.append(
            {
                "task": row.task,
                "metric": row.task_metric,
                "variant": row.variant,
                "score": "failed" if isinstance(row.error, str)
                else _percent(row.value) + " %" if row.unit == "fraction" else format_number(row.value),
                "change": format_interval(*interval, sign=True),
                "unit": "points" if row.unit == "fraction" else "% of perplexity",
                "sparsity [%]": _percent(row.sparsity) + ("" if row.mask_active is not False else " †"),
                "items": format_number(row.n, 0),
            }
        )  # fmt: skip
    return pd.DataFrame(shown)


def speed_table(table: pd.DataFrame) -> pd.DataFrame:
    """Times next to full attention."""
    shown = [
        {
            "clock": row.clock,
            "method": row.method if isinstance(row.method, str) else "focus",
            "tokens": format_number(row.tokens, 0),
            "K": format_number(row.groups, 0),
            "k": format_number(row.top_k, 0),
            "groups": row.assignment if isinstance(row.assignment, str) else ABSENT,
            "full [ms]": _milliseconds(row.reference_level),
            "ours [ms]": "failed" if isinstance(row.error, str) else _milliseconds(row.level),
            "speedup": format_significant(row.value),
            "bound": format_significant(None if is_missing(row.density) else 1 / row.density),
            "path": row.path if isinstance(row.path, str) else ABSENT,
        }
        for row in select(table, {"metric": "speedup"}).itertuples()
    ]
    return pd.DataFrame(shown)


def routing_table(table: pd.DataFrame) -> pd.DataFrame:
    """Groups of held-out tokens at the last probe of each phase."""
    rows = select(table, {"source": "probes"})
    shown = []
    for (variant, phase), probes in rows.groupby(["variant", "phase"], dropna=False, sort=False):
        last = probes[probes.step == probes.step.max()].drop_duplicates("metric").set_index("metric").value
        shown.append(
            {
                "variant": variant if isinstance(variant, str) else ABSENT,
                "phase": phase,
                "step": format_number(probes.step.max(), 0),
                "largest group [%]": _percent(last.get("dominance")),
                "worst layer [%]": _percent(last.get("dominance_worst")),
                "empty groups": format_number(last.get("dead_groups"), 1),
                "stability": format_number(last.get("stability"), 3),
                "confidence": format_number(last.get("confidence")),
            }
        )
    return pd.DataFrame(shown)


def group_table(table: pd.DataFrame) -> pd.DataFrame:
    """The analysis of the groups, one row for each layer."""
    rows = select(table, {"source": "analysis"})
    if rows.empty:
        return rows
    wide = rows.pivot_table(index=["layer", "head"], columns="metric", values="value", aggfunc="first", dropna=False)
    return wide.reset_index().map(lambda cell: _significant(cell)).astype(str)


def generation_table(table: pd.DataFrame) -> pd.DataFrame:
    """Means over prompts of generated continuations."""
    rows = select(table, {"source": "generation"})
    if rows.empty:
        return rows
    wide = rows.pivot_table(index="variant", columns="metric", values="value", aggfunc="mean", sort=False)
    return wide.reset_index().map(lambda cell: _significant(cell))


def _significant(cell: Any) -> str:
    return cell if isinstance(cell, str) else format_significant(cell)


def _percent(fraction: Any) -> str:
    return format_number(None if is_missing(fraction) else 100 * float(fraction), 1)


def _milliseconds(seconds: Any) -> str:
    return format_significant(None if is_missing(seconds) else 1e3 * float(seconds))


def _drop_constant(frame: pd.DataFrame, name: str, other: str) -> pd.DataFrame:
    """Drop a column that equals another one."""
    return frame.drop(columns=name) if len(frame) and (frame[name] == frame[other]).all() else frame


# --- passages, continuations and the card of an adapter ---


def write_run_extras(run_dir: Path) -> None:
    """Write what some jobs leave: continuations.md, passage.html, and the README of a trained adapter."""
    record, results = read_record(run_dir), load_run(run_dir)
    title, passage = title_of(results), run_dir / "groups" / "passage.json"
    if record.get("continuations"):
        replace_file(run_dir / "continuations.md", render_continuations(record["continuations"], title).encode())
    if passage.exists():
        page = render_passage(json.loads(passage.read_text(encoding="utf-8")), title)
        replace_file(run_dir / "passage.html", page.encode())
    if (run_dir / "adapter").is_dir():
        card = render_card(results, record["config"], run_tables(results.measurements))
        replace_file(run_dir / "adapter" / "README.md", card.encode())


def render_passage(passage: dict[str, Any], title: str) -> str:
    """Return a passage as HTML, its tokens coloured by group, one section for each layer."""
    parts = [
        f'<!doctype html>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n<h1>{html.escape(title)}</h1>'
    ]
    for layer in passage["layers"]:
        head = "" if layer.get("head") is None else f", head {layer['head']}"
        words = "".join(_colored(passage["pieces"], layer["groups"]))
        parts.append(f"<details><summary>layer {layer['layer']}{head}</summary><p>{words}</p></details>")
    return "\n".join(parts) + "\n"


def _colored(pieces: list[str], groups: list[int]) -> Iterator[str]:
    for piece, group in zip(pieces, groups, strict=True):
        color = COLORS[group % len(COLORS)]
        yield f'<span title="group {group}" style="background:{color}40">{html.escape(piece)}</span>'


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
        parts.append(f"**{row['attention']}**{loss}: {text}")
    return "\n\n".join(parts) + "\n"


def render_card(results: Results, config: dict[str, Any], tables: dict[str, pd.DataFrame]) -> str:
    """Return the README of an adapter, as the Hub shows it."""
    run = results.runs.iloc[-1]
    hub_id = run.model_requested if run.model_source in ("hub", "hub_cache") else None
    base = f"base_model: {hub_id}\n" if hub_id else ""
    attention = json.dumps(config.get("attention", {}), default=str)
    table = next(iter(tables.values()), pd.DataFrame())
    return f"""---
{base}library_name: focus_exp
tags: [focus, sparse-attention]
---
# {title_of(results)}

A router for Focus attention: it assigns tokens to groups in every layer. A query attends to a local window, to the
first tokens (sinks) and to distant tokens of its own groups.{"" if run.is_causal else " Non-causal: it cannot generate."}

```python
from transformers import AutoModelForCausalLM
from focus_exp import load_adapter

model = AutoModelForCausalLM.from_pretrained("{hub_id or "<base model>"}")
load_adapter(model, "<this folder or owner/name on the Hub>")  # checks the weights it was trained for
```

- Base model: {run.model}
- Data: {run.data}
- Attention: `{attention}`

{to_markdown(table) if not table.empty else ""}
Measured on the data above only. Measure your own: `python -m focus_exp job=evaluate adapter=<this> data=files
data.files='texts/*.txt'`. Prompts shorter than the window are computed as by the base model.
"""
