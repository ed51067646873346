"""job=compare."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from focus_exp.config import Config
from focus_exp.errors import UserError, first_line
from focus_exp.jobs.base import share_scores
from focus_exp.jobs.evaluate import measure
from focus_exp.jobs.prepare import describe
from focus_exp.jobs.run import Run, claimed, finished_record, judged, new_run, recorded, run_folder, seconds_text
from focus_exp.jobs.train import train
from focus_exp.jobs.variants import compose_variant, compose_variants, variant_name, variant_settings
from focus_exp.results.comparison import compare_variants
from focus_exp.results.record import Record, VariantRun
from focus_exp.results.run_dir import NOT_ENDED
from focus_exp.storage import InUse
from focus_exp.training.precision import choose_precision

log = logging.getLogger(__name__)


def compare(config: Config) -> None:
    """Run the variants of a comparison on the same tokens and put their results into one table.

    A variant is an ordinary run that differs in a few settings, a file below conf/variant. `variants=[focus,lora]`
    chooses some, `+variant=compare/lora` runs one alone, `-m +variant=compare/lora,compare/sparq` runs them as jobs
    of their own. The command without `+variant` runs what is left and writes the table, in which a failed variant
    keeps its reason.
    """
    # all of them before the first one runs: a mistake in the last should not cost what the others take
    configs = compose_variants(config)
    print(f"{config.experiment}: {len(configs)} arms, seed {config.seed}: {', '.join(configs)}")
    if config.variant:
        errors = run_arms(configs, others=finished_arms(config))
        if config.variant in errors:
            raise UserError(f"variant {config.variant} failed: {errors[config.variant]}")
        return
    with claimed(run_folder(config)):
        compare_all(config, configs)


def compare_all(config: Config, configs: dict[str, Config]) -> None:
    shared = compose_variant(config, None, HydraConfig.get().overrides.task)
    precision = choose_precision(shared.trainer.precision, shared.trainer.accelerator, trains_base=False)
    # what all arms share is what the comparison says of itself
    said = asdict(replace(shared, job="compare", variants=config.variants, references=config.references))
    waiting = new_run(config, describe(precision))
    waiting.record.config = said
    waiting.record.variants = [
        VariantRun(
            name=name,
            settings=variant_settings(config, name),
            folder=str(run_folder(arm)),
            status="interrupted",
            error=NOT_ENDED,
        )
        for name, arm in configs.items()
    ]
    try:
        with judged(waiting.record):
            errors = run_arms(configs, waiting)
    except BaseException:
        waiting.save()
        raise
    with recorded(config, describe(precision)) as run:
        run.record.config = said
        run.record.variants = [
            describe_arm(name, arm, variant_settings(config, name), errors.get(name)) for name, arm in configs.items()
        ]
        compare_variants(run.record, run.folder, config.references)
        if len(processors := processors_of(configs)) > 1:
            named = "; ".join(f"{cpu}: {', '.join(names)}" for cpu, names in processors.items())
            run.warn(f"arms were trained on several processors, whose rounding training magnifies ({named})")
        if len(bases := bases_of(run.record.variants)) > 1:
            named = "; ".join(", ".join(names) for names in bases.values())
            run.warn(f"arms of different base models are not compared with each other ({named})")


def bases_of(arms: list[VariantRun]) -> dict[str, list[str]]:
    """The arms that finished by the fingerprint of their base model."""
    found: dict[str, list[str]] = {}
    for arm in arms:
        if arm.status == "finished" and arm.base:
            found.setdefault(arm.base, []).append(arm.name)
    return found


def processors_of(configs: dict[str, Config]) -> dict[str, list[str]]:
    """The arms that are on record by the processor that they ran on."""
    found: dict[str, list[str]] = {}
    for name, config in configs.items():
        if (path := run_folder(config) / "record.json").exists():
            found.setdefault(Record.load(path).machine.get("cpu", "unknown"), []).append(name)
    return found


def run_arms(
    configs: dict[str, Config], comparison: Run | None = None, others: Iterable[Config] | None = None
) -> dict[str, str]:
    """Run each in turn, in order; returns the reasons of those that failed.

    They take the scores that they share from one another, or from `others` that are finished.
    """
    errors: dict[str, str] = {}
    to_run = {name: config for name, config in configs.items() if config.overwrite or not finished_record(config)}
    if len(to_run) < len(configs):
        print(f"finished already: {', '.join(name for name in configs if name not in to_run)}")
    began = time.perf_counter()
    for done, (name, config) in enumerate(to_run.items()):
        left = (time.perf_counter() - began) / done * (len(to_run) - done) if done else None
        print(f"\narm {done + 1} of {len(to_run)}: {name}" + (f", about {seconds_text(left)} left" if left else ""))
        if comparison:
            comparison.save()
        share_scores(config, others or [other for other in configs.values() if finished_record(other)])
        try:
            (measure if config.adapter else train)(config)
        except (OSError, InUse):  # a full disk fails every arm; who holds one arm's folder may run the others too
            raise
        except Exception as error:  # whatever a method's code raises, the other arms go on
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            errors[name] = f"{kind}{first_line(error)}"
            log.error("arm %s failed: %s; the others go on", name, errors[name])
        gc.collect()
    return errors


def finished_arms(config: Config) -> Iterator[Config]:
    """Those of the command line's comparison, composed as they are asked for; what is wrong with one is not said."""
    for name in map(variant_name, config.variants):
        with suppress(UserError, HydraException, OmegaConfBaseException):
            if finished_record(arm := compose_variant(config, name, HydraConfig.get().overrides.task)):
                yield arm


def describe_arm(name: str, config: Config, settings: list[str], error: str | None) -> VariantRun:
    folder = run_folder(config)
    arm = VariantRun(name=name, settings=settings, folder=str(folder))
    path = folder / "record.json"
    if not path.exists():
        return replace(arm, status="failed", error=error or "it left no record")
    record = Record.load(path)
    phases = [record.setting("recipe", "phases", {})[phase] for phase, _ in config.phases]
    return replace(
        arm,
        status=record.status,
        error=error or record.error,
        trainable_parameters=record.method.get("trainable_parameters") or 0,
        learning_rate=phases[-1]["learning_rate"] if phases and record.steps else None,
        trials=record.trials,
        base=record.model.get("fingerprint", ""),
        steps=record.steps,
        tokens_seen=record.tokens_seen,
        train_seconds=record.train_seconds,
        fit_seconds=record.fit_seconds,
        commit=record.commit,
        config_hash=record.config_hash,
        started=record.started,
    )
