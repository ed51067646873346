"""The paper's tables with this project's measurements next to the paper's numbers."""

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


# --- what a column of the paper is measured by ---


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
        if attribute == "value":
            number = getattr(row, self.attribute)
        else:
            number = getattr(row, attribute) if self.attribute == "value" else None
        if number is None or not math.isfinite(number):
            return None
        return 100 * math.expm1(min(number, MAX_NATS)) + 0.0 if self.origin else SCALES[self.scale](row, number)


PERPLEXITY = Column("ppl", "PPL", {"metric": "perplexity"})


# --- which runs stand next to a row of the paper ---


@dataclass(frozen=True)
class Source:
    """Source of the measurements of a row of the paper.

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
    """A table of the paper: key, columns, and the sources of each row."""

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
    """Return the rows of a table of the paper: column -> printed cell or None."""
    content = read_yaml("paper")[table]
    return [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]


def paper_speedups(groups: int) -> dict[int, float]:
    """Return table 6: sequence length -> speedup over FlashAttention on an H100."""
    column = f"speedup_K{groups}"
    return {row["tokens"]: row[column] for row in paper_rows("table6_speed") if column in row}


def key_of(row: dict[str, Any], names: Sequence[str]) -> str:
    cells = (row[name] for name in names if row.get(name) is not None)
    return " ".join(f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in cells)


# --- the comparison itself ---


@dataclass(frozen=True)
class Entry:
    """A row of the paper, one source, and the latest run of each seed of a setup."""

    spec: Spec
    paper: dict[str, Any]
    source: Source
    runs: tuple[str, ...] = ()

    def cells(self, column: Column | None) -> dict[str, Any]:
        """Return what selects the measurement in a column, or any of this source."""
        if column is None:
            cells = dict(self.source.cells)
        else:
            variant = self.source.variants.get(column.name, self.source.variant)
            subject = {"kind": BASE} if variant == BASE else {"variant": variant} if variant else {}
            cells = {**self.source.cells, **column.cells, **subject}
            if column.origin and cells.get("source") == "benchmarks":
                cells |= {"metric": "score_change", "reference": FULL}
            elif column.origin:
                cells |= {"metric": "nll_change", "reference": self.source.variants.get(column.origin, BASE)}
        return {key: self.paper[cell[1:]] if str(cell).startswith("$") else cell for key, cell in cells.items()}


class Measurements:
    """Complete runs by name, each with its rows."""

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
        """Return the measurement in a column, of a task its main metric."""
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
        columns = [
            column for column in entry.spec.columns if column.name.startswith(("ppl", "speedup")) and not column.origin
        ]
        rows = [self.measured(entry, run, column) for column in columns or [PERPLEXITY]]
        unique = {(row.source, row.name, row.variant, row.phase, row.groups): row for row in rows if row}
        return [row for row in unique.values() if row.kind != BASE] or list(unique.values())

    def speed(self, entry: Entry, run: str) -> tuple[float, None, None, Row] | None:
        """Return the speedup of one attention layer as in this run, on the same model.

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
    measurements: Measurements,
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
    """Return a table of the paper and the measurements: a row a source and setup.

    Args:
        rows: pattern of a row's key -> variant, fields of a Source, or a list of these.

    Returns:
        The key; paper_X, ours_X, ours_X_low, ours_X_high, ours_X_seeds for each column X; sparsity of the QK pairs [%];
        variant, model, data, runs. `attrs["spec"]` holds the Spec. A row without runs is not measured.
    """
    common = Source(experiments, cells=cells or {}, needs=needs)
    sources = {
        pattern: [replace(common, **({"variant": place} if isinstance(place, str) else place)) for place in places]
        for pattern, places in ((k, v if isinstance(v, list) else [v]) for k, v in rows.items())
    }
    spec = Spec(name, id, title, key, columns, sources, **options)
    table = []
    for paper, places in [*_mapped(spec), *_extras(spec, measurements)]:
        entries = [entry for place in places for entry in measurements.entries(Entry(spec, paper, place))]
        table += [_row(entry, measurements) for entry in entries or [Entry(spec, paper, places[0])]]
    frame = pd.DataFrame(table)
    frame.attrs["spec"] = spec
    return frame


def _mapped(spec: Spec) -> Iterator[tuple[dict[str, Any], list[Source]]]:
    for row in paper_rows(spec.name):
        key = key_of(row, spec.key)
        yield row, next(places for pattern, places in spec.rows.items() if fnmatchcase(key, pattern))


def _extras(spec: Spec, measurements: Measurements) -> list[tuple[dict[str, Any], list[Source]]]:
    """Return variants that the paper does not have, or pairs *_full, *_focus."""
    places = [place for row in spec.rows.values() for place in row]
    mapped = {name for place in places for name in place.names}
    suffix = "_focus" if spec.extra == "pair" else ""
    extras: dict[str, Source] = {}
    for run in measurements.of(*{name for place in places for name in place.experiments}) if spec.extra else ():
        for row in measurements.select(run, {"source": "variants"}):
            if row.variant in mapped or not row.variant.endswith(suffix):
                continue
            stem = row.variant.removesuffix(suffix)
            pair = {"ppl_full": f"{stem}_full", "ppl_focus": row.variant}
            extras[stem] = Source((row.experiment,), variants=pair) if suffix else Source((row.experiment,), stem)
    return [({spec.key[0]: f"{stem} (not in the paper)"}, [place]) for stem, place in extras.items()]


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
        if not column.is_measured:
            continue
        values = [measurements.value(entry, run, column) for run in entry.runs]
        if column.origin:  # a change counts where the perplexity itself was measured
            scored = replace(column, origin="", cells=_plain(spec, column).cells)
            values = [
                value if measurements.value(entry, run, scored) else None
                for value, run in zip(values, entry.runs, strict=True)
            ]
        known = [value for value in values if value is not None]
        key = f"ours_{column.key}"
        is_ppl = column.name.startswith("ppl") and not column.origin
        cells[key] = mean_of([value[0] for value in known], bool(column.origin), is_ppl) if known else None
        cells[f"{key}_low"], cells[f"{key}_high"] = known[0][1:3] if len(known) == 1 else (None, None)
        cells[f"{key}_seeds"] = len(known)
        if known and known[-1][3].source == "benchmarks":
            cells[f"{key}_mask_active"] = known[-1][3].mask_active
        if column.timed and known and known[-1][3].clock:
            cells["timed_tokens"] = known[-1][3].tokens
    return cells | _provenance(entry, measurements)


def _plain(spec: Spec, column: Column) -> Column:
    return next(other for other in spec.columns if other.name == column.name and not other.origin)


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
        "sparsity": distinct("-" if density is None else f"{100 * density:.1f}" for density in densities),
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


def paper_tables(results: Results) -> Iterator[pd.DataFrame]:
    """Yield the tables of paper_tables.yaml with the measurements next to them."""
    measurements = Measurements(results)
    for name, options in read_yaml("paper_tables").items():
        columns = [Column(**column) for column in options["columns"]]
        yield compare(measurements, name, **options | {"columns": columns})
