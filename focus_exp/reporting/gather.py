"""The records below a folder, the arms of their comparisons, and which of them differ in nothing but the seed."""

from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from focus_exp.config import Config, DataConfig, EvalConfig, ModelConfig, RegimeConfig, TrainerConfig
from focus_exp.config_attention import KNOWN, AttentionConfig, FocusConfig
from focus_exp.config_hash import decides, leaves
from focus_exp.records.comparison import load_run
from focus_exp.records.losses import LOSSES, TEXT, Losses, read_losses
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm

QUICK = "quick"
RANDOM = "random"  # source of weights that the seed draws
WANTED = 3  # seeds, where a difference is claimed
# of what decides what a run computes, that in which runs of several seeds may differ: what is measured beside the rest,
# the arithmetic, and from where the model and the text were had that their fingerprints tell
FREE = {
    **dict.fromkeys(("experiment", "seed", "assets", "arms", "against", "bench"), ()),
    "model": ("name", "hub_id", "revision", "path", "trained_by"),
    "data": (
        *("name", "source", "hub_id", "subset", "revision", "text_column", "files"),
        *("max_train_tokens", "max_test_tokens", "workers"),
    ),
    "attention": ("name", "backend"),
    "eval": (
        *("name", "bootstrap_samples", "batch_size", "request_batch_size", "controls", "top_k", "pair_rules"),
        *("adapters", "tasks", "limit", "suite_limit"),
    ),
    "trainer": ("accelerator", "precision", "gradient_checkpointing"),
    "analyze": ("others",),
}
BENCHMARKS = ("eval.tasks=", "eval.limit=")  # settings that choose what else is scored


@dataclass(frozen=True, eq=False)
class Runs:
    """found: folder and record of every run, oldest first; arms: the records of comparisons' arms by their hash and
    start, for a later comparison may have run the same again. folders: where what has losses lies, likewise.
    """

    found: list[tuple[Path, Record]] = field(default_factory=list)
    arms: dict[tuple[str, str], Record] = field(default_factory=dict)
    folders: dict[tuple[str, str], Path] = field(default_factory=dict)

    @property
    def records(self) -> list[Record]:
        return [record for _, record in self.found]

    @property
    def named(self) -> dict[str, Record]:
        """Every record, those of arms after the others, by a name of its own."""
        arms = {f"{own.experiment}/{own.config.get('arm')}/{'/'.join(key)}": own for key, own in self.arms.items()}
        return {folder.as_posix(): record for folder, record in self.found} | arms

    def own(self, arm: Arm) -> Record | None:
        """The record of an arm's own run, if it is below the folder too."""
        return self.arms.get((arm.config_hash, arm.started))

    def losses(self, record: Record) -> Losses | None:
        """Of the held-out text, where they lie beside the record."""
        folder = self.folders.get((record.config_hash, record.started))
        return read_losses(folder / LOSSES).get(TEXT) if folder else None

    def seconds(self, record: Record) -> float | None:
        """What a record took, its arms included; None where that is not known of one."""
        own = [(arm, self.own(arm)) for arm in record.arms if arm.started]
        spent = [record.wall_seconds, *(run.wall_seconds if run else arm.train_seconds for arm, run in own)]
        return None if None in spent else sum(filter(None, spent))


def gather(folder: Path, scale: str = "") -> Runs:
    """Every record below `folder`; a run that was copied into records/ counts once. UserError for an unreadable one.

    At scale=quick nothing is measured, only run: such records are gathered by themselves or not at all.
    """
    found: dict[tuple[str, str, str], tuple[Path, Record]] = {}
    arms: dict[tuple[str, str], Record] = {}
    folders: dict[tuple[str, str], Path] = {}
    # committed copies first: they are what a report should point at
    for path in sorted(folder.rglob("record.json"), key=lambda path: ("records" not in path.parts, str(path))):
        record = load_run(path.parent)
        if is_quick(record) != (scale == QUICK):
            continue
        folders.setdefault((record.config_hash, record.started), path.parent)
        if record.config.get("arm"):
            arms.setdefault((record.config_hash, record.started), record)
            continue
        found.setdefault((record.experiment, record.config_hash, record.started), (path.parent, record))
    return Runs(sorted(found.values(), key=lambda pair: pair[1].started), arms, folders)


def is_quick(record: Record) -> bool:
    return record.setting("scale", "name") == QUICK


def setup(record: Record) -> Hashable:
    """What records of several seeds have in common: the model, the text, every setting that the numbers depend on, and
    the kind of device."""
    usual = _defaults(str(record.setting("attention", "method")))
    settings = leaves(record.config) | {("every_arm",): _unmeasured(record.config.get("every_arm", []))}
    adapter = {name: value for name, value in record.method.get("trained", {}).items() if name != "seed"}
    if record.config.get("adapter"):
        settings.pop(("attention", "budget"), None)  # which its own run found
    fixed = ((key, repr(value)) for key, value in settings.items() if _fixed(key) and value != usual.get(key))
    trained = record.steps, record.tokens_seen, *sorted(adapter.items())
    return _sources(record), tuple(sorted(fixed)), record.device_kind, *trained


def _fixed(key: tuple[str, ...]) -> bool:
    section, *below = key
    return decides(key) and not (section in FREE and (not FREE[section] or below[0] in FREE[section]))


@cache
def _defaults(method: str) -> dict[tuple[str, ...], Any]:
    """What a record has that is from before a setting; from before methods had their own it holds those of Focus."""
    sections = (
        *(("model", ModelConfig), ("data", DataConfig), ("eval", EvalConfig), ("trainer", TrainerConfig)),
        *(("regime", RegimeConfig), ("attention", FocusConfig), ("attention", KNOWN.get(method, AttentionConfig))),
    )
    found = leaves(asdict(Config()))
    for name, schema in sections:
        found |= leaves(asdict(schema()), name)
    return found


def _unmeasured(settings: list[str]) -> list[str]:
    return [setting for setting in settings if not setting.startswith(BENCHMARKS)]


def run_of(arm: Arm, own: Record | None = None) -> Hashable:
    """What an arm of the same name has in common in comparisons under several seeds, whatever benchmarks each ran.

    own: its own record, by which it is known what lay under the path of its model, what its settings came to and who
    trained its adapter; without it the arm tells.
    """
    base = setup(own) if own else arm.base or None
    return arm.name, tuple(_unmeasured(arm.settings)), arm.steps, arm.tokens_seen, base


def _sources(record: Record) -> Hashable:
    weights = None if record.model.get("source") == RANDOM else record.model.get("fingerprint")
    return record.model.get("name"), weights, record.data.get("name"), record.data.get("fingerprint")


def seeds_of(records: Iterable[Record]) -> list[int]:
    return sorted({record.seed for record in records if record.seed is not None})
