"""The typed record of one run: every number with its birth certificate, as JSON on disk."""

from __future__ import annotations

import json
import math
import platform
import subprocess
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from focus_exp.errors import UserError
from focus_exp.reporting.benchmark_rows import BenchmarkRow
from focus_exp.reporting.groups_rows import GroupReport
from focus_exp.reporting.rows import Arm, Continuation, MethodSpeedRow, ProbeRow, Row, SpeedRow
from focus_exp.storage import replace_file

SCHEMA_VERSION = 1
PACKAGES = (
    "focus_exp", "torch", "transformers", "lightning", "pytorch_lightning", "hydra-core", "omegaconf", "datasets",
    "tokenizers", "numpy", "wandb", "lm_eval", "peft", "flash-attn",
)  # fmt: skip


@dataclass(kw_only=True)
class Record:
    """One run. Times are seconds, `started` is ISO 8601, `group_shares` [layers][groups] follows `layers`.

    `phases` are the rows of soft gates and of hard groups as configured, after each of several phases.
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
    peak_memory_bytes: int | None = None
    layers: list[int] = field(default_factory=list)
    group_shares: list[list[float]] | None = None
    rows: list[Row] = field(default_factory=list)
    phases: list[Row] = field(default_factory=list)
    probes: list[ProbeRow] = field(default_factory=list)
    benchmarks: list[BenchmarkRow] = field(default_factory=list)
    speed: list[SpeedRow] = field(default_factory=list)
    method_speed: list[MethodSpeedRow] = field(default_factory=list)
    arms: list[Arm] = field(default_factory=list)
    continuations: list[Continuation] = field(default_factory=list)
    groups: GroupReport | None = None
    findings: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # of the run about itself
    error: str | None = None

    @property
    def base(self) -> Row | None:
        """The base row, if it was scored."""
        return next((row for row in self.rows if row.kind == "base" and row.scored), None)

    @property
    def device_kind(self) -> str:
        """`cpu` of `cpu, 2 threads, float32`."""
        return self.device.partition(",")[0]

    @property
    def number_format(self) -> str:
        """`float32` of `cpu, 2 threads, float32 (no native bfloat16 on this cpu)`."""
        return self.device.rpartition(", ")[2].partition(" (")[0]

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        """A value of the resolved config, or `default`."""
        return (self.config.get(section) or {}).get(key, default)

    def save(self, path: str | Path) -> None:
        """Write strict JSON, atomically; non-finite floats become the strings "nan", "inf", "-inf"."""
        text = json.dumps(_strict(asdict(self)), indent=2, allow_nan=False, ensure_ascii=False)
        replace_file(path, (text + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read a record. Raises UserError for a missing or corrupt file, another schema, unknown keys, wrong types."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: not a readable record ({error}); remove it and run the job again") from error
        if not isinstance(values, dict) or values.get("schema_version") != SCHEMA_VERSION:
            found = values.get("schema_version") if isinstance(values, dict) else type(values).__name__
            raise UserError(f"{path}: schema version {found}, this code reads {SCHEMA_VERSION}; run the job again")
        try:
            return _decode(cls, values, "record")
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; [] if there is no file. A torn last line is dropped, any other is a UserError."""
    path = Path(path)
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    metrics = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(values, dict):
            raise UserError(f"{path}:{number}: expected an object, found {line[:40]}")
        metrics.append(values)
    return metrics


def write_metrics(path: str | Path, lines: list[dict[str, Any]]) -> None:
    """A metrics.jsonl of these lines, atomically."""
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def environment() -> dict[str, Any]:
    """The Record fields `commit` (None outside git, "-dirty" with local changes), `versions` and `machine`."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "commit": _commit(),
        "versions": versions,
        "machine": {"platform": platform.platform(), "cpu": _cpu_name()},
    }


def _commit() -> str | None:
    # an installed copy may lie in a virtual environment inside someone else's repository
    if not _git("ls-files", Path(__file__).name):
        return None
    head = _git("rev-parse", "HEAD")
    return f"{head}-dirty" if head and _git("status", "--porcelain") else head or None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _decode(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type `hint`; ValueError naming the place otherwise."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        return None if value is None else _decode(next(a for a in arguments if a is not type(None)), value, where)
    if origin is Literal and value in arguments:
        return value
    if origin is list and isinstance(value, list):
        return [_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if (is_dataclass(hint) or is_typeddict(hint)) and isinstance(value, dict):
        return _decode_fields(hint, value, where)
    if hint is float and (type(value) in (int, float) or value in ("nan", "inf", "-inf")):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise ValueError(f"{where}: expected {getattr(hint, '__name__', hint)}, found {str(value)[:40]!r}")


def _decode_fields(hint: Any, value: dict[str, Any], where: str) -> Any:
    hints = get_type_hints(hint)
    optional = set()
    if is_dataclass(hint):
        optional = {f.name for f in fields(hint) if f.default is not MISSING or f.default_factory is not MISSING}
    unknown, missing = sorted(value.keys() - hints.keys()), sorted(hints.keys() - value.keys() - optional)
    if unknown or missing:
        raise ValueError(f"{where}: unknown keys {unknown}, missing keys {missing}")
    return hint(**{key: _decode(hints[key], item, f"{where}.{key}") for key, item in value.items()})
