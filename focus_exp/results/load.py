"""Load the runs below a folder as tables. Imports neither torch nor a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from focus_exp.config import upgrade_keys
from focus_exp.errors import UserError
from focus_exp.results.convert import parse_record, primary_label
from focus_exp.results.measurement import COLUMNS, MEASUREMENTS, variant_name
from focus_exp.results.setup import setup_key, variant_key

NUMBERS = ("value", "low", "high", "density")
COUNTS = ("n", "seed")
# settings that become columns of their own, and their types
SETTINGS = {
    "kind": "string", "method": "string", "top_k": "Int64", "pair_rule": "string", "window": "Int64", "path": "string",
    "phase": "string", "step": "Int64", "trainable": "string", "causal": "boolean", "dof": "Float64", "task": "string",
    "seq_len": "Int64", "clock": "string", "groups": "Int64", "assignment": "string", "dtype": "string",
    "layer": "string", "head": "Int64", "stderr": "Float64", "primary_metric": "boolean",
    "deciding_metric": "boolean", "error": "string",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Results:
    """The runs below a folder.

    Attributes:
        runs: one row a run, oldest first; see `describe_run`.
        variants: one row a variant of a comparison: `comparison` (its run), `variant`, `run` (its own run, "" where it
            left none), `primary` (the variant of its own run that stands for it), status, error, settings (overrides),
            trainable_parameters, learning_rate, lr_trials, steps, tokens, seconds, setup.
        measurements: the rows of every `measurements.csv` with their `run`; `settings` as text, and its known keys as
            columns (`SETTINGS`). `causal` is True unless the settings say otherwise; `is_primary`: of the variant that
            stands for its run, after the last phase.
        root: the folder.
    """

    runs: pd.DataFrame
    variants: pd.DataFrame
    measurements: pd.DataFrame
    root: Path

    def join_variants(self) -> pd.DataFrame:
        """Return the measurements of comparisons: their own, and those of their variants' runs.

        A variant's rows carry the comparison as `run`, its own run as `variant_run` and the name in its own run as
        `own_variant`; `variant` is the variant's name, or `base` for full attention of the first variant that has one.
        """
        columns = {"comparison": "run", "variant": "variant_name", "run": "variant_run", "primary": "primary_variant"}
        named = self.variants[[*columns]].rename(columns=columns)
        own = self.measurements.rename(columns={"run": "variant_run", "variant": "own_variant"})
        joined = named.merge(own, on="variant_run", how="inner", sort=False)
        is_base = joined.own_variant == "base"
        first = joined[is_base].groupby("run").variant_run.transform("first")
        joined = joined[~is_base | joined.variant_run.eq(first.reindex(joined.index))]
        variant = joined.variant_name.where(joined.own_variant != "base", "base")
        comparisons = self.measurements[self.measurements.run.isin(self.variants.comparison)]
        joined = joined.assign(variant=variant).drop(columns="variant_name")
        return pd.concat([joined, comparisons.assign(is_primary=True)], ignore_index=True)

    def describe_run(self, run: str) -> dict[str, Any]:
        """Return the provenance of a run: its `record.json`."""
        return read_record(self.root / run)


def load_runs(root: str | Path) -> Results:
    """Load every run below `root`; UserError for an unreadable record."""
    root = Path(root)
    folders = sorted(path.parent for path in root.rglob("record.json"))
    records = {folder.relative_to(root).as_posix(): read_record(folder) for folder in folders}
    runs = pd.DataFrame([describe_run(run, record) for run, record in records.items()])
    if not runs.empty:
        runs = runs.sort_values("started", kind="stable", ignore_index=True).convert_dtypes()
    by_start = {(record["config_hash"], record["started"]): run for run, record in records.items()}
    primary = dict(zip(runs.run, runs.primary_variant, strict=True)) if not runs.empty else {}
    own = {start: setup_key(records[run]) for start, run in by_start.items()}
    variants = [row for run, record in records.items() for row in _variants(run, record, by_start, own)]
    for row in variants:
        row["primary"] = primary.get(row["run"])
    frames = [_read_table(folder / MEASUREMENTS, folder.relative_to(root).as_posix()) for folder in folders]
    measurements = _expand_settings(pd.concat(frames, ignore_index=True)) if frames else pd.DataFrame(columns=COLUMNS)
    if not measurements.empty:
        is_own = measurements.variant == measurements.run.map(primary)
        measurements["is_primary"] = is_own & measurements.phase.isna()
    return Results(runs, pd.DataFrame(variants).convert_dtypes(), measurements, root)


def read_record(folder: Path) -> dict[str, Any]:
    """Read the provenance of a run; UserError where it is missing or damaged."""
    path = folder / "record.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} must be a readable record ({error}). Remove it and run the job again.") from error
    if not isinstance(record, dict) or "config" not in record:
        raise UserError(f"{path} must be a record with a config. Remove it and run the job again.")
    return record | {"config": upgrade_keys(record["config"] or {})}


def describe_run(run: str, record: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a run in `Results.runs`.

    `variant` is its name in a comparison (empty if it is of none); `primary_variant` the variant of its measurements
    that stands for it; `is_complete` whether its numbers are whole; `setup` is equal for runs that differ in their seed
    alone; tokens, steps: trained; times in seconds; units: of the confidence intervals.
    """
    config, model, data, method = (record.get(key) or {} for key in ("config", "model", "data", "method"))
    commit, device = record.get("commit") or "", record.get("device") or ""
    attention, units, machine = (config.get("attention") or {}, record.get("units") or {}, record.get("machine") or {})
    timed = any(record.get(key) for key in ("speed", "method_speed")) and not record.get("rows")
    complete = record["status"] == "finished" or (record["status"] == "interrupted" and timed)
    return {
        "run": run,
        "experiment": record["experiment"],
        "job": config.get("job"),
        "variant": config.get("variant") or "",
        "is_comparison": bool(record.get("arms")),
        "primary_variant": record.get("primary_variant") or _primary_variant(record),
        "status": record["status"],
        "is_complete": complete,
        "error": record.get("error"),
        "started": record["started"],
        "command": record["command"],
        "commit": commit.removesuffix("-dirty"),
        "is_dirty": commit.endswith("-dirty"),
        "config_hash": record["config_hash"],
        "setup": _run_setup(record),
        "seed": record.get("seed") if record.get("seed") is not None else config.get("seed"),
        "budget": (config.get("budget") or {}).get("name"),
        "model_config": (config.get("model") or {}).get("name"),
        "model_requested": model.get("requested"),
        "model_used": model.get("used"),
        "model_name": model.get("name"),
        "model_source": model.get("source"),
        "model_fingerprint": model.get("fingerprint"),
        "model_parameters": model.get("parameters"),
        "is_model_substituted": bool(model.get("substitution")),
        "data_config": (config.get("data") or {}).get("name"),
        "data_requested": data.get("requested"),
        "data_used": data.get("used"),
        "data_name": data.get("name"),
        "data_fingerprint": data.get("fingerprint"),
        "is_data_substituted": bool(data.get("substitution")),
        "device": device,
        "device_kind": device.partition(",")[0],
        "precision": device.rpartition(", ")[2].partition(" (")[0],
        "cpu": machine.get("cpu"),
        "platform": machine.get("platform"),
        "torch": (record.get("versions") or {}).get("torch"),
        "attention": attention.get("method"),
        "groups": attention.get("groups"),
        "top_k": attention.get("top_k"),
        "pair_rule": attention.get("pair_rule"),
        "window": attention.get("window"),
        "sinks": attention.get("sinks"),
        "temperature": attention.get("temperature"),
        "gate": attention.get("gate"),
        "seq_len": (config.get("eval") or {}).get("seq_len"),
        "recipe": (config.get("recipe") or {}).get("name"),
        "is_causal": method.get("causal", True),
        "trainable_parameters": method.get("trainable_parameters"),
        "lr_trials": len(record.get("tries") or ()),
        "tokens": record.get("tokens_seen") or record.get("tokens") or 0,
        "steps": record.get("steps") or 0,
        "seconds": record.get("wall_seconds"),
        "train_seconds": record.get("train_seconds"),
        "fit_seconds": record.get("fit_seconds"),
        "peak_memory_bytes": record.get("peak_memory_bytes"),
        "unit_kind": units.get("kind"),
        "units": units.get("count"),
        "dof": units.get("freedom"),
        "warnings": "; ".join(record.get("warnings") or ()),
    }


def _run_setup(record: dict[str, Any]) -> str:
    """Return the set-up of a run; of one that is no comparison with its experiment."""
    key = setup_key(record)
    return key if record.get("arms") else f"{record['experiment']}-{key}"


def _primary_variant(record: dict[str, Any]) -> str:
    """Find the variant that stands for a run of schema 2."""
    return variant_name(primary_label(parse_record(record)) or "")


def _variants(
    run: str,
    record: dict[str, Any],
    by_start: dict[tuple[str, str], str],
    own: dict[tuple[str, str], str],
) -> list[dict[str, Any]]:
    return [
        {
            "comparison": run,
            "variant": row["name"],
            "run": by_start.get((row["config_hash"], row["started"]), ""),
            "primary": "",
            "status": row["status"],
            "error": row["error"],
            "settings": " ".join(row["settings"]),
            "trainable_parameters": row["trainable_parameters"] if row["tokens_seen"] else 0,
            "learning_rate": row["learning_rate"],
            "lr_trials": len(row["tries"]),
            "steps": row["steps"],
            "tokens": row["tokens_seen"],
            "train_seconds": row["train_seconds"],
            "fit_seconds": row.get("fit_seconds"),
            "commit": row["commit"],
            "setup": variant_key(
                row["name"],
                row["settings"],
                row["steps"],
                row["tokens_seen"],
                own.get((row["config_hash"], row["started"]), ""),
            ),
        }
        for row in record.get("arms") or ()
    ]


def _read_table(path: Path, run: str) -> pd.DataFrame:
    if not path.exists():
        return pd.DataFrame(columns=["run", *COLUMNS])
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    table.insert(0, "run", run)
    return table


def _expand_settings(table: pd.DataFrame) -> pd.DataFrame:
    """Type the columns, and add the known settings as columns."""
    for name in (*NUMBERS, *COUNTS):
        table[name] = pd.to_numeric(table[name].replace("", None)).astype("Int64" if name in COUNTS else "Float64")
    parsed = {text: json.loads(text) if text else {} for text in table.settings.unique()}
    for name, kind in SETTINGS.items():
        known = {text: values[name] for text, values in parsed.items() if name in values}
        column = table.settings.map(known)
        table[name] = (column.astype(object).where(column.notna(), None)).astype(kind)
    table["causal"] = table.causal.fillna(True)
    return table
