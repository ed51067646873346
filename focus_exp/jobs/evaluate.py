"""job=evaluate: measure an adapter that was trained before, on any data, beside its base and the controls."""

from __future__ import annotations

from dataclasses import replace

from focus_exp.checks import validate
from focus_exp.config import AttentionConfig, Config, RegimeConfig
from focus_exp.errors import UserError
from focus_exp.jobs.backend import set_backend
from focus_exp.jobs.run import finished_record, open_run, run_folder
from focus_exp.jobs.train import describe, load, prepare
from focus_exp.models.adapter import load_adapter, read_description
from focus_exp.models.attach import is_causal
from focus_exp.training.precision import choose_precision


def evaluate(config: Config) -> None:
    """Measure `config.adapter` as `config.eval` says; attention is the adapter's, save top_k, pair_rule, backend."""
    if not config.adapter:
        raise UserError("job=evaluate needs adapter=<folder that save_adapter wrote>, such as <run folder>/adapter")
    description = read_description(config.adapter)
    config = with_adapter(config, description)
    folder = run_folder(config)
    if not config.overwrite and (done := finished_record(folder)):
        print("\n".join([*done.findings, "", f"finished already, in {folder}; overwrite=true runs it again"]))
        return
    precision = choose_precision(config.trainer.precision, config.trainer.accelerator, trains_base=False)
    attention = config.attention
    kept = f"{attention.method}, K={attention.groups}, window {attention.window}"
    print(f"evaluation of {config.adapter} ({kept}: the adapter's own) on {config.data.name}; {describe(precision)}")
    print(f"run folder: {folder}")
    with open_run(config, describe(precision)) as run:
        loaded, corpus = load(run, precision)
        model, evaluation, _ = prepare(run, loaded, corpus, precision)
        load_adapter(model, str(config.adapter))
        set_backend(model, config, precision, config.eval.window)
        evaluation.measure_base()
        evaluation.measure_attached()
        run.record.method = {
            "name": config.attention.name,
            "causal": is_causal(model),
            "trainable_parameters": description["trainable_parameters"],
        }
        run.record.layers = list(description["layers"])
        evaluation.write_into(run.record)


def with_adapter(config: Config, description: dict[str, object]) -> Config:
    """The configuration with the adapter's own method in place of attention.*, and nothing to train."""
    options = dict(description["options"])  # type: ignore[call-overload]
    chosen = {key: getattr(config.attention, key) for key in ("top_k", "pair_rule", "backend")}
    attention = AttentionConfig(name=config.attention.name, method=str(description["method"]), **{**options, **chosen})
    merged = replace(config, attention=attention, regime=RegimeConfig(name="none"))
    validate(merged)
    return merged
