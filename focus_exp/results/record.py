"""The typed record of one run: provenance as JSON, next to its measurements."""

from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from focus_exp.errors import UserError
from focus_exp.results.losses import LOSSES, Losses, read_losses
from focus_exp.results.measurement import MEASUREMENTS, Measurement, format_measurements, read_measurements
from focus_exp.storage import replace_file

RECORD = "record.json"
TRAINING_TEXT = "trained_on"  # key of Record.data, where the text that was scored is another one
Status = Literal["running", "finished", "failed", "interrupted"]


@dataclass(kw_only=True)
class Trial:
    """A learning rate of the last phase, and its validation loss [nats] or its error."""

    learning_rate: float
    nll: float | None = None
    error: str | None = None


@dataclass(kw_only=True)
class VariantRun:
    """The run of one variant of a comparison.

    Args:
        settings: overrides in which it differs from the other variants.
        folder: its directory, whose record `started` then; "" if it left none.
    """

    name: str
    settings: list[str]
    folder: str = ""
    status: Status = "finished"
    error: str | None = None
    config_hash: str = ""
    started: str = ""


@dataclass(kw_only=True)
class Record:
    """One run. Times are in seconds, `started` is ISO 8601.

    Args:
        tokens_seen: of training steps and of the sequences that routers were fitted to and balanced on.
        fit_seconds: of `train_seconds`, before any phase, in whichever run the fit was made.
        setup: equal for runs that differ in their seed only; of a run in tables, which have a part of its `config`.
        continuations: texts of job=generate.
        warnings: of the run about itself.
        error: why the run did not finish, or how far it is while it runs. A killed run stays `running`.
        path: of the loaded file.
    """

    status: Status
    experiment: str
    schema_version: Literal[3] = 3
    command: str = ""
    started: str = ""
    commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    device: str = ""
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    config_hash: str = ""
    setup: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    tokens_seen: int = 0
    steps: int = 0
    wall_seconds: float | None = None
    train_seconds: float | None = None
    fit_seconds: float | None = None
    peak_memory_bytes: int | None = None
    trials: list[Trial] = field(default_factory=list)
    variants: list[VariantRun] = field(default_factory=list)
    continuations: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str | None = None
    path: Path | None = field(default=None, repr=False)

    @cached_property
    def measurements(self) -> list[Measurement]:
        """Return the measurements next to the loaded record; a new run has none yet."""
        return read_measurements(self.path.with_name(MEASUREMENTS)) if self.path else []

    @cached_property
    def losses(self) -> dict[str, Losses]:
        """Return the losses next to the loaded record, by task."""
        return read_losses(self.path.with_name(LOSSES)) if self.path else {}

    @property
    def primary_variant(self) -> str:
        """Return the variant that represents the run: configured routing, method or trained weights; "" without one."""
        attention = self.config.get("attention") or {}
        method, top_k = attention.get("method", "full"), attention.get("top_k")
        ranked: dict[int, str] = {}
        for m in self.measurements:
            s = m.settings
            if m.metric != "perplexity" or s.get("phase"):
                continue
            # with top-1 routing both pair rules keep the same pairs
            is_same_rule = s.get("top_k") == 1 or s.get("pair_rule") in (None, attention.get("pair_rule"))
            if (s["kind"], s["method"]) == ("hard", method) and s.get("top_k") in (None, top_k) and is_same_rule:
                ranked.setdefault(0, m.variant)
            elif (s["kind"], s["method"]) == ("control", method):
                ranked.setdefault(1, m.variant)
            elif s["kind"] == "trained":
                ranked.setdefault(2, m.variant)
        return ranked[min(ranked)] if ranked else ""

    def find(self, metric: str, variant: str, reference: str = "") -> float | None:
        """Return the value of a measurement after the last phase, None if there is none."""
        cells = (metric, variant, reference)
        final = (m for m in self.measurements if not m.settings.get("phase"))
        return next((m.value for m in final if (m.metric, m.variant, m.reference) == cells), None)

    def setting(self, *keys: str) -> Any:
        """Return a value of the resolved config, None where it has none."""
        value: Any = self.config
        for key in keys:
            value = (value or {}).get(key)
        return value

    def save(self, path: str | Path) -> None:
        """Write measurements, then the record."""
        if "measurements" in vars(self):
            seeded = [replace(measurement, seed=self.seed) for measurement in self.measurements]
            replace_file(Path(path).with_name(MEASUREMENTS), format_measurements(seeded).encode())
        replace_file(path, self.format(indent=1) + b"\n")

    def format(self, indent: int | None = None) -> bytes:
        """Return strict JSON: "NaN", "Infinity" as strings, in dicts null."""
        # NumPy's and torch's scalars are not JSON
        return _adapter().dump_json(self, indent=indent, exclude={"path"}, fallback=lambda value: value.item())

    @classmethod
    def load(cls, path: str | Path) -> "Record":
        """Read a record.

        Raises:
            UserError: if the file is missing or damaged, or of another schema.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"{path} must be a readable record ({error}). Run the job again.") from error
        return replace(cls.parse(content, path), path=Path(path))

    @classmethod
    def parse(cls, content: bytes, path: str | Path) -> "Record":
        """Read the JSON of a record; `path` names its file in errors."""
        try:
            return _adapter().validate_json(content)
        except ValidationError as error:
            wrong = error.errors()[0]
            place = "".join(f"{part}: " for part in wrong["loc"])
            got = str(wrong["input"])[:40]
            raise UserError(
                f"{path}: {place}{wrong['msg']} (got {got!r}). Remove the file and run the job again."
            ) from error


@cache
def _adapter() -> TypeAdapter[Record]:
    return TypeAdapter(with_config(ConfigDict(ser_json_inf_nan="strings"))(Record))
