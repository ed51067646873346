"""Benchmarks: every task under full attention, the method and its controls.

A task is one of lm-eval, of the long-range suite (passkey@1024 has passages of 1,024 words), or perplexity@<tokens>.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.assets import cache_root
from focus_exp.config import Config
from focus_exp.data import SequenceDataset
from focus_exp.data.long_range import is_long_range
from focus_exp.errors import LeftOut, TooLong, UserError, first_line
from focus_exp.evaluation.perplexity import score, scores_key, sequence_means
from focus_exp.evaluation.variants import BASE, Variant, attached_variants, slug, without_method
from focus_exp.models.load import count_positions
from focus_exp.results.intervals import FEWEST, NORMAL, assign_units, estimate
from focus_exp.results.losses import Losses, benchmark_name
from focus_exp.results.measurement import Measurement, exp
from focus_exp.storage import replace_file
from focus_exp.training.precision import Precision

if TYPE_CHECKING:  # lm-eval takes seconds to import
    from focus_exp.evaluation.lm_eval_harness import MaskedLM

log = logging.getLogger(__name__)

# document, offset of the first token in it, scored tokens; 0 and 1 for an item
Unit = tuple[str, int, int]
NO_FILTER = "none"
PERPLEXITY = "perplexity"
FRACTIONS = ("acc", "exact_match", "em", "f1")  # metrics between 0 and 1, whatever their items
PRIMARY = ("acc_norm", "acc")  # shown first
LEFT_OUT = "left_out"  # setting of a task that the model or its method cannot do
SAMPLES, RESULT = "samples.jsonl", "result.json"


@dataclass
class Metric:
    """One number of a task; samples hold each item's score under `key`."""

    key: str
    filter: str
    value: float
    stderr: float | None
    higher_is_better: bool

    @property
    def name(self) -> str:
        return self.key if self.filter == NO_FILTER else f"{self.key} ({self.filter})"

    @property
    def is_perplexity(self) -> bool:
        return self.key.endswith(PERPLEXITY)

    @property
    def rank(self) -> int:
        """Return the place among the metrics of a task: the first is its primary one."""
        return PRIMARY.index(self.name) if self.name in PRIMARY else len(PRIMARY)

    @property
    def sign(self) -> int:
        """Return -1 for a perplexity, whose items have log-likelihoods."""
        return -1 if self.is_perplexity else 1

    def unit(self, samples: list[dict[str, Any]]) -> str:
        """Return "fraction" for scores between 0 and 1, "" for a perplexity, else the metric's name."""
        if self.is_perplexity:
            return ""
        scores = self.scores(samples).values()
        is_fraction = self.key.split("_norm")[0] in FRACTIONS or (scores and all(0 <= score <= 1 for score in scores))
        return "fraction" if is_fraction else self.name

    def scores(self, samples: list[dict[str, Any]]) -> dict[Unit, float]:
        """Return the score of each item, or of each sequence of a document."""
        return {
            (sample["document"], sample.get("offset", 0), sample.get("tokens", 1)): sample["scores"][self.key]
            for sample in samples
            if sample["filter"] == self.filter and self.key in sample["scores"]
        }

    def is_mean_of(self, scores: dict[Unit, float]) -> bool:
        """Return whether the value is the token-weighted mean of its items."""
        if not scores:
            return False
        mean = self.sign * np.average([*scores.values()], weights=[tokens for *_, tokens in scores])
        return math.isclose(mean, np.log(self.value) if self.sign < 0 else self.value, rel_tol=1e-6, abs_tol=1e-6)


@dataclass
class TaskResult:
    """Result of a task under one variant.

    samples: items with their `scores`; sequences also have an `offset` in their document and scored `tokens`.
    requests: inputs of the model, whose pairs are counted. group_fractions: tokens in each group [layers][K].
    differences: from lm-eval, on purpose. key: precision, weights and router that the result depends on.
    """

    metrics: list[Metric]
    samples: list[dict[str, Any]]
    requests: int
    sparsity: float
    distant_density: float
    group_fractions: list[list[float]]
    version: str = ""
    shots: int | None = None
    source: str = ""
    differences: str = ""
    seconds: float = 0.0
    key: str = ""

    def change(self, metric: Metric, base: TaskResult | None) -> Change | None:
        """Return the paired change of a metric from the base; None where it has none.

        A metric that is not the mean of its items has none: the change of its items could be of the other sign. Nor
        have results of other items: of another version or source of the task.
        """
        reference = next((other for other in base.metrics if other.name == metric.name), None) if base else None
        if base is None or reference is None:
            return None
        if (self.version, self.shots, self.source) != (base.version, base.shots, base.source):
            return None
        scores, others = metric.scores(self.samples), reference.scores(base.samples)
        if not metric.is_mean_of(scores) or not reference.is_mean_of(others):
            return None
        return paired_difference(scores, others, metric.sign)

    def measurements(self, variant: Variant, task: str, base: TaskResult | None) -> Iterator[Measurement]:
        """Yield every metric with its paired change, and what the mask did."""
        changes = [self.change(metric, base) for metric in self.metrics]
        primary = min(self.metrics, key=lambda metric: metric.rank, default=None)
        ranked = sorted(zip(self.metrics, changes, strict=True), key=lambda pair: deciding_rank(*pair))
        density = variant.density(self.sparsity)
        facts = {"task": task, "num_fewshot": self.shots, "task_version": self.version or None}
        facts |= {"source": self.source or None, "differences": self.differences or None}
        facts["seq_len"] = int(task.partition("@")[2]) if is_perplexity(task) else None
        for metric, change in zip(self.metrics, changes, strict=True):
            documents = [document for document, _, _ in metric.scores(self.samples)]
            count, unit = len(set(assign_units(documents).tolist())) or None, metric.unit(self.samples)
            common: dict[str, Any] = {"variant": variant.name, "density": density, "n": count, "unit": unit}
            marks: dict[str, Any] = {"higher_is_better": None if metric.higher_is_better else False}
            marks |= {"primary_metric": metric is primary or None, "deciding_metric": metric is ranked[0][0] or None}
            settings = variant.settings | facts | marks | {"lm_eval_metric": metric.name, "stderr": metric.stderr}
            name = task if task.startswith(metric.name) else f"{metric.name}:{task}"
            yield Measurement(metric=name, value=metric.value, settings=settings, **common)
            if change is not None:
                changed = f"{metric.name}_change:{task}"
                if metric.is_perplexity:
                    changed, common["unit"] = f"nll_change{name.removeprefix(metric.name)}", "nats"
                common |= {"value": change.value, "low": change.low, "high": change.high, "reference": BASE}
                yield Measurement(metric=changed, settings=settings | {"dof": change.dof, "stderr": None}, **common)
            if metric is primary:
                yield from self.request_measurements(variant, task, density)

    def request_measurements(self, variant: Variant, task: str, density: float | None) -> Iterator[Measurement]:
        """Yield what the mask did on the requests of a task."""
        common: dict[str, Any] = {"variant": variant.name, "density": density, "settings": {"task": task}}
        for metric, value, unit in (
            ("requests", self.requests, ""),
            ("distant_density", self.distant_density, "fraction"),
            ("eval_seconds", self.seconds, "s"),
        ):
            yield Measurement(metric=f"{metric}:{task}", value=value, unit=unit, **common)


class Change(NamedTuple):
    """A paired change with its 95 % interval; dof is None for a normal interval."""

    value: float
    low: float | None
    high: float | None
    dof: float | None


def deciding_rank(metric: Metric, change: Change | None) -> tuple[int, int]:
    """Rank a metric that got worse first, then better ones, then the primary."""
    if change is None or change.low is None or change.high is None:
        outcome = 3
    elif change.low <= 0 <= change.high:
        outcome = 2
    else:
        outcome = 1 if (change.high > 0) == metric.higher_is_better else 0
    return outcome, metric.rank


def paired_difference(scores: dict[Unit, float], others: dict[Unit, float], sign: int = 1) -> Change | None:
    """Return the mean difference over common items with its 95 % interval.

    Scores of 0 or 1 get one item won and one lost before the interval is taken (Bonett and Price, 2012): otherwise ten
    equal items would prove that there is no difference. Without enough documents their interval is a normal one.
    """
    common = sorted(scores.keys() & others.keys())
    pairs = np.array([[scores[unit], others[unit]] for unit in common], dtype=np.float64).reshape(-1, 2)
    if not len(pairs) or not np.isfinite(pairs).all():
        return None
    differences = sign * (pairs[:, 0] - pairs[:, 1])
    mean, (documents, _, tokens) = float(differences.mean()), zip(*common, strict=True)
    if not np.isin(pairs, (0, 1)).all():
        interval = estimate(differences, tokens, documents)
        low, high = interval.bounds
        return Change(interval.value, low, high, interval.freedom)
    padded = np.append(differences, [1, -1])
    if FEWEST <= len(set(documents)) < len(documents):
        interval = estimate(padded, (*tokens, 1, 1), (*documents, "won", "lost"))
        low, high = interval.bounds
        return Change(mean, low, high, interval.freedom)
    half = NORMAL * padded.std() / len(padded) ** 0.5
    return Change(mean, float(padded.mean() - half), float(padded.mean() + half), None)


def write_result(folder: Path, result: TaskResult) -> None:
    """Write samples as JSON lines, then the rest, which marks them complete."""
    lines = [json.dumps(sample, ensure_ascii=False, default=str) + "\n" for sample in result.samples]
    replace_file(folder / SAMPLES, "".join(lines).encode())
    rest = asdict(replace(result, samples=[])) | {"samples": len(lines)}
    replace_file(folder / RESULT, json.dumps(rest, indent=1).encode())


def read_result(folder: Path, key: str) -> TaskResult | None:
    """Read a result; None where it is missing, damaged or of another key."""
    try:
        rest = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        samples = [json.loads(line) for line in (folder / SAMPLES).read_text(encoding="utf-8").split("\n") if line]
        # of earlier versions, without differences, some are of another computation
        if (len(samples), key) != (rest["samples"], rest["key"]) or "differences" not in rest:
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
        base_folder: where runs share the results of the unmodified model; by default `folder`.
        warn: called with one line for each task that is left out.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    blocks: SequenceDataset
    config: Config
    precision: Precision
    folder: Path
    weights: str = ""
    base_folder: Path | None = None
    warn: Callable[[str], None] = log.warning
    measurements: list[Measurement] = field(default_factory=list)
    losses: dict[str, Losses] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bases: dict[str, TaskResult] = {}
        self.loaded: dict[str, Any] = {}  # tasks of lm-eval, and where their items came from
        if named := [task for task in self.config.eval.tasks if not is_perplexity(task)]:
            from focus_exp.evaluation.lm_eval_harness import check_names

            check_names(named)

    def measure_base(self) -> None:
        """Score the unmodified model, the reference of every other variant."""
        with without_method(self.model):
            for task in self.config.eval.tasks:
                result = self.add(Variant(name=BASE, kind="base"), task)
                if result is not None:
                    self.bases[task] = result

    def measure_attached(self) -> None:
        """Score what was trained and what is attached, with the controls of a router, on what the base could run."""
        for task in self.bases:
            with closing(attached_variants(self.model, self.config)) as variants:
                for variant in variants:
                    if result := self.add(variant, task):
                        variant.group_fractions = result.group_fractions

    def require_score(self) -> None:
        """Raise UserError if there are tasks that are not left out and none has a score."""
        errors = [
            m.settings["error"] for m in self.measurements if m.settings.get("error") and not m.settings.get(LEFT_OUT)
        ]
        if errors and all(m.value is None for m in self.measurements):
            raise UserError(f"eval.tasks must have a task that can be scored: {errors[0]}")

    def add(self, variant: Variant, task: str) -> TaskResult | None:
        """Run a task under a variant, or read its result; a failure becomes its error."""
        folder = self.base_folder if variant.kind == "base" and self.base_folder else self.folder
        items = f"{task}-beyond-{self.config.answer_distance}" if is_long_range(task) else task
        folder = folder / slug(variant.name) / slug(items)
        key = scores_key(self.model, variant, self.precision, self.weights)
        result = read_result(folder, key)
        if result is None:
            result = self.run(variant, task)
            if result is None:
                return None
            result.key = key
            write_result(folder, result)
        base = None if variant.kind == "base" else self.bases.get(task)
        self.measurements += result.measurements(variant, task, base)
        for metric in result.metrics:
            scores = metric.scores(result.samples)
            name = benchmark_name({"task": task, "lm_eval_metric": metric.name})
            losses = self.losses.setdefault(name, Losses(list(scores)))
            losses.nll[variant.name] = np.array([metric.sign * scores.get(unit, math.nan) for unit in losses.units])
        numbers = ", ".join(f"{metric.name} {metric.value:.4g}" for metric in result.metrics)
        log.info("measured: %s, %s: %s (%.1f s)", variant.name, task, numbers, result.seconds)
        return result

    def run(self, variant: Variant, task: str) -> TaskResult | None:
        """Run a task as the model is now; None if it failed, whose error is a measurement."""
        start, label = time.perf_counter(), f"{task}, {variant.name}"
        try:
            result = self.run_perplexity(task, label) if is_perplexity(task) else self.run_lm_eval(task, label)
        except Exception as error:  # whatever a task's own code raises, the other tasks run
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            is_left_out = isinstance(error, LeftOut)
            reason = f"{kind}{first_line(error)}"
            settings = variant.settings | {"task": task, "error": reason, LEFT_OUT: is_left_out or None}
            failed = Measurement(variant=variant.name, metric=f"score:{task}", value=None, settings=settings)
            self.measurements.append(failed)
            if is_left_out:
                self.warn(f"{task} is left out: {reason}")
            else:
                log.error("%s under %s failed: %s", task, variant.name, reason)
            return None
        return replace(result, seconds=time.perf_counter() - start)

    def run_lm_eval(self, task: str, label: str) -> TaskResult:
        """Run a task of lm-eval or of the long-range suite, loaded the first time."""
        from focus_exp.evaluation.lm_eval_harness import load_task, run_task

        settings = self.config.eval
        if task not in self.loaded:
            self.loaded[task] = load_task(task, self.config, cache_root(self.config.cache_dir))
        tasks, source = self.loaded[task]
        limit = (is_long_range(task) and settings.long_range_limit) or settings.limit
        result = run_task(self.lm, task, tasks, label=label, shots=settings.num_fewshot, limit=limit)
        return replace(result, source=source)

    def run_perplexity(self, task: str, label: str) -> TaskResult:
        """Return the perplexity of sequences; standard error by the delta method."""
        length = int(task.partition("@")[2])
        blocks, indices = self.cut_sequences(length)
        scores = score(self.model, blocks, indices, 1, self.precision, label)
        losses, places, tokens = sequence_means(scores.nll), blocks.locate(indices), length - blocks.unscored
        samples = [
            {"document": document, "offset": offset, "tokens": tokens, "filter": NO_FILTER, "scores": {PERPLEXITY: ll}}
            for (document, offset), ll in zip(places, (-losses).tolist(), strict=True)
        ]
        mean = estimate(losses, documents=[document for document, _ in places])
        value = exp(mean.value)
        stderr = None if mean.stderr is None else value * mean.stderr
        metric = Metric(PERPLEXITY, NO_FILTER, value, stderr, higher_is_better=False)
        pairs, source = scores.pairs, f"text {blocks.stream.digest[:12]}"
        mask = (pairs.sparsity, pairs.distant_density, pairs.group_fractions)
        return TaskResult([metric], samples, len(indices), *mask, source=source)

    def cut_sequences(self, length: int) -> tuple[SequenceDataset, list[int]]:
        """Cut the held-out text into sequences of `length`; as many tokens at any length.

        Raises:
            UserError: the model or the text is too short.
        """
        settings = self.config.eval
        longest = count_positions(self.model)
        if longest is not None and length > longest:
            raise TooLong(f"perplexity@<tokens> must be <= {longest}, the positions of the model (got {length})")
        blocks = SequenceDataset(self.blocks.stream, length, prefix=self.blocks.prefix, cross_documents=False)
        count = len(blocks)
        if settings.max_sequences is not None:
            count = max(1, settings.max_sequences * settings.seq_len // length)
        return blocks, blocks.select_evenly(count)

    @cached_property
    def lm(self) -> MaskedLM:
        from focus_exp.evaluation.lm_eval_harness import MaskedLM

        return MaskedLM(
            self.model, self.tokenizer, batch_size=self.config.eval.request_batch_size, precision=self.precision
        )


def is_perplexity(task: str) -> bool:
    return task.partition("@")[0] == PERPLEXITY
