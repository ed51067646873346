"""The records below a folder, the arms of their comparisons, and which of them differ in nothing but the seed."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from focus_exp.config_attention import FocusConfig
from focus_exp.records.comparison import load_run
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm

QUICK = "quick"
RANDOM = "random"  # source of weights that the seed draws
WANTED = 3  # seeds, where a difference is claimed
# of the attention that every arm starts from
ATTENTION = ("method", "groups", "routing_dim", "temperature", "assignment", "gate", "window", "sinks", "top_k")
BENCHMARKS = ("eval.tasks=", "eval.limit=")  # settings that choose what else is scored


@dataclass(frozen=True, eq=False)
class Runs:
    """found: folder and record of every run, oldest first; arms: the own records of comparisons' arms by their hash."""

    found: list[tuple[Path, Record]] = field(default_factory=list)
    arms: dict[str, Record] = field(default_factory=dict)

    @property
    def records(self) -> list[Record]:
        return [record for _, record in self.found]

    @property
    def named(self) -> dict[str, Record]:
        """Every record, those of arms after the others, by a name of its own."""
        arms = {f"{record.experiment}/{record.config.get('arm')}/{key}": record for key, record in self.arms.items()}
        return {folder.as_posix(): record for folder, record in self.found} | arms

    def own(self, arm: Arm) -> Record | None:
        """The record of an arm's own run, if it is below the folder too."""
        return self.arms.get(arm.config_hash)

    def seconds(self, record: Record) -> float:
        """What a record took, its arms included."""
        own = [(arm, self.own(arm)) for arm in record.arms]
        spent = [(run.wall_seconds if run else arm.train_seconds) or 0.0 for arm, run in own]
        return sum(spent) + (record.wall_seconds or 0.0)


def gather(folder: Path, scale: str = "") -> Runs:
    """Every record below `folder`; a run that was copied into records/ counts once. UserError for an unreadable one.

    At scale=quick nothing is measured, only run: such records are gathered by themselves or not at all.
    """
    found: dict[tuple[str, str, str], tuple[Path, Record]] = {}
    arms: dict[str, Record] = {}
    # committed copies first: they are what a report should point at
    for path in sorted(folder.rglob("record.json"), key=lambda path: ("records" not in path.parts, str(path))):
        record = load_run(path.parent)
        if is_quick(record) != (scale == QUICK):
            continue
        if record.config.get("arm"):
            arms.setdefault(record.config_hash, record)
            continue
        found.setdefault((record.experiment, record.config_hash, record.started), (path.parent, record))
    return Runs(sorted(found.values(), key=lambda pair: pair[1].started), arms)


def is_quick(record: Record) -> bool:
    return record.setting("scale", "name") == QUICK


def setup(record: Record) -> Hashable:
    """What records of several seeds have in common: the model, the text, the attention, how much was trained."""
    # a record from before methods had options of their own holds those of Focus, whatever its method
    attention = tuple(record.setting("attention", key, getattr(FocusConfig, key)) for key in ATTENTION)
    evaluation = record.setting("eval", "window"), record.setting("eval", "max_windows")
    trained = record.setting("regime", "name"), record.steps, record.tokens_seen
    return _sources(record), attention, evaluation, trained


def run_of(arm: Arm, own: Record | None = None) -> Hashable:
    """What an arm of the same name has in common in comparisons under several seeds, whatever benchmarks each ran.

    own: its own record, by which it is known what lay under the path of its model; without it the arm tells.
    """
    settings = tuple(setting for setting in arm.settings if not setting.startswith(BENCHMARKS))
    return arm.name, settings, arm.steps, arm.tokens_seen, _sources(own) if own else arm.base or None


def _sources(record: Record) -> Hashable:
    weights = None if record.model.get("source") == RANDOM else record.model.get("fingerprint")
    return record.model.get("name"), weights, record.data.get("name"), record.data.get("fingerprint")


def seeds_of(records: Iterable[Record]) -> list[int]:
    return sorted({record.seed for record in records if record.seed is not None})
