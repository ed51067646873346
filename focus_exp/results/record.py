"""The typed record of one run: every number with its birth certificate, as JSON on disk."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, reduce
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from focus_exp.config import upgrade_keys
from focus_exp.errors import UserError
from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.groups import GroupReport
from focus_exp.records.rows import Arm, Continuation, Difference, FitRow, ProbeRow, Row, Try, Units
from focus_exp.results.measurement import (
    MEASUREMENTS,
    Measurement,
    format_measurements,
    primary_variant,
    read_measurements,
)
from focus_exp.storage import replace_file

RECORD = "record.json"
SCHEMA_VERSION = 2
NON_FINITE = ("nan", "inf", "-inf")


@dataclass(kw_only=True)
class Record:
    """One run. Times are seconds, `started` is ISO 8601, `group_shares` [layers][groups] follows `layers`.

    `tokens_seen` are those of the steps and of the blocks that routers were fitted to and balanced on. `phases` are the
    rows of soft gates and of hard groups as configured, after each of several phases. `tries` are of learning rates.
    `units`: what the intervals of the rows, or of the groups, are over.
    """

    status: Literal["finished", "failed", "interrupted"]
    experiment: str
    schema_version: int = SCHEMA_VERSION
    command: str = ""
    started: str = ""
    commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    device: str = ""
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    config_hash: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    tokens_seen: int = 0
    steps: int = 0
    wall_seconds: float | None = None
    train_seconds: float | None = None
    fit_seconds: float | None = None  # of these, before any phase, in whichever run the fit was made
    peak_memory_bytes: int | None = None
    layers: list[int] = field(default_factory=list)
    group_shares: list[list[float]] | None = None
    units: Units | None = None
    rows: list[Row] = field(default_factory=list)
    phases: list[Row] = field(default_factory=list)
    tries: list[Try] = field(default_factory=list)
    fits: list[FitRow] = field(default_factory=list)
    probes: list[ProbeRow] = field(default_factory=list)
    benchmarks: list[BenchmarkRow] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)
    method_speed: list[dict[str, Any]] = field(default_factory=list)
    arms: list[Arm] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)  # between arms
    continuations: list[Continuation] = field(default_factory=list)
    groups: GroupReport | None = None
    warnings: list[str] = field(default_factory=list)  # of the run about itself
    error: str | None = None
    path: Path | None = field(default=None, repr=False)  # of the loaded file

    @property
    def base(self) -> Row | None:
        """The base row, if it was scored."""
        return next((row for row in self.rows if row.kind == "base" and row.scored), None)

    @cached_property
    def measurements(self) -> list[Measurement]:
        """The measurements next to the record that was loaded, or those of a new run."""
        return read_measurements(self.path.with_name(MEASUREMENTS)) if self.path else []

    @property
    def primary_variant(self) -> str:
        """Return the variant that represents the run, "" if none does."""
        rows = ({"variant": m.variant, **m.settings} for m in self.measurements if m.metric == "perplexity")
        return primary_variant(self.config.get("attention") or {}, rows)

    def find(self, metric: str, variant: str, reference: str = "") -> float | None:
        """Return the value of a measurement after the last phase, None if there is none."""
        cells = (metric, variant, reference)
        return next(
            (m.value for m in self.measurements
             if (m.metric, m.variant, m.reference) == cells and not m.settings.get("phase")), None
        )  # fmt: skip

    @property
    def is_timed(self) -> bool:
        """Return whether the run has timings."""
        return any("clock" in measurement.settings for measurement in self.measurements)

    @property
    def is_complete(self) -> bool:
        return is_complete(self.status, self.is_timed, any(m.metric == "perplexity" for m in self.measurements))

    @property
    def device_kind(self) -> str:
        """`cpu` of `cpu, 2 threads, float32`."""
        return self.device.partition(",")[0]

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        """A value of the resolved config, or `default`."""
        return (self.config.get(section) or {}).get(key, default)

    def save(self, path: str | Path) -> None:
        """Write the measurements, then strict JSON; non-finite floats become the strings "nan", "inf", "-inf"."""
        if "measurements" in vars(self):
            seeded = [replace(measurement, seed=self.seed) for measurement in self.measurements]
            replace_file(Path(path).with_name(MEASUREMENTS), format_measurements(seeded).encode())
        values = {key: value for key, value in asdict(self).items() if key != "path"}
        text = json.dumps(_strict(values), indent=1, allow_nan=False, ensure_ascii=False)
        replace_file(path, (text + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> "Record":
        """Read a record. Raises UserError for a missing or corrupt file, another schema, unknown keys, wrong types."""
        try:
            text = Path(path).read_text(encoding="utf-8")
            values = json.loads(text)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: not a readable record ({error}); remove it and run the job again") from error
        if not isinstance(values, dict) or values.get("schema_version") != SCHEMA_VERSION:
            found = values.get("schema_version") if isinstance(values, dict) else type(values).__name__
            raise UserError(f"{path}: schema version {found}, this code reads {SCHEMA_VERSION}; run the job again")
        try:
            record = _decode(text)
        except ValidationError as error:
            wrong = error.errors()[0]
            place = ".".join(map(str, wrong["loc"]))
            raise UserError(f"{path}: {place}: {wrong['msg']}, found {str(wrong['input'])[:40]!r}") from error
        return replace(record, path=Path(path), config=upgrade_keys(record.config))


def is_complete(status: str, is_timed: bool, is_scored: bool) -> bool:
    """Return whether a run's numbers are whole: it finished, or only timed, where each time stands for itself."""
    return status == "finished" or (status == "interrupted" and is_timed and not is_scored)


@cache
def _reader() -> TypeAdapter[Record]:
    return TypeAdapter(with_config(ConfigDict(extra="forbid", strict=True))(Record))


def _decode(text: str) -> Record:
    try:
        return _reader().validate_json(text)
    except ValidationError as error:
        # numbers that JSON cannot write stand there as words
        words = [wrong["loc"] for wrong in error.errors() if wrong["input"] in NON_FINITE]
        if not words:
            raise
    values = json.loads(text)
    for *place, name in words:
        holder = reduce(lambda part, key: part[key], place, values)
        holder[name] = float(holder[name])
    return _reader().validate_json(json.dumps(values))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
