"""Load the measurements of all runs below a directory as one table, variants joined into their comparisons."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import pandas as pd
import yaml

from focus_exp.errors import UserError
from focus_exp.records.intervals import student
from focus_exp.records.metrics import METRICS, read_metrics
from focus_exp.records.rows import acted
from focus_exp.reporting.aggregate import Row, to_rows
from focus_exp.results.measurement import MEASUREMENTS, Measurement, read_measurements

T = TypeVar("T")
QUICK = "quick"
LONG_TEXT = "perplexity@"  # benchmark: perplexity at a sequence length
COLUMNS = {
    **dict.fromkeys(
        "value low high level reference_level stderr dof trainable_params first_params reference_params density sparsity "
        "distant_density".split(),
        "Float64",
    ),
    **dict.fromkeys(
        "seed seq_len window num_groups train_tokens steps model_params top_k n tokens groups step n_units start end layer "
        "head".split(),
        "Int64",
    ),
    **dict.fromkeys(
        "is_variant complete mask_active causal reference_causal primary deciding reversed".split(), "boolean"
    ),
    **dict.fromkeys(
        "run experiment started status device device_kind first_variant setup source variant requested_model model data "
        "attention gate variant_commit variant_setup name kind method pair_rule task version task_metric clock assignment "
        "dtype path phase trainable reference_setup metric unit reference error subject".split(),
        "string",
    ),
}
# settings in which runs of several seeds may differ: what is evaluated besides, arithmetic, and paths
IGNORED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("experiment", "seed", "assets", "arms", "against", "bench", "job", "arm", "overwrite"), ()),
    **dict.fromkeys(
        ("runs_dir", "cache_dir", "logger", "adapter", "report", "plan", "reproduce", "scale", "sweep"), ()
    ),
    "model": ("name", "hub_id", "revision", "path", "trained_by", "dtype", "paper"),
    "data": (
        *("name", "source", "hub_id", "subset", "revision", "text_column", "files"),
        *("max_train_tokens", "max_test_tokens", "workers"),
    ),
    "attention": ("name", "backend", "seed"),
    "eval": (
        *("name", "bootstrap_samples", "batch_size", "request_batch_size", "controls", "top_k", "pair_rules"),
        *("adapters", "tasks", "limit", "suite_limit"),
    ),
    "trainer": (
        *("name", "accelerator", "precision", "gradient_checkpointing", "log_every", "progress", "checkpoint_every"),
        *("keep_checkpoints", "probe_every", "strategy", "devices", "num_nodes", "cpu_offload"),
    ),
    "analyze": ("others",),
}
EVALUATED = ("eval.tasks=", "eval.limit=")  # overrides that choose what else is scored
LATER = {("attention", "fit_to"): "loss", ("attention", "encoders"): 2}  # defaults that older runs do not name


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


class Run:
    """A run directory: its record and its measurements."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
            self.measurements = read_measurements(folder / MEASUREMENTS)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: not readable as a run ({error}). Remove it and run the job again.") from error
        self.config: dict[str, Any] = self.record["config"]
        self.key = (self.record["config_hash"], self.record["started"])
        self.variants: dict[str, Run | None] = {}

    def setting(self, section: str, name: str) -> Any:
        return (self.config.get(section) or {}).get(name)

    @property
    def is_complete(self) -> bool:
        """Return whether its numbers are whole: finished, or timings only, each of which stands for itself."""
        timed = any("clock" in row.settings for row in self.measurements)
        quality = any(row.metric == "nll" for row in self.measurements)
        return self.record["status"] == "finished" or (self.record["status"] == "interrupted" and timed and not quality)


def load_results(root: Path, scale: str = "") -> Results:
    """Load all runs below `root`. Raises UserError for an unreadable one.

    A run that was copied into records/ counts once. Runs of scale=quick are loaded by themselves or not at all.
    """
    found: dict[tuple[str, str, str], Run] = {}
    variants: dict[tuple[str, str], Run] = {}
    for path in sorted(root.rglob("record.json"), key=lambda path: ("records" not in path.parts, str(path))):
        run = Run(path.parent)
        if (run.setting("scale", "name") == QUICK) != (scale == QUICK):
            continue
        if run.config.get("arm"):
            variants.setdefault(run.key, run)
        else:
            found.setdefault((run.record["experiment"], *run.key), run)
    runs = sorted(found.values(), key=lambda run: run.record["started"])
    for run in runs:
        run.variants = {arm["name"]: variants.get((arm["config_hash"], arm["started"])) for arm in _arms(run)}
    return build_results([*runs, *variants.values()], root, scale == QUICK)


def load_run(folder: Path) -> Results:
    """Load one run, a comparison with its variants, including positions, probes, groups and continuations."""
    run = Run(folder)
    for arm in _arms(run):
        own = folder.parent.parent.joinpath(*Path(arm["folder"]).parts[-2:])
        run.variants[arm["name"]] = Run(own) if arm["started"] and (own / "record.json").exists() else None
    return build_results([run], folder.parent, details=True)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the training log of a run; of a comparison those of its variants, each with its `variant`."""
    run = Run(folder)
    lines = read_metrics(folder / METRICS)
    for arm in _arms(run):
        own = folder.parent.parent.joinpath(*Path(arm["folder"]).parts[-2:])
        lines += [{"variant": arm["name"], **line} for line in read_metrics(own / METRICS)]
    return lines


def _arms(run: Run) -> list[dict[str, Any]]:
    return run.record.get("arms") or []


def build_results(runs: list[Run], root: Path, is_quick: bool = False, details: bool = False) -> Results:
    """Return the tables of runs."""
    names = {id(run): _name(run, root) for run in runs}
    rows = [row for run in runs for row in _run_rows(run, names[id(run)], details)]
    table = pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)
    facts = pd.DataFrame([_run_facts(run, names[id(run)]) for run in runs])
    return Results(facts.set_index("run") if len(facts) else facts, table, is_quick)


def _name(run: Run, root: Path) -> str:
    return run.folder.relative_to(root).as_posix() if run.folder.is_relative_to(root) else run.folder.as_posix()


def _run_facts(run: Run, name: str) -> dict[str, Any]:
    record, own = run.record, [variant for variant in run.variants.values() if variant]
    seconds = [one.record.get("wall_seconds") for one in [run, *own]]
    sources = [record["model"], record["data"]]
    if not record["model"] and own:  # a comparison describes the model and data of its variants
        sources = [own[0].record["model"], own[0].record["data"]]
    keys = ("experiment", "seed", "status", "device", "steps", "started", "commit", "config_hash", "command")
    return {
        "run": name,
        **{key: record.get(key) for key in keys},
        **{key: value for key, value in _described(run).items() if key in ("model", "data", "seq_len", "train_tokens")},
        "is_variant": bool(run.config.get("arm")),
        "device_kind": record["device"].partition(",")[0],
        "model_fingerprint": sources[0].get("fingerprint"),
        "model_id": sources[0].get("requested") if sources[0].get("source") in ("hub", "hub_cache") else None,
        "substitutions": [part["substitution"] for part in sources if part.get("substitution")],
        "substituted": any(part.get("substitution") for part in sources),
        "warnings": record.get("warnings") or [],
        "causal": (record.get("method") or {}).get("causal", True),
        "wall_seconds": record.get("wall_seconds"),
        "total_seconds": None if None in seconds else sum(seconds),
    }


# --- rows of the table ---


def _run_rows(run: Run, name: str, details: bool) -> Iterator[dict[str, Any]]:
    record, arms = run.record, _arms(run)
    first = arms[0] if arms else None
    shared = {
        "run": name,
        **{key: record.get(key) for key in ("experiment", "seed", "started", "status", "device")},
        "device_kind": record["device"].partition(",")[0],
        "complete": run.is_complete,
        "is_variant": bool(run.config.get("arm")),
        "first_variant": first and first["name"],
        "first_params": first and first.get("trainable_parameters"),
        "setup": _digest((setup_key(run), None if first else record["experiment"])),
        **_described(run),
        "variant": run.config.get("arm"),
    }
    if not arms:
        yield from (shared | row for row in _subjects(run, details))
        return
    own = {arm["name"]: _variant_facts(run, arm) for arm in arms}
    rows: list[dict[str, Any]] = []
    base: Run | None = next(
        (v for v in run.variants.values() if v and any(r.variant == "base" for r in v.measurements)), None
    )
    if base:
        rows += [
            shared | row for row in _subjects(base, details) if row["kind"] == "base" and row["source"] != "phases"
        ]
    for variant, part in run.variants.items():
        rows += [shared | row | own[variant] for row in _variant_rows(part, details)] if part else []
    rows += [shared | own[arm["name"]] | row for arm in arms for row in _arm_rows(arm)]
    primary = {
        row["variant"]: row
        for row in rows
        if row["source"] == "rows" and row["variant"] and row["metric"] == "perplexity"
    }
    for row in _differences(run, primary, {row["variant"]: row for row in rows if row["metric"] == "nll_change"}):
        rows.append(shared | own[row["variant"]] | row)
    for row in rows:
        other = own.get(row.get("reference") or "")
        if other:
            row |= {"reference_params": other["trainable_params"], "reference_setup": other["variant_setup"]}
    yield from rows


def _described(run: Run) -> dict[str, Any]:
    """Return what ran: model, data, router and training."""
    record = run.record
    return {
        "requested_model": run.setting("model", "name"),
        "model": record["model"].get("name") or run.setting("model", "name"),
        "data": record["data"].get("name") or run.setting("data", "name"),
        "seq_len": run.setting("eval", "window"),
        "window": run.setting("attention", "window"),
        "num_groups": run.setting("attention", "groups"),
        "gate": run.setting("attention", "gate"),
        "attention": run.setting("attention", "method"),
        "train_tokens": record.get("tokens_seen"),
        "steps": record.get("steps"),
        "model_params": record["model"].get("parameters"),
        "variant_commit": record.get("commit"),
    }


def _variant_facts(comparison: Run, arm: dict[str, Any]) -> dict[str, Any]:
    own = comparison.variants[arm["name"]]
    groups = dict(setting.partition("=")[::2] for setting in arm["settings"]).get("attention.groups")
    settings = tuple(setting for setting in arm["settings"] if not setting.startswith(EVALUATED))
    base = setup_key(own) if own else arm.get("base") or None
    return _described(own or comparison) | {
        "variant": arm["name"],
        "train_tokens": arm["tokens_seen"],
        "steps": arm["steps"],
        "trainable_params": arm["trainable_parameters"],
        "variant_setup": _digest((arm["name"], settings, arm["steps"], arm["tokens_seen"], base)),
        **({"num_groups": int(groups)} if groups else {}),
    }


def _variant_rows(run: Run, details: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows that stand for a variant in its comparison: primary quality, phases, probes, its benchmarks."""
    rows = list(_subjects(run, details))
    primary = next((row for row in rows if row["source"] == "rows" and row["primary"]), None)
    for row in rows:
        if row["source"] == "benchmarks":
            same = primary and row["kind"] == primary["kind"]
            if same and (row["kind"] != "control" or row["method"] == primary["method"]):
                yield row
        elif row["source"] == "rows":
            if primary and row["subject"] == primary["subject"] and row["reference"] in (None, "base"):
                yield row
        elif row["source"] in ("phases", "probes", "probe_log"):
            yield row


def _arm_rows(arm: dict[str, Any]) -> Iterator[dict[str, Any]]:
    trained = arm["trainable_parameters"] if arm["tokens_seen"] else 0
    yield _row("variants", "parameters", trained, error=arm["error"])


def _differences(
    run: Run, primary: Mapping[str, dict[str, Any]], changes: Mapping[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the paired changes between variants in both directions."""
    seen: set[frozenset[str]] = set()
    for one in run.measurements:
        pair = frozenset((one.variant, one.reference))
        if one.metric != "nll_change" or pair in seen or not pair <= primary.keys():
            continue
        seen.add(pair)
        own, other = primary[one.variant], primary[one.reference]
        dof, units = (changes[one.variant][key] for key in ("dof", "n_units"))
        for mine, theirs, sign in ((own, other, 1), (other, own, -1)):
            low, high = (one.low, one.high) if sign > 0 or one.low is None else (-one.high, -one.low)
            levels = own["value"], None if own["nll"] is None else math.exp(min(own["nll"] - one.value, 700.0))
            level, reference_level = levels if sign > 0 else levels[::-1]
            keep = ("variant", "name", "kind", "method", "top_k", "pair_rule", "sparsity", "distant_density", "causal")
            yield {
                **{key: mine[key] for key in (*keep, "mask_active", "subject")},
                **_row("rows", "nll_change", sign * one.value, low, high, "nats"),
                "reference": theirs["variant"], "reference_causal": theirs["causal"], "reversed": sign < 0 or None,
                "level": level, "reference_level": reference_level, "n_units": units, "dof": dof,
                "stderr": _stderr(low, high, dof),
                "primary": True if sign > 0 else None,
            }  # fmt: skip


def _row(
    source: str, metric: str, value: Any, low: Any = None, high: Any = None, unit: str = "", **cells: Any
) -> dict[str, Any]:
    blank = dict.fromkeys(("kind", "reference", "primary", "subject", "dof", "n_units", "nll"))
    return blank | {"source": source, "metric": metric, "value": value, "low": low, "high": high, "unit": unit} | cells


def _stderr(low: float | None, high: float | None, dof: float | None) -> float | None:
    return None if low is None or high is None or dof is None else (high - low) / 2 / student(dof)


def _subjects(run: Run, details: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run that is no comparison."""
    quality = [one for one in run.measurements if "kind" in one.settings and "task" not in one.settings]
    quality = [one for one in quality if one.metric not in ("generated_tokens",) and "prompt" not in one.settings]
    yield from _quality_rows(run, quality)
    yield from _probe_rows([one for one in run.measurements if "step" in one.settings], details)
    yield from _benchmark_rows([one for one in run.measurements if "task" in one.settings])
    yield from _speed_rows([one for one in run.measurements if "clock" in one.settings])
    yield from _group_rows(run.measurements)
    if details:
        yield from _detail_rows(run.measurements)


def _quality_rows(run: Run, rows: list[Measurement]) -> Iterator[dict[str, Any]]:
    by_subject: dict[tuple[str, str | None], dict[tuple[str, str], Measurement]] = {}
    for one in rows:
        by_subject.setdefault((one.variant, one.settings.get("phase")), {})[one.metric, one.reference] = one
    primary = _primary_subject(run, [key for key in by_subject if key[1] is None], by_subject)
    phases = (run.config.get("regime") or {}).get("phases") or {}
    last = next(reversed(phases.values()), {}).get("train")
    for (variant, phase), metrics in by_subject.items():
        level = metrics["perplexity", ""]
        facts, kind = level.settings, level.settings["kind"]
        values = {metric: one.value for (metric, _), one in metrics.items()}
        soft = kind == "soft" or (kind == "causal_counterpart" and facts.get("top_k") is None)
        sparsity = None if level.density is None else 1 - level.density
        common = {
            "name": variant,
            "subject": f"{variant}, after {phase}" if phase else variant,
            **{key: facts.get(key) for key in ("kind", "method", "top_k", "pair_rule", "path", "phase", "error")},
            "trainable": facts.get("trainable") or last,
            "causal": facts.get("causal") is not False,
            "primary": (variant, phase) == primary,
            "sparsity": sparsity,
            "distant_density": values.get("distant_density"),
            "mask_active": None if soft or kind in ("base", "trained") else acted(facts["method"], sparsity),
            "nll": values.get("nll"),
        }
        source = "phases" if phase else "rows"
        yield common | _row(source, "perplexity", level.value, level.low, level.high) | common
        for metric, name, unit in (("nll", "nll", "nats"), ("largest_group_fraction", "largest_group", "fraction")):
            if values.get(metric) is not None:
                yield _row(source, name, values[metric], unit=unit) | common
        if kind == "base":
            yield _row(source, "parameters", 0) | common
        for (metric, reference), one in metrics.items():
            if metric != "nll_change" or one.value is None:
                continue
            dof = one.settings.get("dof") or 1.0
            base = None if common["nll"] is None else math.exp(min(common["nll"] - one.value, 700.0))
            yield _row(source, "nll_change", one.value, one.low, one.high, "nats") | common | {
                "reference": _reference(kind, reference), "level": level.value, "reference_level": base,
                "n_units": one.n if one.low is not None else None, "dof": dof if one.low is not None else None,
                "stderr": _stderr(one.low, one.high, dof),
            }  # fmt: skip


def _reference(kind: str, reference: str) -> str:
    if kind == "causal_counterpart" and reference != "base":
        return "non-causal counterpart"
    return "soft" if kind == "hard" and reference.endswith("_soft") else reference


def _primary_subject(
    run: Run, subjects: list[tuple[str, str | None]], rows: Mapping[tuple[str, str | None], Mapping[Any, Measurement]]
) -> tuple[str, str | None] | None:
    """Return what stands for a run: hard routing as configured, its method, or its trained weights."""
    method, top_k, rule = (run.setting("attention", key) for key in ("method", "top_k", "pair_rule"))

    def rank(subject: tuple[str, str | None]) -> int | None:
        facts = rows[subject]["perplexity", ""].settings
        if facts["kind"] == "hard" and facts["method"] == method and facts.get("top_k") in (None, top_k):
            # with top-1 routing both pair rules keep the same pairs
            return 0 if facts.get("top_k") == 1 or facts.get("pair_rule") in (None, rule) else None
        if facts["kind"] == "control":
            return 1 if facts["method"] == (method or "full") else None
        return 2 if facts["kind"] == "trained" else None

    ranked = [(place, index) for index, subject in enumerate(subjects) if (place := rank(subject)) is not None]
    return subjects[min(ranked)[1]] if ranked else None


def _probe_rows(rows: list[Measurement], details: bool) -> Iterator[dict[str, Any]]:
    """Yield the last probe of each phase, and the maximum after its first step."""
    names = {"dominance": "fraction", "dominance_worst": "fraction", "dead_groups": "groups", "confidence": "fraction"}
    labels = {"assignment_overlap": "stability"}
    phases: dict[str, list[Measurement]] = {}
    for one in rows:
        phases.setdefault(one.settings["phase"], []).append(one)
    for phase, probes in phases.items():
        last = max(one.settings["step"] for one in probes)
        common = {"phase": phase, "trainable": probes[0].settings.get("trainable"), "step": last, "name": "router"}
        for one in probes:
            name = labels.get(one.metric, one.metric)
            if one.settings["step"] == last and (name in names or name == "stability"):
                yield _row("probes", name, one.value, unit=names.get(name, "fraction")) | common
            if details and name in ("dominance", "dead_groups"):
                yield _row("probe_log", name, one.value) | common | {"step": one.settings["step"]}
        trained = [one for one in probes if one.settings["step"]] or probes
        for name in ("dominance", "dead_groups"):
            values = [one.value for one in trained if one.metric == name and one.value is not None]
            if values:
                yield _row("probes", f"{name}_most", max(values), unit=names[name]) | common


def _benchmark_rows(rows: list[Measurement]) -> Iterator[dict[str, Any]]:
    distant = {
        (one.variant, one.settings["task"]): one.value for one in rows if one.metric.startswith("distant_density:")
    }
    scores = [one for one in rows if "kind" in one.settings and not one.reference]
    changes = {
        (one.variant, one.settings["task"], one.settings.get("lm_eval_metric")): one
        for one in rows
        if one.reference and not one.metric.startswith("perplexity_change_pct")
    }
    for one in scores:
        facts, task = one.settings, one.settings["task"]
        sparsity = None if one.density is None else 1 - one.density
        unmasked = facts["kind"] in ("base", "trained", "missing")
        common = {
            "name": None, "variant": one.variant, "subject": f"{one.variant} {task} {facts.get('lm_eval_metric')}",
            **{key: facts.get(key) for key in ("kind", "method", "task", "error", "primary", "deciding")},
            "version": facts.get("task_version") or "", "task_metric": facts.get("lm_eval_metric") or "", "n": one.n,
            "tokens": facts.get("seq_len"), "causal": facts.get("causal") is not False, "sparsity": sparsity,
            "distant_density": distant.get((one.variant, task)),
            "mask_active": None if unmasked else acted(facts["method"], sparsity),
        }  # fmt: skip
        yield _row("benchmarks", "score", one.value, unit=one.unit) | common | {"stderr": facts.get("stderr")}
        if one.value is None or facts["kind"] == "base":
            continue
        change = changes.get((one.variant, task, facts.get("lm_eval_metric")))
        if change is None or change.value is None:
            yield _row("benchmarks", "score_change", None, unit=one.unit) | common
            continue
        is_perplexity = change.unit == "nats"
        full = one.value * math.exp(-change.value) if is_perplexity else one.value - change.value
        dof = change.settings.get("dof") or (math.inf if change.unit == "fraction" else None)
        dof = dof if change.low is not None and (change.n or 0) > 1 else None
        yield _row("benchmarks", "score_change", change.value, change.low, change.high, change.unit) | common | {
            "reference": "full attention", "level": one.value, "reference_level": full, "dof": dof,
            "stderr": _stderr(change.low, change.high, dof), "n_units": change.n,
        }  # fmt: skip


def _speed_rows(rows: list[Measurement]) -> Iterator[dict[str, Any]]:
    described = {}
    for one in rows:
        facts = {key: value for key, value in one.settings.items() if key != "error"}
        described.setdefault(json.dumps(facts, sort_keys=True), {})[one.metric, one.variant] = one
    cases = []
    for metrics in described.values():
        speedup = next(one for (metric, _), one in metrics.items() if metric == "speedup")
        facts, values = speedup.settings, {key: one.value for key, one in metrics.items()}
        source = "speed" if "groups" in facts else "method_speed"
        keys = ("clock", "groups", "assignment", "top_k", "pair_rule", "dtype", "path", "error", "method")
        common = {
            **{key: facts.get(key) for key in keys}, "tokens": facts["seq_len"], "density": speedup.density,
            "reference": "full attention", "timed_window": facts.get("window"), "name": None,
        }  # fmt: skip
        own, full = ((metric, name) for metric in ("latency_ms",) for name in (speedup.variant, "full"))
        levels = [None if values.get(key) is None else values[key] / 1e3 for key in (own, full)]
        case = (
            _row(source, "speedup", speedup.value, unit="x")
            | common
            | dict(zip(("level", "reference_level"), levels, strict=True))
        )
        cases.append(case)
        peaks = [values.get(("peak_memory_bytes", name)) for name in (speedup.variant, "full")]
        if None not in peaks and peaks[1]:
            cases.append(
                _row(source, "peak_memory", peaks[0] / peaks[1], unit="x")
                | common
                | {"level": peaks[0], "reference_level": peaks[1]}
            )
        attention = values.get(("attention_speedup", speedup.variant))
        if attention is not None:
            cases.append(_row(source, "attention_speedup", attention, unit="x") | common)
    _mark_primary_speed([case for case in cases if case["metric"] == "speedup" and case["source"] == "speed"])
    yield from cases


def _mark_primary_speed(cases: list[dict[str, Any]]) -> None:
    """Mark for each k the timing of the trained router that stands next to its quality.

    That is at the longest length at which all series were timed, with routing, or else the prefill.
    """

    def series(case: dict[str, Any]) -> tuple[Any, ...]:
        rule = case["pair_rule"] if case["top_k"] > 1 else ""
        return (case["groups"], case["assignment"], case["top_k"], rule, case["timed_window"], case["dtype"])

    for clock in ("attention", "prefill"):
        own = [case for case in cases if case["clock"] == clock]
        if len({case["top_k"] for case in own}) < 2:
            continue
        timed = [case for case in own if case["value"] and math.isfinite(case["value"])]
        lengths = [
            {case["tokens"] for case in timed if series(case) == key} for key in {series(case) for case in timed}
        ]
        common = max(set.intersection(*lengths), default=0) if lengths else 0
        marked = set()
        for case in sorted(timed, key=series):
            key = series(case)[2:4]
            if case["tokens"] == common and case["assignment"] == "trained" and key not in marked:
                marked.add(key)
                case["primary"] = True
        return


def _group_rows(rows: list[Measurement]) -> Iterator[dict[str, Any]]:
    """Yield the analysis of the groups: medians over layers, since the paper does not name its layers."""
    analyzed = [
        one for one in rows if "word_class" in one.settings or one.metric in ("layer_confidence", "pair_affinity")
    ]
    layers: dict[Any, list[Measurement]] = {}
    for one in analyzed:
        if one.variant == "router":
            layers.setdefault((one.settings.get("layer"), one.settings.get("head")), []).append(one)
    if not any(one.metric == "layer_confidence" for one in analyzed):
        return

    def values(layer: list[Measurement], metric: str, word_class: str = "") -> list[float]:
        own = [one for one in layer if one.metric == metric and one.value is not None]
        return [one.value for one in own if not word_class or one.settings["word_class"] == word_class]

    parts = list(layers.values())
    purity = [max(values(part, "group_purity", "punctuation"), default=0.0) for part in parts]
    sizes = [values(part, "group_fraction") for part in parts]
    affinities = [value for part in parts for value in values(part, "pair_affinity")]
    for metric, value in (
        ("punctuation_purity", median(purity)),
        ("group_confidence", fmean(value for part in parts for value in values(part, "layer_confidence"))),
        ("smallest_group", median(map(min, sizes))),
        ("largest_group", median(map(max, sizes))),
        ("affinity", max(affinities, default=None)),
    ):
        if value is not None:
            yield _row("groups", metric, value, unit="fraction")


def _detail_rows(rows: list[Measurement]) -> Iterator[dict[str, Any]]:
    """Yield what only the figures and tables of a single run show: positions, group sizes, analysis, continuations."""
    kinds = {one.variant: one.settings["kind"] for one in rows if one.metric == "perplexity" and "kind" in one.settings}
    for one in rows:
        facts = one.settings
        place = {"name": one.variant, "layer": facts.get("layer"), "head": facts.get("head")}
        if one.metric == "nll_at_position" and not facts.get("phase"):
            bounds = {"start": facts["position_start"], "end": facts["position_end"], "kind": kinds.get(one.variant)}
            yield _row("positions", one.metric, one.value) | place | bounds
        elif one.metric == "group_fraction" and "word_class" not in facts:
            yield _row("group_sizes", one.metric, one.value) | place
        elif "router" in facts or one.metric in ("layer_confidence", "passage_distant_density"):
            yield _row("analysis", " ".join(filter(None, [one.metric, facts.get("router")])), one.value) | place
        elif "prompt" in facts:
            yield _row("generation", one.metric, one.value) | place | {"variant": one.variant}


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


def setup_key(run: Run) -> Any:
    """Return what runs of several seeds share: model, data, every setting that decides the numbers, and the device."""
    record = run.record
    settings = _leaves(run.config)
    settings["every_arm",] = [one for one in run.config.get("every_arm") or [] if not one.startswith(EVALUATED)]
    if run.config.get("adapter"):
        settings.pop(("attention", "budget"), None)  # found by the adapter's own run
    decisive = sorted(
        (key, repr(value))
        for key, value in settings.items()
        if value not in (None, False, [], {}) and LATER.get(key) != value and not _is_ignored(key)
    )
    adapter = {
        key: value for key, value in ((record.get("method") or {}).get("trained") or {}).items() if key != "seed"
    }
    model, data = record["model"], record["data"]
    weights = None if model.get("source") == "random" else model.get("fingerprint")
    identity = model.get("name"), weights, data.get("name"), data.get("fingerprint")
    trained = record.get("steps"), record.get("tokens_seen"), *sorted(adapter.items())
    return identity, tuple(decisive), record["device"].partition(",")[0], *trained


def _leaves(values: Mapping[str, Any], *above: str) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for key, value in values.items():
        found |= _leaves(value, *above, key) if isinstance(value, Mapping) else {(*above, key): value}
    return found


def _is_ignored(key: tuple[str, ...]) -> bool:
    section, *below = key
    return section in IGNORED and (not IGNORED[section] or below[0] in IGNORED[section])


def _digest(shared: Any) -> str:
    return sha256(repr(shared).encode()).hexdigest()[:12]


@cache
def read_yaml(name: str) -> Any:
    """Return the content of a YAML file of this package. Raises UserError for malformed YAML."""
    try:
        return yaml.safe_load((files("focus_exp.reporting") / f"{name}.yaml").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{name}.yaml: {error}.") from error
