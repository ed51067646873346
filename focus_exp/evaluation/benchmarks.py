"""Benchmark rows: every task under full attention, the attached method and its controls.

A task is one of lm-eval, of the long-range suite (passkey@1024 has passages of 1,024 words), or perplexity@<tokens>.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.assets import cache_root
from focus_exp.config import Config
from focus_exp.data import SequenceDataset
from focus_exp.errors import UserError, first_line
from focus_exp.evaluation.controls import (
    BASE,
    RANDOM_GROUPS,
    WINDOW_ONLY,
    hard_name,
    random_groups,
    slug,
    trained_name,
    window_only,
)
from focus_exp.evaluation.perplexity import PairCounter, token_losses
from focus_exp.models.methods import disable_method, is_causal, observe_selections, set_routing, swap_methods
from focus_exp.progress import ProgressBar
from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.results.intervals import FEWEST, NORMAL, estimate, units_of
from focus_exp.results.losses import Losses
from focus_exp.storage import replace_file
from focus_exp.training.precision import Precision

if TYPE_CHECKING:  # lm-eval takes seconds to import
    from focus_exp.evaluation.lm_eval_harness import MaskedLM

log = logging.getLogger(__name__)

# document, offset of the first token in it, scored tokens; 0 and 1 for an item
Unit = tuple[str, int, int]
NO_FILTER = "none"
PERPLEXITY = "perplexity"
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
SAMPLES, RESULT = "samples.jsonl", "result.json"


@dataclass
class RequestStats:
    """Lengths of a task's requests, and the pairs that the mask pruned on those very requests.

    A request is one input of the model; continuations that share it are one request. A generation counts as its prompt
    and the generated tokens that were read, in a pass of its own: cached steps never show all pairs of a query at once.
    """

    lengths: list[int] = field(default_factory=list)
    truncated: int = 0
    pairs: PairCounter = field(default_factory=PairCounter)

    def summary(self) -> dict[str, Any]:
        """Return the fields of a `BenchmarkRow` that follow."""
        total, distant, _ = self.pairs.totals
        lengths = np.quantile(self.lengths, QUANTILES, method="nearest").tolist() if self.lengths else []
        return {
            "requests": len(self.lengths),
            "truncated": self.truncated,
            "request_tokens": lengths,
            "distant_share": distant / total if total else None,
            "distant_pairs_kept": self.pairs.distant_density,
            "pairs_removed": self.pairs.sparsity,
            "removed_by_layer": [(distant - kept) / total for total, distant, kept in self.pairs.by_layer],
            "largest_group": self.pairs.largest_group,
        }


@dataclass
class Metric:
    """One number of a task; samples hold each item's score in it under `key` and `filter`."""

    key: str
    filter: str
    value: float
    stderr: float | None
    higher_is_better: bool

    @property
    def name(self) -> str:
        return self.key if self.filter == NO_FILTER else f"{self.key} ({self.filter})"

    @property
    def sign(self) -> int:
        """Return -1 for a perplexity, whose items have log-likelihoods."""
        return -1 if self.key.endswith(PERPLEXITY) else 1

    def scores(self, samples: list[dict[str, Any]]) -> dict[Unit, float]:
        """Return the score of each item, or of each sequence of a document."""
        return {
            (sample["document"], sample.get("offset", 0), sample.get("tokens", 1)): sample["scores"][self.key]
            for sample in samples
            if sample["filter"] == self.filter and self.key in sample["scores"]
        }

    def is_mean_of(self, scores: dict[Unit, float]) -> bool:
        """Return whether the value is the token-weighted mean of its items; a group's mean over tasks is not."""
        if not scores:
            return False
        mean = self.sign * np.average([*scores.values()], weights=[tokens for *_, tokens in scores])
        return math.isclose(mean, np.log(self.value) if self.sign < 0 else self.value, rel_tol=1e-6, abs_tol=1e-6)


@dataclass
class TaskResult:
    """Result of a task under one variant.

    samples: items with their `scores`; sequences also have an `offset` in their document and scored `tokens`.
    stats: fields of a `BenchmarkRow` by `RequestStats.summary`. group_fractions: tokens in each group [layers][K].
    key: precision and weights that the result depends on.
    """

    metrics: list[Metric]
    samples: list[dict[str, Any]]
    stats: dict[str, Any]
    group_fractions: list[list[float]]
    version: str = ""
    shots: int | None = None
    seed: int | None = None
    source: str = ""
    seconds: float = 0.0
    key: str = ""

    def rows(self, row: BenchmarkRow, base: TaskResult | None) -> Iterator[BenchmarkRow]:
        """Fill in `row` once per metric, paired with the same items of the base.

        A metric that is not the mean of its items has no difference: that of its items could be of the other sign.
        """
        facts = {key: getattr(self, key) for key in ("version", "shots", "seed", "source", "seconds")}
        references = {metric.name: metric for metric in base.metrics} if base else {}
        for metric in self.metrics:
            scores, reference = metric.scores(self.samples), references.get(metric.name)
            difference = low = high = dof = None
            if base and reference and metric.is_mean_of(scores):
                others = reference.scores(base.samples)
                if reference.is_mean_of(others):
                    difference, low, high, dof = paired_difference(scores, others, metric.sign)
            yield replace(
                row, metric=metric.name, value=metric.value, stderr=metric.stderr,
                n=len(set(units_of([document for document, _, _ in scores]).tolist())) or None,
                higher_is_better=metric.higher_is_better, difference=difference, difference_low=low,
                difference_high=high, freedom=dof, **facts, **self.stats,
            )  # fmt: skip


def paired_difference(
    scores: dict[Unit, float], others: dict[Unit, float], sign: int = 1
) -> tuple[float | None, float | None, float | None, float | None]:
    """Return the mean difference over common items, its 95 % interval over documents, and its degrees of freedom.

    Scores of 0 or 1 get one item won and one lost before the interval is taken (Bonett and Price, 2012): otherwise ten
    equal items would prove that there is no difference. Without enough documents their interval is a normal one.
    """
    common = sorted(scores.keys() & others.keys())
    pairs = np.array([[scores[unit], others[unit]] for unit in common], dtype=np.float64).reshape(-1, 2)
    if not len(pairs) or not np.isfinite(pairs).all():
        return None, None, None, None
    differences = sign * (pairs[:, 0] - pairs[:, 1])
    mean, (documents, _, tokens) = float(differences.mean()), zip(*common, strict=True)
    if not np.isin(pairs, (0, 1)).all():
        interval = estimate(differences, tokens, documents)
        return (interval.value, *interval.bounds, interval.freedom)
    padded = np.append(differences, [1, -1])
    if FEWEST <= len(set(documents)) < len(documents):
        interval = estimate(padded, (*tokens, 1, 1), (*documents, "won", "lost"))
        return (mean, *interval.bounds, interval.freedom)
    half = NORMAL * padded.std() / len(padded) ** 0.5
    return mean, float(padded.mean() - half), float(padded.mean() + half), None


def write_result(folder: Path, result: TaskResult) -> None:
    """Write samples as JSON lines, then the rest, whose presence shows that the samples are complete."""
    lines = [json.dumps(sample, ensure_ascii=False, default=str) + "\n" for sample in result.samples]
    replace_file(folder / SAMPLES, "".join(lines).encode())
    rest = asdict(replace(result, samples=[])) | {"samples": len(lines)}
    replace_file(folder / RESULT, json.dumps(rest, indent=1).encode())


def read_result(folder: Path, key: str) -> TaskResult | None:
    """Read a result; None where it is missing, damaged or of another key."""
    try:
        rest = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        samples = [json.loads(line) for line in (folder / SAMPLES).read_text(encoding="utf-8").split("\n") if line]
        if (len(samples), key) != (rest["samples"], rest["key"]):
            return None
        return TaskResult(**rest | {"samples": samples, "metrics": [Metric(**metric) for metric in rest["metrics"]]})
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass
class BenchmarkEvaluator:
    """Score `config.eval.tasks`, kept in `folder` so that a run resumes.

    Args:
        blocks: held-out sequences, whose text perplexity@<tokens> uses.
        weights: fingerprint of the base; results of other weights are not read.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    blocks: SequenceDataset
    config: Config
    precision: Precision
    folder: Path
    weights: str = ""
    rows: list[BenchmarkRow] = field(default_factory=list)
    losses: dict[str, Losses] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bases: dict[str, TaskResult] = {}
        self.runners: dict[str, Callable[[str], TaskResult]] = {}  # called with a label for the progress bar
        self.missing: set[str] = set()
        if named := [task for task in self.config.eval.tasks if not is_perplexity(task)]:
            from focus_exp.evaluation.lm_eval_harness import check_names

            check_names(named)

    def measure_base(self) -> None:
        """Score the unmodified model, the reference of every other row."""
        with self.full_attention():
            for task in self.config.eval.tasks:
                result = self.add(BenchmarkRow(attention=BASE, kind="base", task=task))
                if result is not None:
                    self.bases[task] = result

    def measure_attached(self) -> None:
        """Score what was trained and what is attached, with the controls of a router."""
        attention, recipe = self.config.attention, self.config.recipe
        for task in self.config.eval.tasks:
            if recipe.trains("lora") or recipe.trains("all"):
                with self.full_attention():
                    name = trained_name(self.model, self.config)
                    self.add(BenchmarkRow(attention=name, kind="trained", task=task))
            if self.config.has_router:
                self.measure_focus(task)
            elif attention.method != "full":
                causal = is_causal(self.model)
                self.add(
                    BenchmarkRow(
                        attention=attention.name, kind="control", task=task, method=attention.method, causal=causal
                    )
                )

    def measure_focus(self, task: str) -> None:
        """Score the configured hard routing, then its controls on the same requests."""
        attention, model = self.config.focus, self.model
        set_routing(model, hard=True, top_k=attention.top_k, pair_rule=attention.pair_rule)
        row = BenchmarkRow(
            attention=hard_name(attention.top_k, attention.pair_rule), kind="hard", task=task, method="focus",
            causal=is_causal(model), memberships=attention.top_k if attention.pair_rule == "share" else 1,
        )  # fmt: skip
        result = self.add(row)
        if result is None or not self.config.eval.controls:
            return
        controls: list[tuple[str, str, dict[int, Any]]] = [
            (WINDOW_ONLY, "window", window_only(model, attention.window, attention.sinks)),
            (RANDOM_GROUPS, "random_groups", random_groups(model, result.group_fractions, attention, self.config.seed)),
        ]
        for name, method, methods in controls:
            with swap_methods(model, methods):
                self.add(BenchmarkRow(attention=name, kind="control", task=task, method=method))

    def require_score(self) -> None:
        """Raise UserError if there are tasks and none has a score."""
        errors = [row.error for row in self.rows if row.error is not None]
        if errors and len(errors) == len(self.rows):
            raise UserError(f"eval.tasks must have a task that can be scored: {errors[0]}")

    def full_attention(self) -> AbstractContextManager[Any]:
        is_attached = getattr(self.model, "focus_attachment", None) is not None
        return disable_method(self.model) if is_attached else nullcontext()

    def add(self, row: BenchmarkRow) -> TaskResult | None:
        """Run a row's task, or read its result; a failure becomes the row's error."""
        if row.task in self.missing:
            return None
        folder, key = self.folder / slug(row.attention) / slug(row.task), f"{self.precision.name} {self.weights}"
        result = read_result(folder, key)
        if result is None:
            result = self.run(row)
            if result is None:
                return None
            result.key = key
            write_result(folder, result)
        rows = list(result.rows(row, None if row.kind == "base" else self.bases.get(row.task)))
        self.rows += rows
        for filled, metric in zip(rows, result.metrics, strict=True):
            scores = metric.scores(result.samples)
            losses = self.losses.setdefault(filled.scored_as, Losses(list(scores)))
            losses.nll[row.attention] = np.array([metric.sign * scores.get(unit, math.nan) for unit in losses.units])
        numbers = ", ".join(f"{filled.metric} {filled.value:.4g}" for filled in rows)
        log.info("measured: %s, %s: %s (%.1f s)", row.attention, row.task, numbers, result.seconds)
        return result

    def run(self, row: BenchmarkRow) -> TaskResult | None:
        try:
            runner = self.runners.get(row.task) or self.load(row.task)
        except UserError as error:
            self.missing.add(row.task)
            self.rows.append(BenchmarkRow(attention="", kind="missing", task=row.task, error=first_line(error)))
            log.warning("not measured: %s: %s", row.task, first_line(error))
            return None
        self.runners[row.task] = runner
        start = time.perf_counter()
        try:
            result = runner(f"{row.task}, {row.attention}")
        except Exception as error:  # whatever a task's own code raises, the other tasks run
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self.rows.append(replace(row, error=f"{kind}{first_line(error)}"))
            log.error("%s under %s failed: %s", row.task, row.attention, self.rows[-1].error)
            return None
        return replace(result, seconds=time.perf_counter() - start)

    def load(self, task: str) -> Callable[[str], TaskResult]:
        """Return what runs `task`; UserError where it cannot be run."""
        settings = self.config.eval
        if is_perplexity(task):
            blocks, indices = self.cut_sequences(int(task.partition("@")[2]))
            return lambda label: run_perplexity(self.model, blocks, indices, self.precision, label)
        from focus_exp.evaluation.lm_eval_harness import load_task, run_task

        loaded = load_task(task, self.config, cache_root(self.config.cache_dir))
        limit = (loaded.is_long_range and settings.long_range_limit) or settings.limit

        def run(label: str) -> TaskResult:
            result = run_task(
                self.lm, task, loaded.tasks, label=label,
                shots=settings.num_fewshot, limit=limit, bootstrap=settings.bootstrap_samples,
            )  # fmt: skip
            return replace(result, source=loaded.source)

        return run

    def cut_sequences(self, length: int) -> tuple[SequenceDataset, list[int]]:
        """Cut the held-out text into sequences of `length`, and choose as many tokens of them as at any length.

        Raises:
            UserError: the model or the text is too short.
        """
        settings = self.config.eval
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and length > longest:
            raise UserError(f"perplexity@<tokens> must be <= {longest}, the positions of the model (got {length})")
        blocks = SequenceDataset(self.blocks.stream, length, bos=self.blocks.bos, cross_documents=False)
        count = len(blocks)
        if settings.max_sequences is not None:
            count = max(1, settings.max_sequences * settings.seq_len // length)
        return blocks, blocks.select_evenly(count)

    @cached_property
    def lm(self) -> MaskedLM:
        from focus_exp.evaluation.lm_eval_harness import MaskedLM

        return MaskedLM(
            self.model, self.tokenizer, batch_size=self.config.eval.request_batch_size, precision=self.precision,
            allow_truncation=self.config.eval.allow_truncation,
        )  # fmt: skip


def is_perplexity(task: str) -> bool:
    return task.partition("@")[0] == PERPLEXITY


@torch.no_grad()
def run_perplexity(
    model: PreTrainedModel, blocks: SequenceDataset, indices: list[int], precision: Precision, label: str
) -> TaskResult:
    """Return the perplexity of sequences, its standard error over documents by the delta method.

    Raises:
        RuntimeError: a loss is not finite.
    """
    stats, samples = RequestStats(), []
    with precision.context(), observe_selections(model, stats.pairs.observe):
        places = zip(indices, blocks.locate(indices), strict=True)
        for index, (document, offset) in ProgressBar(places, f"{label:<28}", len(indices), unit="sequence"):
            item = blocks[index]
            loss = token_losses(model, item["input_ids"][None].to(model.device))[0, item["scored_from"] :]
            if not loss.isfinite().all():
                raise RuntimeError("a loss is not finite")
            place = {"document": document, "offset": offset, "tokens": len(loss)}
            samples.append(place | {"filter": NO_FILTER, "scores": {PERPLEXITY: -loss.double().mean().item()}})
            stats.lengths.append(item["input_ids"].numel())
    losses, tokens, documents = zip(
        *((-sample["scores"][PERPLEXITY], sample["tokens"], sample["document"]) for sample in samples), strict=True
    )
    mean = estimate(losses, tokens, documents)
    value = math.exp(mean.value)
    stderr = None if mean.stderr is None else value * mean.stderr
    metric = Metric(PERPLEXITY, NO_FILTER, value, stderr, higher_is_better=False)
    return TaskResult([metric], samples, stats.summary(), stats.pairs.group_fractions, source=blocks.stream.name)
