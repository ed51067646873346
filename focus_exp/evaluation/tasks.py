"""lm-eval tasks by name: official ones on the hub's items or the embedded copy of them, and our long-range suite."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict

from focus_exp.assets import choose_source, hub_reachable
from focus_exp.config import Config, DataConfig
from focus_exp.data.benchmarks import describe, load_benchmark
from focus_exp.data.hub import in_cache
from focus_exp.data.long_range import build_suite, task_config
from focus_exp.data.long_range_items import MAKERS
from focus_exp.errors import UserError, first_line
from focus_exp.evaluation.harness import strict_logging


@dataclass(frozen=True)
class LoadedTask:
    """A task, or a group of them scored as one, ready to run; `source` says where its items came from, `suite` whether
    from the long-range suite."""

    name: str
    tasks: TaskDict
    source: str
    suite: bool = False


@functools.cache
def official() -> TaskManager:
    """lm-eval's own tasks; reading their descriptions takes seconds."""
    return TaskManager()


def check_names(names: list[str]) -> None:
    """UserError for a name that is neither lm-eval's nor of the long-range suite."""
    for name in names:
        if name.partition("@")[0] not in MAKERS and name not in official().task_index:
            raise UserError(
                f"eval.tasks holds {name}, which lm-eval does not know and the long-range suite does not have; "
                f"choose from `lm_eval ls tasks` or {', '.join(MAKERS)}"
            )


def load_task(name: str, config: Config, cache: Path) -> LoadedTask:
    """The task `name`; `passkey@1024` is the suite's with passages of 1,024 words.

    UserError, in one line, where its items cannot be had under the policy `config.assets`.
    """
    kind, _, words = name.partition("@")
    if kind in MAKERS:
        suite = build_suite(
            cache, config.eval.long_range_distance or config.attention.window, int(words) if words else None
        )
        loaded = _load(TaskManager(include_defaults=False), task_config(suite, kind, name))
        return LoadedTask(name, loaded, f"long-range suite {suite.digest[:12]} of {suite.shape.words} words", True)
    with reading(config.assets, cache) as sources:
        try:
            loaded = _load(official(), name)
        # whatever a task's own code, the data sets library or the network make of a missing data set
        except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise UserError(f"{type(error).__name__}: {first_line(error)}") from error
    if name not in {*loaded["tasks"], *(n for n, g in loaded["groups"].items() if g.has_aggregation)}:
        raise UserError(f"it has no score of its own; name its tasks: {', '.join(loaded['tasks'])}")
    return LoadedTask(name, loaded, "; ".join(dict.fromkeys(sources)))


def _load(manager: TaskManager, spec: Any) -> TaskDict:
    with strict_logging():
        loaded = manager.load([spec])
    for task in loaded["tasks"].values():
        if process := task.get_config("process_docs"):
            # lm-eval processes all documents whenever it asks for one of them
            task.set_config("process_docs", functools.cache(process))
    return loaded


@contextmanager
def reading(policy: str, cache: Path) -> Iterator[list[str]]:
    """Within the block lm-eval reads data sets from where `policy` says; yields the places, as they are read.

    Its tasks ask for the hub's data sets by name; answering that call leaves their definitions as they are.
    """
    from_hub = datasets.load_dataset
    sources: list[str] = []

    def read(path: str, name: str | None = None, **options: Any) -> Any:
        wanted = DataConfig(name=path, source="hub", hub_id=path, subset=name)
        origin = choose_source(policy, path, lambda: in_cache(wanted))
        if origin == "embedded":
            sources.append(describe(path, name))
            return load_benchmark(path, name, cache)
        hub_reachable()  # offline from here on if not
        sources.append(f"{path} ({origin})")
        return from_hub(path, name, **options)

    datasets.load_dataset = read
    try:
        yield sources
    finally:
        datasets.load_dataset = from_hub
