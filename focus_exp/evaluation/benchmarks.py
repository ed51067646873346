"""The rows of the benchmark table: every task under full attention, the attached method and its controls."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.assets import cache_root
from focus_exp.config import Config
from focus_exp.data import Blocks
from focus_exp.errors import UserError, first_line
from focus_exp.evaluation import long_context
from focus_exp.evaluation.controls import BASE, RANDOM_GROUPS, WINDOW_ONLY, hard_name, random_groups, window_only
from focus_exp.evaluation.outcomes import Outcome, Unit, read_outcome, slug, write_outcome
from focus_exp.models.lora import describe_lora
from focus_exp.models.methods import disable_method, is_causal, set_routing, swap_methods
from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.results.losses import Losses
from focus_exp.training.precision import Precision

if TYPE_CHECKING:  # lm-eval takes seconds to import
    from focus_exp.evaluation.live_model import LiveModel

log = logging.getLogger(__name__)

# runs a task under what is attached now; its argument labels the progress bar
Runner = Callable[[str], Outcome]


@dataclass
class Benchmarks:
    """Measures `config.eval.tasks`; results are kept in `folder`, so that an interrupted evaluation goes on.

    blocks: windows of held-out text, of which perplexity@<tokens> takes the text. weights: the base's fingerprint.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    blocks: Blocks
    config: Config
    precision: Precision
    folder: Path
    weights: str = ""
    rows: list[BenchmarkRow] = field(default_factory=list)
    losses: dict[str, Losses] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bases: dict[str, Outcome] = {}
        self.runners: dict[str, Runner] = {}
        self.missing: set[str] = set()
        named = [task for task in self.config.eval.tasks if not is_perplexity(task)]
        if named:
            from focus_exp.evaluation.tasks import check_names

            check_names(named)

    def measure_base(self) -> None:
        """The rows that every other one is compared with: nothing attached, or all of it switched off."""
        with self.full_attention():
            for task in self.config.eval.tasks:
                outcome = self.add(BenchmarkRow(attention=BASE, kind="base", task=task))
                if outcome is not None:
                    self.bases[task] = outcome

    def measure_attached(self) -> None:
        """Rows of what was trained and of what is attached, with the controls of a router."""
        attention, recipe = self.config.attention, self.config.recipe
        row = BenchmarkRow(attention=attention.name, kind="control", task="", method=attention.method)
        for task in self.config.eval.tasks:
            if recipe.trains("lora") or recipe.trains("all"):
                lora = f"{describe_lora(self.model)['name']}, trained" if recipe.trains("lora") else None
                with self.full_attention():
                    name = lora or "full attention, trained weights"
                    self.add(BenchmarkRow(attention=name, kind="trained", task=task))
            if self.config.has_router:
                self.measure_focus(task)
            elif attention.method != "full":
                self.add(replace(row, task=task, causal=is_causal(self.model)))

    def measure_focus(self, task: str) -> None:
        attention, model = self.config.focus, self.model
        set_routing(model, hard=True, top_k=attention.top_k, pair_rule=attention.pair_rule)
        name = hard_name(attention.top_k, attention.pair_rule)
        row = BenchmarkRow(attention=name, kind="hard", task=task, method="focus", causal=is_causal(model))
        outcome = self.add(replace(row, memberships=attention.top_k if attention.pair_rule == "share" else 1))
        if outcome is None or not self.config.eval.controls:
            return
        controls: list[tuple[str, str, dict[int, Any]]] = [
            (WINDOW_ONLY, "window", window_only(model, attention.window, attention.sinks)),
            (RANDOM_GROUPS, "random_groups", random_groups(model, outcome.groups, attention, self.config.seed)),
        ]
        for name, method, methods in controls:
            with swap_methods(model, methods):
                self.add(BenchmarkRow(attention=name, kind="control", task=task, method=method))

    def require_score(self) -> None:
        """Raise UserError if there are tasks and none has a score."""
        errors = [row.error for row in self.rows if row.error is not None]
        if errors and len(errors) == len(self.rows):
            raise UserError(f"all eval.tasks failed: {errors[0]}")

    def full_attention(self) -> AbstractContextManager[Any]:
        attached = getattr(self.model, "focus_attachment", None) is not None
        return disable_method(self.model) if attached else nullcontext()

    def add(self, row: BenchmarkRow) -> Outcome | None:
        """Run a row's task, or read what it gave before; a row that fails stays as a row with its reason."""
        if row.task in self.missing:
            return None
        folder = self.folder / slug(row.attention) / slug(row.task)
        outcome = read_outcome(folder, self.precision.name, self.weights)
        if outcome is None:
            outcome = self.run(row)
            if outcome is None:
                return None
            outcome.precision, outcome.weights = self.precision.name, self.weights
            write_outcome(folder, outcome)
        rows = list(outcome.rows(row, None if row.kind == "base" else self.bases.get(row.task)))
        self.rows += rows
        for filled, metric in zip(rows, outcome.metrics, strict=True):
            self.keep(filled, metric.parts(outcome.samples))
        numbers = ", ".join(f"{filled.metric} {filled.value:.4g}" for filled in rows)
        print(f"measured: {row.attention:<32} {row.task:<16} {numbers} ({outcome.seconds:.0f} s)")
        return outcome

    def keep(self, row: BenchmarkRow, parts: dict[Unit, float]) -> None:
        """Scores of items, losses of windows, for whoever makes the interval again."""
        losses = self.losses.setdefault(row.scored_as, Losses(list(parts)))
        sign = -1 if row.is_perplexity else 1
        losses.nll[row.attention] = np.array([sign * parts.get(unit, math.nan) for unit in losses.units])

    def run(self, row: BenchmarkRow) -> Outcome | None:
        try:
            runner = self.runners.get(row.task) or self.load(row.task)
        except UserError as error:
            self.missing.add(row.task)
            self.rows.append(BenchmarkRow(attention="", kind="missing", task=row.task, error=first_line(error)))
            left = len(self.config.eval.tasks) - len(self.missing)
            print(f"NOT MEASURED: {row.task}: {first_line(error)}; the other {left} of eval.tasks run")
            return None
        self.runners[row.task] = runner
        began = time.perf_counter()
        try:
            outcome = runner(f"{row.task}, {row.attention}")
        except Exception as error:  # whatever a task's own code raises, the other tasks go on
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self.rows.append(replace(row, error=f"{kind}{first_line(error)}"))
            log.error("%s under %s failed: %s", row.task, row.attention, self.rows[-1].error)
            return None
        return replace(outcome, seconds=time.perf_counter() - began)

    def load(self, task: str) -> Runner:
        """How `task` is run; UserError, whose first line says it all, where it cannot be."""
        settings = self.config.eval
        if is_perplexity(task):
            length = int(task.partition("@")[2])
            windows, indices = long_context.windows_of(length, self.blocks, self.model, settings)
            return lambda label: long_context.run_perplexity(self.model, windows, indices, self.precision, label)
        from focus_exp.evaluation.harness import run_task
        from focus_exp.evaluation.tasks import load_task

        loaded = load_task(task, self.config, cache_root(self.config.cache_dir))
        limit = (loaded.suite and settings.long_range_limit) or settings.limit

        def run(label: str) -> Outcome:
            outcome = run_task(
                self.lm, task, loaded.tasks, label=label,
                shots=settings.num_fewshot, limit=limit, bootstrap=settings.bootstrap_samples,
            )  # fmt: skip
            return replace(outcome, source=loaded.source)

        return run

    @cached_property
    def lm(self) -> LiveModel:
        from focus_exp.evaluation.harness import evaluating, strict_logging
        from focus_exp.evaluation.live_model import LiveModel

        with evaluating(self.model), strict_logging():
            return LiveModel(
                self.model, self.tokenizer, batch_size=self.config.eval.request_batch_size,
                precision=self.precision, allow_truncation=self.config.eval.allow_truncation,
            )  # fmt: skip


def is_perplexity(task: str) -> bool:
    return task.partition("@")[0] == long_context.KIND
