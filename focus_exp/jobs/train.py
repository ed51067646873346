"""job=train: load, measure the base, attach, train, make hard, measure again, write it all down.

A run lives in runs/<experiment>/<model>-<attention>-<regime>/seed=<n>-<hash of the configuration>: config.yaml,
metrics.jsonl, probe.jsonl (largest group, dead groups and stability on the same held-out tokens while a router is
trained), adapter/, record.json, table.md, quality.csv, figures/ and an offline W&B run. The same command on an
interrupted run goes on where it stopped, to the same numbers; on a finished one it says so (overwrite=true repeats
it).

assets=auto|hub|embedded says which weights and text may be used; what stands in for what is said in the first lines
and in every table. Hard groups below the break-even of the device, which is measured once and cached, go through
masked attention, which computes the same and saves nothing.
"""

from __future__ import annotations

import json
import sys
import time

import pytorch_lightning as pl
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.assets import cache_root
from focus_exp.attention.focus_options import FocusOptions
from focus_exp.config import Config, phases_of, to_dict
from focus_exp.config_attention import method_options
from focus_exp.data import SPLITS, Blocks, Corpus, bos_of, load_corpus
from focus_exp.data.files import find_texts
from focus_exp.errors import UserError
from focus_exp.evaluation.benchmarks import Benchmarks
from focus_exp.evaluation.evaluation import Evaluation
from focus_exp.evaluation.quality import Quality
from focus_exp.jobs.backend import check_backend, dense_training, set_backend
from focus_exp.jobs.base import make_base, with_base
from focus_exp.jobs.run import Run, already_finished, open_run
from focus_exp.jobs.tune import last_rate, tuned
from focus_exp.models.adapter import read_adapter, save_adapter
from focus_exp.models.attach import attach
from focus_exp.models.attached import attachment_of, is_causal, is_trainable
from focus_exp.models.load import LoadedModel, fingerprint, load_model, whole
from focus_exp.models.lora import add_lora, describe_lora, router_parameters, save_lora
from focus_exp.models.modules import attached_methods
from focus_exp.records.metrics import read_metrics
from focus_exp.records.rows import ProbeRow, Try
from focus_exp.speed.timing import device_name
from focus_exp.storage import aside
from focus_exp.training.checkpoints import checkpoint_of, mend
from focus_exp.training.dual_fit import fit_dual, rebalance, table_of
from focus_exp.training.exchange import agreed, alone, in_turns, is_main
from focus_exp.training.indexer_fit import fit_indexers
from focus_exp.training.module import NonFiniteError
from focus_exp.training.precision import Precision, choose_device, choose_precision
from focus_exp.training.probe import PROBES, probe_tokens
from focus_exp.training.processes import processes
from focus_exp.training.regimes import CHECKPOINTS, train_phases, unreached_rates
from focus_exp.training.strategies import check_strategy, is_sharded, place, place_added, share_added, strategy_name
from focus_exp.training.warm_start import calibrate, calibrated, warm_start

# how the other processes of a run are started
FOLLOWER = [sys.executable, "-m", "focus_exp.jobs.follower"]


def train(config: Config) -> None:
    """Run the experiment that `config` describes, or say that it is finished already."""
    if not already_finished(config):
        check_strategy(config, choose_device(config.trainer.accelerator))
        carry_out(config, *tuned(config, train))


def carry_out(asked: Config, config: Config, tries: list[Try]) -> None:
    """The run that `asked` names, with the learning rate of `config`, which was the best of the `tries`. The processes
    that are started here are told it, for one that looked for it would repeat tries which the others do not."""
    precision = choose_precision(config.trainer.precision, config.trainer.accelerator, config.regime.trains("all"))
    device = f"{describe(precision)}{describe_processes(config)}"
    told = json.dumps([to_dict(asked), to_dict(config)])
    with processes(config.trainer, precision.device.type, FOLLOWER, told), open_run(asked, device) as run:
        run.config, run.record.config, run.record.tries = config, to_dict(config), tries
        print(f"{headline(config)}; {device}")
        print(f"run folder: {run.folder}")
        if tries:
            print(f"learning rate {last_rate(config):g}, the best of {len(tries)} on validation text")
        with in_turns(config.trainer.devices):
            loaded, corpus = load(run, precision)
        model, evaluation, blocks = prepare(run, loaded, corpus, precision)
        for sentence in filter(None, [dense_training(model, config), *unreached_rates(config)]):
            run.warn(sentence)
        alone(model, evaluation.measure_base)
        with run.training():
            attach_method(model, config, precision)
            fit(run, model, blocks, precision, evaluation.quality)
            if config.regime.trains("all"):
                save_weights(run, model, loaded.tokenizer)
                # what a run with model.path= of them says it began with
                run.record.method["weights"] = fingerprint(model)
        alone(model, evaluation.measure_attached)
        evaluation.write_into(run.record, run.folder)


def load(run: Run, precision: Precision) -> tuple[LoadedModel, Corpus]:
    """The model on its device and the corpus, both announced and on record."""
    config, cache = run.config, cache_root(run.config.cache_dir)
    if config.data.source == "files":  # what is wrong with them is known before a model is fetched or trained
        find_texts(config.data.files)
    make_base(config)
    loaded = load_model(
        with_base(config), assets=config.assets, cache=cache, seed=config.seed, dtype=precision.weights,
        from_scratch=config.regime.from_scratch,
    )  # fmt: skip
    run.describe_model(loaded.provenance, sum(p.numel() for p in loaded.model.parameters()))
    place(loaded.model, config, precision.device)
    corpus = load_corpus(config.data, loaded.tokenizer, assets=config.assets, cache=cache)
    run.describe_data(corpus.provenance, {name: len(getattr(corpus, name)) for name in SPLITS})
    run.save()
    return loaded, corpus


def prepare(
    run: Run, loaded: LoadedModel, corpus: Corpus, precision: Precision
) -> tuple[PreTrainedModel, Evaluation, Blocks]:
    config, model = run.config, loaded.model
    check_length(model, "data.block_size", config.data.block_size, config.model.name)
    check_length(model, "eval.window", config.eval.window, config.model.name)
    bos = bos_of(loaded.tokenizer)
    held_out = corpus.validation if config.eval.split == "validation" else corpus.test
    windows = Blocks(held_out, config.eval.window, stride=config.eval.stride, bos=bos, cross_documents=False)
    for sentence in windows.left_out("eval.window"):
        run.warn(sentence)
    blocks = Blocks(corpus.train, config.data.block_size, bos=bos, cross_documents=True)
    check_backend(model, config.attention.backend)
    model.requires_grad_(False)
    for adapter in config.eval.adapters:  # what is wrong with them is known before the hours of training
        read_adapter(model, adapter)
    weights, folder = loaded.provenance.fingerprint, run.folder
    quality = Quality(model, windows, config, precision, folder / "evaluation", weights)
    benchmarks = Benchmarks(model, loaded.tokenizer, windows, config, precision, folder / "benchmarks", weights)
    return model, Evaluation(quality, benchmarks), blocks


def check_length(model: PreTrainedModel, key: str, length: int, name: str) -> None:
    """UserError where the model has no position for so many tokens."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise UserError(f"{key}={length} exceeds the {longest} positions of {name}; use {longest} or less")


def attach_method(model: PreTrainedModel, config: Config, precision: Precision) -> None:
    if config.attention.method != "full":
        pl.seed_everything(config.seed, verbose=False)
        attach(model, config.attention.method, **method_options(config.attention))
        set_backend(model, config, precision, max(config.eval.window, config.data.block_size))
    if config.regime.trains("lora"):
        budget = router_parameters(model, config.regime.lora.router_groups, FocusOptions.routing_dim)
        pl.seed_everything(config.seed, verbose=False)
        add_lora(model, config.regime.lora, budget)
        added = describe_lora(model)
        print(
            f"{added['name']} on {', '.join(added['target_modules'])}: {trained_parameters(model, config):,} numbers "
            f"to train, where a router of {config.regime.lora.router_groups} groups has {budget:,}"
        )
    place_added(model, precision.device)


def fit(run: Run, model: PreTrainedModel, blocks: Blocks, precision: Precision, quality: Quality | None = None) -> None:
    """Warm start, phases, calibration; what was added is on disk when it returns, and after a non-finite loss too.

    With `quality` routers are watched on its text while they are trained, and measured between phases.
    """
    config, record = run.config, run.record
    phases, routed = phases_of(config), config.has_router
    if is_main():
        for sentence in mend(run.folder / CHECKPOINTS):
            run.warn(sentence)
    begun = agreed(any(checkpoint_of(run.folder / CHECKPOINTS, name).exists() for name, _ in phases[:1]))
    fitting = fit_first(run, model, blocks, precision, begun)
    balancing = sample_blocks(blocks, config.focus.calibration_blocks, config.seed + 2) if routed else []
    moved = sample_blocks(blocks, config.dual.fit_blocks, config.seed + 2) if config.dual and phases else []

    def measure(phase: str) -> None:
        assert quality is not None
        with calibrated(model, balancing, precision):
            quality.measure_between(phase)

    def between(phase: str) -> None:
        if quality and routed:
            alone(model, lambda: measure(phase))

    share_added(model)
    try:
        trained = train_phases(
            model, blocks, config, precision, run.folder, run.loggers,
            probed=probe_tokens(quality.blocks) if quality else None,
            between=between, logged=run.show,
        )  # fmt: skip
    except NonFiniteError as error:
        kept = run.folder / CHECKPOINTS
        if config.regime.trains("lora"):
            kept = save_lora(model, run.folder / "adapter", is_main())
        elif routed and not config.regime.trains("all"):
            kept = save_adapter(model, run.folder / "adapter", {"note": f"the last good state: {error}"}, is_main())
        raise UserError(
            f"{error}; training stopped, the last good state is in {kept}. "
            "Lower regime.phases.*.learning_rate or trainer.gradient_clip"
        ) from error
    record.steps = trained.steps
    record.tokens_seen = trained.tokens + sum(tokens.numel() for tokens in (*fitting, *balancing, *moved))
    record.probes = [ProbeRow(**line) for line in read_metrics(run.folder / PROBES)]
    record.method = {
        "name": config.attention.name,
        "causal": is_causal(model),
        "trainable_parameters": trained_parameters(model, config),
    }
    if moved:
        alone(model, lambda: rebalance(model, moved, precision))
    if routed:
        alone(model, lambda: calibrate(model, balancing, precision))
        record.layers = attachment_of(model).layers
        record.method |= method_options(config.attention)
    # a budget may leave no encoder anywhere, and is what a layer reads nevertheless
    if config.dual or any(method.state_dict() for method in attached_methods(model).values()):
        extra = {"trained_with": config.model.name, "substitution": record.model.get("substitution")}
        extra |= {"steps": trained.steps, "tokens": record.tokens_seen, "seed": config.seed}
        save_adapter(model, run.folder / "adapter", extra, is_main())
    if config.regime.trains("lora"):
        record.method |= describe_lora(model)
        save_lora(model, run.folder / "adapter", is_main())
    model.eval()


def fit_first(run: Run, model: PreTrainedModel, blocks: Blocks, precision: Precision, begun: bool) -> list[Tensor]:
    """Fit what is attached to the frozen base before any phase; the blocks of text that this took."""
    config, cache = run.config, cache_root(run.config.cache_dir)
    seed = config.seed
    if config.has_router and phases_of(config) and config.focus.warm_start_blocks:
        sample = sample_blocks(blocks, config.focus.warm_start_blocks, seed + 1)
        if not begun:
            began = time.perf_counter()
            alone(model, lambda: warm_start(model, sample, config.focus.warm_start_steps, precision, seed))
            print(f"routers fitted to the attention in {len(sample)} blocks ({time.perf_counter() - began:.0f} s)")
        return sample
    if config.fitting is None:
        return []
    sample = sample_blocks(blocks, config.fitting.fit_blocks, seed + 1)
    began = time.perf_counter()
    if config.dual:
        run.record.fits, seconds = fit_dual(model, sample, config.dual, precision, cache, seed)
        print(table_of(run.record.fits))
    else:
        seconds = fit_indexers(model, sample, config.fitting, precision, cache, seed)
    run.record.fit_seconds = seconds
    # what other runs spent on it belongs to what this one would have taken alone; an earlier part has counted its own
    run.record.train_seconds = max(run.record.train_seconds or 0.0, seconds - (time.perf_counter() - began))
    return sample


def trained_parameters(model: PreTrainedModel, config: Config) -> int:
    """Numbers trained in any phase or fitted before, by the same predicate that freezes."""
    parts = {phase.train for _, phase in phases_of(config)} | ({"router"} if config.fitting else set())
    return sum(p.numel() for name, p in model.named_parameters() if any(is_trainable(name, part) for part in parts))


def save_weights(run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """The whole trained base with its tokenizer, as model.path= takes it; the routers are in the adapter."""
    # of those that its family may tie the ones that this model does tie, for which a whole model's share their memory
    tied = set(model.all_tied_weights_keys) if is_sharded(model) else set()
    state = {}
    for name, tensor in model.state_dict().items():
        if ".focus." not in name and name not in tied:
            gathered = whole(tensor).cpu() if is_sharded(model) else tensor
            if is_main():
                state[name] = gathered
    if not is_main():
        return
    with aside(run.folder / "model") as new:
        model.save_pretrained(new, state_dict=state)
        tokenizer.save_pretrained(new)


def sample_blocks(blocks: Blocks, count: int, seed: int) -> list[Tensor]:
    chosen = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))[:count]
    return [blocks[int(i)]["input_ids"] for i in chosen]


def headline(config: Config) -> str:
    """One line on what is about to run."""
    run = f"{config.experiment}, {config.arm}" if config.arm else config.experiment
    what = f"{run}: {config.regime.name} of {config.model.name} with {config.attention.name}"
    tokens = config.trainer.batch_size * config.trainer.accumulate * config.data.block_size
    phases = ", then ".join(f"{p.steps} steps of {tokens:,} tokens ({p.train})" for _, p in phases_of(config))
    return f"{what} on {config.data.name}, seed {config.seed}: {phases or 'no training'}"


def describe_processes(config: Config) -> str:
    count = config.trainer.devices * config.trainer.num_nodes
    return "" if count == 1 else f", {strategy_name(config.trainer)} over {count} processes"


def describe(precision: Precision) -> str:
    return f"{device_name(precision.device)}, {precision.name} ({precision.reason})"
