"""Load model and text, train a missing base, and choose the kernel: shared by every job with a model."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.assets import cache_root
from focus_exp.attention.base import SPARSE_FROM
from focus_exp.attention.kernels import KERNELS, KernelRequirements, cpu_sparse
from focus_exp.config import Config, ModelConfig
from focus_exp.data import Corpus, SequenceDataset, TokenStream, find_prefix, load_corpus
from focus_exp.data.texts import find_texts
from focus_exp.errors import UserError
from focus_exp.evaluation.benchmarks import BenchmarkEvaluator
from focus_exp.evaluation.perplexity import PerplexityEvaluator
from focus_exp.identity import identity
from focus_exp.models.adapter import read_adapter
from focus_exp.models.load import count_positions, load_model
from focus_exp.results.losses import LOSSES, TEXT, write_losses
from focus_exp.results.measurement import Measurement
from focus_exp.results.record import TRAINING_TEXT
from focus_exp.results.run_dir import run_folder
from focus_exp.runs.compose import base_overrides, compose_base, needs_base
from focus_exp.runs.open import Run
from focus_exp.runs.resume import check_fingerprint, finished_record
from focus_exp.speed.model import model_shape
from focus_exp.storage import file_lock
from focus_exp.training.distributed import is_main, place_base
from focus_exp.training.phases import tokens_per_step
from focus_exp.training.precision import Precision

SCORES_FORMAT = 2  # 1 paired perplexity@N by the name of the text


@dataclass(frozen=True)
class Setup:
    """The frozen base on its device, its text, and what scores it on held-out text."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    training_text: TokenStream
    perplexity: PerplexityEvaluator
    benchmarks: BenchmarkEvaluator
    written: list[Measurement] = field(default_factory=list)

    def measure_base(self) -> None:
        """Score the unmodified model; of perplexity the first round, unless its weights will be trained.

        Raises:
            UserError: all of eval.tasks failed.
        """
        self.perplexity.measure_base()
        self.benchmarks.measure_base()
        self.benchmarks.require_score()

    def measure_attached(self, on_round: Callable[[int, int], None] | None = None) -> None:
        """Score what is attached or trained; see `PerplexityEvaluator`."""
        self.perplexity.measure_attached(on_round)
        self.benchmarks.measure_attached()

    def write(self, run: Run) -> None:
        """Write the scores in place of those that were written before, and their losses."""
        earlier = {*map(id, self.written)}
        self.written[:] = [*self.perplexity.measurements(), *self.benchmarks.measurements]
        others = [measurement for measurement in run.record.measurements if id(measurement) not in earlier]
        run.record.measurements = [*others, *self.written]
        text = self.perplexity.losses
        losses = ({TEXT: text} if text.nll else {}) | self.benchmarks.losses
        if losses and is_main():
            write_losses(run.folder / LOSSES, losses)


def prepare(run: Run) -> Setup:
    """Load, print and record model and text.

    Raises:
        UserError: if they are not available or do not fit each other.
    """
    config, cache = run.config, cache_root(run.config.cache_dir)
    for data in (config.data, config.scored_data):  # checked before a model is downloaded or trained
        if data.source == "files":
            find_texts(str(data.files))
    building = build_kernel(config, run.precision.device)
    places: dict[str, Any] = {"assets": config.assets, "cache": cache}
    random: dict[str, Any] = {"seed": config.seed, "from_scratch": config.recipe.from_scratch}
    loaded = load_model(train_base(config), dtype=run.precision.weights, **places, **random)
    model, tokenizer = loaded.model, loaded.tokenizer
    parameters = sum(p.numel() for p in model.parameters())
    run.describe("model", loaded.provenance, f"{parameters:,} parameters", parameters=parameters)
    place_base(model, config, run.precision.device)
    trained, corpus = load_texts(run, tokenizer)
    run.save()
    check_length(model, "eval.seq_len", config.eval.seq_len, config.model.name)
    held_out = corpus.validation if config.eval.split == "validation" else corpus.test
    sequences = SequenceDataset(held_out, config.eval.seq_len, prefix=find_prefix(tokenizer), cross_documents=False)
    for warning in sequences.length_warnings("eval.seq_len"):
        run.warn(warning)
    building.join()
    check_backend(model, config.attention.backend, run.precision)
    model.requires_grad_(False)
    for adapter in config.eval.adapters:  # checked before the hours of training
        read_adapter(model, adapter, check_base=config.check_base)
    weights, shared = loaded.provenance.fingerprint, shared_folder(run, held_out, sequences.prefix, cache)
    perplexity = PerplexityEvaluator(
        model, sequences, config, run.precision, run.folder / "evaluation", weights, shared / "evaluation"
    )
    benchmarks = BenchmarkEvaluator(
        model,
        tokenizer,
        sequences,
        config,
        run.precision,
        run.folder / "benchmarks",
        weights,
        shared / "benchmarks",
        warn=run.warn,
    )
    return Setup(model, tokenizer, trained.train, perplexity, benchmarks)


def load_texts(run: Run, tokenizer: PreTrainedTokenizerBase) -> tuple[Corpus, Corpus]:
    """Load, print and record the text that is trained on and the one that is scored, by default the same."""
    config, facts = run.config, dict[str, Any]()
    load = partial(load_corpus, tokenizer=tokenizer, assets=config.assets, cache=cache_root(config.cache_dir))
    needed = count_training_tokens(config)
    trained = scored = load(config.scored_data, train_tokens=1 if config.eval.data else needed)
    if config.eval.data and config.is_trained:
        trained = load(config.data, train_tokens=needed)
        text = trained.provenance
        check_fingerprint("training text", run.record.data.get(TRAINING_TEXT, {}), text.fingerprint, run.folder)
        facts[TRAINING_TEXT] = {"name": text.name, **asdict(text)}
        print(f"training text: {text.used} ({text.source})")
    streams = {"train": trained.train, "validation": scored.validation, "test": scored.test}
    tokens = {name: len(stream) for name, stream in streams.items()}
    detail = ", ".join(f"{name} {count:,} tokens" for name, count in tokens.items())
    run.describe("data", scored.provenance, detail, tokens=tokens, **facts)
    return trained, scored


def shared_folder(run: Run, text: TokenStream, prefix: list[int], cache: Path) -> Path:
    """Return where runs share the scores of the same unmodified model on the same text, whatever else they score."""
    used = [SCORES_FORMAT, identity(run.config, of="base"), run.record.model["fingerprint"], text.digest, prefix]
    key = [*used, run.precision.name, run.precision.device.type]
    return cache / "scores" / hashlib.sha256(repr(key).encode()).hexdigest()[:16]


def count_training_tokens(config: Config) -> int:
    """Return the training tokens that a run takes, at least those of the longest variant of a comparison.

    Variants with as many steps then read the same text in the same order.
    """
    budget = config.budget
    steps = max(sum(phase.steps for _, phase in config.phases), budget["both_steps"])
    router = config.recipe.router
    warm_up = router.warm_start_sequences + router.balance_sequences if router else 0
    fitted = config.fitting.sequences if config.fitting else 0
    shared = sum(budget[f"{name}_sequences"] for name in ("warm_start", "balance", "calibration"))
    return steps * tokens_per_step(config) + max(warm_up + fitted, shared) * config.data.seq_len


def training_sequences(config: Config, setup: Setup) -> SequenceDataset:
    """Cut the training text into sequences; UserError if model or text is too short for one."""
    check_length(setup.model, "data.seq_len", config.data.seq_len, config.model.name)
    prefix = find_prefix(setup.tokenizer)
    return SequenceDataset(setup.training_text, config.data.seq_len, prefix=prefix, cross_documents=True)


def check_length(model: PreTrainedModel, key: str, length: int, name: str) -> None:
    """Raise UserError if the model has fewer positions."""
    positions = count_positions(model)
    if positions is not None and length > positions:
        fix = f"Type {key}={positions}, or a model with more." if "+" not in key else "Give smaller ones."
        raise UserError(f"{key} must be <= {positions}, the positions of {name} (got {length}). {fix}")


def train_base(config: Config) -> ModelConfig:
    """Return the model's configuration with its weights' folder, trained first by model.base_run if they are missing.

    They are trained in another process; of several commands that need them one trains and the others wait.
    """
    if not needs_base(config):
        return config.model
    base = compose_base(config)
    folder = run_folder(base)
    with file_lock(folder.with_name(f".{folder.name}.making"), str(folder), wait=True):
        if finished_record(base) is None:
            print(f"training {config.model.name} first: {' '.join(config.model.base_run)}")
            command = [sys.executable, "-m", "focus_exp", *base_overrides(config)]
            if code := subprocess.run(command).returncode:
                raise UserError(
                    f"training model={config.model.name} failed with exit code {code}, for the reason above. Or type "
                    "model.path=<other weights>."
                )
    return replace(config.model, path=str(folder / "model"))


def build_kernel(config: Config, device: torch.device) -> Thread:
    """Start to compile the CPU kernel, if it will serve and is not there, while model and text are loaded."""
    serves = device.type == "cpu" and config.attention.backend in ("auto", "cpu")
    is_long = max(config.data.seq_len, config.eval.seq_len) >= SPARSE_FROM["cpu"]
    thread = Thread(target=cpu_sparse.unavailable_reason if serves and is_long else lambda: None, daemon=True)
    thread.start()
    return thread


def check_backend(model: PreTrainedModel, backend: str, precision: Precision) -> None:
    """Raise UserError if the requested kernel does not support this model on this device."""
    dtype = torch.bfloat16 if precision.autocast else model.dtype
    requirements = KernelRequirements(model.device.type, dtype, model_shape(model).head_dim)
    reason = KERNELS[backend].unsupported_reason(requirements) if backend in KERNELS else None
    if backend == "flash" and getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        reason = "takes no softcap"
    if reason:
        raise UserError(f"attention.backend must be supported here (got {backend}, which {reason}). Type auto.")
