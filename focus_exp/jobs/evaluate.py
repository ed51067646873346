"""job=evaluate."""

from __future__ import annotations

from transformers import PreTrainedModel

from focus_exp.config import Config
from focus_exp.errors import UserError
from focus_exp.jobs.adapter import with_adapter
from focus_exp.jobs.backend import set_backend
from focus_exp.jobs.prepare import describe, load, prepare
from focus_exp.jobs.run import Run, already_finished, open_run, run_folder
from focus_exp.models.adapter import load_adapter, read_description
from focus_exp.models.methods import is_causal
from focus_exp.training.precision import Precision, choose_precision


def evaluate(config: Config) -> None:
    """Measure a trained adapter, on any data, against its base and the controls.

    The base is that of the adapter's run, or else of the Hub, unless an experiment or model= chooses one.
    `eval=downstream` runs lm-eval tasks and states the fraction of pairs pruned on each request; `eval=long_range`
    runs tasks whose answers lie beyond the window. Both need make install-evaluation.
    """
    if not config.adapter:
        raise UserError("job=evaluate needs adapter=<run folder>/adapter, or owner/name of one on the hub")
    measure(with_adapter(config))


def measure(config: Config) -> None:
    """Measure `config.adapter`, of whose own method and base `config` is."""
    if already_finished(config):
        return
    precision = choose_precision(config.trainer.precision, config.trainer.accelerator, trains_base=False)
    attention = config.attention
    groups = f", K={config.focus.groups}" if config.has_router else ""
    kept = f"{attention.method}{groups}, window {attention.window}"
    print(f"evaluation of {config.adapter} ({kept}: the adapter's own) on {config.data.name}; {describe(precision)}")
    print(f"run folder: {run_folder(config)}")
    with open_run(config, describe(precision)) as run:
        loaded, corpus = load(run, precision)
        model, evaluators = prepare(run, loaded, corpus, precision)
        put_adapter(run, model, precision, config.eval.seq_len)
        evaluators.measure_base()
        evaluators.measure_attached()
        evaluators.write_final(run.record, run.folder)


def put_adapter(run: Run, model: PreTrainedModel, precision: Precision, longest: int) -> None:
    """Attach what `config.adapter` holds, for sequences of up to `longest` tokens, and put it on record."""
    config, description = run.config, read_description(str(run.config.adapter))
    load_adapter(model, str(config.adapter), check_base=config.check_base)
    set_backend(model, config, precision, longest)
    run.record.method = {
        "name": config.attention.name,
        "causal": is_causal(model),
        "trainable_parameters": description["trainable_parameters"],
        "trained": {name: description[name] for name in ("steps", "tokens", "seed") if name in description},
    }
    if (then := description["base_model"]["fingerprint"]) != run.record.model.get("fingerprint"):
        run.warn(f"check_base=false: the adapter was trained on other weights (fingerprint {then[:12]})")
    if description.get("seed", config.seed) != config.seed:
        run.warn(
            f"the adapter was trained under seed {description['seed']}, and this run is of seed {config.seed}: reports "
            f"tell runs of several seeds apart by theirs; give it seed={description['seed']}"
        )
