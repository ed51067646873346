"""Load the measurements of all runs below a directory as one table, variants joined into their comparisons."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import yaml
from scipy.special import stdtrit

from focus_exp.errors import UserError
from focus_exp.records.rows import ENGAGED, WITHOUT_MASK
from focus_exp.reporting.aggregate import Row, to_rows
from focus_exp.results.load import Results as Loaded
from focus_exp.results.load import load_runs, read_record
from focus_exp.results.measurement import MEASUREMENTS
from focus_exp.results.metrics import METRICS, read_metrics

T = TypeVar("T")
QUICK = "quick"
# columns of the measurements, by type
NUMBERS = [
    *(
        "value",
        "low",
        "high",
        "level",
        "reference_level",
        "stderr",
        "dof",
        "trainable_params",
        "first_params",
        "density",
    ),
    *("reference_params", "sparsity", "distant_density", "largest_group"),
]
INTEGERS = [
    *("seed", "seq_len", "window", "num_groups", "train_tokens", "steps", "model_params", "top_k", "n", "tokens"),
    *("groups", "step", "n_units", "layer", "head", "start", "end"),
]
FLAGS = ["is_variant", "complete", "mask_active", "causal", "reference_causal", "primary", "deciding", "reversed"]
TEXTS = [
    *("run", "experiment", "started", "status", "device", "device_kind", "first_variant", "setup", "source", "variant"),
    *("requested_model", "model", "data", "attention", "gate", "variant_commit", "variant_setup", "name", "kind"),
    *("method", "pair_rule", "task", "version", "task_metric", "clock", "assignment", "dtype", "path", "phase", "unit"),
    *("trainable", "reference_setup", "metric", "reference", "error", "subject"),
]
COLUMNS = {
    name: kind
    for names, kind in ((NUMBERS, "Float64"), (INTEGERS, "Int64"), (FLAGS, "boolean"), (TEXTS, "string"))
    for name in names
}
LEVELS = {  # metrics that are columns of all rows of a variant
    "perplexity": "row_perplexity", "nll": "row_nll", "distant_density": "distant_density",
    "largest_group_fraction": "largest_group",
}  # fmt: skip
OF_RUN = {  # column -> of the comparison or single run
    "experiment": "experiment", "seed": "seed", "started": "started", "status": "status", "device": "device",
    "device_kind": "device_kind", "complete": "is_complete", "setup": "setup",
}  # fmt: skip
OF_VARIANT = {  # column -> of the variant's own run
    "requested_model": "model_config", "model": "model", "data": "data", "seq_len": "seq_len", "window": "window",
    "num_groups": "groups", "gate": "gate", "attention": "attention", "train_tokens": "tokens", "steps": "steps",
    "model_params": "model_parameters", "variant_commit": "commit",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Results:
    """runs: one row for each run, by its name; measurements: one row for each run, subject and metric.

    A comparison has the rows of its variants. Columns of the measurements:
        source: rows, phases (quality), benchmarks, probes, speed, method_speed, groups, variants
        metric: perplexity, nll, nll_change, score, score_change, speedup, peak_memory, dominance, ...
        value, low, high, unit, stderr, dof, n_units; level, reference_level: both sides of a difference
        primary: the row that stands for its run, variant or task; sparsity, density: of the causal QK pairs
        setup, variant_setup: equal for runs that differ in the seed only
    """

    runs: pd.DataFrame
    measurements: pd.DataFrame
    is_quick: bool = False
    root: Path | None = None
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    def complete(self) -> pd.DataFrame:
        """Return the measurements of complete runs; variants as rows of their comparisons."""
        table = self.measurements
        return table[table.complete & ~table.is_variant]

    def rows_by_run(self) -> dict[str, list[Row]]:
        """Return the rows of every complete run, oldest first."""
        return {str(run): to_rows(rows) for run, rows in self.complete().groupby("run", sort=False)}

    def cached(self, make: Callable[[Results], T]) -> T:
        """Return make(self), made once."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    def minutes(self, runs: Iterable[str]) -> float | None:
        """Return the wall time of runs and of the variants of comparisons; None where one is unknown."""
        seconds = [self.runs.total_seconds[run] for run in runs]
        return None if not seconds or any(map(pd.isna, seconds)) else round(sum(seconds) / 60, 1)


# --- reading ---


def load_results(root: Path, budget: str = "") -> Results:
    """Load all runs below `root`. Raises UserError for an unreadable one.

    A run that was copied into records/ counts once. Runs of budget=quick are loaded by themselves or not at all.
    """
    loaded = load_runs(root)
    if loaded.runs.empty:
        return Results(loaded.runs, pd.DataFrame(columns=list(COLUMNS)).astype(COLUMNS), budget == QUICK)
    runs = loaded.runs[(loaded.runs.budget == QUICK).fillna(False) == (budget == QUICK)]
    copies = runs.run.str.contains("(?:^|/)records/")
    runs = runs.assign(copied=~copies).sort_values(["copied", "run"], kind="stable")
    runs = runs.drop_duplicates(["experiment", "config_hash", "started"]).sort_values("started", kind="stable")
    return replace(build_results(loaded, runs, is_quick=budget == QUICK), root=root)


def load_run(folder: Path) -> Results:
    """Load one run, or a comparison with its variants."""
    loaded, name = _load_with_variants(folder)
    own = loaded.variants[loaded.variants.comparison == name].run.tolist() if len(loaded.variants) else []
    results = build_results(loaded, loaded.runs[loaded.runs.run.isin([name, *own])], details=True)
    measurements = results.measurements
    return Results(results.runs.loc[[name]], measurements[measurements.run == name])


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the training log of a run; of a comparison those of its variants, each with its `variant`."""
    lines = read_metrics(folder / METRICS)
    loaded, name = _load_with_variants(folder)
    own = loaded.variants[loaded.variants.comparison == name] if len(loaded.variants) else loaded.variants
    for row in own.itertuples():
        lines += [{"variant": row.variant, **line} for line in read_metrics(loaded.root / row.run / METRICS)]
    return lines


@lru_cache(maxsize=1)
def _load_once(root: Path, changed: float) -> Loaded:
    return load_runs(root)


def _load_with_variants(folder: Path) -> tuple[Loaded, str]:
    """Load a run, of a comparison with the other runs of its experiment; return them and the name of the run."""
    folder = folder.absolute()
    root = folder.parent.parent if read_record(folder).get("arms") else folder
    changed = max(path.stat().st_mtime for path in (folder / "record.json", folder / MEASUREMENTS) if path.exists())
    return _load_once(root, changed), folder.relative_to(root).as_posix()


# --- one table ---

GENERATED = [
    *("generated_tokens", "continuation_nll", "agreeing_tokens", "generation_seconds", "keys_read", "cache_bytes"),
]


def build_results(loaded: Loaded, runs: pd.DataFrame, is_quick: bool = False, details: bool = False) -> Results:
    """Return the tables of these runs: their own rows, and those of comparisons from their variants."""
    variants = loaded.variants if len(loaded.variants) else pd.DataFrame(columns=["comparison", "variant", "run"])
    variants = variants[variants.comparison.isin(runs.run)]
    runs = _describe_runs(runs, variants)
    raw = loaded.measurements[loaded.measurements.run.isin(runs.run)].reset_index(drop=True)
    raw = raw.astype({"value": float, "low": float, "high": float, "density": float, "n": float, "dof": float})
    raw["reference"] = raw.reference.replace("", None)
    parts = [
        _quality_rows(raw, runs),
        _benchmark_rows(raw),
        _probe_rows(raw, details),
        _speed_rows(raw),
        _group_rows(raw),
    ]
    rows = pd.concat([*parts, *([_details(raw)] if details else [])], ignore_index=True)
    rows = rows.drop(columns=["window", "seq_len", "seed"])
    facts = runs.assign(**{name: runs[source] for name, source in {**OF_RUN, **OF_VARIANT}.items()})
    of_run = facts[["run", *OF_RUN, "is_variant", "first_variant", "first_params", "copied_order"]]
    of_variant = facts[["run", *OF_VARIANT]]
    own = rows[~rows.run.isin(variants.comparison)].merge(of_variant, on="run")
    names = own.run.map(runs.set_index("run").variant)
    own["variant"] = names.where(
        names.fillna("") != "", own.variant.where(own.source.isin(["benchmarks", "generation", "costs"]))
    )
    joined = [_join_variants(rows, of_variant, variants)] if len(variants) else []
    joined += [_differences(raw, joined[0])] if joined else []
    table = pd.concat([own, *joined], ignore_index=True).merge(of_run, on="run")
    table = table.sort_values("copied_order", kind="stable").reset_index(drop=True).reindex(columns=list(COLUMNS))
    table = table.astype(object).where(lambda cells: cells.notna(), None).astype(COLUMNS)
    return Results(facts.set_index("run"), table, is_quick)


def _describe_runs(runs: pd.DataFrame, variants: pd.DataFrame) -> pd.DataFrame:
    """Add what the tables show of a run; of a comparison the first variant and the time of all variants."""
    runs = runs.sort_values("started", kind="stable")
    is_variant = runs.variant.fillna("") != ""
    runs = pd.concat([runs[~is_variant], runs[is_variant]]).reset_index(drop=True)
    first = variants.drop_duplicates("comparison").set_index("comparison")
    seconds = variants.join(runs.set_index("run").seconds, on="run").groupby("comparison").seconds.agg(
        lambda own: own.sum(skipna=False)
    )  # fmt: skip
    return runs.assign(
        copied_order=range(len(runs)),
        is_variant=runs.variant.fillna("") != "",
        first_variant=runs.run.map(first.variant) if len(first) else None,
        first_params=runs.run.map(first.trainable_parameters) if len(first) else None,
        model=runs.model_name.where(runs.model_source != "local").combine_first(runs.model_config),
        data=runs.data_name.combine_first(runs.data_config),
        total_seconds=runs.seconds + (runs.run.map(seconds).fillna(0) if len(seconds) else 0),
    )


def _setting(rows: pd.DataFrame, name: str) -> pd.Series:
    """Return a setting that is no column."""
    return rows.settings.map(lambda text: json.loads(text).get(name) if text else None)


def _mask_activity(rows: pd.DataFrame) -> pd.Series:
    """Return whether the mask prunes at least 5 % of the QK pairs; None without a mask."""
    soft = (rows.kind == "soft") | ((rows.kind == "causal_counterpart") & rows.top_k.isna())
    masked = ~soft & ~rows.kind.isin(["base", "trained", "missing"]) & ~rows.method.isin(WITHOUT_MASK)
    return (rows.sparsity >= ENGAGED).astype(object).where(masked & rows.sparsity.notna(), None)


def _standard_errors(rows: pd.DataFrame) -> pd.Series:
    return (rows.high - rows.low) / 2 / stdtrit(rows.dof.astype(float), 0.975)


def _quality_rows(raw: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Perplexity, loss and its paired changes, for each routing, control and phase."""
    rows = raw[raw.kind.notna() & raw.task.isna() & ~raw.metric.isin(GENERATED)].copy()
    if rows.empty:
        return rows
    rows["name"], rows["source"] = rows.variant, np.where(rows.phase.isna(), "rows", "phases")
    rows["subject"] = rows.variant + (", after " + rows.phase).fillna("")
    levels = raw[raw.reference.isna() & raw.metric.isin(LEVELS) & raw.task.isna()]
    levels = levels.assign(subject=levels.variant + (", after " + levels.phase).fillna(""))
    levels = levels.drop_duplicates(["run", "subject", "metric"]).pivot(
        index=["run", "subject"], columns="metric", values="value"
    )
    levels = levels.reindex(columns=list(LEVELS)).rename(columns=LEVELS).reset_index()
    rows = rows.merge(levels, on=["run", "subject"], how="left")
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
    rows["trainable"] = rows.trainable.where(rows.trainable.notna(), rows.run.map(last).astype("string"))
    base = rows[(rows.kind == "base") & (rows.metric == "perplexity")]
    zero = base.assign(metric="parameters", value=0, low=None, high=None)
    return pd.concat([rows, zero]).drop(columns=["row_perplexity", "n"])


def _benchmark_rows(raw: pd.DataFrame) -> pd.DataFrame:
    """Scores of tasks and their paired changes from full attention."""
    rows = raw[raw.task.notna() & raw.kind.notna() & ~raw.metric.str.startswith("perplexity_change_pct")].copy()
    if rows.empty:
        return rows
    rows["source"], rows["metric"] = "benchmarks", np.where(rows.reference.isna(), "score", "score_change")
    rows["task_metric"], rows["version"] = _setting(rows, "lm_eval_metric"), _setting(rows, "task_version")
    rows["subject"] = rows.variant + " " + rows.task + " " + rows.task_metric.fillna("")
    rows["sparsity"], rows["tokens"] = 1 - rows.density, rows.seq_len
    rows["mask_active"] = _mask_activity(rows)
    rows = rows.rename(columns={"primary_metric": "primary", "deciding_metric": "deciding"})
    density = raw[raw.metric.str.startswith("distant_density:")]
    density = density.set_index(["run", "variant", "task"]).value
    scores = rows[rows.metric == "score"].set_index(["run", "subject"]).value
    density_of, score_of = density.to_dict(), scores.to_dict()
    rows["distant_density"] = [density_of.get(key) for key in zip(rows.run, rows.variant, rows.task, strict=True)]
    rows["score"] = [score_of.get(key) for key in zip(rows.run, rows.subject, strict=True)]
    change, fraction = rows.metric == "score_change", rows.unit == "fraction"
    dof = rows.dof.mask(rows.dof.isna() & fraction, np.inf)  # of a fraction the interval is normal
    rows["dof"] = dof.where(change & rows.low.notna() & (rows.n > 1))
    rows["stderr"] = _standard_errors(rows).fillna(rows.stderr.astype(float))
    rows["n_units"], rows["level"] = rows.n.where(change), rows.score.where(change)
    full = (rows.score * np.exp(-rows.value)).where(rows.unit == "nats", rows.score - rows.value)
    rows["reference_level"] = full.where(change)
    rows["reference"] = rows.reference.mask(change, "full attention")
    return rows.drop(columns="score")


def _probe_rows(raw: pd.DataFrame, details: bool) -> pd.DataFrame:
    """The last probe of each phase, the maximum after its first step, and with `details` all (source `probe_log`)."""
    rows = raw[raw.step.notna()].copy()
    if rows.empty:
        return rows
    rows["metric"] = rows.metric.replace({"assignment_overlap": "stability"})
    rows["variant"], rows["name"] = None, "router"
    steps = rows.groupby(["run", "phase"], sort=False).step
    log = rows[rows.metric.isin(["dominance", "dead_groups"])].assign(source="probe_log")
    last = rows[rows.step == steps.transform("max")].assign(source="probes")
    trained = log[(log.step > 0) | (log.groupby(["run", "phase"]).step.transform("max") == 0)]
    most = trained.sort_values("value").groupby(["run", "phase", "metric"], sort=False).tail(1)
    most = most.assign(source="probes", metric=most.metric + "_most", step=steps.transform("max"))
    return pd.concat([last, most, *([log] if details else [])])


def _speed_rows(raw: pd.DataFrame) -> pd.DataFrame:
    """Speedups, and the ratio of the peak memory, each with both sides."""
    rows = raw[raw.clock.notna()].copy()
    if rows.empty:
        return rows
    case = [
        "run",
        "clock",
        "method",
        "seq_len",
        "groups",
        "assignment",
        "top_k",
        "pair_rule",
        "window",
        "dtype",
        "path",
    ]
    rows["case"] = rows.groupby(case, dropna=False, sort=False).ngroup()
    sides = {}
    for metric, factor in (("latency_ms", 1e-3), ("peak_memory_bytes", 1.0)):
        for side, full in (("level", rows.variant == "full"), ("reference_level", rows.variant != "full")):
            own = rows[(rows.metric == metric) & ~full].drop_duplicates("case").set_index("case")
            sides[metric, side] = factor * own.value
    speedups = rows[rows.metric.isin(["speedup", "attention_speedup"])].copy()
    memory = rows[rows.metric == "speedup"].assign(metric="peak_memory", unit="x", value=None)
    for part, metric in ((speedups, "latency_ms"), (memory, "peak_memory_bytes")):
        for side in ("level", "reference_level"):
            part[side] = part.case.map(sides[metric, side])
    memory["value"] = memory.level / memory.reference_level
    found = pd.concat([speedups, memory[memory.value.notna()]], ignore_index=True)
    found["source"] = np.where(found.groups.notna(), "speed", "method_speed")
    found["reference"], found["tokens"] = "full attention", found.seq_len
    found["primary"] = _primary_speed(found)
    return found.drop(columns=["variant", "n", "layer"])


def _primary_speed(rows: pd.DataFrame) -> pd.Series:
    """Mark for each k the timing of the trained router that stands next to its quality.

    That is at the longest length at which all series were timed, with routing, or else the prefill.
    """
    marks = pd.Series(None, rows.index, dtype=object)
    timed = rows[(rows.metric == "speedup") & (rows.source == "speed") & rows.clock.isin(["attention", "prefill"])]
    for _, run in timed.groupby("run"):
        clocks = [own for clock in ("attention", "prefill") if (own := run[run.clock == clock]).top_k.nunique() > 1]
        if not clocks:
            continue
        own = clocks[0][clocks[0].value > 0]
        own = own.assign(rule=own.pair_rule.where(own.top_k > 1, ""))
        series = own.groupby(["groups", "assignment", "top_k", "rule", "window", "dtype"]).tokens.agg(set)
        common = max(set.intersection(*series), default=0) if len(series) else 0
        marked = own[(own.tokens == common) & (own.assignment == "trained")].sort_values("groups", kind="stable")
        marks[marked.drop_duplicates(["top_k", "rule"]).index] = True
    return marks


def _group_rows(raw: pd.DataFrame) -> pd.DataFrame:
    """The analysis of the groups: medians over layers, since the paper does not name its layers."""
    rows = raw[(raw.variant == "router") & raw.run.isin(raw.run[raw.metric == "layer_confidence"])]
    rows = rows.assign(word_class=_setting(rows, "word_class"))
    found: list[dict[str, Any]] = []
    for run, own in rows.groupby("run"):
        groups, layers = own[own.word_class.notna()], ["layer", "head"]
        punctuation = groups[(groups.metric == "group_purity") & (groups.word_class == "punctuation")]
        purity = punctuation.groupby(layers, dropna=False).value.max()
        confidence = own[own.metric == "layer_confidence"]
        missing = [0.0] * (len(confidence) - len(purity))
        sizes = groups[groups.metric == "group_fraction"].groupby(layers, dropna=False).value
        values = {
            "punctuation_purity": np.median([*purity, *missing]),
            "group_confidence": confidence.value.mean(),
            "smallest_group": sizes.min().median(),
            "largest_group": sizes.max().median(),
            "affinity": own[own.metric == "pair_affinity"].value.max(),
        }
        found += [{"run": run, "source": "groups", "metric": name, "value": value} for name, value in values.items()]
    return pd.DataFrame(found, columns=["run", "source", "metric", "value"]).assign(unit="fraction")


def _details(raw: pd.DataFrame) -> pd.DataFrame:
    """What only the figures and tables of a single run show: positions, group sizes, analysis, continuations."""
    positions = raw[(raw.metric == "nll_at_position") & raw.phase.isna()]
    kinds = raw[raw.metric == "perplexity"].drop_duplicates(["run", "variant"]).set_index(["run", "variant"]).kind
    positions = positions.drop(columns="kind").join(kinds, on=["run", "variant"]).assign(source="positions")
    ends = {"start": _setting(positions, "position_start"), "end": _setting(positions, "position_end")}
    sizes = raw[(raw.metric == "group_fraction") & _setting(raw, "word_class").isna()].assign(source="group_sizes")
    router = _setting(raw, "router")
    analysis = raw[router.notna() | raw.metric.isin(["layer_confidence", "passage_distant_density"])]
    names = analysis.metric + (" " + router[analysis.index].astype("string")).fillna("")
    analysis = analysis.assign(source="analysis", metric=names)
    generation = raw[raw.metric.isin(GENERATED)].assign(source="generation")
    costs = raw[raw.metric.str.startswith("class_nll")]
    costs = costs.assign(
        source="costs", variant=_setting(costs, "word_class"), metric=costs.metric + " " + costs.variant
    )
    rows = pd.concat([positions.assign(**ends), sizes, analysis, generation, costs])
    return rows.assign(name=rows.variant, layer=pd.to_numeric(rows.layer, errors="coerce"))


# --- comparisons ---


def _join_variants(rows: pd.DataFrame, described: pd.DataFrame, variants: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of comparisons: the base of their first variant, what stands for each variant, its parameters."""
    facts = {
        "comparison": "run", "variant": "variant", "run": "own_run", "trainable_parameters": "trainable_params",
        "setup": "variant_setup", "tokens": "train_tokens", "steps": "steps", "error": "variant_error",
        "groups": "groups_set",
    }  # fmt: skip
    groups = variants.settings.str.extract(r"(?:^| )attention\.groups=(\d+)")[0].astype("Int64")
    facts_of = variants.assign(groups=groups)[list(facts)].rename(columns=facts)
    facts_of = facts_of.merge(
        described.rename(columns={"run": "own_run"}).drop(columns=["train_tokens", "steps"]), on="own_run", how="left"
    )
    facts_of["num_groups"] = facts_of.groups_set.fillna(facts_of.num_groups)
    parts = facts_of.merge(rows.rename(columns={"run": "own_run"}).drop(columns="variant"), on="own_run")
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
    params = facts_of.assign(
        source="variants", metric="parameters", value=facts_of.trainable_params, error=facts_of.variant_error
    )
    return pd.concat([base, parts[kept.fillna(False)], params], ignore_index=True)


def _differences(raw: pd.DataFrame, joined: pd.DataFrame) -> pd.DataFrame:
    """Return the paired changes between variants of a comparison, in both directions."""
    rows = joined[(joined.source == "rows") & joined.variant.notna()]
    levels = rows[rows.metric == "perplexity"].set_index(["run", "variant"])
    changes = rows[rows.metric == "nll_change"].set_index(["run", "variant"])
    found, seen = [], set()
    for one in to_rows(raw[(raw.metric == "nll_change") & raw.run.isin(joined.run)]):
        pair = (one.run, frozenset((one.variant, one.reference)))
        sides = [(one.run, one.variant), (one.run, one.reference)]
        if pair in seen or not all(side in levels.index for side in sides):
            continue
        seen.add(pair)
        own, other = (levels.loc[side].to_dict() | {"run": one.run, "variant": side[1]} for side in sides)
        shown = own["value"], np.exp(min(own["row_nll"] - one.value, 700))
        for sign, mine, theirs in ((1, own, other), (-1, other, own)):
            cells = {
                "metric": "nll_change", "unit": "nats", "value": sign * one.value, "reference": theirs["variant"],
                **dict(zip(("low", "high"), sorted((sign * one.low, sign * one.high)), strict=True)),
                **dict(zip(("level", "reference_level"), shown[::sign], strict=True)),
                **changes.loc[sides[0]][["dof", "n_units"]].to_dict(),
                **{f"reference_{name}": theirs[key] for name, key in REFERENCE.items()},
                "primary": True if sign > 0 else None, "reversed": True if sign < 0 else None,
            }  # fmt: skip
            found.append(mine | cells)
    frame = pd.DataFrame(found, columns=list(dict.fromkeys([*joined.columns, *(found[0] if found else ())])))
    return frame.assign(stderr=_standard_errors(frame.astype({"low": float, "high": float})))


REFERENCE = {"causal": "causal", "params": "trainable_params", "setup": "variant_setup"}


# --- selection ---


def select(table: pd.DataFrame, cells: dict[str, Any], query: str = "") -> pd.DataFrame:
    """Return the rows with these cells: a value, one of a list, or a pattern with *; and on which `query` holds."""
    for column, wanted in cells.items():
        present = table[column].dropna().unique()
        table = table[table[column].isin([cell for cell in present if matches(cell, wanted)])]
    return table.query(query, engine="python") if query else table


def matches(cell: Any, wanted: Any) -> bool:
    """Return whether a cell equals `wanted`, one of a list, or a pattern with *."""
    if isinstance(wanted, list):
        return any(matches(cell, one) for one in wanted)
    return bool(cell == wanted) or (isinstance(cell, str) and isinstance(wanted, str) and fnmatchcase(cell, wanted))


@cache
def read_yaml(name: str) -> Any:
    """Return the content of a YAML file of this package. Raises UserError for malformed YAML."""
    try:
        return yaml.safe_load((files("focus_exp.reporting") / f"{name}.yaml").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{name}.yaml: {error}.") from error
