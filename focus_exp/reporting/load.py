"""Load all runs below a directory into one frame, variants joined into their comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from focus_exp.reporting.comparison import join_variants, pair_variants, trained_parameters
from focus_exp.reporting.frame import (
    BASE,
    COUNTERPART,
    FULL,
    RUN_FACTS,
    SETTINGS,
    SOFT,
    VARIANT_FACTS,
    Row,
    filter_rows,
    to_frame,
)
from focus_exp.results.intervals import student
from focus_exp.results.measurement import MIN_SPARSITY, WITHOUT_MASK, Measurement, exp
from focus_exp.results.metrics import METRICS, read_metrics
from focus_exp.results.record import TRAINING_TEXT, Record
from focus_exp.results.runs import find_variants, load_variants, read_runs

QUICK = "quick"
QUALITY = ("perplexity", "nll", "nll_change")
# settings of a measurement -> their columns, where these have other names
SETTING_COLUMNS = {"seq_len": "tokens", "lm_eval_metric": "task_metric", "task_version": "version"}
SETTING_COLUMNS |= {f"{name}_metric": name for name in ("primary", "deciding")}
# facts of a run: attributes of its record, and settings of its configuration by their column
RECORDED = ("experiment", "status", "error", "started", "command", "config_hash", "seed", "device", "steps")
CONFIGURED = {"requested_model": "model.name", "budget": "budget.name", "num_groups": "attention.groups"}
CONFIGURED |= {"attention": "attention.method", "window": "attention.window", "seq_len": "eval.seq_len"}
CONFIGURED |= {"lora_rank": "recipe.lora.rank"}
ASSET = ("requested", "used", "source", "fingerprint")  # of the model and of the text


@dataclass(frozen=True, eq=False)
class Results:
    """The runs below a directory.

    runs: provenance by run (the path below the directory), oldest first, variants of comparisons last.
    rows: one for each run, subject and metric, with the columns of `frame.COLUMNS`; a comparison has the rows of its
        variants.
    """

    runs: pd.DataFrame
    rows: pd.DataFrame
    is_quick: bool = False
    root: Path | None = None

    @cached_property
    def complete(self) -> pd.DataFrame:
        """Rows of finished runs; variants as rows of their comparisons."""
        return filter_rows(self.rows, {"status": "finished", "is_variant": [False, None]})

    @cached_property
    def rows_by_run(self) -> dict[str, pd.DataFrame]:
        """Rows of every finished run, oldest first."""
        return dict([*self.complete.groupby("run", sort=False)])


def load_results(root: Path, budget: str = "") -> Results:
    """Load all runs below `root`; those of budget=quick are shown by themselves or not at all.

    Raises:
        UserError: a record is unreadable.
    """
    records = read_runs(root)
    facts = {name: describe_run(name, record) for name, record in records.items()}
    records = {name: run for name, run in records.items() if (facts[name]["budget"] == QUICK) == (budget == QUICK)}
    by_hash = {name.rpartition("-")[2]: name for name in records}
    for name, record in records.items():
        adapter = Path(record.config.get("adapter") or "")
        folder = adapter.parent if adapter.name == "adapter" else adapter
        if trainer := by_hash.get(folder.name.rpartition("-")[2]):  # a run, whose folder ends with its hash
            facts[name]["steps"] += records[trainer].steps
            if {record.config["job"], records[trainer].config["job"]} == {"analyze"}:  # of the same router, again
                facts[name]["setup"] = facts[trainer]["setup"]
    return replace(join_runs(records, facts, records), is_quick=budget == QUICK, root=root)


def load_run(folder: Path) -> Results:
    """Load one run, or a comparison with its variants."""
    name, records = load_variants(folder)
    return join_runs(records, {name: describe_run(name, record) for name, record in records.items()}, [name])


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the training log of a run, or of all variants of a comparison."""
    lines = read_metrics(folder / METRICS)
    name, records = load_variants(folder)
    for variant, run in find_variants(name, records).items():
        lines += [{"variant": variant, **line} for line in read_metrics(folder.parents[1] / run / METRICS)]
    return lines


def join_runs(records: Mapping[str, Record], facts: Mapping[str, dict[str, Any]], names: Iterable[str]) -> Results:
    """Return the rows of runs, those of comparisons from the runs of their variants.

    Args:
        records, facts: by name, also of variants that are not shown themselves.
        names: of the runs that are shown.
    """
    measured = {name: measured_rows(record, facts[name]) for name, record in records.items()}
    runs: list[dict[str, Any]] = []
    rows: list[Any] = []
    for name in sorted(names, key=lambda name: (facts[name]["is_variant"], records[name].started)):
        record, joined, variant = records[name], measured[name], facts[name]["variant"]
        variants = find_variants(name, records)
        seconds = [record.wall_seconds, *(records[run].wall_seconds for run in variants.values())]
        runs.append(facts[name] | {"total_seconds": None if None in seconds else sum(filter(None, seconds))})
        shared = {fact: facts[name][fact] for fact in RUN_FACTS}
        if record.variants:
            shared["first_variant"] = record.variants[0].name
            runs_by_variant = {variant: records[run] for variant, run in variants.items()}
            joined = join_variants(runs_by_variant, {variant: measured[run] for variant, run in variants.items()})
            joined += pair_variants(record, runs_by_variant, joined)
        elif variant:
            shared["variant"] = variant
        rows += [row._replace(**shared) for row in joined]
    return Results(pd.DataFrame(runs).convert_dtypes().set_index("run") if runs else pd.DataFrame(), to_frame(rows))


def measured_rows(record: Record, facts: Mapping[str, Any]) -> list[Any]:
    """Return the rows of a run's own measurements."""
    template = Row(causal=True, **{name: facts[name] for name in VARIANT_FACTS})
    rows = [to_row(measurement, template) for measurement in record.measurements]
    router = template._replace(causal=facts["is_causal"], name=record.method.get("name"))
    quality, groups = quality_rows(rows, record), group_rows(rows, router)
    return [*quality, *benchmark_rows(rows), *probe_rows(rows), *speed_rows(rows), *groups, *detail_rows(rows)]


def describe_run(name: str, record: Record) -> dict[str, Any]:
    """Return the provenance of a run; times in seconds. variant: its name in a comparison, or ""."""
    model, data = record.model, record.data
    key, variant = record.setup or record.config_hash, record.config.get("variant") or ""
    is_local = model.get("source") == "local"  # named after its folder, which says nothing elsewhere
    parts = {f"{part}_{name}": facts.get(name) for part, facts in (("model", model), ("data", data)) for name in ASSET}
    return parts | {
        **{name: getattr(record, name) for name in RECORDED},
        **{name: record.setting(*place.split(".")) for name, place in CONFIGURED.items()},
        "run": name,
        "variant": variant,
        "is_variant": bool(variant),
        "commit": record.commit or "",
        "setup": key if record.variants else f"{record.experiment}-{key}",
        "model": (None if is_local else model.get("name")) or record.setting("model", "name"),
        "data": data.get("name") or record.setting("data", "name"),
        "training_text": data.get(TRAINING_TEXT, {}).get("name"),
        "is_model_substituted": bool(model.get("substitution")),
        "is_data_substituted": bool(data.get("substitution")),
        "model_params": model.get("parameters"),
        "architecture": name_architecture(record),
        "device_kind": record.device.partition(",")[0],
        "is_causal": record.method.get("causal", True),
        "train_tokens": record.tokens_seen,
        "seconds": record.wall_seconds,
        "warnings": "; ".join(record.warnings),
    }


def name_architecture(record: Record) -> str | None:
    """Return what the attention of a run's model is called in the paper; None where its configuration is not recorded.

    That of a model which stands in for another one is not recorded.
    """
    model, config = record.model, record.setting("model", "architecture") or {}
    if not config or (model.get("substitution") and Path(model["requested"]).name != model["used"]):
        return None
    kind, heads = config["model_type"], config.get("num_attention_heads")
    heads_kind = "MHA" if config.get("num_key_value_heads", heads) == heads else "GQA"
    return {"qwen2": "GQA, bias", "olmo2": "MHA, QK norm", "gemma2": "softcap"}.get(
        kind, heads_kind if kind in ("gpt2", "llama", "mistral") else kind
    )


def to_row(m: Measurement, template: Any) -> Any:
    """Return the columns and settings of a measurement, None for missing ones.

    Args:
        template: has the facts of its run.
    """
    numbers = {name: getattr(m, name) for name in ("value", "low", "high", "density")}
    numbers = {name: None if x is None or math.isnan(x) else x for name, x in numbers.items()}
    settings = {SETTING_COLUMNS.get(key, key): cell for key, cell in m.settings.items()}
    density, phase = numbers["density"], settings.get("phase")
    cells: dict[str, Any] = numbers | {name: settings[name] for name in SETTINGS if name in settings}
    cells.update(variant=m.variant, name=m.variant, subject=m.variant + (f", after {phase}" if phase else ""))
    cells.update(metric=m.metric, unit=m.unit, n=m.n, reference=m.reference or None)
    cells.update(sparsity=None if density is None else 1 - density)
    return template._replace(**cells, case=str(m.settings) if "clock" in m.settings else None)


def is_mask_active(row: Any) -> bool | None:
    """Return whether the mask prunes >= 5 % of the QK pairs; None without a mask."""
    is_soft = row.kind == SOFT or (row.kind == "causal_counterpart" and row.top_k is None)
    if is_soft or row.kind in (BASE, "trained") or row.method in WITHOUT_MASK or row.sparsity is None:
        return None
    return bool(row.sparsity >= MIN_SPARSITY)


def standard_error(row: Any, dof: float | None) -> float | None:
    return None if dof is None or row.low is None else (row.high - row.low) / 2 / student(dof)


def quality_rows(rows: list[Any], record: Record) -> Iterator[Any]:
    """Yield perplexity, loss and its paired changes, for each routing, control and phase."""
    primary, parameters = record.primary_variant, trained_parameters(record)
    subjects: dict[str, dict[str, Any]] = {}  # what else was measured of each
    for row in rows:
        if row.reference is None and row.task is None:
            subjects.setdefault(row.subject, {}).setdefault(row.metric, row.value)
    for row in rows:
        if row.kind is None or row.task is not None or row.metric not in QUALITY:
            continue
        other = subjects.get(row.subject, {})
        own_tokens = other.get("training_tokens")
        cells: dict[str, Any] = {"source": "phases" if row.phase else "rows", "variant": None, "dof": None, "n": None}
        cells.update(primary=row.variant == primary and not row.phase, mask_active=is_mask_active(row))
        cells.update(distant_density=other.get("distant_density"), largest_group=other.get("largest_group_fraction"))
        cells.update(trainable_params=0 if row.kind == BASE else None if row.phase else parameters)
        cells.update(own_tokens=own_tokens, train_tokens=int(own_tokens) if own_tokens else row.train_tokens)
        if row.metric == "nll_change":
            base = None if other.get("nll") is None else exp(other["nll"] - row.value)
            cells.update(reference=name_reference(row), level=other.get("perplexity"), reference_level=base)
            if row.low is not None:
                cells.update(dof=row.dof, n_units=row.n, stderr=standard_error(row, row.dof))
        yield row._replace(**cells)


def name_reference(row: Any) -> str:
    """Return what a change is from; a soft or non-causal counterpart has the name of its kind."""
    if row.kind == "causal_counterpart" and row.reference != BASE:
        return COUNTERPART
    return SOFT if row.kind == "hard" and row.reference.endswith("_soft") else str(row.reference)


def benchmark_rows(rows: list[Any]) -> Iterator[Any]:
    """Yield scores of tasks and their paired changes from full attention."""
    rows = [row for row in rows if row.task is not None]
    density = {(row.variant, row.task): row.value for row in rows if row.metric.startswith("distant_density:")}
    scored = [row for row in rows if row.kind is not None]
    scores = {(row.variant, row.task, row.task_metric): row.value for row in scored if row.reference is None}
    for row in scored:
        score = scores.get((row.variant, row.task, row.task_metric))
        cells: dict[str, Any] = {"source": "benchmarks", "metric": "score", "name": None, "dof": None}
        cells.update(subject=f"{row.variant} {row.task} {row.task_metric or ''}", mask_active=is_mask_active(row))
        cells.update(distant_density=density.get((row.variant, row.task)))
        if row.reference is not None:
            dof = math.inf if row.dof is None and row.unit == "fraction" else row.dof  # of a fraction it is normal
            dof = dof if row.low is not None and (row.n or 0) > 1 else None
            cells.update(metric="score_change", reference=FULL, level=score)
            cells.update(dof=dof, n_units=row.n, stderr=standard_error(row, dof))
            if score is not None and row.value is not None:
                cells["reference_level"] = score * exp(-row.value) if row.unit == "nats" else score - row.value
        yield row._replace(**cells)


def probe_rows(rows: list[Any]) -> Iterator[Any]:
    """Yield the last probe and the maximum of each phase."""
    phases: dict[str, list[Any]] = {}
    for row in rows:
        if row.step is not None and row.phase is not None:
            metric = "stability" if row.metric == "assignment_overlap" else row.metric
            probe = row._replace(source="probes", variant=None, name="router", metric=metric)
            phases.setdefault(row.phase, []).append(probe)
    for probes in phases.values():
        end = max(row.step for row in probes)
        yield from (row for row in probes if row.step == end)
        for metric in ("dominance", "dead_groups"):
            trained = [row for row in probes if row.metric == metric and (row.step > 0 or end == 0)]
            if trained := [row for row in trained if row.value is not None]:
                yield max(trained, key=lambda row: row.value)._replace(metric=f"{metric}_most", step=end)


def speed_rows(rows: list[Any]) -> Iterator[Any]:
    """Yield speedups and ratios of peak memory, each with both sides."""
    sides: dict[Any, float | None] = {}
    for row in rows:
        sides.setdefault((row.case, row.metric, row.variant == "full"), row.value)
    for row in [row for row in rows if row.metric == "speedup"]:
        source = "method_speed" if row.groups is None else "speed"
        speed = row._replace(source=source, reference=FULL, variant=None, name=None, n=None, layer=None)
        ours, full = (sides.get((row.case, "latency_ms", is_full)) for is_full in (False, True))
        yield speed._replace(level=ours and 1e-3 * ours, reference_level=full and 1e-3 * full)
        ours, full = (sides.get((row.case, "peak_memory_bytes", is_full)) for is_full in (False, True))
        if ours is not None and full is not None:
            yield speed._replace(metric="peak_memory", unit="x", value=ours / full, level=ours, reference_level=full)


def group_rows(rows: list[Any], router: Any) -> Iterator[Any]:
    """Yield medians over layers of the groups; the paper does not name its layers.

    Args:
        router: a row with the facts of the router.
    """
    columns = ["variant", "metric", "layer", "head", "word_class", "value"]
    cells = [[getattr(row, name) for name in columns] for row in rows if row.variant == "router"]
    frame = pd.DataFrame(cells, columns=columns)
    values = {name: part for name, part in frame.groupby("metric")}
    if "layer_confidence" not in values:
        return
    layers, pure = ["layer", "head"], values["group_purity"]
    fractions = values["group_fraction"].dropna(subset="word_class").groupby(layers, dropna=False).value
    purity = pure[pure.word_class == "punctuation"].groupby(layers, dropna=False).value.max().tolist()
    confidence = values["layer_confidence"].value
    medians = {
        "punctuation_purity": median([*purity, *[0.0] * (len(confidence) - len(purity))]),
        "group_confidence": confidence.mean(),
        "smallest_group": fractions.min().median(),
        "largest_group": fractions.max().median(),
    }
    for metric, value in medians.items():
        yield router._replace(source="groups", metric=metric, value=value, unit="fraction")


def detail_rows(rows: list[Any]) -> Iterator[Any]:
    """Yield the analysis of the groups, continuations, and costs by word class."""
    sources = {"pair_affinity": "pairs", "passage_groups": "passage"}
    sources |= dict.fromkeys(("group_fraction", "group_purity", "class_fraction"), "word groups")
    for row in rows:
        if row.metric in sources and (row.word_class is not None or row.metric in ("pair_affinity", "passage_groups")):
            yield row._replace(source=sources[row.metric], variant=None)
        if row.router is not None or row.metric in ("layer_confidence", "passage_distant_density"):
            metric = f"{row.metric} {row.router}" if row.router else row.metric
            yield row._replace(source="analysis", metric=metric, variant=None)
        elif row.prompt is not None:
            yield row._replace(source="generation")
        elif row.metric.startswith("class_nll"):
            yield row._replace(source="costs", variant=row.word_class, metric=f"{row.metric} {row.variant}")
