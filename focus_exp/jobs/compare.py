"""job=compare."""

from __future__ import annotations

import gc
import logging
from dataclasses import asdict, replace

from focus_exp.config import Config
from focus_exp.errors import UserError, first_line
from focus_exp.jobs.evaluate import evaluate_adapter
from focus_exp.jobs.train import train
from focus_exp.results.record import RECORD, TRAINING_TEXT, Record, VariantRun
from focus_exp.results.run_dir import earlier_record, name_data, name_model, run_folder
from focus_exp.runs.compose import (
    command_overrides,
    compose_variant,
    compose_variants,
    describe_budget,
    runs_alone,
    variant_settings,
)
from focus_exp.runs.open import lock_run_dir, record_run
from focus_exp.runs.resume import finished_record
from focus_exp.storage import InUse

log = logging.getLogger(__name__)


def compare(config: Config) -> None:
    """Run the variants of a comparison on the same tokens and put their results into one table.

    A variant is an ordinary run that differs in a few settings, an entry of conf/variant; what is typed holds for
    every variant, also where it sets something else. `variants=[focus,lora]` chooses some, `+variant=compare/lora` runs
    one alone, `-m +variant=compare/lora,compare/sparq` runs them as jobs of their own. The command without `+variant`
    runs what is left and writes the table, in which a failed variant keeps its reason; then it exits with 2 and names
    the failed ones. `attention=<method>` runs that method alone, with the settings of the experiment.
    """
    configs = compose_variants(config)  # all of them: a mistake in the last one is found before the first one runs
    if runs_alone(config):
        run_variant(*configs.values())
        return
    shared = compose_variant(config, None, command_overrides())
    config = replace(config, model=shared.model, data=shared.data)  # which name the folder of the run
    what = f"{len(configs)} variants of {name_model(shared)} on {name_data(shared)}, seed {config.seed}"
    print(f"{config.experiment}: {what}; {describe_budget(config)}\nvariants: {', '.join(configs)}")
    with lock_run_dir(config):
        errors = run_variants(configs)
        with record_run(config) as run:
            recorded = replace(shared, job="compare", variants=config.variants, references=config.references)
            run.record.config = asdict(recorded)
            run.record.variants = [
                describe_variant(name, variant, variant_settings(config, name), errors.get(name))
                for name, variant in configs.items()
            ]
            records = [record for variant in configs.values() if (record := earlier_record(variant))]
            if measured := next((r for r in records if r.find("nll", variant="base") is not None), None):
                run.record.model = measured.model
                run.record.data = {key: value for key, value in measured.data.items() if key != TRAINING_TEXT}
    if errors:
        raise UserError(
            f"variants failed: {', '.join(errors)} ({len(errors)} of {len(configs)}), for the reasons in {run.folder}. "
            "Re-run the same command to run them again, or leave them out of variants."
        )


def run_variant(config: Config) -> None:
    (evaluate_adapter if config.adapter else train)(config)


def run_variants(configs: dict[str, Config]) -> dict[str, str]:
    """Run the variants that are not finished; returns the reasons of those that failed."""
    errors: dict[str, str] = {}
    to_run = {name: config for name, config in configs.items() if config.overwrite or not finished_record(config)}
    if len(to_run) < len(configs):
        print(f"already finished: {', '.join(name for name in configs if name not in to_run)}")
    for number, (name, config) in enumerate(to_run.items(), start=1):
        print(f"\nvariant {number} of {len(to_run)}: {name}")
        try:
            run_variant(config)
        except (OSError, InUse):  # a full disk fails every variant; a command that runs one may run the others too
            raise
        except Exception as error:  # of any method's code
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            errors[name] = f"{kind}{first_line(error)}"
            log.error("variant %s failed: %s", name, errors[name])
        gc.collect()
    return errors


def describe_variant(name: str, config: Config, settings: list[str], error: str | None) -> VariantRun:
    """Return a variant's entry in the record of the comparison, from its own record."""
    folder = run_folder(config)
    variant = VariantRun(name=name, settings=settings, folder=str(folder))
    if not (folder / RECORD).exists():
        return replace(variant, status="failed", error=error or "it left no record")
    record = Record.load(folder / RECORD)
    same = {key: getattr(record, key) for key in ("status", "config_hash", "started")}
    return replace(variant, error=error or record.error, **same)
