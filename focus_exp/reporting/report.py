"""Write the report: conclusions, verdicts, the paper's tables and CSV files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from focus_exp.errors import UserError
from focus_exp.reporting import groups, tables
from focus_exp.reporting.claims import DIFFERENT_ROUTER, VERDICTS, evaluate_claims
from focus_exp.reporting.figures import describe_timing, report_figures, save_figures, untimed_methods
from focus_exp.reporting.format import (
    ABSENT,
    format_change,
    format_interval,
    format_number,
    format_percent,
    format_significant,
    to_latex,
    to_markdown,
)
from focus_exp.reporting.frame import FULL, read_yaml
from focus_exp.reporting.load import Results
from focus_exp.reporting.pages import fill
from focus_exp.reporting.paper_specs import Column, Spec, paper_rows
from focus_exp.reporting.paper_tables import paper_tables
from focus_exp.storage import replace_file

REPORT = "report"
CONCLUSIONS = "conclusions.md"  # written by hand, next to the records that it is about
REDUCED_BUDGET = ", reduced budget"  # after a verdict


def report_tables(results: Results) -> dict[str, pd.DataFrame]:
    """Return every table of the report by the name of its CSV file.

    Raises:
        UserError: there are no runs.
    """
    if results.runs.empty:
        raise UserError("runs_dir must contain runs (found none). Run an experiment first.")
    claims = evaluate_claims(results)
    paper = {f"paper_{table.attrs['spec'].name}": table for table in paper_tables(results)}
    own = {name: make(results) for name, make in tables.OWN_TABLES.items()}
    analyses = groups.latest_analyses(results)
    own |= {
        "groups": groups.describe_groups(analyses),
        "pairs": groups.list_pairs(analyses),
        "power": tables.power(claims),
    }
    content = {"claims": claims, "verdicts": verdict_table(claims), **paper, **own}
    return {name: table for name, table in content.items() if not table.empty}


def write_report(results: Results, content: dict[str, pd.DataFrame], folder: Path) -> None:
    """Write the report, figures and a CSV file of each of its tables."""
    shown = [("Verdicts", content["verdicts"])]
    shown += [(t.attrs["spec"].title, display_table(t)) for t in content.values() if "spec" in t.attrs]
    latex = "\n".join(to_latex(table, title) for title, table in shown)
    files = {f"{REPORT}.md": render_markdown(results, content), f"{REPORT}.tex": latex}
    files |= {f"{name}.csv": table.to_csv(index=False) for name, table in content.items()}
    drawings = groups.draw_passages(groups.latest_analyses(results))
    for name, text in (files | {f"figures/{name}.svg": drawing for name, drawing in drawings.items()}).items():
        replace_file(folder / name, text.encode())
    save_figures(report_figures(content), folder / "figures")


def describe_setup(results: Results) -> str:
    """Return one line on what was measured."""
    runs, steps = results.runs, results.runs.steps[results.runs.steps > 0]
    models = ", ".join(f"{name} ({count} runs)" for name, count in runs.model.value_counts().items())
    is_substituted = (runs.is_model_substituted | runs.is_data_substituted).any()
    substitute = ", in place of the paper's models and PG-19" if is_substituted else ""
    trained = f"{steps.min():,} to {steps.max():,} training steps (paper: 4,000)" if len(steps) else "no training"
    scale = " budget=quick: no number is meaningful." if results.is_quick else ""
    return f"{models}{substitute}; {trained}; {runs.seed.nunique()} seeds.{scale}"


def render_markdown(results: Results, content: dict[str, pd.DataFrame]) -> str:
    """Return the report as Markdown, at most 300 lines."""
    claims = content["claims"]
    counts, shown = claims.verdict.value_counts(), {*claims.verdict, *claims.own_verdict}
    legend = [f"**{word}** ({counts.get(word, 0)}): {text}." for word, text in VERDICTS.items() if word in shown]
    parts = ["# Reproducing Focus (arXiv:2604.03260): report", describe_setup(results)]
    if results.root and (conclusions := results.root / CONCLUSIONS).exists():
        parts.append(re.sub("<!--.*?-->", "", fill(conclusions.read_text(encoding="utf-8"), content)).strip())
    parts += [
        "![Change of perplexity against pairs pruned](figures/frontier.svg)",
        "## Verdicts",
        " ".join(legend),
        "**reduced budget**: trained for under a quarter of the paper's steps. ‡ non-causal router. Intervals are over "
        "documents and seeds. Models: on how many a verdict rests. Sparsity: causal pairs pruned. Where a claim is "
        "about the paper's router, the last column has this project's causal one (`attention=focus`). Numbers, "
        "required sample sizes and all runs: [claims.csv](claims.csv).",
        to_markdown(content["verdicts"]).strip(),
        "## The paper's tables",
        "Paper and ours next to each other. Steps: of our training; the paper's are 4,000 (T4: 2,000). Several seeds: "
        "mean. ΔPPL: paired with the base model, 95 % CI in the CSV "
        "files for one seed. † mask inactive (under 5 % of the pairs pruned). ‡ non-causal router.",
    ]
    for name, table in content.items():
        if "spec" in table.attrs and table.attrs["spec"].is_shown:
            parts += render_section(name, table)
    parts += render_groups(content, groups.draw_passages(groups.latest_analyses(results)))
    figures = ("![Perplexity change and speedup](figures/figure1.svg)", "![Speedup by length](figures/speed.svg)")
    parts += ["### Figure 1: Perplexity and speed", " ".join(figures)]
    if "paper_figure1" in content:
        untimed = ", ".join(untimed_methods(content["paper_figure1"])) or "none"
        parts.append(
            f"Figure 1 has all methods with a time of one run: {describe_timing(content['paper_figure1'])}. Without a "
            f"mask the speedup is 1. Without a time: {untimed}. [CSV](paper_figure1.csv)"
        )
    if "methods" in content:
        parts += ["## This project's methods", to_markdown(methods_table(content["methods"])).strip()]
    parts += [
        "## Appendices (CSV)",
        "\n".join(
            f"- [{name}.csv]({name}.csv): {text}"
            for name, text in read_yaml("tables")["appendices"].items()
            if name in content
        ),
    ]
    return "\n\n".join(parts) + "\n"


def verdict_table(claims: pd.DataFrame) -> pd.DataFrame:
    """Return the claims as text in ten narrow columns."""
    rows = claims.to_dict("records")
    return pd.DataFrame(
        {
            "id": claims.id,
            "claim": claims.claim,
            "paper": claims.paper,
            "measured (95 % CI)": [ABSENT if row["verdict"] == DIFFERENT_ROUTER else claim_value(row) for row in rows],
            "sparsity [%]": [format_percent(x) for x in claims.sparsity],
            "seeds": [format_number(x, 0) for x in claims.seeds],
            "models": [format_number(x, 0) for x in claims.models],
            "verdict": [row["verdict"] + REDUCED_BUDGET * row["reduced_budget"] for row in rows],
            "run": [
                f"{_text(row['experiment'])} {_text(row['variant'])}".strip() + " ‡" * (row["causal"] is False)
                for row in rows
            ],
            "causal router, ours": [own_result(row) for row in rows],
        }
    )


def own_result(row: dict[str, Any]) -> str:
    """Format value and verdict of this project's router."""
    if pd.isna(row["own_value"]):
        return ABSENT
    value = claim_value(row | {name: row[f"own_{name}"] for name in ("value", "low", "high")})
    return f"{value}: {row['own_verdict']}" + REDUCED_BUDGET * row["own_reduced_budget"]


def _text(cell: Any) -> str:
    return "" if pd.isna(cell) else str(cell)


def claim_value(row: dict[str, Any]) -> str:
    """Format the value of a claim: a change of perplexity, a speedup, a fraction."""
    value, low, high, unit = (row[name] for name in ("value", "low", "high", "unit"))
    if pd.isna(value):
        return ABSENT
    if unit == "x":
        at = "" if pd.isna(row["tokens"]) else f" at {int(row['tokens']):,} tokens"
        return f"{format_significant(value)}x{at}"
    is_points = unit != "nats" and row["reference"] == FULL
    return format_change(value, low, high, unit, sign=unit == "nats") + (" points" if is_points else " %")


def display_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return a paper table as text: key, paper and ours, sparsity, training steps, seeds."""
    spec: Spec = table.attrs["spec"]
    rows = table[table.runs != ""].to_dict("records")
    shown = {name.replace("_", " "): [_key_text(row[name]) for row in rows] for name in spec.key}
    if any(row["variant"] for row in rows):
        shown["variant"] = [row["variant"] + (" ‡" if row["causal"] is False else "") for row in rows]
    else:
        shown["device"] = _devices(rows, spec)
    for column in spec.columns:
        if column.name in paper_rows(spec.name)[0]:
            head = f"{column.label}, paper" if column.is_measured else column.label
            shown[head] = [_paper_text(row[f"paper_{column.key}"], column, spec.name) for row in rows]
        if column.is_measured:
            shown[f"{column.label}, ours"] = [_ours_text(row, column) for row in rows]
    if any(row["sparsity"] for row in rows):
        shown["sparsity [%]"] = [row["sparsity"] or ABSENT for row in rows]
    if "variant" in shown and any(row["steps"] for row in rows):
        shown["steps"] = [row["steps"] or ABSENT for row in rows]
    shown["seeds"] = [format_number(row["seeds"] or None, 0) for row in rows]
    return pd.DataFrame(shown)


def _devices(rows: list[dict[str, Any]], spec: Spec) -> list[str]:
    """Return the device of each row, with the commit where it was measured more than once."""
    places = [(*(row[name] for name in spec.key), row["device"]) for row in rows]
    return [
        f"{row['device']}, commit {row['commits']}" if places.count(place) > 1 else row["device"]
        for row, place in zip(rows, places, strict=True)
    ]


def _key_text(cell: Any) -> str:
    return ABSENT if pd.isna(cell) else f"{cell:g}" if isinstance(cell, float) else str(cell)


def _paper_text(cell: Any, column: Column, table: str) -> str:
    """Format a printed number with as many decimals as its column has."""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if pd.isna(cell) or isinstance(cell, str):
        return _text(cell) or ABSENT
    if column.origin:
        return format_interval(cell, sign=True)
    printed = (repr(row[column.name]).partition(".")[2].removesuffix("0") for row in paper_rows(table))
    return f"{cell:,.{max(map(len, printed))}f}"


def _ours_text(row: dict[str, Any], column: Column) -> str:
    key = f"ours_{column.key}"
    text = format_number(row[key], column.digits)
    if column.origin:
        text = format_interval(row[key], row[f"{key}_low"], row[f"{key}_high"], sign=True)
    return text + (" †" if row.get(f"{key}_mask_active") is False else "")


def render_section(name: str, table: pd.DataFrame) -> list[str]:
    """Return title, table and provenance of a paper table."""
    spec: Spec = table.attrs["spec"]
    measured = table[table.runs != ""]
    missing = table[table.runs == ""]
    facts = []
    if len(measured):
        for label, column in (("Model", "used_model"), ("data", "used_data"), ("commits", "commits")):
            facts.append(f"{label}: {', '.join(_parts(measured[column])) or ABSENT}")
    if len(missing):
        rows = missing.to_dict("records")
        names = [row["variant"] or " ".join(_key_text(row[key]) for key in spec.key) for row in rows]
        facts.append(f"not run: {', '.join(dict.fromkeys(names))} (needs {', '.join(_parts(missing.needs))})")
    note = " ".join(filter(None, [spec.note, "; ".join(facts) + ".", f"[CSV]({name}.csv)"]))
    shown = [to_markdown(display_table(table)).strip()] if len(measured) else []
    return [f"### {spec.id}: {spec.title}", *shown, note]


def render_groups(content: dict[str, pd.DataFrame], passages: Iterable[str]) -> list[str]:
    """Return the groups of the layer that goes best with word classes, pairs and passages, for each router."""
    parts = []
    for run, described in content.get("groups", pd.DataFrame({"run": []})).groupby("run", sort=False):
        layer = groups.closest_layer(described)
        first, router = layer.iloc[0], "causal router of this project" if layer.causal.iloc[0] else "paper's router"
        where = f"layer {first.layer}" + ("" if pd.isna(first["head"]) else f", head {first['head']}")
        parts += [
            f"Groups of the {router} at {where}, the one that goes best with the word classes (all: "
            f"[groups.csv](groups.csv); run `{run}`, {first.model}, {first.data}). A group is named by its most "
            "frequent class; its tokens are those that it has most above what its size lets expect.",
            to_markdown(groups.groups_table(layer)).strip(),
        ]
    if "pairs" in content:
        parts += [
            "Distant pairs of one group with the highest affinity, of the run's own passage ([CSV](pairs.csv)):",
            to_markdown(groups.pairs_table(content["pairs"])).strip(),
        ]
    return [*parts, *(f"![A passage, coloured by group](figures/{name}.svg)" for name in passages)]


def _parts(cells: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(part for cell in cells for part in str(cell).split(" / ") if part))


def methods_table(methods: pd.DataFrame) -> pd.DataFrame:
    """Return the methods as text: sparsity, ΔPPL by length, parameters, speed."""
    rows = methods.to_dict("records")
    shown = {"method": [row["method"] for row in rows]}
    for tokens in (1024, 8192):
        label = f"{tokens:,}"
        shown[f"sparsity at {label} [%]"] = [format_percent(row[f"sparsity_{tokens}"]) for row in rows]
        shown[f"ΔPPL at {label} [%]"] = [
            format_interval(row[f"change_{tokens}"], row[f"low_{tokens}"], row[f"high_{tokens}"], sign=True)
            for row in rows
        ]
    shown["trainable parameters"] = [format_number(row["trainable_params"], 0) for row in rows]
    shown["speedup, layer, 32k"] = [format_significant(row["speedup_layer"]) for row in rows]
    shown["speedup, prefill, 8k"] = [format_significant(row["speedup_prefill"]) for row in rows]
    return pd.DataFrame(shown)
