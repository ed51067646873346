"""The runs below a directory: a folder for each run, or three tables that hold many.

    runs.jsonl            a line a run: its name and record, with the part of the configuration that is reported
    measurements.parquet  the rows of every measurements.csv, and the run
    losses.parquet        a row for each scored unit and variant of every losses.csv, and the run

The name of a run is its path below the directory. `job=report report.collect=<folder>` adds runs to the tables.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from focus_exp.errors import UserError
from focus_exp.identity import flatten
from focus_exp.results.losses import KEY, Losses
from focus_exp.results.measurement import COLUMNS, from_frame, to_frame
from focus_exp.results.record import RECORD, Record
from focus_exp.storage import replace_file

RUNS, MEASUREMENTS, LOSSES = "runs.jsonl", "measurements.parquet", "losses.parquet"
# of the configuration; `setup` and `config_hash` identify the rest
KEPT = [
    *("job", "variant", "adapter", "references", "budget.name", "model.name", "data.name", "recipe.lora.rank"),
    *(f"model.architecture.{key}" for key in ("model_type", "num_attention_heads", "num_key_value_heads")),
    *(f"attention.{key}" for key in ("method", "groups", "window", "top_k", "pair_rule")),
    *(f"eval.{key}" for key in ("seq_len", "max_sequences", "split", "controls")),
]


def read_runs(root: Path) -> dict[str, Record]:
    """Return the runs below `root` by name: those in tables, there or below, and those in folders.

    Raises:
        UserError: a record or a table is damaged.
    """
    runs: dict[str, Record] = {}
    for place in sorted(path.parent for path in root.rglob(RUNS)):
        runs |= {(place / name).relative_to(root).as_posix(): run for name, run in read_tables(place).items()}
    for path in sorted(root.rglob(RECORD)):
        runs[path.parent.relative_to(root).as_posix()] = Record.load(path)
    return runs


def read_tables(root: Path) -> dict[str, Record]:
    """Return the runs in the tables of `root` by name; {} without tables."""
    if not (root / RUNS).exists():
        return {}
    try:
        lines = [json.loads(line) for line in (root / RUNS).read_text(encoding="utf-8").splitlines()]
        measurements = dict([*pd.read_parquet(root / MEASUREMENTS).groupby("run", sort=False)])
        losses = dict([*pd.read_parquet(root / LOSSES).groupby("run", sort=False)])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{root / RUNS} and its tables must be readable ({error}). Restore them.") from error
    runs = {}
    for line in lines:
        name = line.pop("run")
        runs[name] = run = Record.parse(json.dumps(line).encode(), root / RUNS)
        run.measurements = from_frame(measurements[name]) if name in measurements else []
        run.losses = _parse_losses(losses[name]) if name in losses else {}
    return runs


def _parse_losses(rows: pd.DataFrame) -> dict[str, Losses]:
    tasks: dict[str, Losses] = {}
    for (task, variant), scored in rows.groupby(["of", "variant"], sort=False):
        units = [*scored[[*KEY[1:]]].itertuples(index=False, name=None)]
        tasks.setdefault(task, Losses(units)).nll[variant] = scored.value.to_numpy(float)
    return tasks


def collect_runs(source: Path, root: Path) -> list[str]:
    """Add the runs in folders below `source` to the tables of `root`, in place of earlier ones; return their names.

    Raises:
        UserError: `source` has no runs, or a record is damaged.
    """
    added = {"/".join(path.parts[-4:-1]): Record.load(path) for path in sorted(source.absolute().rglob(RECORD))}
    if not added:
        raise UserError(f"report.collect must hold runs (got {source}, without any). Type a folder below runs_dir.")
    write_tables(root, read_tables(root) | added)
    return [*added]


def write_tables(root: Path, runs: Mapping[str, Record]) -> None:
    """Write the tables of runs, by name."""
    lines = [json.dumps({"run": name, **_shorten(runs[name])}, ensure_ascii=False) + "\n" for name in sorted(runs)]
    measurements = [_measurement_rows(name, runs[name]) for name in sorted(runs)]
    losses = [_loss_rows(name, runs[name].losses) for name in sorted(runs)]
    _write_parquet(root / MEASUREMENTS, measurements)
    _write_parquet(root / LOSSES, losses)
    replace_file(root / RUNS, "".join(lines).encode())


def _shorten(run: Record) -> dict[str, Any]:
    """Return a record as JSON, with the part of its configuration that is reported."""
    config: dict[str, Any] = {}
    for key, value in flatten(run.config).items():
        if ".".join(key) in KEPT:
            place = config
            for part in key[:-1]:
                place = place.setdefault(part, {})
            place[key[-1]] = value
    shortened: dict[str, Any] = json.loads(replace(run, config=config).format())
    return {key: value for key, value in shortened.items() if value not in (None, [], {}, "")}


def _measurement_rows(name: str, run: Record) -> pd.DataFrame:
    return to_frame(run.measurements).assign(run=name)[["run", *COLUMNS]]


def _loss_rows(name: str, losses: Mapping[str, Losses]) -> pd.DataFrame:
    frames = [
        pd.DataFrame(scored.units, columns=[*KEY[1:]]).assign(run=name, of=task, variant=variant, value=values)
        for task, scored in losses.items()
        for variant, values in scored.nll.items()
    ]
    return pd.concat(frames) if frames else pd.DataFrame()


def _write_parquet(path: Path, frames: Iterable[pd.DataFrame]) -> None:
    content, filled = io.BytesIO(), [frame for frame in frames if len(frame)]
    table = pd.concat(filled) if filled else pd.DataFrame({"run": []})
    table.to_parquet(content, index=False, compression="zstd")
    replace_file(path, content.getvalue())


def find_variants(name: str, runs: Mapping[str, Record]) -> dict[str, str]:
    """Return the name of the run of each variant of a comparison; without those that are gone or were repeated since.

    Args:
        name: of the comparison.
        runs: by name; the variants have the same experiment.
    """
    experiment = name.split("/")[:-2]
    names = {v.name: "/".join([*experiment, *_place(v.folder)]) for v in runs[name].variants}
    started = {v.name: v.started for v in runs[name].variants}
    return {v: run for v, run in names.items() if run in runs and runs[run].started == started[v]}


def load_variants(folder: Path) -> tuple[str, dict[str, Record]]:
    """Return the name of the run in a folder, and by name that run and those of its variants."""
    record, root, name = Record.load(folder / RECORD), folder.parents[1], "/".join(_place(folder))
    names = ["/".join(_place(variant.folder)) for variant in record.variants]
    return name, {name: record} | {n: Record.load(root / n / RECORD) for n in names if (root / n / RECORD).exists()}


def _place(folder: str | Path) -> tuple[str, ...]:
    """Return the part of a run's folder below its experiment."""
    return Path(folder).parts[-2:]
