"""Load all runs below a directory, variants joined into their comparisons."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy.special import stdtrit

from focus_exp.errors import UserError
from focus_exp.reporting.aggregate import Row
from focus_exp.results.measurement import COLUMNS as CSV_COLUMNS
from focus_exp.results.measurement import MEASUREMENTS, MIN_SPARSITY, WITHOUT_MASK, primary_variant
from focus_exp.results.metrics import METRICS, read_metrics
from focus_exp.results.record import RECORD, Record, is_complete
from focus_exp.results.setup import setup_key, variant_key

QUICK = "quick"
# settings of a measurement that become columns
SETTINGS = (
    *("kind", "method", "top_k", "pair_rule", "window", "path", "phase", "step", "trainable", "causal", "dof", "task"),
    *("seq_len", "clock", "groups", "assignment", "dtype", "layer", "head", "stderr", "primary_metric"),
    *("deciding_metric", "error", "lm_eval_metric", "task_version", "word_class", "router", "position_start"),
    "position_end",
)
INTEGERS = (
    *("seed", "seq_len", "window", "num_groups", "train_tokens", "steps", "model_params", "top_k", "n", "tokens"),
    *("groups", "step", "n_units", "layer", "head", "start", "end"),
)
COLUMNS = (
    *INTEGERS,
    *("value", "low", "high", "level", "reference_level", "stderr", "dof", "trainable_params", "first_params"),
    *("density", "reference_params", "sparsity", "distant_density", "largest_group", "is_variant", "complete"),
    *("mask_active", "causal", "reference_causal", "primary", "deciding", "reversed", "run", "experiment", "started"),
    *("status", "device", "device_kind", "first_variant", "setup", "source", "variant", "requested_model", "model"),
    *("data", "attention", "gate", "variant_commit", "variant_setup", "name", "kind", "method", "pair_rule", "task"),
    *("version", "task_metric", "clock", "assignment", "dtype", "path", "phase", "unit", "trainable"),
    *("reference_setup", "metric", "reference", "error", "subject"),
)
OF_RUN = (  # columns of the comparison or single run
    *("experiment", "seed", "started", "status", "device", "device_kind", "complete", "setup", "is_variant"),
    *("first_variant", "first_params"),
)
OF_VARIANT = (  # columns of the variant's own run
    *("requested_model", "model", "data", "seq_len", "window", "num_groups", "gate", "attention", "train_tokens"),
    *("steps", "model_params", "variant_commit"),
)
GENERATED = (
    *("generated_tokens", "continuation_nll", "agreeing_tokens", "generation_seconds", "keys_read", "cache_bytes"),
)


@dataclass(frozen=True, eq=False)
class Results:
    """The runs below a directory.

    runs: one row for each run, by its name (the path below the directory).
    rows: one for each run, subject and metric, with the attributes `COLUMNS`; a comparison has those of its variants.
        source: rows, phases (quality), benchmarks, probes, speed, method_speed, groups, variants
        metric: perplexity, nll, nll_change, score, score_change, speedup, peak_memory, dominance, ...
        level, reference_level: both sides of a difference
        primary: the row that represents its run, variant or task; sparsity, density: of the causal QK pairs
        setup, variant_setup: equal for runs that differ in the seed only
    """

    runs: pd.DataFrame
    rows: list[Row]
    is_quick: bool = False
    root: Path | None = None

    @cached_property
    def complete(self) -> list[Row]:
        """Rows of complete runs; variants as rows of their comparisons."""
        return [row for row in self.rows if row.complete and not row.is_variant]

    @cached_property
    def rows_by_run(self) -> dict[str, list[Row]]:
        """Rows of every complete run, oldest first."""
        rows: dict[str, list[Row]] = {}
        for row in self.complete:
            rows.setdefault(row.run, []).append(row)
        return rows

    def select_run(self, name: str) -> Results:
        """Return one run."""
        return Results(self.runs.loc[[name]], [row for row in self.rows if row.run == name])

    def minutes(self, runs: Iterable[str]) -> float | None:
        """Return the wall time of runs with their variants; None where unknown."""
        seconds = [self.runs.total_seconds[run] for run in runs]
        return None if not seconds or any(map(pd.isna, seconds)) else round(sum(seconds) / 60, 1)


# --- files ---


@dataclass(frozen=True, eq=False)
class Loaded:
    """The files of all runs below a directory.

    runs: provenance, one row for each run. variants: one row for each variant of a comparison: `comparison`, `variant`,
    `run` (its own, "" where it left none). measurements: those of every run, settings as columns.
    """

    root: Path
    runs: pd.DataFrame
    variants: pd.DataFrame
    measurements: pd.DataFrame


def load_results(root: Path, budget: str = "") -> Results:
    """Load all runs below `root`. Raises UserError for an unreadable one."""
    return build_report_results(read_runs(root), budget)


def build_report_results(loaded: Loaded, budget: str = "") -> Results:
    """Build the rows that the report shows.

    A run that was copied into records/ counts once. Runs of budget=quick are shown by themselves or not at all.
    """
    runs, is_quick = loaded.runs, budget == QUICK
    if len(runs):
        runs = runs[(runs.budget == QUICK).fillna(False) == is_quick]
        copies = runs.run.str.contains("(?:^|/)records/")
        runs = runs.assign(copied=~copies).sort_values(["copied", "run"], kind="stable")
        runs = runs.drop_duplicates(["experiment", "config_hash", "started"])
    return build_results(loaded, runs, is_quick)


def load_run(folder: Path) -> Results:
    """Load one run, or a comparison with its variants."""
    return _load_once(folder.absolute(), _changed_at(folder))


@lru_cache(maxsize=1)  # for its table, its figures and its texts
def _load_once(folder: Path, changed: float) -> Results:
    loaded, name = _read_with_variants(folder)
    variant_runs = loaded.variants.run[loaded.variants.comparison == name]
    runs = loaded.runs[loaded.runs.run.isin([name, *variant_runs])]
    return build_results(loaded, runs, details=True).select_run(name)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the training log of a run, or of all variants of a comparison."""
    loaded, name = _read_with_variants(folder)
    lines = read_metrics(folder / METRICS)
    for row in loaded.variants[loaded.variants.comparison == name].itertuples():
        lines += [{"variant": row.variant, **line} for line in read_metrics(loaded.root / row.run / METRICS)]
    return lines


def _read_with_variants(folder: Path) -> tuple[Loaded, str]:
    """Read a run, of a comparison with its experiment; return them and its name."""
    folder = folder.absolute()
    root = folder.parent.parent if Record.load(folder / RECORD).variants else folder
    return _read_once(root, _changed_at(folder)), folder.relative_to(root).as_posix()


def _changed_at(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder / RECORD, folder / MEASUREMENTS) if path.exists())


@lru_cache(maxsize=1)
def _read_once(root: Path, changed: float) -> Loaded:
    return read_runs(root)


def read_runs(root: Path) -> Loaded:
    """Read record and measurements of every run below `root`; UserError if damaged."""
    folders = sorted(path.parent for path in root.rglob(RECORD))
    records = {folder.relative_to(root).as_posix(): Record.load(folder / RECORD) for folder in folders}
    frames = [_read_table(folder / MEASUREMENTS, run) for folder, run in zip(folders, records, strict=True)]
    table = _expand_settings(pd.concat(frames, ignore_index=True) if frames else _read_table(root / MEASUREMENTS, ""))
    by_run = {str(run): group for run, group in table[table.metric == "perplexity"].groupby("run", sort=False)}
    timed = set(table.run[table.clock.notna()])
    runs = pd.DataFrame([describe_run(run, record, by_run.get(run), run in timed) for run, record in records.items()])
    if len(runs):
        runs = runs.sort_values("started", kind="stable", ignore_index=True).convert_dtypes()
        primary = table.run.map(runs.set_index("run").primary_variant.to_dict())
        table["is_primary"] = (table.variant == primary) & table.phase.isna()
    starts = {(record.config_hash, record.started): run for run, record in records.items()}
    setups = {start: setup_key(records[run]) for start, run in starts.items()}
    variants = [row for run, record in records.items() for row in _describe_variants(run, record, starts, setups)]
    return Loaded(root, runs, pd.DataFrame(variants, columns=VARIANTS).convert_dtypes(), table)


def describe_run(run: str, record: Record, perplexities: pd.DataFrame | None, is_timed: bool) -> dict[str, Any]:
    """Return the row of a run in `Results.runs`; times in seconds.

    variant: its name in a comparison, or ""; primary_variant: of its measurements the one that represents it.
    """
    model, data, setting = record.model, record.data, record.setting
    rows = [] if perplexities is None else perplexities.to_dict("records")
    key, variant = setup_key(record), record.config.get("variant") or ""
    commit = (record.commit or "").removesuffix("-dirty")
    is_local = model.get("source") == "local"  # named after its folder, which says nothing elsewhere
    return {
        "run": run, "experiment": record.experiment, "variant": variant, "is_variant": bool(variant),
        "primary_variant": primary_variant(record.config.get("attention") or {}, rows), "status": record.status,
        "complete": is_complete(record.status, is_timed, bool(rows)), "started": record.started,
        "command": record.command, "commit": commit, "variant_commit": commit, "config_hash": record.config_hash,
        "setup": key if record.variants else f"{record.experiment}-{key}",
        "seed": record.config.get("seed") if record.seed is None else record.seed,
        "budget": setting("budget", "name"), "requested_model": setting("model", "name"),
        "model": (None if is_local else model.get("name")) or setting("model", "name"),
        "data": data.get("name") or setting("data", "name"),
        **{f"{part}_{key}": facts.get(key) for part, facts in (("model", model), ("data", data))
           for key in ("requested", "used", "source", "fingerprint")},
        "is_model_substituted": bool(model.get("substitution")), "is_data_substituted": bool(data.get("substitution")),
        "model_params": model.get("parameters"), "device": record.device, "device_kind": record.device_kind,
        "attention": setting("attention", "method"), "num_groups": setting("attention", "groups"),
        "gate": setting("attention", "gate"), "window": setting("attention", "window"),
        "seq_len": setting("eval", "seq_len"), "is_causal": record.method.get("causal", True),
        "train_tokens": record.tokens_seen, "tokens": record.tokens_seen, "steps": record.steps,
        "seconds": record.wall_seconds, "warnings": "; ".join(record.warnings),
    }  # fmt: skip


VARIANTS = ["comparison", "variant", "own_run", "run", "trainable_params", "variant_setup", "train_tokens", "steps"]
VARIANTS += ["variant_error", "groups_set"]


def _describe_variants(
    comparison: str, record: Record, starts: dict[Any, str], setups: dict[Any, str]
) -> list[dict[str, Any]]:
    rows = []
    for v in record.variants:
        start = v.config_hash, v.started
        groups = [int(text.partition("=")[2]) for text in v.settings if text.startswith("attention.groups=")]
        setup = variant_key(v.name, v.settings, v.steps, v.tokens_seen, setups.get(start, ""))
        trained, run = v.trainable_parameters if v.tokens_seen else 0, starts.get(start, "")
        cells = (comparison, v.name, run, run, trained, setup, v.tokens_seen, v.steps, v.error)
        rows.append(dict(zip(VARIANTS, (*cells, groups[0] if groups else None), strict=True)))
    return rows


def _read_table(path: Path, run: str) -> pd.DataFrame:
    table = pd.read_csv(path, dtype=str, keep_default_na=False) if path.exists() else pd.DataFrame(columns=CSV_COLUMNS)
    table.insert(0, "run", run)
    return table


def _expand_settings(table: pd.DataFrame) -> pd.DataFrame:
    """Convert numbers, and add the known settings as columns."""
    for name in ("value", "low", "high", "density", "n"):
        table[name] = pd.to_numeric(table[name].replace("", None)).astype(float)
    parsed = {text: json.loads(text) if text else {} for text in table.settings.unique()}
    for name in SETTINGS:
        known = {text: values[name] for text, values in parsed.items() if name in values}
        table[name] = table.settings.map(known).astype(object)
    table["reference"] = table.reference.replace("", None)
    table["causal"] = table.causal.where(table.causal.notna(), True)
    numbers = ["dof", "stderr", "step", "seq_len", "top_k", "groups", "window", "head"]
    table[numbers] = table[numbers].astype(float)
    return table.drop(columns=["settings", "seed"])


# --- one table ---


def build_results(loaded: Loaded, runs: pd.DataFrame, is_quick: bool = False, details: bool = False) -> Results:
    """Return the rows of these runs, and those of comparisons from their variants.

    Args:
        details: add what only the figures and tables of a single run show.
    """
    if runs.empty:
        return Results(runs, [], is_quick, loaded.root)
    variants = loaded.variants[loaded.variants.comparison.isin(runs.run)]
    runs = _sort_runs(runs, variants)
    raw = loaded.measurements[loaded.measurements.run.isin(runs.run)].reset_index(drop=True)
    parts = [_quality_rows(raw), _benchmark_rows(raw), _probe_rows(raw, details), _speed_rows(raw), _group_rows(raw)]
    rows = pd.concat([*parts, *([_details(raw)] if details else [])], ignore_index=True)
    rows = rows.drop(columns=["window", "seq_len"])
    of_variant = runs[["run", *OF_VARIANT]]
    single = rows[~rows.run.isin(variants.comparison)].merge(of_variant, on="run")
    names = single.run.map(runs.set_index("run").variant.to_dict())
    has_own = single.source.isin(["benchmarks", "generation", "costs"])
    single["variant"] = names.where(names != "", single.variant.where(has_own))
    joined = [_join_variants(rows, of_variant, variants)] if len(variants) else []
    joined += [_differences(raw, joined[0])] if joined else []
    table = pd.concat([single, *joined], ignore_index=True)
    table = table.merge(runs.reset_index()[["run", "index", *OF_RUN]], on="run")
    table = table.sort_values("index", kind="stable").reindex(columns=COLUMNS)
    return Results(runs.set_index("run"), _to_rows(table), is_quick, loaded.root)


def _to_rows(table: pd.DataFrame) -> list[Row]:
    """Return one object for each row, with None for missing cells."""
    cells = {}
    for name in table:
        column = table[name].astype(object).where(table[name].notna(), None).tolist()
        cells[name] = [None if cell is None else int(cell) for cell in column] if name in INTEGERS else column
    return [Row(**dict(zip(cells, row, strict=True))) for row in zip(*cells.values(), strict=True)]


def _sort_runs(runs: pd.DataFrame, variants: pd.DataFrame) -> pd.DataFrame:
    """Sort by start, variants last; add first variants and total times."""
    runs = runs.sort_values(["is_variant", "started"], kind="stable", ignore_index=True)
    first = variants.drop_duplicates("comparison").set_index("comparison")
    seconds = variants.run.map(runs.set_index("run").seconds.to_dict()).groupby(variants.comparison)
    total = seconds.agg(lambda group: group.sum(skipna=False)).to_dict()
    return runs.assign(
        first_variant=runs.run.map(first.variant.to_dict()),
        first_params=runs.run.map(first.trainable_params.to_dict()),
        total_seconds=runs.seconds + runs.run.map(total).fillna(0),
    )


def _mask_activity(rows: pd.DataFrame) -> pd.Series:
    """Return whether the mask prunes >= 5 % of the QK pairs; None without a mask."""
    soft = (rows.kind == "soft") | ((rows.kind == "causal_counterpart") & rows.top_k.isna())
    masked = ~soft & ~rows.kind.isin(["base", "trained", "missing"]) & ~rows.method.isin(WITHOUT_MASK)
    return (rows.sparsity >= MIN_SPARSITY).astype(object).where(masked & rows.sparsity.notna(), None)


def _standard_errors(rows: pd.DataFrame) -> pd.Series:
    return (rows.high - rows.low) / 2 / stdtrit(rows.dof.astype(float), 0.975)


def _subjects(rows: pd.DataFrame) -> pd.Series:
    return rows.variant + (", after " + rows.phase).fillna("")


def _quality_rows(raw: pd.DataFrame) -> pd.DataFrame:
    """Perplexity, loss and its paired changes, for each routing, control and phase."""
    rows = raw[raw.kind.notna() & raw.task.isna() & ~raw.metric.isin(GENERATED)].copy()
    rows["name"], rows["source"] = rows.variant, np.where(rows.phase.isna(), "rows", "phases")
    rows["subject"] = _subjects(rows)
    levels = raw[raw.reference.isna() & raw.task.isna()]
    levels = levels.assign(subject=_subjects(levels)).drop_duplicates(["run", "subject", "metric"])
    for name, metric in (
        ("row_perplexity", "perplexity"), ("row_nll", "nll"), ("distant_density", "distant_density"),
        ("largest_group", "largest_group_fraction"),
    ):  # fmt: skip
        values = levels[levels.metric == metric].set_index(["run", "subject"]).value.to_dict()
        rows[name] = [values.get(key, np.nan) for key in zip(rows.run, rows.subject, strict=True)]
    rows["sparsity"] = 1 - rows.density
    rows["mask_active"] = _mask_activity(rows)
    rows = rows[rows.metric.isin(["perplexity", "nll", "nll_change"])]
    change = rows.metric == "nll_change"
    rows = rows[~(change & rows.value.isna())].assign(dof=rows.dof.fillna(1.0).where(change & rows.low.notna()))
    rows["stderr"], rows["n_units"] = _standard_errors(rows), rows.n.where(rows.dof.notna())
    rows["level"] = rows.row_perplexity.where(change)
    rows["reference_level"] = np.exp((rows.row_nll - rows.value).clip(upper=700)).where(change)
    counterpart = (rows.kind == "causal_counterpart") & (rows.reference != "base") & change
    soft = (rows.kind == "hard") & rows.reference.str.endswith("_soft").fillna(False).astype(bool)
    rows["reference"] = rows.reference.mask(counterpart, "non-causal counterpart").mask(soft, "soft")
    rows["primary"] = rows.is_primary
    # controls are trained as far as their run is
    last = rows[rows.trainable.notna()].groupby("run").trainable.last().to_dict()
    rows["trainable"] = rows.trainable.where(rows.trainable.notna(), rows.run.map(last))
    base = rows[(rows.kind == "base") & (rows.metric == "perplexity")]
    zero = base.assign(metric="parameters", value=0, low=None, high=None)
    return pd.concat([rows, zero]).drop(columns="n")


def _benchmark_rows(raw: pd.DataFrame) -> pd.DataFrame:
    """Return scores of tasks and their paired changes from full attention."""
    rows = raw[raw.task.notna() & raw.kind.notna() & ~raw.metric.str.startswith("perplexity_change_pct")].copy()
    change = rows.reference.notna()
    rows["source"], rows["metric"] = "benchmarks", np.where(change, "score_change", "score")
    rows["subject"] = rows.variant + " " + rows.task + " " + rows.lm_eval_metric.fillna("")
    rows["sparsity"], rows["tokens"] = 1 - rows.density, rows.seq_len
    rows["mask_active"] = _mask_activity(rows)
    density = raw[raw.metric.str.startswith("distant_density:")].set_index(["run", "variant", "task"]).value.to_dict()
    scores = rows[~change].set_index(["run", "subject"]).value.to_dict()
    keys = zip(rows.run, rows.variant, rows.task, rows.subject, strict=True)
    cells = [(density.get((run, variant, task)), scores.get((run, subject))) for run, variant, task, subject in keys]
    rows["distant_density"], score = [cell[0] for cell in cells], pd.Series([cell[1] for cell in cells], rows.index)
    score = score.astype(float)
    dof = rows.dof.mask(rows.dof.isna() & (rows.unit == "fraction"), np.inf)  # of a fraction the interval is normal
    rows["dof"] = dof.where(change & rows.low.notna() & (rows.n > 1))
    rows["stderr"] = _standard_errors(rows).fillna(rows.stderr)
    rows["n_units"], rows["level"] = rows.n.where(change), score.where(change)
    rows["reference_level"] = (score * np.exp(-rows.value)).where(rows.unit == "nats", score - rows.value).where(change)
    rows["reference"] = rows.reference.mask(change, "full attention")
    names = {"primary_metric": "primary", "deciding_metric": "deciding", "lm_eval_metric": "task_metric"}
    return rows.rename(columns={**names, "task_version": "version"})


def _probe_rows(raw: pd.DataFrame, details: bool) -> pd.DataFrame:
    """Return the last probe and maximum of each phase; all with `details`."""
    rows = raw[raw.step.notna()].copy()
    rows["metric"] = rows.metric.replace({"assignment_overlap": "stability"})
    rows["variant"], rows["name"] = None, "router"
    end = rows.groupby(["run", "phase"], sort=False).step.transform("max")
    log = rows[rows.metric.isin(["dominance", "dead_groups"])].assign(source="probe_log")
    last = rows[rows.step == end].assign(source="probes")
    trained = log[(log.step > 0) | (end[log.index] == 0)]
    most = trained.sort_values("value").groupby(["run", "phase", "metric"], sort=False).tail(1)
    most = most.assign(source="probes", metric=most.metric + "_most", step=end)
    return pd.concat([last, most, *([log] if details else [])])


def _speed_rows(raw: pd.DataFrame) -> pd.DataFrame:
    """Return speedups and ratios of peak memory, each with both sides."""
    rows = raw[raw.clock.notna()].copy()
    case = ["run", "clock", "method", "seq_len", "groups", "assignment", "top_k", "pair_rule", "window", "dtype"]
    rows["case"] = rows.groupby([*case, "path"], dropna=False, sort=False).ngroup()
    speedups = rows[rows.metric.isin(["speedup", "attention_speedup"])].copy()
    memory = rows[rows.metric == "speedup"].assign(metric="peak_memory", unit="x", value=None)
    for part, metric, factor in ((speedups, "latency_ms", 1e-3), (memory, "peak_memory_bytes", 1.0)):
        for side, wanted in (("level", rows.variant != "full"), ("reference_level", rows.variant == "full")):
            side_rows = rows[(rows.metric == metric) & wanted].drop_duplicates("case").set_index("case")
            part[side] = part.case.map((factor * side_rows.value).to_dict())
    memory["value"] = memory.level / memory.reference_level
    table = pd.concat([speedups, memory[memory.value.notna()]], ignore_index=True)
    table["source"] = np.where(table.groups.notna(), "speed", "method_speed")
    table["reference"], table["tokens"] = "full attention", table.seq_len
    table["primary"] = _primary_speed(table)
    return table.drop(columns=["variant", "n", "layer"])


def _primary_speed(rows: pd.DataFrame) -> pd.Series:
    """Mark for each k the timing of the trained router to show with its quality.

    That is at the longest length at which all series were timed, with routing, or else the prefill.
    """
    marks = pd.Series(None, rows.index, dtype=object)
    timed = rows[(rows.metric == "speedup") & (rows.source == "speed") & rows.clock.isin(["attention", "prefill"])]
    for _, run in timed.groupby("run"):
        clocks = [c for c in ("attention", "prefill") if run[run.clock == c].top_k.nunique() > 1]
        if not clocks:
            continue
        timings = run[(run.clock == clocks[0]) & (run.value > 0)]
        timings = timings.assign(rule=timings.pair_rule.where(timings.top_k > 1, ""))
        series = timings.groupby(["groups", "assignment", "top_k", "rule", "window", "dtype"]).tokens.agg(set)
        common = max(set.intersection(*series), default=0) if len(series) else 0
        marked = timings[(timings.tokens == common) & (timings.assignment == "trained")]
        marked = marked.sort_values("groups", kind="stable")
        marks[marked.drop_duplicates(["top_k", "rule"]).index] = True
    return marks


def _group_rows(raw: pd.DataFrame) -> pd.DataFrame:
    """Return medians over layers of the groups; the paper does not name its layers."""
    rows = raw[(raw.variant == "router") & raw.run.isin(raw.run[raw.metric == "layer_confidence"])]
    cells: list[tuple[Any, ...]] = []
    for run, group in rows.groupby("run"):
        groups, layers = group[group.word_class.notna()], ["layer", "head"]
        punctuation = groups[(groups.metric == "group_purity") & (groups.word_class == "punctuation")]
        purity = punctuation.groupby(layers, dropna=False).value.max()
        confidence = group[group.metric == "layer_confidence"].value
        sizes = groups[groups.metric == "group_fraction"].groupby(layers, dropna=False).value
        values = {
            "punctuation_purity": np.median([*purity, *[0.0] * (len(confidence) - len(purity))]),
            "group_confidence": confidence.mean(),
            "smallest_group": sizes.min().median(),
            "largest_group": sizes.max().median(),
            "affinity": group[group.metric == "pair_affinity"].value.max(),
        }
        cells += [(run, "groups", metric, value, "fraction") for metric, value in values.items()]
    return pd.DataFrame(cells, columns=["run", "source", "metric", "value", "unit"])


def _details(raw: pd.DataFrame) -> pd.DataFrame:
    """Return losses by position, the analysis of the groups, and continuations."""
    positions = raw[(raw.metric == "nll_at_position") & raw.phase.isna()]
    kinds = raw[raw.metric == "perplexity"].drop_duplicates(["run", "variant"]).set_index(["run", "variant"]).kind
    positions = positions.drop(columns="kind").join(kinds, on=["run", "variant"]).assign(source="positions")
    positions = positions.rename(columns={"position_start": "start", "position_end": "end"})
    analysis = raw[raw.router.notna() | raw.metric.isin(["layer_confidence", "passage_distant_density"])]
    analysis = analysis.assign(source="analysis", metric=analysis.metric + (" " + analysis.router).fillna(""))
    generation = raw[raw.metric.isin(GENERATED)].assign(source="generation")
    costs = raw[raw.metric.str.startswith("class_nll")]
    costs = costs.assign(source="costs", variant=costs.word_class, metric=costs.metric + " " + costs.variant)
    rows = pd.concat([positions, analysis, generation, costs])
    return rows.assign(name=rows.variant, layer=pd.to_numeric(rows.layer, errors="coerce"))


# --- comparisons ---


def _join_variants(rows: pd.DataFrame, described: pd.DataFrame, variants: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of comparisons: base, primary rows and parameters of variants."""
    facts = variants.drop(columns="run").rename(columns={"comparison": "run"})
    own_runs = described.rename(columns={"run": "own_run"}).drop(columns=["train_tokens", "steps"])
    facts = facts.merge(own_runs, on="own_run", how="left")
    facts["num_groups"] = facts.groups_set.fillna(facts.num_groups)
    parts = facts.merge(rows.rename(columns={"run": "own_run"}).drop(columns="variant"), on="own_run")
    primary = parts[parts.primary.eq(True) & (parts.source == "rows") & (parts.metric == "perplexity")]
    primary = primary.drop_duplicates("own_run").set_index("own_run")[["subject", "kind", "method"]]
    parts = parts.join(primary.add_prefix("primary_"), on="own_run")
    quality = (parts.source == "rows") & (parts.subject == parts.primary_subject)
    quality &= parts.reference.isna() | (parts.reference == "base")
    same = (parts.kind == parts.primary_kind) & ((parts.kind != "control") | (parts.method == parts.primary_method))
    kept = quality | ((parts.source == "benchmarks") & same) | parts.source.isin(["phases", "probes", "probe_log"])
    first = parts[(parts.kind == "base") & (parts.source == "rows")].drop_duplicates("run")[["run", "own_run"]]
    base = parts[parts.kind.isin(["base", "missing"]) & parts.source.isin(["rows", "benchmarks"])]
    base = base.merge(first, on=["run", "own_run"])
    base = base.drop(columns=["variant_setup", "trainable_params"]).assign(variant=None)
    params = facts.assign(source="variants", metric="parameters", value=facts.trainable_params)
    return pd.concat([base, parts[kept], params.assign(error=facts.variant_error)], ignore_index=True)


def _differences(raw: pd.DataFrame, joined: pd.DataFrame) -> pd.DataFrame:
    """Return the paired changes between variants of a comparison, in both directions."""
    rows = joined[(joined.source == "rows") & joined.variant.notna()].drop_duplicates(["run", "variant", "metric"])
    levels, changes = (
        {(row["run"], row["variant"]): row for row in rows[rows.metric == metric].to_dict("records")}
        for metric in ("perplexity", "nll_change")
    )
    changes_between: list[dict[str, Any]] = []
    seen = set()
    for row in raw[(raw.metric == "nll_change") & raw.run.isin(joined.run)].itertuples():
        sides = [(row.run, row.variant), (row.run, row.reference)]
        pair = frozenset(sides)
        if pair in seen or not all(side in levels for side in sides):
            continue
        seen.add(pair)
        ours, other = (levels[side] for side in sides)
        shown = ours["value"], np.exp(min(ours["row_nll"] - row.value, 700))
        for sign, mine, theirs in ((1, ours, other), (-1, other, ours)):
            low, high = sorted((sign * row.low, sign * row.high))
            level, reference_level = shown[::sign]
            changes_between.append(mine | {
                "metric": "nll_change", "unit": "nats", "value": sign * row.value, "low": low, "high": high,
                "level": level, "reference_level": reference_level, "reference": theirs["variant"],
                "dof": changes[sides[0]]["dof"], "n_units": changes[sides[0]]["n_units"],
                "reference_causal": theirs["causal"], "reference_params": theirs["trainable_params"],
                "reference_setup": theirs["variant_setup"], "primary": True if sign > 0 else None,
                "reversed": True if sign < 0 else None,
            })  # fmt: skip
    frame = pd.DataFrame(changes_between, columns=None if changes_between else joined.columns)
    return frame.assign(stderr=_standard_errors(frame.astype({"low": float, "high": float})))


# --- selection ---


def select(rows: Iterable[Row], cells: dict[str, Any], query: str = "") -> list[Row]:
    """Return the rows with these cells (see `matches`) for which `query` holds.

    query: a Python condition on the attributes of a row; a comparison with a missing cell does not hold.
    """
    kept = [row for row in rows if all(matches(getattr(row, key), wanted) for key, wanted in cells.items())]
    return [row for row in kept if _holds(query, row)] if query else kept


def _holds(query: str, row: Row) -> bool:
    try:
        return bool(eval(query, {"__builtins__": {}}, vars(row)))
    except (TypeError, AttributeError):
        return False


def matches(cell: Any, wanted: Any) -> bool:
    """Return whether a cell equals `wanted`, one of a list, or a pattern with *."""
    if isinstance(wanted, list):
        return any(matches(cell, one) for one in wanted)
    return bool(cell == wanted) or (isinstance(cell, str) and isinstance(wanted, str) and fnmatchcase(cell, wanted))


@cache
def read_yaml(name: str) -> Any:
    """Return the content of a YAML file of this package."""
    try:
        return yaml.safe_load((files("focus_exp.reporting") / f"{name}.yaml").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{name}.yaml: {error}.") from error
