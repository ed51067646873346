"""The paper's tables with this project's measurements next to the paper's numbers: one function for each table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pandas as pd

from focus_exp.reporting.aggregate import Row, aggregate_seeds, mean_of
from focus_exp.reporting.load import Results, matches, read_yaml

BASE, FULL = "base", "full attention"
MAX_NATS = 50.0  # keeps exp() finite
MASKED = "masked"  # kernel path that computes every pair


# --- what a column of the paper is measured by ---


@dataclass(frozen=True)
class Column:
    """A column of the paper and the measurement next to it.

    name: in paper.yaml; cells: measurement -> value; attribute, scale: what is shown of it, in the paper's unit;
    origin: row or column of the base model, for a column that holds the change from it; timed: the speed of a layer.
    """

    name: str
    label: str
    cells: dict[str, Any] = field(default_factory=dict)
    attribute: str = "value"
    scale: Callable[[Row, float], float] = lambda row, value: value
    digits: int = 2
    origin: str = ""
    timed: bool = False

    @property
    def key(self) -> str:
        return f"{self.name}_change" if self.origin else self.name

    def convert(self, row: Row, attribute: str) -> float | None:
        """Return a value or a bound of a measurement in the paper's unit."""
        if attribute == "value":
            number = getattr(row, self.attribute)
        else:
            number = getattr(row, attribute) if self.attribute == "value" else None
        if number is None or not math.isfinite(number):
            return None
        return 100 * math.expm1(min(number, MAX_NATS)) + 0.0 if self.origin else self.scale(row, number)


def _percent(row: Row, value: float) -> float:
    return 100 * value


PPL = {"metric": "perplexity"}
TASKS = {"lambada": "lambada_openai"}  # column of the paper -> task of lm-eval, where they differ


def perplexity(name: str = "ppl", label: str = "PPL", **cells: Any) -> Column:
    return Column(name, label, PPL | cells)


def change(name: str = "ppl", label: str = "ΔPPL [%]", origin: str = "pretrained") -> Column:
    """Return the column of changes from `origin`: a row of the paper, or a column."""
    return Column(name, label, {"metric": "nll_change"}, origin=origin)


def parameters() -> Column:
    return Column("trainable_params", "parameters", {"metric": "parameters"}, digits=0)


def accuracy(name: str, label: str, task: str = "") -> Column:
    return Column(name, label, {"metric": "score", "task": task or name}, scale=_percent, digits=1)


def points(name: str, label: str, task: str) -> Column:
    return Column(name, label, {"metric": "score_change", "task": task}, scale=_percent, digits=1)


def dominance(name: str, label: str, trainable: str) -> Column:
    return Column(name, label, {"metric": "dominance", "trainable": trainable}, scale=_percent, digits=1)


def stability(name: str, label: str, trainable: str) -> Column:
    return Column(name, label, {"metric": "stability", "trainable": trainable}, digits=3)


ACCURACIES = [
    accuracy(name, label, TASKS.get(name, name))
    for name, label in (("hellaswag", "HellaSwag"), ("arc_easy", "ARC-E"), ("piqa", "PIQA"), ("lambada", "LAMBADA"))
]


# --- which runs stand next to a row of the paper ---


@dataclass(frozen=True)
class Source:
    """Where a row of the paper is measured.

    variant: of a comparison ("base": its full attention); variants: one for each column; cells: of measurements that
    belong to no variant, $name stands for the paper's own cell; needs: what a CPU without the Hub lacks.
    """

    experiments: Sequence[str]
    variant: str = ""
    variants: Mapping[str, str] = field(default_factory=dict)
    cells: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.variants.values(), *filter(None, [self.variant])]))


@dataclass(frozen=True)
class Spec:
    """A table of the paper: its key columns, its other columns, and the sources of each row by a pattern of its key."""

    name: str
    id: str
    title: str
    key: Sequence[str]
    columns: Sequence[Column]
    rows: Mapping[str, list[Source]]
    extra: str = ""
    note: str = ""
    shown: bool = True  # in the Markdown report


@cache
def paper_rows(table: str) -> list[dict[str, Any]]:
    """Return the rows of a table of the paper: column -> printed cell, None where not printed."""
    content = read_yaml("paper")[table]
    return [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]


def paper_speedups(groups: int) -> dict[int, float]:
    """Return table 6: sequence length -> speedup over FlashAttention on an H100; {} for another number of groups."""
    column = f"speedup_K{groups}"
    return {row["tokens"]: row[column] for row in paper_rows("table6_speed") if column in row}


def key_of(row: dict[str, Any], names: Sequence[str]) -> str:
    cells = (row[name] for name in names if row.get(name) is not None)
    return " ".join(f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in cells)


# --- the comparison itself ---


@dataclass(frozen=True)
class Entry:
    """A row of the paper, one of its sources, and the latest run of each seed of one setup."""

    spec: Spec
    paper: dict[str, Any]
    source: Source
    runs: tuple[str, ...] = ()

    def cells(self, column: Column | None) -> dict[str, Any]:
        """Return what selects the measurement in a column, or any measurement of this source."""
        if column is None:
            cells = dict(self.source.cells)
        else:
            variant = self.source.variants.get(column.name, self.source.variant)
            subject = {"kind": BASE} if variant == BASE else {"variant": variant} if variant else {}
            cells = {**self.source.cells, **column.cells, **subject}
            if column.origin and cells.get("source") == "benchmarks":
                cells |= {"metric": "score_change", "reference": FULL}
            elif column.origin:
                cells["reference"] = self.source.variants.get(column.origin, BASE)
        return {key: self.paper[cell[1:]] if str(cell).startswith("$") else cell for key, cell in cells.items()}


class Measurements:
    """Complete runs by name, each with its rows; variants are rows of their comparisons."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.rows = results.rows_by_run
        self.timers = [run for run, rows in self.rows.items() if any(row.clock for row in rows)]

    def of(self, *experiments: str) -> Iterator[str]:
        """Yield the runs of these experiments, oldest first."""
        return (run for run, rows in self.rows.items() if rows and rows[0].experiment in experiments)

    def select(self, run: str, cells: Mapping[str, Any]) -> list[Row]:
        return [row for row in self.rows[run] if all(matches(getattr(row, key), want) for key, want in cells.items())]

    def entries(self, entry: Entry) -> list[Entry]:
        """Return one entry for each setup."""
        names = entry.source.names
        present: dict[str, Any] = {"source": "variants", "variant": names} if names else entry.cells(None)
        if names == [BASE]:
            present = {"source": "rows", "kind": BASE}
        setups: dict[Any, dict[int | None, str]] = {}
        for run in self.of(*entry.source.experiments):
            if rows := self.select(run, present):
                setup = tuple(dict.fromkeys((row.setup, row.variant_setup) for row in rows))
                setups.setdefault(setup, {})[rows[0].seed] = run
        return [replace(entry, runs=tuple(seeds.values())) for seeds in setups.values()]

    def measured(self, entry: Entry, run: str, column: Column) -> Row | None:
        """Return the measurement in a column: the first with a number, of a task its main metric."""
        rows = sorted(self.select(run, entry.cells(column)), key=_metric_rank)
        return next((row for row in rows if row.value is not None), next(iter(rows), None))

    def value(self, entry: Entry, run: str, column: Column) -> tuple[float, float | None, float | None, Row] | None:
        """Return the number in a column with its bounds and its measurement."""
        if column.timed:
            return self.speed(entry, run)
        row = self.measured(entry, run, column)
        number = column.convert(row, "value") if row else None
        if row is None or number is None:
            return None
        return number, column.convert(row, "low"), column.convert(row, "high"), row

    def behind(self, entry: Entry, run: str) -> list[Row]:
        """Return the measurements whose sparsity the row reports."""
        columns = [one for one in entry.spec.columns if one.name.startswith(("ppl", "speedup")) and not one.origin]
        rows = [self.measured(entry, run, column) for column in columns or [perplexity()]]
        unique = {(row.source, row.name, row.variant, row.phase, row.groups): row for row in rows if row}
        return [row for row in unique.values() if row.kind != BASE] or list(unique.values())

    def speed(self, entry: Entry, run: str) -> tuple[float, None, None, Row] | None:
        """Return the speedup of one attention layer as in this run, timed on the same model.

        At the length at which other methods were timed, or else at the longest.
        """
        behind = self.behind(entry, run)
        if all(row.kind in (BASE, "trained") for row in behind[:1]):
            return (1.0, None, None, behind[0]) if behind else None
        fingerprint = self.results.runs.model_fingerprint
        timers = [timer for timer in self.timers if fingerprint[timer] == fingerprint[run]]
        cells: dict[str, Any] = {"metric": "speedup", "clock": "attention"}
        others = cells | {"source": "method_speed"}
        common = max((row.tokens for timer in timers for row in self.select(timer, others)), default=0)
        scored = behind[0]
        if scored.method == "focus":
            top_k = scored.top_k or 1
            cells |= {"source": "speed", "groups": scored.num_groups, "top_k": top_k}
            cells |= {"pair_rule": scored.pair_rule, "primary": True} if top_k > 1 else {}
        else:
            cells |= {"source": "method_speed", "method": scored.method}
        timed = [(timer, row) for timer in timers for row in self.select(timer, cells) if row.value]
        best = max(
            timed,
            key=lambda pair: (
                pair[1].tokens == common,
                pair[1].tokens,
                pair[1].assignment == "balanced",
                bool(self.select(pair[0], others)),
            ),
            default=None,
        )
        return best and (best[1].value, None, None, best[1])


def _metric_rank(row: Row) -> tuple[bool, bool]:
    """Order accuracies first, normalised ones before others."""
    is_fraction = row.unit == "fraction"
    return not is_fraction, not (row.primary if is_fraction else row.deciding)


def compare(
    results: Results,
    name: str,
    id: str,
    title: str,
    key: Sequence[str],
    columns: Sequence[Column],
    experiments: Sequence[str],
    rows: Mapping[str, Any],
    needs: str = "",
    cells: Mapping[str, Any] | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Return a table of the paper with the measurements next to it, one row for each source and setup.

    Args:
        rows: pattern of a row's key -> variant, fields of a Source, or a list of these.

    Returns:
        The key; paper_X, ours_X, ours_X_low, ours_X_high, ours_X_seeds for each column X; sparsity of the QK pairs [%];
        variant, model, data, runs. `attrs["spec"]` holds the Spec. A row without runs is not measured.
    """
    common = Source(experiments, cells=cells or {}, needs=needs)
    sources = {
        pattern: [replace(common, **({"variant": one} if isinstance(one, str) else one)) for one in places]
        for pattern, places in ((k, v if isinstance(v, list) else [v]) for k, v in rows.items())
    }
    spec = Spec(name, id, title, key, columns, sources, **options)
    measurements = results.cached(Measurements)
    found = []
    for paper, places in [*_mapped(spec), *_extras(spec, measurements)]:
        entries = [entry for place in places for entry in measurements.entries(Entry(spec, paper, place))]
        found += [_row(entry, measurements) for entry in entries or [Entry(spec, paper, places[0])]]
    frame = pd.DataFrame(found)
    frame.attrs["spec"] = spec
    return frame


def _mapped(spec: Spec) -> Iterator[tuple[dict[str, Any], list[Source]]]:
    for row in paper_rows(spec.name):
        key = key_of(row, spec.key)
        yield row, next(places for pattern, places in spec.rows.items() if fnmatchcase(key, pattern))


def _extras(spec: Spec, measurements: Measurements) -> list[tuple[dict[str, Any], list[Source]]]:
    """Return variants of the table's experiments that the paper does not have, or pairs *_full, *_focus of them."""
    places = [place for row in spec.rows.values() for place in row]
    mapped = {name for place in places for name in place.names}
    suffix = "_focus" if spec.extra == "pair" else ""
    found: dict[str, Source] = {}
    for run in measurements.of(*{name for place in places for name in place.experiments}) if spec.extra else ():
        for row in measurements.select(run, {"source": "variants"}):
            if row.variant in mapped or not row.variant.endswith(suffix):
                continue
            stem = row.variant.removesuffix(suffix)
            pair = {"ppl_full": f"{stem}_full", "ppl_focus": row.variant}
            found[stem] = Source((row.experiment,), variants=pair) if suffix else Source((row.experiment,), stem)
    return [({spec.key[0]: f"{stem} (not in the paper)"}, [place]) for stem, place in found.items()]


def _paper_cell(spec: Spec, row: dict[str, Any], column: Column) -> Any:
    after = row.get(column.name)
    if not column.origin:
        return after
    base = next((other for other in paper_rows(spec.name) if key_of(other, spec.key) == column.origin), None)
    before = base[column.name] if base and base != row else row.get(column.origin)
    return None if before is None or after is None else 100 * (after / before - 1)


def _row(entry: Entry, measurements: Measurements) -> dict[str, Any]:
    spec = entry.spec
    cells: dict[str, Any] = {name: entry.paper.get(name) for name in spec.key}
    for column in spec.columns:
        cells[f"paper_{column.key}"] = _paper_cell(spec, entry.paper, column)
        if not (column.cells or column.timed):
            continue
        found = [measurements.value(entry, run, column) for run in entry.runs]
        if column.origin:  # a change counts where the perplexity itself was measured
            scored = replace(column, origin="", cells=_plain(spec, column).cells)
            found = [
                one if measurements.value(entry, run, scored) else None
                for one, run in zip(found, entry.runs, strict=True)
            ]
        known = [one for one in found if one is not None]
        key = f"ours_{column.key}"
        is_ppl = column.name.startswith("ppl") and not column.origin
        cells[key] = mean_of([one[0] for one in known], bool(column.origin), is_ppl) if known else None
        cells[f"{key}_low"], cells[f"{key}_high"] = known[0][1:3] if len(known) == 1 else (None, None)
        cells[f"{key}_seeds"] = len(known)
        if known and known[-1][3].source == "benchmarks":
            cells[f"{key}_mask_active"] = known[-1][3].mask_active
        if column.timed and known and known[-1][3].clock:
            cells["timed_tokens"] = known[-1][3].tokens
    return cells | _provenance(entry, measurements)


def _plain(spec: Spec, column: Column) -> Column:
    return next(one for one in spec.columns if one.name == column.name and not one.origin)


def _provenance(entry: Entry, measurements: Measurements) -> dict[str, Any]:
    behind = [measurements.behind(entry, run) for run in entry.runs]
    flat = [row for rows in behind for row in rows]
    aggregated = aggregate_seeds(flat)
    densities = [1 - row.density if row.density is not None else row.sparsity for row in aggregated]
    last = behind[-1] if behind else []
    runs = [measurements.results.runs.loc[run] for run in entry.runs]
    variants = entry.source.names or [str(row.name) for row in last if row.source != "speed"]

    def distinct(values: Any) -> str:
        return " / ".join(dict.fromkeys(str(value) for value in values if value is not None and value is not pd.NA))

    return {
        "sparsity": distinct("-" if one is None else f"{100 * one:.1f}" for one in densities),
        "variant": distinct(variants),
        "causal": all(row.causal is not False for row in last) if last else None,
        "used_model": distinct(row.model for row in flat or runs),
        "used_data": distinct(row.data for row in flat or runs),
        "train_tokens": distinct(row.train_tokens for row in flat),
        "device": distinct(run.device_kind for run in runs),
        "seeds": len({run.seed for run in runs}),
        "experiment": distinct(run.experiment for run in runs),
        "needs": "" if runs else entry.source.needs or f"+experiment={entry.source.experiments[0]}",
        "runs": " ".join(entry.runs),
        "commits": distinct(str(row.variant_commit or "")[:7] for row in flat or ()),
    }


# --- the tables ---

TUNED = {
    "longformer": "longformer",
    "performer": "performer",
    "routing_transformer": "routing_transformer",
    "full_finetune": "full_finetuning",
}
ROUTERS = ["focus", "focus_paper", "focus_paper_sinks"]
BALANCED_NOTE = "balanced: this project's causal assignment in place of the non-causal Sinkhorn assignment."


def table1_retrofit(results: Results) -> pd.DataFrame:
    rows = {"pretrained": BASE, **TUNED, "focus": ROUTERS}
    title = "Methods retrofitted onto GPT-2 124M, PG-19, 1,024 tokens"
    columns = [parameters(), perplexity(), change(), *ACCURACIES]
    return compare(results, "table1_retrofit", "T1", title, ["method"], columns, ["compare", "seeds"], rows)


def table_dg(results: Results) -> pd.DataFrame:
    cells = {"metric": "parameters"}
    fraction = Column(
        "percent_of_model", "of the model [%]", cells, scale=lambda row, value: 100 * value / row.model_params
    )
    rows = {"768": ["d_768", "paper_768"], "128": "d_128", "32": "d_32", "16": ["d_16", "paper_16"]}
    title, columns = "Width of the routing space, GPT-2 124M, PG-19, K = 4", [parameters(), fraction, perplexity()]
    return compare(results, "table_dg", "d_g", title, ["d_g"], columns, ["routing_dim"], rows)


def table2_scale(results: Results) -> pd.DataFrame:
    rows: dict[str, Any] = {name: {"variant": name, "needs": "the Hub"} for name in ("gpt2_124m", "gpt2_774m")}
    rows |= {name: [name, f"{name}_paper"] for name in ("mistral_7b", "qwen2_5_7b", "olmo2_7b", "llama2_13b")}
    rows["llama2_70b"] = {"variant": "llama2_70b", "needs": "the Hub and several GPUs"}
    base = Column("ppl_pretrained", "PPL base", {"metric": "nll_change", "reference": BASE}, "reference_level")
    columns = [base, perplexity("ppl_focus", "PPL Focus"), change("ppl_focus", origin="ppl_pretrained"), *ACCURACIES]
    return compare(
        results, "table2_scale", "T2", "Models of all sizes, PG-19, top-2", ["model"], columns, ["model_scale"], rows,
        "the Hub and a GPU", extra="variant",
    )  # fmt: skip


def table2_gsm8k(results: Results) -> pd.DataFrame:
    cells = {"metric": "score_change", "task": "gsm8k_cot"}
    full = Column("gsm8k_full", "full attention [%]", cells, "reference_level", _percent, 1)
    return compare(
        results, "table2_scale_gsm8k_8shot_cot", "T2 GSM8K", "GSM8K, 8-shot chain of thought", ["model"],
        [full, accuracy("gsm8k_focus", "Focus [%]", "gsm8k_cot")], ["model_scale"], {"mistral_7b": "mistral_7b"},
        "the Hub and a GPU", extra="variant",
    )  # fmt: skip


def table3_lora(results: Results) -> pd.DataFrame:
    tasks = {"HellaSwag": "hellaswag", "ARC-E": "arc_easy", "LAMBADA": "lambada", "PIQA": "piqa"}
    deltas = [points(f"{task}_delta", f"{label} [points]", TASKS.get(task, task)) for label, task in tasks.items()]
    rows = {"lora_r4": "lora", "lora_r16": "lora_r16", "focus_dg16": "focus"}
    return compare(
        results, "table3_lora", "T3", "LoRA and Focus, GPT-2 124M, PG-19", ["method"],
        [parameters(), perplexity(), *deltas], ["compare", "seeds"], rows,
        note="lora_r4, ours: the rank that is size-matched to the router.",
    )  # fmt: skip


def table4_alignment(results: Results) -> pd.DataFrame:
    loras = {f"lora_r4 {rate:g}": f"lora_{name}" for rate, name in ((1e-5, "1e-5"), (5e-5, "5e-5"), (1e-4, "1e-4"))}
    rows = {"instruct": BASE, "focus_k2": ["focus_k2", "paper_k2"], **loras}
    scores = [accuracy("truthfulqa_mc1", "TruthfulQA MC1"), ACCURACIES[0], ACCURACIES[1], ACCURACIES[3]]
    return compare(
        results, "table4_alignment", "T4", "Alignment, Mistral-7B-Instruct, 2,000 steps", ["method", "learning_rate"],
        [parameters(), perplexity(), change(origin="instruct"), *scores], ["alignment"], rows, extra="variant",
    )  # fmt: skip


def table5_full_training(results: Results) -> pd.DataFrame:
    def pair(stem: str, **options: Any) -> dict[str, Any]:
        return {"variants": {"ppl_full": f"{stem}full", "ppl_focus": f"{stem}focus"}, **options}

    rows = {
        "gpt2_124m_pg19": [pair("", experiments=["full_training"], needs=""), pair("pg19_")],
        "gpt2_774m_pg19": pair("gpt2_774m_"),
        "gpt2_xl_1_5b_pg19": pair("gpt2_1_5b_"),
        "gpt2_124m_wikitext103": pair("wikitext103_"),
        "gpt2_124m_openwebtext": pair("openwebtext_"),
        "mistral_shape_7b_scratch*": pair("", experiments=["from_scratch"], needs="the Hub and weeks of GPUs"),
    }
    full = Column("ppl_full", "PPL full attention", {"metric": ["perplexity", "score"]})
    return compare(
        results, "table5_full_training", "T5", "All weights trained, full attention and Focus", ["setting"],
        [full, perplexity("ppl_focus", "PPL Focus"), change("ppl_focus", origin="ppl_full")], ["domains"], rows,
        "the Hub and a GPU", extra="pair", note="From scratch, ours: a byte-level model of 6M parameters.",
    )  # fmt: skip


def table_long_context(results: Results) -> pd.DataFrame:
    stems = [("k_2", "k_3"), ("k_2_share", "k_3_share"), ("paper_k_2", "paper_k_3")]
    rows = [{"variants": {"ppl_full": BASE, "ppl_focus_k2": k2, "ppl_focus_k3": k3}} for k2, k3 in stems]
    columns = [Column("ppl_full", "PPL full attention", {"metric": ["perplexity", "score"]})]
    for k in (2, 3):
        columns.append(Column(f"ppl_focus_k{k}", f"PPL top-{k}", {"metric": "score"}))
        columns.append(change(f"ppl_focus_k{k}", f"ΔPPL top-{k} [%]", origin="ppl_full"))
    return compare(
        results, "table_long_context", "long context", "Routers trained at 1,024 tokens on longer contexts, Mistral 7B",
        ["tokens"], columns, ["long_context"], {"*": rows}, cells={"source": "benchmarks", "tokens": "$tokens"},
    )  # fmt: skip


def table6_speed(results: Results) -> pd.DataFrame:
    columns = [Column(f"speedup_K{k}", f"speedup, K = {k}", {"metric": "speedup", "groups": k}) for k in (4, 8)]
    cells = {"source": "speed", "clock": "attention", "assignment": "balanced", "top_k": 1, "tokens": "$tokens"}
    title = "Speedup over FlashAttention, one layer, H100"
    return compare(results, "table6_speed", "T6", title, ["tokens"], columns, ["speed"], {"*": {}}, "a GPU", cells)


def table7_topk(results: Results) -> pd.DataFrame:
    def hard(model: str, rule: str) -> dict[str, Any]:
        cells = {"source": "rows", "kind": "hard", "num_groups": 4, "top_k": "$top_k", "pair_rule": [None, rule]}
        return {"cells": cells | {"requested_model": model}}

    rows = {
        "gpt2_124m *": [hard("[!m]*", "query_topk"), hard("[!m]*", "share")],
        "mistral_7b *": hard("mistral_7b", "share") | {"needs": "the Hub and a GPU"},
    }
    timed = {"source": "speed", "kind": None, "metric": "speedup", "primary": True}
    density = Column("pairs_retained_percent", "far density [%]", PPL, "distant_density", _percent, 1)
    return compare(
        results, "table7_topk", "T7", "Top-k at inference, K = 4, PG-19", ["model", "top_k"],
        [perplexity(), Column("claimed_speedup", "speedup", timed), density], ["speed_quality"], rows,
        note="The paper's speedup is K/k, not a measurement; ours is of the trained router.",
    )  # fmt: skip


def table8_dominance(results: Results) -> pd.DataFrame:
    rows = {
        "entropy_balance_loss": "entropy_balance",
        "stop_gradient": "stop_gradient",
        "ema_centroids": "ema",
        "recluster_100": "recluster",
        "balance_x5": "balance_x5",
        "sinkhorn": ["sinkhorn", "balanced"],
    }
    columns = [Column(f"blocks_{name}", f"blocks {name}") for name in "ABC"]
    columns += [dominance("outcome", "largest group [%]", "all")]
    title = "Measures against router collapse"
    return compare(
        results, "table8_dominance", "T8", title, ["mitigation"], columns, ["stability"], rows, note=BALANCED_NOTE
    )


def table8_two_phase(results: Results) -> pd.DataFrame:
    columns = [
        dominance("dominance_centroid", "max [%], router", "router"),
        stability("stability_centroid", "stability, router", "router"),
        dominance("dominance_full_ft", "max [%], all", "all"),
        stability("stability_full_ft", "stability, all", "all"),
    ]
    rows = {"softmax_balance_loss": ["balance", "entropy_balance"], "sinkhorn": ["sinkhorn", "balanced"]}
    return compare(
        results, "table8_dominance_two_phase_K8", "T8 phases", "The router alone, then all weights, K = 8", ["method"],
        columns, ["stability"], rows, note=BALANCED_NOTE,
    )  # fmt: skip


def table9_ablation(results: Results) -> pd.DataFrame:
    default = ["paper", "default"]
    rows = {
        **{"groups 4": "K_4", "groups 8": default, "groups 16": "K_16", "groups 32": "K_32"},
        **{"window 64": "w_sixteenth", "window 128": default, "window 256": "w_quarter", "window 512": "w_half"},
        **{"temperature 0.05": "tau_0.05", "temperature 0.1": default},
        **{"temperature 0.2": "tau_0.2", "temperature 0.5": "tau_0.5"},
        **{"sinkhorn_iterations 3": "N_3", "sinkhorn_iterations 5": "N_5"},
        **{"sinkhorn_iterations 10": ["paper", "N_10"], "sinkhorn_iterations 20": "N_20"},
    }
    scored = {"kind": ["hard", "control", "trained"]}
    columns = [
        perplexity("ppl_centroid", "PPL, router", trainable=["router", None], **scored),
        perplexity("ppl_finetuned", "PPL, all", trainable="all", **scored),
        dominance("dominance_centroid", "max [%], router", "router"),
        dominance("dominance_full_ft", "max [%], all", "all"),
    ]
    title = "Ablation around K = 8, w = 128, tau = 0.1, N = 10"
    return compare(results, "table9_ablation", "T9", title, ["parameter", "value"], columns, ["ablation"], rows)


def table10_token_selection(results: Results) -> pd.DataFrame:
    rows = {"pretrained": BASE, "sparq": "sparq", "sparq_mean_reallocation": "sparq_mean", "magicpig": "magicpig"}
    return compare(
        results, "table10_token_selection", "T10", "Token selection, 32 tokens per query, GPT-2 124M", ["method"],
        [perplexity(), change(), *ACCURACIES], ["compare", "seeds"], rows | {"focus": ROUTERS},
    )  # fmt: skip


def groups_section5(results: Results) -> pd.DataFrame:
    metrics = {
        "punctuation_purity_percent": "punctuation_purity",
        "mean_confidence": "group_confidence",
        "smallest_group_percent": "smallest_group",
        "largest_group_percent": "largest_group",
    }
    rows = {key: {"cells": {"source": "groups", "num_groups": 8, "metric": metric}} for key, metric in metrics.items()}
    factor = {"group_confidence": 1}
    value = Column("value", "value", {"source": "groups"}, scale=lambda row, x: factor.get(row.metric, 100) * x)
    return compare(
        results, "groups_section5", "section 5", "Groups, K = 8", ["quantity"], [value], ["groups"], rows,
        note="Ours: median over layers of this project's router.",
    )  # fmt: skip


def groups_pairs(results: Results) -> pd.DataFrame:
    columns = [Column("position", "position"), Column("other_position", "other position")]
    columns += [Column("affinity", "affinity", {"metric": "affinity"}, digits=3)]
    cells = {"source": "groups", "num_groups": 8, "metric": "affinity"}
    return compare(
        results, "groups_section5_pairs", "section 5 pairs", "Distant pairs of one group", ["word", "other_word"],
        columns, ["groups"], {"*": {"cells": cells}}, shown=False,
    )  # fmt: skip


def figure1(results: Results) -> pd.DataFrame:
    rows: dict[str, Any] = {"pretrained": BASE, **TUNED, "focus": ROUTERS[:2]}
    for k in (2, 3, 4):
        cells = {"source": "rows", "kind": "hard", "num_groups": 4, "requested_model": "[!m]*", "top_k": k}
        rows[f"focus, k = {k}"] = {
            "experiments": ["speed_quality"], "cells": cells | {"pair_rule": [None, "query_topk"]},
        }  # fmt: skip
    columns = [perplexity(), change(), Column("speed", "speedup, one layer", timed=True)]
    title = "Perplexity and speed"
    return compare(results, "figure1", "Figure 1", title, ["method"], columns, ["compare", "seeds"], rows, shown=False)


PAPER_TABLES: list[Callable[[Results], pd.DataFrame]] = [
    table1_retrofit, table_dg, table2_scale, table2_gsm8k, table3_lora, table4_alignment, table5_full_training,
    table_long_context, table6_speed, table7_topk, table8_dominance, table8_two_phase, table9_ablation,
    table10_token_selection, groups_section5, groups_pairs, figure1,
]  # fmt: skip
