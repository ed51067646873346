"""Load model and data, and check that they fit; shared by every job with a model."""

from __future__ import annotations

from transformers import PreTrainedModel

from focus_exp.assets import cache_root
from focus_exp.config import Config
from focus_exp.data import SPLITS, Corpus, SequenceDataset, find_bos, load_corpus
from focus_exp.data.texts import find_texts
from focus_exp.errors import UserError
from focus_exp.evaluation.benchmarks import BenchmarkEvaluator
from focus_exp.evaluation.evaluators import Evaluators
from focus_exp.evaluation.perplexity import PerplexityEvaluator
from focus_exp.jobs.backend import check_backend
from focus_exp.jobs.base import make_base, with_base
from focus_exp.jobs.run import Run
from focus_exp.models.adapter import read_adapter
from focus_exp.models.load import LoadedModel, load_model
from focus_exp.speed.timing import device_name
from focus_exp.training.distributed import place_base, strategy_name
from focus_exp.training.precision import Precision


def headline(config: Config) -> str:
    """One line on what is about to run."""
    run = f"{config.experiment}, {config.variant}" if config.variant else config.experiment
    what = f"{run}: {config.recipe.name} of {config.model.name} with {config.attention.name}"
    tokens = config.trainer.batch_size * config.trainer.accumulate * config.data.seq_len
    phases = ", then ".join(f"{p.steps} steps of {tokens:,} tokens ({p.trainable})" for _, p in config.phases)
    return f"{what} on {config.data.name}, seed {config.seed}: {phases or 'no training'}"


def describe_processes(config: Config) -> str:
    count = config.trainer.devices * config.trainer.num_nodes
    return "" if count == 1 else f", {strategy_name(config.trainer)} over {count} processes"


def describe(precision: Precision) -> str:
    return f"{device_name(precision.device)}, {precision.name} ({precision.reason})"


def load(run: Run, precision: Precision) -> tuple[LoadedModel, Corpus]:
    """The model on its device and the corpus, both announced and on record."""
    config, cache = run.config, cache_root(run.config.cache_dir)
    if config.data.source == "files":  # what is wrong with them is known before a model is fetched or trained
        find_texts(config.data.files)
    make_base(config)
    loaded = load_model(
        with_base(config), assets=config.assets, cache=cache, seed=config.seed, dtype=precision.weights,
        from_scratch=config.recipe.from_scratch,
    )  # fmt: skip
    run.describe_model(loaded.provenance, sum(p.numel() for p in loaded.model.parameters()))
    place_base(loaded.model, config, precision.device)
    corpus = load_corpus(config.data, loaded.tokenizer, assets=config.assets, cache=cache)
    if corpus.special_tokens:
        run.warn(
            f"{corpus.special_tokens:,} strings in the text, such as {loaded.tokenizer.eos_token}, became special "
            "tokens; data.split_special_tokens=true tokenises them as text"
        )
    run.describe_data(corpus.provenance, {name: len(getattr(corpus, name)) for name in SPLITS})
    run.save()
    return loaded, corpus


def prepare(run: Run, loaded: LoadedModel, corpus: Corpus, precision: Precision) -> tuple[PreTrainedModel, Evaluators]:
    """The frozen base, and what scores it on held-out text; UserError where they do not fit."""
    config, model = run.config, loaded.model
    check_length(model, "eval.seq_len", config.eval.seq_len, config.model.name)
    bos = find_bos(loaded.tokenizer)
    held_out = corpus.validation if config.eval.split == "validation" else corpus.test
    windows = SequenceDataset(held_out, config.eval.seq_len, stride=config.eval.stride, bos=bos, cross_documents=False)
    for warning in windows.length_warnings("eval.seq_len"):
        run.warn(warning)
    check_backend(model, config.attention.backend)
    model.requires_grad_(False)
    for adapter in config.eval.adapters:  # what is wrong with them is known before the hours of training
        read_adapter(model, adapter, check_base=config.check_base)
    weights, folder = loaded.provenance.fingerprint, run.folder
    perplexity = PerplexityEvaluator(model, windows, config, precision, folder / "evaluation", weights)
    tasks = folder / "benchmarks"
    benchmarks = BenchmarkEvaluator(model, loaded.tokenizer, windows, config, precision, tasks, weights)
    return model, Evaluators(perplexity, benchmarks)


def training_blocks(config: Config, loaded: LoadedModel, corpus: Corpus) -> SequenceDataset:
    """Cut the training text into blocks; UserError where the model or the text is too short for one."""
    check_length(loaded.model, "data.seq_len", config.data.seq_len, config.model.name)
    return SequenceDataset(corpus.train, config.data.seq_len, bos=find_bos(loaded.tokenizer), cross_documents=True)


def check_length(model: PreTrainedModel, key: str, length: int, name: str) -> None:
    """UserError where the model has no position for so many tokens."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise UserError(f"{key}={length} exceeds the {longest} positions of {name}; use {longest} or less")
