"""The paper's tables with this project's measurements next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from focus_exp.reporting.format import format_percent
from focus_exp.reporting.frame import BASE, FULL, aggregate_seeds, filter_rows, to_frame, to_rows
from focus_exp.reporting.load import Results
from focus_exp.reporting.paper_specs import Column, Place, Spec, join_key, paper_rows, read_specs
from focus_exp.reporting.tables import find_speedup


@dataclass(frozen=True)
class Entry:
    """A row of the paper, one source of its measurements, and the latest run of each seed of a setup."""

    results: Results
    spec: Spec
    paper: dict[str, Any]
    place: Place
    runs: tuple[str, ...] = ()

    def setups(self) -> list[Entry]:
        """Return one entry with its runs for each setup."""
        names, is_longest = self.place.names, self.place.is_longest
        present: dict[str, Any] = {"source": "rows", "variant": names} if names else self.place.cells
        if names == [BASE]:
            present = {"source": "rows", "kind": BASE}
        rows = filter_rows(self.results.complete, {"experiment": self.place.experiments, **present})
        runs = [to_rows(part) for _, part in rows.groupby("run", sort=False)]
        setups: dict[Any, dict[int | None, str]] = {}
        for part in sorted(runs, key=lambda part: part[0].steps or 0) if is_longest else runs:
            setup = tuple(dict.fromkeys((row.setup, row.variant_setup) for row in part))
            setups.setdefault(setup, {})[part[0].seed] = part[0].run
        entries = [replace(self, runs=tuple(seeds.values())) for seeds in setups.values()]
        return entries[-1:] if is_longest else entries

    def measurement(self, run: str, column: Column) -> Any:
        """Return the measurement in a column, of a task its main metric; None where it has no number."""
        if column.timed:
            return self.speed(run)
        place = self.place
        variant = place.variants.get(column.name, place.variant)
        subject = {"kind": BASE} if variant == BASE else {"variant": variant} if variant else {}
        cells = {**place.cells, **column.cells, **subject}
        if column.origin and cells.get("source") == "benchmarks":
            cells |= {"metric": "score_change", "reference": FULL}
        elif column.origin:
            cells |= {"metric": "nll_change", "reference": place.variants.get(column.origin, BASE)}
        return min(to_rows(filter_rows(self.results.rows_by_run[run], cells)), key=_metric_rank, default=None)

    def behind(self, run: str) -> list[Any]:
        """Return the measurements whose sparsity the row reports."""
        columns = [c for c in self.spec.columns if c.name.startswith(("ppl", "speedup")) and not c.origin]
        metric = self.place.cells.get("metric", "perplexity")
        columns = columns or [Column("ppl", "PPL", {"metric": metric})]
        rows = [self.measurement(run, column) for column in columns]
        unique = {(row.source, row.name, row.variant, row.phase, row.groups): row for row in rows if row}
        return [row for row in unique.values() if row.kind != BASE] or list(unique.values())

    def timings(self, run: str) -> pd.DataFrame:
        """Return the speedups of one layer by the last run that timed several methods on the model, at its longest.

        One run has one device and one state of the kernels.
        """
        fingerprints = self.results.runs.model_fingerprint
        same = [*fingerprints.index[fingerprints == fingerprints[run]]]
        cells = {"experiment": "speed_methods", "run": same, "metric": "speedup", "clock": "attention"}
        timed = filter_rows(self.results.complete, cells)
        timed = timed[(timed.run == timed.run.iloc[-1]) & timed.value.notna()] if len(timed) else timed
        return timed[timed.tokens == timed.tokens.max()]

    def speed(self, run: str) -> Any:
        """Return the measurement behind the row with the speedup of one layer of its routing as its value."""
        scored = next(iter(self.behind(run)), None)
        return scored and scored._replace(value=find_speedup(self.timings(run), scored), low=None, high=None)

    def row(self) -> dict[str, Any]:
        """Return the row of the table."""
        spec = self.spec
        cells: dict[str, Any] = {name: self.paper.get(name) for name in spec.key}
        for column in spec.columns:
            cells[f"paper_{column.key}"] = _paper_cell(spec, self.paper, column)
            if not column.is_measured:
                continue
            rows = [row for run in self.runs if (row := self.measurement(run, column))]
            rows = [row for row in rows if column.convert(row, "value") is not None]
            values: list[Any] = [column.convert(row, "value") for row in rows]
            key = f"ours_{column.key}"
            cells[key] = column.average(values) if values else None
            for bound in ("low", "high"):
                cells[f"{key}_{bound}"] = column.convert(rows[0], bound) if len(rows) == 1 else None
            cells[f"{key}_seeds"] = len(values)
            if rows and rows[-1].source == "benchmarks":
                cells[f"{key}_mask_active"] = rows[-1].mask_active
            if column.timed:
                timed = to_rows(self.timings(self.runs[-1])) if self.runs else []
                names = ("tokens", "device_kind", "commit")
                cells |= {f"timed_{name}": getattr(timed[0], name) if timed else None for name in names}
        return cells | self._provenance()

    def _provenance(self) -> dict[str, Any]:
        behind = [self.behind(run) for run in self.runs]
        flat = [row for rows in behind for row in rows]
        last = behind[-1] if behind else []
        sparsities = [row.sparsity for row in aggregate_seeds(to_frame(flat))]
        runs = [self.results.runs.loc[run] for run in self.runs]
        variants = self.place.names or [str(row.name) for row in last if row.source != "speed"]
        return {
            "sparsity": _distinct(map(format_percent, sparsities)),
            "variant": _distinct(variants),
            "causal": all(row.causal is not False for row in last) if last else None,
            "used_model": _distinct(row.model for row in flat or runs),
            "used_data": _distinct(row.data for row in flat or runs),
            "steps": _distinct(0 if row.kind == BASE else row.steps for row in flat),
            "train_tokens": _distinct(row.train_tokens for row in flat),
            "device": _distinct(run.device_kind for run in runs),
            "seeds": len({run.seed for run in runs}),
            "experiment": _distinct(run.experiment for run in runs),
            "needs": "" if runs else self.place.needs or f"+experiment={self.place.experiments[0]}",
            "runs": " ".join(self.runs),
            "commits": _distinct(str(row.commit or "")[:7] for row in flat or ()),
        }


def _distinct(values: Any) -> str:
    return " / ".join(dict.fromkeys(str(value) for value in values if value is not None and value is not pd.NA))


def _metric_rank(row: Any) -> tuple[bool, bool]:
    """Order accuracies first, normalised ones before others."""
    is_fraction = row.unit == "fraction"
    return not is_fraction, not (row.primary if is_fraction else row.deciding)


def _paper_cell(spec: Spec, row: dict[str, Any], column: Column) -> Any:
    after = row.get(column.name)
    if not column.origin:
        return after
    base = next((other for other in paper_rows(spec.name) if join_key(other, spec.key) == column.origin), None)
    before = base[column.name] if base and base != row else row.get(column.origin)
    return None if before is None or after is None else 100 * (after / before - 1)


def paper_tables(results: Results) -> Iterator[pd.DataFrame]:
    """Yield the tables of paper_specs.py with the measurements next to them: a row a source and setup.

    Columns: the key; paper_X, ours_X, ours_X_low, ours_X_high, ours_X_seeds for each column X; sparsity of the QK pairs
    [%]; variant, model, data, runs. `attrs["spec"]` holds the Spec. A row without runs is not measured.
    """
    for spec in read_specs():
        paper = {join_key(row, spec.key): row for row in paper_rows(spec.name)}
        rows = []
        for key in [*paper, *(key for key in spec.rows if key not in paper)]:
            row = paper.get(key, {spec.key[0]: f"{key} (not in the paper)"})
            for entry in (Entry(results, spec, row, place) for place in spec.places(key)):
                rows += entry.setups() or [entry] * (key in paper)
        frame = pd.DataFrame([entry.row() for entry in rows])
        frame.attrs["spec"] = spec
        yield frame
