"""Tables of this project: methods, frontier, speed, differences, pitfalls, runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import pandas as pd

from focus_exp.reporting.format import to_percent
from focus_exp.reporting.frame import (
    BASE,
    COUNTERPART,
    SMALL_EFFECT,
    SOFT,
    aggregate_seeds,
    filter_rows,
    read_yaml,
    root_mean_square,
    to_rows,
)
from focus_exp.reporting.load import Results
from focus_exp.results.intervals import required_size, student

LONG_TEXT = "perplexity@"  # benchmark: perplexity at a sequence length
LENGTHS = (1024, 4096, 8192)
DENSITIES = (5, 10, 20, 30)  # of the curves [%]
# label -> variant of the experiment `frontier`, then of `compare`
METHODS = {
    "Focus, two encoders": "dual_20",
    "Focus, two encoders, short fit": "dual_20_fast",
    "Focus, two encoders, 16 groups": "dual_16_groups_fast",
    "Focus, top-1": "focus_k1",
    "local window, 512": "window_512",
    "local window, 1,024": "window_1024",
    "random groups": "random_groups",
    "token indexer": "token_indexer",
    "block means (MoBA)": "block_means_20",
    "block gate (SeerAttention)": "block_gate_20",
    "key gate": "key_gate_20",
    "SparQ": "sparq",
    "MagicPIG": "magicpig",
    "best tokens (oracle)": "best_tokens",
    "LoRA, size-matched": "lora",
    "full fine-tuning": "full_finetuning",
}
# curve of the frontier -> its variants, and hard routings of one
FAMILIES = {"Focus": ["focus_k1", "k_2", "k_3"], "local window": ["window", "window_512", "window_1024"]}
FAMILIES |= {"random groups": ["random_groups"], "SparQ": ["sparq", "sparq_dense"]}
FAMILIES |= {
    name.replace("_", " "): [f"{name}_{n}" for n in DENSITIES] for name in ("block_means", "block_gate", "key_gate")
}
FAMILIES |= {"Focus, two encoders": [f"dual_{n}" for n in DENSITIES]}
FAMILIES |= {"Focus, two encoders, short fit": [f"dual_{n}_fast" for n in DENSITIES]}


def frontier(results: Results) -> pd.DataFrame:
    """Return ΔPPL [%] and density of the QK pairs by method and length."""
    complete = filter_rows(results.complete, {"experiment": ["frontier", "compare", "long_context"], "causal": True})
    at_length = filter_rows(complete, {"source": "rows", "metric": "nll_change", "reference": BASE})
    longer = filter_rows(complete, {"source": "benchmarks", "metric": "score_change", "task": f"{LONG_TEXT}*"})
    rows = []
    for row in [*aggregate_seeds(at_length), *aggregate_seeds(longer)]:
        if row.attention == "focus_dual" and row.steps:  # after its fit
            row = row._replace(variant=f"{row.variant}, {row.steps} steps")
        family = next((name for name, variants in FAMILIES.items() if row.variant in variants), None)
        tokens = int(row.task.removeprefix(LONG_TEXT)) if row.task else row.seq_len
        repeated = row.task and tokens == row.seq_len and row.experiment == "long_context"  # scored as rows as well
        if row.sparsity is None or repeated:
            continue
        point: dict[str, Any] = {"tokens": tokens, "method": family or row.method, "run": row.members[0].run}
        point |= {"seeds": len(row.seeds), "trainable_params": row.trainable_params if row.train_tokens else 0}
        point |= _percent_changes(row)
        rows.append(row._asdict() | point)
    columns = [
        *("model", "data", "experiment", "variant", "tokens", "method", "density", "sparsity", "distant_density"),
        *("change", "low", "high"),
        *("seeds", "trainable_params", "train_tokens", "run"),
    ]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.sort_values(["tokens", "experiment"], kind="stable").reset_index(drop=True)


def methods(results: Results) -> pd.DataFrame:
    """Return sparsity, ΔPPL by length, parameters and speed of each method, on the model with most points.

    Speedups are of a layer at 32,768 tokens and of a prefill at 8,192, on a CPU.
    """
    points = frontier(results)
    if points.empty:
        return points
    model = points.model.mode()[0]
    points = points[points.model == model]
    points = points[points["data"] == points["data"].mode()[0]]
    cells = {"experiment": ["frontier", "speed"], "metric": "speedup", "device_kind": "cpu", "model": model}
    rows = filter_rows(results.complete, cells)
    timings = {
        "speedup_layer": filter_rows(rows, {"clock": "attention", "tokens": 32_768}),
        "speedup_prefill": filter_rows(rows, {"clock": "prefill", "tokens": 8_192}),
    }
    table = []
    for method in _methods_by_length(points):
        run = results.rows_by_run[method.pop("run")]
        scored = to_rows(filter_rows(run, {"source": "rows", "variant": method["variant"]}))[0]
        table.append(method | {name: find_speedup(timed, scored) for name, timed in timings.items()})
    return pd.DataFrame(table)


def models(results: Results) -> pd.DataFrame:
    """Return sparsity and ΔPPL by length of each method of the frontier on each model and data set."""
    points = frontier(results)
    if points.empty:
        return points
    setups = points[points.experiment == "frontier"].groupby(["model", "data"], sort=False)
    rows = [
        {"model": model, "data": data} | row for (model, data), curves in setups for row in _methods_by_length(curves)
    ]
    return pd.DataFrame(rows).drop(columns=["experiment", "trainable_params", "run"], errors="ignore")


def _methods_by_length(points: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the points of each method in one row: of `frontier`, else of `compare`."""
    for label, variant in METHODS.items():
        curve = points[points.variant == variant]
        curve = curve[curve.experiment == ("frontier" if (curve.experiment == "frontier").any() else "compare")]
        if curve.empty:
            continue
        first, at = curve.iloc[0], curve.drop_duplicates("tokens").set_index("tokens").reindex(LENGTHS)
        names = ("sparsity", "change", "low", "high", "seeds")
        changes = {f"{name}_{tokens}": at[name][tokens] for tokens in LENGTHS for name in names}
        row = {"method": label, "variant": variant, "experiment": first.experiment}
        yield row | changes | {"trainable_params": first.trainable_params, "run": first.run}


def find_speedup(timings: pd.DataFrame, row: Any) -> float | None:
    """Return the last speedup of a row's routing, of Focus by its groups, else by name; 1 without a mask."""
    if row.kind in (BASE, "trained"):
        return 1.0
    cells = {"source": "method_speed", "method": row.method}
    if row.method == "focus_dual":
        cells["num_groups"] = row.num_groups
    elif row.method == "focus":
        cells = {"source": "speed", "groups": row.num_groups, "top_k": row.top_k or 1, "assignment": "balanced"}
        cells |= {"pair_rule": row.pair_rule} if cells["top_k"] > 1 else {}
    return next(iter(filter_rows(timings, cells).value[::-1]), None)


def speed(results: Results) -> pd.DataFrame:
    """Return every timing next to full attention, and its break-even length.

    Columns: metric: speedup (`ours`, `full`: seconds) or peak_memory (ratio; bytes); bound: 1 / density.
    """
    rows = filter_rows(results.complete, {"source": ["speed", "method_speed"], "metric": ["speedup", "peak_memory"]})
    columns = [
        *("experiment", "model", "device_kind", "metric", "clock", "method", "groups", "assignment", "top_k"),
        *("pair_rule", "dtype", "tokens", "value", "level", "reference_level", "density", "path", "run"),
    ]
    names = {"device_kind": "device", "level": "ours", "reference_level": "full"}
    groups = rows.groups.where(rows.method != "focus_dual", rows.num_groups)
    rows = rows.assign(groups=groups, method=rows.method.fillna("focus"))
    frame = rows[columns].rename(columns=names).convert_dtypes()
    frame["bound"] = 1 / frame["density"].astype(float)
    series = ["run", "metric", "clock", "method", "groups", "assignment", "top_k", "pair_rule", "dtype"]
    frame["break_even"] = None
    for _, rows in frame[frame.metric == "speedup"].groupby(series, dropna=False, sort=False):
        points = [*rows[["tokens", "value"]].dropna().astype(float).itertuples(index=False, name=None)]
        frame.loc[rows.index, "break_even"] = break_even(points) if points else None
    return frame.sort_values([*series, "tokens"], kind="stable").reset_index(drop=True)


def break_even(points: list[tuple[float, float]]) -> float | None:
    """Return the length [tokens] from which on no measured speedup is below 1.

    Interpolates log speedup linearly in log length. None where the longest length is slower.
    """
    points = sorted(points)
    slower = [index for index, (_, speedup) in enumerate(points) if speedup < 1]
    if not slower:
        return points[0][0]
    if slower[-1] + 1 == len(points):
        return None
    (before, below), (after, above) = points[slower[-1]], points[slower[-1] + 1]
    weight = math.log(below) / (math.log(below) - math.log(above))
    return float(before * (after / before) ** weight)


def differences(results: Results) -> pd.DataFrame:
    """Return every paired change of the loss, aggregated over seeds."""
    rows = filter_rows(results.complete, {"source": "rows", "metric": "nll_change", "reversed": None})
    rows = rows[rows.reference != SOFT]
    return pd.DataFrame([_difference(row) for row in aggregate_seeds(rows)])


def _percent_changes(row: Any) -> dict[str, float | None]:
    return {"change": to_percent(row.value), "low": to_percent(row.low), "high": to_percent(row.high)}


def _difference(row: Any) -> dict[str, Any]:
    text = [member.stderr * student(member.dof) for member in row.members if member.stderr is not None]
    seeds, spread = len(row.seeds), row.seed_deviation
    return {
        "experiment": " ".join(dict.fromkeys(member.experiment for member in row.members)),
        "variant": row.variant or row.name,
        "name": row.name,
        "reference": row.reference,
        "model": row.model,
        "data": row.data,
        "groups": row.num_groups if row.attention in ("focus", "random_groups") else None,
        "steps": row.steps,
        "device": row.device_kind,
        "sparsity": row.sparsity,
        "causal": all(member.causal is not False for member in row.members),
        "seeds": " ".join(str(seed) for seed in row.seeds),
        "num_seeds": seeds,
        "nll_change": row.value,
        "nll_change_low": row.low,
        "nll_change_high": row.high,
        **_percent_changes(row),
        "units": row.n_units,
        "unit_deviation": row.deviation,
        "seed_deviation": spread,
        "half_width_documents": root_mean_square(text) if text else None,
        "half_width_seeds": spread and student(seeds - 1) * spread / seeds**0.5,
        "units_for_1_percent": required_size(row.deviation, SMALL_EFFECT) if row.deviation else None,
        "seeds_for_1_percent": spread and required_size(spread, SMALL_EFFECT),
        "commits": " ".join(dict.fromkeys(member.commit or "" for member in row.members)),
        "runs": " ".join(dict.fromkeys(member.run for member in row.members)),
    }


def transfer(results: Results) -> pd.DataFrame:
    """Return ΔPPL [%] at 4,096 tokens by text and router: fitted_on_<text>, in-domain too, or a baseline."""
    moved, points = differences(results), frontier(results)
    if moved.empty or "transfer" not in set(moved.experiment):
        return pd.DataFrame()
    moved = moved[(moved.experiment == "transfer") & (moved.reference == BASE)]
    commands = moved.runs.map(runs(results).set_index("run").command)
    router = moved.variant.where(moved.variant != "focus_dual", commands.str.extract(r"transfer/(\w+)\]")[0])
    moved = moved.assign(router=router.str.removeprefix("focus_dual, "), seeds=moved.num_seeds)
    points = points[(points.experiment == "frontier") & (points.tokens == 4096)]
    texts = points["data"].map({value: name for name, value in read_yaml("tables")["names"].items()})
    named = zip(points.variant, texts, strict=True)
    points = points.assign(router=[name.replace("dual_20_fast", f"fitted_on_{text}") for name, text in named])
    names = ["model", "data", "router", "change", "low", "high", "sparsity", "distant_density", "seeds"]
    table = pd.concat([points, moved]).reindex(columns=names)
    return table.drop_duplicates(["model", "data", "router"]).reset_index(drop=True)


def gpu(results: Results) -> pd.DataFrame:
    """Return the timings of one layer in gpu/ of the records, with the name of their file."""
    files = sorted((results.root / "gpu").glob("*.json")) if results.root else []
    rows = [
        {"file": path.stem, **row} for path in files for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
    ]
    return pd.DataFrame(rows).drop(columns="full by kernel [s]", errors="ignore")


def generation(results: Results) -> pd.DataFrame:
    """Return the means over prompts of what was generated, by run and variant: one column a metric."""
    rows = filter_rows(results.complete, {"source": "generation"}).astype({"value": float})
    index = ["run", "model", "data", "seq_len", "variant"]
    return rows.pivot_table("value", index, "metric", sort=False).reset_index() if len(rows) else pd.DataFrame()


def recall(results: Results) -> pd.DataFrame:
    """Return the fraction of items [%] that each method answers where the answer or the examples are far back.

    Columns: score, base: per cent; change, low, high: points; units: documents of the suite, else items.
    """
    cells = {"experiment": "recall", "source": "benchmarks", "metric": "score_change", "unit": "fraction"}
    rows = []
    for row in aggregate_seeds(filter_rows(results.complete, cells)):
        facts = {"metric": row.task_metric, "units": row.n_units, "seeds": len(row.seeds), "run": row.members[0].run}
        facts |= {"change": 100 * row.value, "low": 100 * row.low, "high": 100 * row.high}
        facts |= {"score": 100 * fmean(member.level for member in row.members)}
        facts |= {"base": 100 * fmean(member.reference_level for member in row.members)}
        rows.append(row._asdict() | facts)
    columns = ["model", "data", "task", "metric", "variant", "sparsity", "score", "base", "change", "low", "high"]
    return pd.DataFrame(rows, columns=[*columns, "units", "seeds", "run"])


def power(claims: pd.DataFrame) -> pd.DataFrame:
    """Return deviations and required sample sizes behind the claims."""
    rows = {id: row for id, row in claims.attrs["rows"].items() if row.source == "rows" and row.deviation}
    columns = [
        *("id", "experiment", "variant", "reference", "units", "change", "low", "high", "unit_deviation"),
        *("seed_deviation", "half_width_documents", "half_width_seeds", "units_for_1_percent", "seeds_for_1_percent"),
    ]
    return pd.DataFrame([{"id": id, **_difference(row)} for id, row in rows.items()], columns=columns)


def pitfalls(results: Results) -> pd.DataFrame:
    """Return what a reader of the paper could mistake, with measurements."""
    rows = results.rows[results.rows.status == "finished"].sort_values("started", kind="stable")
    changes = filter_rows(rows, {"source": "rows", "metric": "nll_change"})
    soft = filter_rows(changes, {"reference": SOFT, "mask_active": True, "first_variant": None})
    published = (soft.experiment == "compare") & soft.variant.isin(["focus", "focus_paper"])
    published |= soft.experiment.isin(["retrofit_124m", "leak"])
    many = filter_rows(changes, {"reference": BASE, "kind": "hard", "pair_rule": "share"}).dropna(subset=["top_k"])
    idle = filter_rows(rows, {"source": "benchmarks", "metric": "score_change", "kind": "hard", "deciding": True})
    idle = filter_rows(idle, {"is_variant": False, "mask_active": [True, False]})
    parts = {
        "non-causal router": filter_rows(changes, {"reference": COUNTERPART}),
        "soft gate trained, hard mask used": soft[published & ((soft.top_k == 1) | soft.primary.eq(True))],
        "k > K/2 is full attention": many[(many.top_k >= 2) & (2 * many.top_k > many.num_groups)],
        "benchmark with an inactive mask": idle[idle.first_variant.isna() | (idle.variant == idle.first_variant)],
    }
    columns = [
        *("pitfall", "experiment", "variant", "seed", "name", "task", "top_k", "num_groups", "sparsity"),
        *("distant_density", "mask_active", "causal", "reference_level", "level", "value", "low", "high", "unit"),
        "run",
    ]
    return pd.concat([part.assign(pitfall=name)[columns] for name, part in parts.items()]).convert_dtypes()


def runs(results: Results) -> pd.DataFrame:
    """Return the list of runs: model, data, device, command and commit."""
    columns = [
        *("experiment", "seed", "status", "model", "data", "device", "steps", "train_tokens", "seconds"),
        *("started", "commit", "config_hash", "command"),
    ]
    frame = results.runs[~results.runs.is_variant.astype(bool)]
    return frame[[name for name in columns if name in frame]].reset_index()


OWN_TABLES: dict[str, Callable[[Results], pd.DataFrame]] = {
    make.__name__: make
    for make in (methods, models, frontier, speed, differences, transfer, gpu, generation, recall, pitfalls, runs)
}
