"""The paper's tables with this project's measurements next to the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

import pandas as pd

from focus_exp.reporting.aggregate import Row, aggregate_seeds, mean_of
from focus_exp.reporting.format import to_percent
from focus_exp.reporting.load import Results, read_yaml, select

BASE, FULL = "base", "full attention"

SCALES: dict[str, Callable[[Row, float], float]] = {  # to the paper's unit
    "": lambda row, value: value,
    "percent": lambda row, value: 100 * value,
    "percent_of_model": lambda row, value: 100 * value / row.model_params,
    "percent_except_confidence": lambda row, value: value if row.metric == "group_confidence" else 100 * value,
}


@dataclass(frozen=True)
class Column:
    """A column of the paper and its measurement; see paper_tables.yaml."""

    name: str
    label: str
    cells: dict[str, Any] = field(default_factory=dict)
    attribute: str = "value"
    scale: str = ""
    digits: int = 2
    origin: str = ""
    timed: bool = False

    @property
    def key(self) -> str:
        return f"{self.name}_change" if self.origin else self.name

    @property
    def is_measured(self) -> bool:
        return bool(self.cells or self.origin or self.timed)

    def convert(self, row: Row, attribute: str) -> float | None:
        """Return a value or a bound of a measurement in the paper's unit."""
        if attribute != "value" and self.attribute != "value":
            return None  # other attributes have no bounds
        number = getattr(row, self.attribute if attribute == "value" else attribute)
        if number is None or not math.isfinite(number):
            return None
        return to_percent(number) if self.origin else SCALES[self.scale](row, number)


@dataclass(frozen=True)
class Spec:
    """A table of the paper; see paper_tables.yaml."""

    name: str
    id: str
    title: str
    key: list[str]
    experiments: list[str]
    columns: list[Column]
    rows: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    cells: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    note: str = ""
    shown: bool = True  # in the Markdown report

    @classmethod
    def read(cls, name: str, options: dict[str, Any]) -> Spec:
        """Read an entry of paper_tables.yaml."""
        return cls(name=name, **options | {"columns": [Column(**column) for column in options["columns"]]})

    def entries(self, results: Results, paper: dict[str, Any], row: Any) -> list[Entry]:
        """Return the sources that a row names: variants, fields of an Entry, or a list of these."""
        common = Entry(results, self, paper, self.experiments, cells=self.cells, needs=self.needs)
        places = row if isinstance(row, list) else [row]
        return [replace(common, **({"variant": place} if isinstance(place, str) else place)) for place in places]


@cache
def paper_rows(table: str) -> list[dict[str, Any]]:
    """Return the rows of a table of the paper: column -> printed cell or None."""
    content = read_yaml("paper")[table]
    return [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]


def key_of(row: dict[str, Any], names: list[str]) -> str:
    cells = (row[name] for name in names if row.get(name) is not None)
    return " ".join(f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in cells)


@dataclass(frozen=True)
class Entry:
    """A row of the paper, one source of its measurements, and the latest run of each seed of a setup.

    variant: of a comparison ("base": its full attention); variants: one for each column; cells: of measurements that
    belong to no variant, $name stands for the paper's own cell; needs: what a CPU without the Hub lacks; pick: keep the
    setup with the most training steps.
    """

    results: Results
    spec: Spec
    paper: dict[str, Any]
    experiments: list[str]
    variant: str = ""
    variants: dict[str, str] = field(default_factory=dict)
    cells: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    pick: Literal["", "steps"] = ""
    runs: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.variants.values(), *filter(None, [self.variant])]))

    def select(self, run: str, cells: dict[str, Any]) -> list[Row]:
        cells = {key: self.paper[cell[1:]] if str(cell).startswith("$") else cell for key, cell in cells.items()}
        return select(self.results.rows_by_run[run], cells)

    def setups(self) -> list[Entry]:
        """Return one entry with its runs for each setup."""
        present: dict[str, Any] = {"source": "rows", "variant": self.names} if self.names else self.cells
        if self.names == [BASE]:
            present = {"source": "rows", "kind": BASE}
        setups: dict[Any, dict[int | None, str]] = {}
        runs = self.results.rows_by_run.items()
        for run, rows in sorted(runs, key=lambda item: item[1][0].steps or 0) if self.pick else runs:
            if rows[0].experiment in self.experiments and (rows := self.select(run, present)):
                setup = tuple(dict.fromkeys((row.setup, row.variant_setup) for row in rows))
                setups.setdefault(setup, {})[rows[0].seed] = run
        entries = [replace(self, runs=tuple(seeds.values())) for seeds in setups.values()]
        return entries[-1:] if self.pick else entries

    def measurement(self, run: str, column: Column) -> Row | None:
        """Return the measurement in a column, of a task its main metric; None where it has no number."""
        if column.timed:
            return self.speed(run)
        variant = self.variants.get(column.name, self.variant)
        subject = {"kind": BASE} if variant == BASE else {"variant": variant} if variant else {}
        cells = {**self.cells, **column.cells, **subject}
        if column.origin and cells.get("source") == "benchmarks":
            cells |= {"metric": "score_change", "reference": FULL}
        elif column.origin:
            cells |= {"metric": "nll_change", "reference": self.variants.get(column.origin, BASE)}
        return min(self.select(run, cells), key=_metric_rank, default=None)

    def behind(self, run: str) -> list[Row]:
        """Return the measurements whose sparsity the row reports."""
        columns = [c for c in self.spec.columns if c.name.startswith(("ppl", "speedup")) and not c.origin]
        columns = columns or [Column("ppl", "PPL", {"metric": self.cells.get("metric", "perplexity")})]
        rows = [self.measurement(run, column) for column in columns]
        unique = {(row.source, row.name, row.variant, row.phase, row.groups): row for row in rows if row}
        return [row for row in unique.values() if row.kind != BASE] or list(unique.values())

    def timings(self, run: str) -> list[Row]:
        """Return the speedups of one layer by the last run that timed several methods on the model, at its longest.

        One run has one device and one state of the kernels.
        """
        fingerprint, timed = self.results.runs.model_fingerprint, list[Row]()
        for timer, rows in self.results.rows_by_run.items():
            if rows[0].experiment == "speed_methods" and fingerprint[timer] == fingerprint[run]:
                timed = [row for row in select(rows, {"metric": "speedup", "clock": "attention"}) if row.value]
        return [row for row in timed if row.tokens == max(row.tokens for row in timed)]

    def speed(self, run: str) -> Row | None:
        """Return the speedup of one attention layer as in this run; 1 without a mask."""
        behind = self.behind(run)
        if not behind or behind[0].kind in (BASE, "trained"):
            return behind[0].replace(value=1.0, low=None, high=None) if behind else None
        scored = behind[0]
        cells: dict[str, Any] = {"source": "method_speed", "method": scored.method}
        if scored.method == "focus":
            top_k = scored.top_k or 1
            cells = {"source": "speed", "groups": scored.num_groups, "top_k": top_k, "assignment": "balanced"}
            cells |= {"pair_rule": scored.pair_rule} if top_k > 1 else {}
        return next(iter(select(self.timings(run), cells)), None)

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
            is_ppl = column.name.startswith("ppl") and not column.origin
            cells[key] = mean_of(values, bool(column.origin), is_ppl) if values else None
            for bound in ("low", "high"):
                cells[f"{key}_{bound}"] = column.convert(rows[0], bound) if len(rows) == 1 else None
            cells[f"{key}_seeds"] = len(values)
            if rows and rows[-1].source == "benchmarks":
                cells[f"{key}_mask_active"] = rows[-1].mask_active
            if column.timed:
                timed = next(iter(self.timings(self.runs[-1])), Row()) if self.runs else Row()
                cells |= {f"timed_{name}": getattr(timed, name) for name in ("tokens", "device_kind", "commit")}
        return cells | self._provenance()

    def _provenance(self) -> dict[str, Any]:
        behind = [self.behind(run) for run in self.runs]
        flat = [row for rows in behind for row in rows]
        last = behind[-1] if behind else []
        densities = [1 - row.density if row.density is not None else row.sparsity for row in aggregate_seeds(flat)]
        runs = [self.results.runs.loc[run] for run in self.runs]
        variants = self.names or [str(row.name) for row in last if row.source != "speed"]
        return {
            "sparsity": _distinct("-" if density is None else f"{100 * density:.1f}" for density in densities),
            "variant": _distinct(variants),
            "causal": all(row.causal is not False for row in last) if last else None,
            "used_model": _distinct(row.model for row in flat or runs),
            "used_data": _distinct(row.data for row in flat or runs),
            "steps": _distinct(0 if row.kind == BASE else row.steps for row in flat),
            "train_tokens": _distinct(row.train_tokens for row in flat),
            "device": _distinct(run.device_kind for run in runs),
            "seeds": len({run.seed for run in runs}),
            "experiment": _distinct(run.experiment for run in runs),
            "needs": "" if runs else self.needs or f"+experiment={self.experiments[0]}",
            "runs": " ".join(self.runs),
            "commits": _distinct(str(row.commit or "")[:7] for row in flat or ()),
        }


def _distinct(values: Any) -> str:
    return " / ".join(dict.fromkeys(str(value) for value in values if value is not None and value is not pd.NA))


def _metric_rank(row: Row) -> tuple[bool, bool]:
    """Order accuracies first, normalised ones before others."""
    is_fraction = row.unit == "fraction"
    return not is_fraction, not (row.primary if is_fraction else row.deciding)


def _paper_cell(spec: Spec, row: dict[str, Any], column: Column) -> Any:
    after = row.get(column.name)
    if not column.origin:
        return after
    base = next((other for other in paper_rows(spec.name) if key_of(other, spec.key) == column.origin), None)
    before = base[column.name] if base and base != row else row.get(column.origin)
    return None if before is None or after is None else 100 * (after / before - 1)


def paper_tables(results: Results) -> Iterator[pd.DataFrame]:
    """Yield the tables of paper_tables.yaml with the measurements next to them: a row a source and setup.

    Columns: the key; paper_X, ours_X, ours_X_low, ours_X_high, ours_X_seeds for each column X; sparsity of the QK pairs
    [%]; variant, model, data, runs. `attrs["spec"]` holds the Spec. A row without runs is not measured.
    """
    for name, options in read_yaml("paper_tables").items():
        spec = Spec.read(name, options)
        rows = []
        for paper in paper_rows(name):
            key = key_of(paper, spec.key)
            row = next(row for pattern, row in spec.rows.items() if fnmatchcase(key, pattern))
            for entry in spec.entries(results, paper, row):
                rows += entry.setups() or [entry]
        for extra, row in spec.extra.items():
            paper = {spec.key[0]: f"{extra} (not in the paper)"}
            rows += [setup for entry in spec.entries(results, paper, row) for setup in entry.setups()]
        frame = pd.DataFrame([entry.row() for entry in rows])
        frame.attrs["spec"] = spec
        yield frame
