"""lm-eval as a library: its tasks, metrics and standard errors, on the live model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

from lm_eval import evaluate
from lm_eval.tasks.manager import TaskDict
from transformers import PreTrainedModel

from focus_exp.errors import UserError
from focus_exp.evaluation.ledger import Ledger
from focus_exp.evaluation.live_model import LiveModel
from focus_exp.evaluation.outcomes import Metric, Outcome
from focus_exp.models.methods import observe_selections

# lm-eval's own default
FEWSHOT_SEED = 1234
# what lm-eval logs when it goes on with a document that it can only score as wrong
NO_SUCH_LABEL = "Label index was not in within range"


def run_task(
    lm: LiveModel, name: str, loaded: TaskDict, *, label: str, shots: int | None, limit: int | None, bootstrap: int
) -> Outcome:
    """Run a loaded task, or a group of tasks as one, counting pairs wherever a method is attached and enabled.

    shots: None for the task's own. limit: documents of a task. bootstrap: resamples, for metrics that are no means.
    UserError where there are no documents for the shots;
    RuntimeError where lm-eval can score a document only as wrong, or a log-likelihood is not finite.
    """
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        # a task that fixes 0 has its examples in the prompt already
        wanted = (own or 0) if shots is None or own == 0 else shots
        if shots and not wanted:
            print(f"{name}: eval.num_fewshot={shots} is not used, for the prompt of the task has its own examples")
        if wanted and not task.sampler.df:
            raise UserError(f"{name} has no items to take {wanted} examples from; use assets=hub or eval.num_fewshot=0")
        task.set_config(key="num_fewshot", value=wanted)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    lm.label, lm.ledger = label, Ledger()
    watched = observe_selections(lm.model, lm.ledger.observe)
    with watched, evaluating(lm.model), strict_logging(), one_process(), redirect_stdout(StringIO()):
        results: Any = evaluate(lm, loaded, limit=limit, bootstrap_iters=bootstrap, log_samples=True)
    return Outcome(
        metrics=list(metrics_of(results["results"][name], results["higher_is_better"].get(name, {}))),
        samples=[slim(task, sample) for task, samples in results["samples"].items() for sample in samples],
        ledger=lm.ledger.summary(),
        groups=lm.ledger.groups,
        version=str(results["versions"].get(name, "")),
        shots=results["n-shot"].get(name),
        seed=FEWSHOT_SEED,
    )


def metrics_of(found: dict[str, Any], higher_is_better: dict[str, bool | None]) -> Iterator[Metric]:
    for place, value in found.items():
        key, comma, filtered = place.partition(",")
        if comma and not key.endswith("_stderr"):
            stderr = found.get(f"{key}_stderr,{filtered}")
            # "N/A" where lm-eval has none
            known = stderr if isinstance(stderr, float) else None
            yield Metric(key, filtered, float(value), known, higher_is_better.get(key) is not False)


def slim(task: str, sample: dict[str, Any]) -> dict[str, Any]:
    """A sample without its prompts, which follow from the document; their hash stays.

    Items of one book are of one document, for they resemble each other; the others are documents of their own.
    """
    scores = {key: float(sample[key]) for key in sample["metrics"] if isinstance(sample[key], (bool, int, float))}
    kept = {key: sample[key] for key in ("doc_id", "filter", "doc", "target", "filtered_resps", "prompt_hash")}
    number, book = sample["doc_id"], sample["doc"].get("book")
    place = {"document": f"{task}/{book}", "offset": number} if book else {"document": f"{task}/{number}"}
    return {**place, "scores": scores, **kept}


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode within the block, afterwards every module in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


class Strict(logging.Handler):
    """Takes lm-eval's messages in; one that says a document cannot be scored is an error."""

    def emit(self, record: logging.LogRecord) -> None:
        if NO_SUCH_LABEL in record.getMessage():
            raise RuntimeError("a document's label is not among its choices, so no answer to it would be right")


@contextmanager
def strict_logging() -> Iterator[None]:
    logger, handler = logging.getLogger("lm_eval"), Strict()
    propagate, level = logger.propagate, logger.level
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextmanager
def one_process() -> Iterator[None]:
    """lm-eval resamples in a pool of processes otherwise, forked from one that holds a model and its threads."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
