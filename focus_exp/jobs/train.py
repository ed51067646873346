"""job=train."""

from __future__ import annotations

from dataclasses import asdict

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus_exp.config import Config
from focus_exp.evaluation.evaluators import Evaluators
from focus_exp.jobs.backend import dense_training
from focus_exp.jobs.fit import attach_method, fit
from focus_exp.jobs.prepare import describe, describe_processes, headline, load, prepare, training_blocks
from focus_exp.jobs.run import Run, already_finished, open_run
from focus_exp.jobs.tune import last_rate, trial_measurement, tuned
from focus_exp.models.load import fingerprint, gather_tensor
from focus_exp.results.record import Trial
from focus_exp.storage import atomic_write
from focus_exp.training.distributed import (
    check_strategy,
    is_main,
    is_sharded,
    process_group,
    run_on_rank_zero,
    sequential_by_rank,
)
from focus_exp.training.phases import unreached_learning_rates
from focus_exp.training.precision import choose_device, choose_precision


def train(config: Config) -> None:
    """Measure the base, attach, train, switch to hard routing, measure again.

    A run is written to runs/<experiment>/<model>-<data>-<device>/<method or variant>-seed<n>-<config hash>:
    config.yaml, metrics.jsonl, probe.jsonl (router load on held-out tokens during training), adapter/, record.json,
    measurements.csv, losses.csv, table.md, figures/ and an offline W&B run. Re-run the same command to resume, to
    the same numbers; overwrite=true repeats a finished run.

    assets=auto|hub|embedded chooses where weights and data may come from. A substitute is named in the first lines,
    in the path and in every table. Below the break-even length of the device, hard routing uses masked attention,
    which gives the same result without a speedup.
    """
    if not already_finished(config):
        check_strategy(config, choose_device(config.trainer.accelerator))
        carry_out(config, *tuned(config, train))


def carry_out(asked: Config, config: Config, trials: list[Trial]) -> None:
    """Run what `asked` names with the learning rate of `config`, the best of the `trials`."""
    precision = choose_precision(config.trainer.precision, config.trainer.accelerator, config.recipe.trains("all"))
    device = f"{describe(precision)}{describe_processes(config)}"
    with process_group(config.trainer, precision.device.type), open_run(asked, device) as run:
        run.config, run.record.config, run.record.trials = config, asdict(config), trials
        print(f"{headline(config)}; {device}")
        run.record.measurements += map(trial_measurement, trials)
        print(f"run folder: {run.folder}")
        if trials:
            print(f"learning rate {last_rate(config):g}, the best of {len(trials)} on validation text")
        with sequential_by_rank(config.trainer.devices):
            loaded, corpus = load(run, precision)
        model, evaluators = prepare(run, loaded, corpus, precision)
        blocks = training_blocks(config, loaded, corpus)
        for sentence in filter(None, [dense_training(model, config), *unreached_learning_rates(config)]):
            run.warn(sentence)
        run_on_rank_zero(model, evaluators.measure_base)
        with run.training():
            attach_method(model, config, precision)
            fit(run, model, blocks, precision, evaluators.perplexity)
            if config.recipe.trains("all"):
                save_weights(run, model, loaded.tokenizer)
                # what a run with model.path= of them says it began with
                run.record.method["weights"] = fingerprint(model)
        run_on_rank_zero(
            model, lambda: evaluators.measure_attached(lambda *scored: publish_round(run, evaluators, *scored))
        )
        evaluators.write_final(run.record, run.folder)


def publish_round(run: Run, evaluators: Evaluators, scored: int, total: int) -> None:
    """Write and print the table of the sequences scored so far; the last round is that of the finished run."""
    if scored < total:
        trained = run.record.measurements
        evaluators.write(run.record, run.folder)
        print(f"{scored} of {total} sequences:")
        run.write_tables()
        run.record.measurements = trained


def save_weights(run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """The whole trained base with its tokenizer, as model.path= takes it; the routers are in the adapter."""
    # of those that its family may tie the ones that this model does tie, for which a whole model's share their memory
    tied = set(model.all_tied_weights_keys) if is_sharded(model) else set()
    state = {}
    for name, tensor in model.state_dict().items():
        if ".focus." not in name and name not in tied:
            gathered = gather_tensor(tensor).cpu() if is_sharded(model) else tensor
            if is_main():
                state[name] = gathered
    if not is_main():
        return
    with atomic_write(run.folder / "model") as new:
        model.save_pretrained(new, state_dict=state)
        tokenizer.save_pretrained(new)
