"""lm-eval as a library: its tasks and metrics on the attached model."""

from __future__ import annotations

import copy
import functools
import logging
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import datasets
import torch
from lm_eval import __version__, evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.assets import hub_reachable, uses_embedded
from focus_exp.config import Config
from focus_exp.data import find_prefix
from focus_exp.data.embedded_benchmarks import describe_source, load_benchmark
from focus_exp.data.long_range import TASKS, build_suite, is_long_range, task_config
from focus_exp.errors import TooLong, UserError, first_line
from focus_exp.evaluation.benchmarks import Metric, TaskResult
from focus_exp.evaluation.perplexity import PairCounter
from focus_exp.models.methods import (
    active_methods,
    cache_unsupported_reason,
    observe_selections,
    pause_observers,
    temporary_attributes,
)
from focus_exp.progress import ProgressBar
from focus_exp.training.precision import Precision

FEWSHOT_SEED = 1234  # lm-eval's own default
BOOTSTRAP_SAMPLES = 1000  # for the standard errors of metrics that are not means
END_OF_TEXT = "<|endoftext|>"
# settings of generation that a task decides in lm-eval too, that do not change texts, and that matter to sampling alone
DECIDED = {
    *("max_length", "eos_token_id", "bos_token_id", "pad_token_id", "use_cache", "cache_implementation"),
    *("transformers_version", "_from_model_config"),
}
SAMPLING = {"do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"}

os.environ.setdefault("DISABLE_MULTIPROC", "1")  # else lm-eval resamples in forks of a process that holds a model


class StrictHandler(logging.Handler):
    """Silence lm-eval, but raise where it could only score a document as wrong."""

    def emit(self, record: logging.LogRecord) -> None:
        if "Label index was not in within range" in record.getMessage():
            raise RuntimeError("a document's label is not among its choices, so no answer to it would be right")


_logger = logging.getLogger("lm_eval")
_logger.propagate = False
_logger.addHandler(StrictHandler(logging.WARNING))


class MaskedLM(HFLM):
    """lm-eval's wrapper of a transformers model, padding masked, pairs counted.

    lm-eval pads without an attention mask, so that a router that balances groups over the sequence would count the
    padding as tokens. Here a score does not depend on the batch, and no request is truncated. Nor are the tokenizer's
    first tokens given twice, or the base's settings of generation used (see `explain_differences`).
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, batch_size: int, precision: Precision
    ) -> None:
        # before a text without context: the tokenizer's own first tokens, or what ends the text before it
        self.prefix = find_prefix(tokenizer)
        self.has_prefix = bool(self.prefix)
        self.prefix = self.prefix or [tokenizer.get_vocab().get(END_OF_TEXT, tokenizer.eos_token_id)]
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=copy.deepcopy(tokenizer),  # to which lm-eval may add a padding token
            batch_size=batch_size,
            prefix_token_id=self.prefix[0],
        )
        self.appends_eos = tokenizer("probe")["input_ids"][-1] == tokenizer.eos_token_id
        self.precision = precision
        self.label = ""
        self.requests = 0  # inputs of the model: continuations that share one are one request
        self.pairs = PairCounter()

    @torch.no_grad()
    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether it is greedy."""
        begins = [self.prefix[0]]  # lm-eval puts one token where there is no context
        requests = [(text, self.prefix if context == begins else context, rest) for text, context, rest in requests]
        by_input: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            by_input[tuple(context + continuation)[:-1]].append(index)
        inputs = sorted(by_input, key=len, reverse=True)
        self.check_length(max(map(len, inputs), default=0), self.max_length)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        progress = ProgressBar(total=len(inputs), desc=f"{self.label:<28}", unit="request", disable=disable_tqdm)
        for begin in range(0, len(inputs), self.batch_size):
            batch = inputs[begin : begin + self.batch_size]
            width = len(batch[0])
            last = width - min(len(tokens) - len(requests[i][2]) for tokens in batch for i in by_input[tokens])
            for tokens, logits in zip(batch, self.last_logits(batch, last), strict=True):
                log_probabilities = logits[: last - width + len(tokens)].float().log_softmax(-1)
                for index in by_input[tokens]:
                    target = torch.tensor(requests[index][2], device=logits.device)
                    rows = log_probabilities[-len(target) :]
                    total = float(rows.gather(1, target[:, None]).sum())
                    answers[index] = total, bool((rows.argmax(-1) == target).all())
            progress.update(len(batch))
        progress.close()
        if not all(math.isfinite(total) for total, _ in answers):
            raise RuntimeError("a log-likelihood is not finite")
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts after the first tokens of the tokenizer.

        lm-eval puts these, too, but leaves those that the tokenizer adds behind them, and scores them.
        """
        windows = [[*self.cut_windows(*request.args)] for request in requests]
        answers = iter(self._loglikelihood_tokens([x for some in windows for x in some], disable_tqdm))
        return [sum(next(answers)[0] for _ in some) for some in windows]

    def cut_windows(self, text: str) -> Iterator[tuple[None, list[int], list[int]]]:
        """Yield context and continuation of the parts of a text as long as the model allows, as lm-eval does."""
        tokens, length = self.tok_encode(text, add_special_tokens=False), self.max_length - len(self.prefix) + 1
        if tokens[: len(self.prefix)] == self.prefix:  # the text has them
            tokens = tokens[len(self.prefix) :]
        for pair in get_rolling_token_windows(tokens, self.prefix[0], length, 1):
            yield None, *make_disjoint_window(pair)

    def explain_differences(self, loaded: TaskDict) -> str:
        """Explain in which ways scores of a task differ from lm-eval's on purpose; "" where they do not."""
        kinds = {task.OUTPUT_TYPE for task in loaded["tasks"].values()}
        reasons = []
        if "loglikelihood_rolling" in kinds and self.has_prefix:
            reasons.append("the tokenizer's first tokens are given once and not scored")
        if "generate_until" in kinds:
            asked = [task.get_config("generation_kwargs") or {} for task in loaded["tasks"].values()]
            same = DECIDED if any(options.get("do_sample") for options in asked) else DECIDED | SAMPLING
            own = self.model.generation_config.to_diff_dict()
            if ignored := sorted(name for name, value in own.items() if value and name not in same):
                reasons.append(f"the base's own {', '.join(ignored)} do not change what the task asks for")
        return f"not as lm-eval {__version__}: {'; '.join(reasons)}" if reasons else ""

    def last_logits(self, batch: list[tuple[int, ...]], last: int) -> Tensor:
        """Return the last logits (B, n, V) of inputs, padded on the right."""
        ids, mask = (
            pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(self.device)
            for rows in (batch, [[1] * len(tokens) for tokens in batch])
        )
        self.requests += len(batch)
        with self.precision.context():
            output = self.model(input_ids=ids, attention_mask=mask, logits_to_keep=last, use_cache=False)
        logits: Tensor = output.logits[:, -last:]  # some models return all
        return logits

    def check_length(self, longest: int, limit: int) -> None:
        """Raise TooLong for a request that lm-eval would truncate."""
        if longest > limit:
            raise TooLong(
                f"a request must be <= {limit} tokens (got {longest}). Lower eval.num_fewshot, or leave the task "
                "out of eval.tasks."
            )

    def tok_encode(self, string: str, *args: Any, **options: Any) -> list[int]:
        """Return token ids without an end-of-text token, which some tokenizers append: the answer follows."""
        ids: list[int] = super().tok_encode(string, *args, **options)
        return ids[:-1] if self.appends_eos and ids[-1] == self.tokenizer.eos_token_id else ids

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return token ids and mask (B, T) of prompts to continue, padded on the left."""
        prompts = [self.tok_encode(string) for string in strings]
        self.check_length(max(map(len, prompts)), left_truncate_len or self.max_length)
        batch = self.tokenizer.pad({"input_ids": prompts}, padding_side=padding_side, return_tensors="pt")
        return batch["input_ids"], batch["attention_mask"]

    @torch.no_grad()
    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], *, attention_mask: Tensor, **options: Any
    ) -> Tensor:
        """Generate, greedily by default, with a KV cache where the method has one.

        Pairs are counted on the prompts alone, in another pass: cached steps never show all pairs of a query at once.
        """
        if not options.setdefault("do_sample", False):
            options.pop("temperature", None)
        settings = GenerationConfig(eos_token_id=self.model.generation_config.eos_token_id)
        plain = temporary_attributes([self.model], generation_config=settings)
        with plain, pause_observers(self.model), self.precision.context():
            output: Tensor = self.model.generate(
                input_ids=context,
                attention_mask=attention_mask,
                max_length=max_length,
                stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0]),
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=cache_unsupported_reason(active_methods(self.model).values()) is None,
                synced_gpus=False,  # of a sharded model too process 0 alone generates: others would not answer
                **options,
            )
        for prompt, mask in zip(context, attention_mask.bool(), strict=True):
            self.requests += 1
            if active_methods(self.model):
                with self.precision.context():
                    self.model(input_ids=prompt[mask][None], use_cache=False, logits_to_keep=1)
        return output


def run_task(
    lm: MaskedLM, name: str, loaded: TaskDict, *, label: str, shots: int | None, limit: int | None
) -> TaskResult:
    """Run a loaded task or group of tasks, and count the kept pairs.

    Args:
        shots: few-shot examples; None for the task's own number.
        limit: documents per task.

    Raises:
        UserError: there are too few items for the examples.
        RuntimeError: a document could only be scored as wrong, or a log-likelihood is not finite.
    """
    for task in loaded["tasks"].values():
        default = task.get_config("num_fewshot")
        # a task that fixes 0 has its examples in the prompt
        count = (default or 0) if shots is None or default == 0 else shots
        if shots and not count:
            print(f"{name}: eval.num_fewshot={shots} is ignored, because the prompt of the task has its own examples")
        if count and not task.sampler.df:
            raise UserError(f"eval.num_fewshot must be 0 for {name} (got {count}). It has no examples; use assets=hub.")
        task.set_config(key="num_fewshot", value=count)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    lm.label, lm.requests, lm.pairs = label, 0, PairCounter()
    with observe_selections(lm.model, lm.pairs.observe), redirect_stdout(StringIO()):
        results: Any = evaluate(lm, loaded, limit=limit, bootstrap_iters=BOOTSTRAP_SAMPLES, log_samples=True)
    return TaskResult(
        metrics=list(iter_metrics(results["results"][name], results["higher_is_better"].get(name, {}))),
        samples=[slim_sample(task, sample) for task, samples in results["samples"].items() for sample in samples],
        requests=lm.requests,
        sparsity=lm.pairs.sparsity,
        distant_density=lm.pairs.distant_density,
        group_fractions=lm.pairs.group_fractions,
        version=str(results["versions"].get(name, "")),
        shots=results["n-shot"].get(name),
        differences=lm.explain_differences(loaded),
    )


def iter_metrics(result: dict[str, Any], higher_is_better: dict[str, bool | None]) -> Iterator[Metric]:
    """Yield the metrics among lm-eval's `metric,filter` keys."""
    for place, value in result.items():
        key, comma, filtered = place.partition(",")
        if comma and not key.endswith("_stderr"):
            stderr = result.get(f"{key}_stderr,{filtered}")  # "N/A" where lm-eval has none
            known = stderr if isinstance(stderr, float) else None
            yield Metric(key, filtered, float(value), known, higher_is_better.get(key) is not False)


def slim_sample(task: str, sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample without its prompts; their hash stays.

    Items of one book resemble each other, so the book is their document; other items are documents of their own.
    """
    scores = {key: float(sample[key]) for key in sample["metrics"] if isinstance(sample[key], (bool, int, float))}
    fields = {key: sample[key] for key in ("doc_id", "filter", "doc", "target", "filtered_resps", "prompt_hash")}
    number, book = sample["doc_id"], sample["doc"].get("book")
    place = {"document": f"{task}/{book}", "offset": number} if book else {"document": f"{task}/{number}"}
    return {**place, "scores": scores, **fields}


@functools.cache
def official_tasks() -> TaskManager:
    """Return lm-eval's own tasks; reading their descriptions takes seconds."""
    return TaskManager()


def check_names(names: list[str]) -> None:
    """Raise UserError for a task of neither lm-eval nor the long-range suite."""
    for name in names:
        if not is_long_range(name) and name not in official_tasks().task_index:
            raise UserError(
                f"eval.tasks must hold tasks of lm-eval or of the long-range suite (got {name}). Choose from "
                f"`lm_eval ls tasks` or {', '.join(TASKS)}."
            )


def load_task(name: str, config: Config, cache: Path) -> tuple[TaskDict, str]:
    """Load a task or a group of tasks, and say where its items came from.

    Raises:
        UserError: they are not available under `config.assets`.
    """
    kind, _, words = name.partition("@")
    if is_long_range(name):
        suite = build_suite(cache, config.answer_distance, int(words) if words else None)
        tasks = read_task(TaskManager(include_defaults=False), task_config(suite, kind, name))
        return tasks, f"long-range suite {suite.digest[:12]} of {suite.shape.words} words"
    with redirect_datasets(config.assets, cache) as sources:
        try:
            tasks = read_task(official_tasks(), name)
        # whatever a task's own code, the datasets library or the network make of a missing data set
        except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise UserError(f"{type(error).__name__}: {first_line(error)}") from error
    if name not in {*tasks["tasks"], *(n for n, group in tasks["groups"].items() if group.has_aggregation)}:
        raise UserError(f"eval.tasks must hold tasks with a score (got {name}). Use {', '.join(tasks['tasks'])}.")
    return tasks, "; ".join(dict.fromkeys(sources))


def read_task(manager: TaskManager, spec: Any) -> TaskDict:
    loaded = manager.load([spec])
    for task in loaded["tasks"].values():
        if process := task.get_config("process_docs"):
            # lm-eval processes all documents whenever it asks for one of them
            task.set_config("process_docs", functools.cache(process))
    return loaded


@contextmanager
def redirect_datasets(policy: str, cache: Path) -> Iterator[list[str]]:
    """Read lm-eval's data sets from where `policy` says; yields the sources.

    Its tasks ask for the hub's data sets by name; answering that call leaves their definitions unchanged.
    """
    from_hub = datasets.load_dataset
    sources: list[str] = []

    def read(path: str, name: str | None = None, **options: Any) -> Any:
        if uses_embedded(policy, "datasets", path, replaceable=True):
            sources.append(describe_source(path, name))
            return load_benchmark(path, name, cache)
        hub_reachable()  # offline from here on if not
        sources.append(f"{path} (hub)")
        return from_hub(path, name, **options)

    datasets.load_dataset = read
    try:
        yield sources
    finally:
        datasets.load_dataset = from_hub
