"""Base weights that another run trains (`model.base_run`), and scores that runs share."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from hydra import compose

from focus_exp.checks import parse
from focus_exp.cli import quote_override
from focus_exp.config import Config, ModelConfig
from focus_exp.errors import UserError
from focus_exp.evaluation.benchmarks import is_perplexity
from focus_exp.evaluation.controls import BASE, SOFT, slug
from focus_exp.jobs.run import finished_record, run_folder
from focus_exp.jobs.variants import compose_variant
from focus_exp.results.record import Record
from focus_exp.storage import atomic_write, file_lock
from focus_exp.training.precision import choose_precision


def base_overrides(config: Config) -> list[str]:
    """The command that trains the base: as `base_run` says, at this scale, in these folders.

    Its learning rate is searched for only where `base_run` says so: a base needs to be the same, not the best.
    """
    overrides = [
        "recipe.tune.factors=[]",
        *config.model.base_run,
        f"budget={config.budget.name}",
        f"assets={config.assets}",
        f"runs_dir={config.runs_dir}",
        f"cache_dir={config.cache_dir or 'null'}",
        f"logger.wandb={config.logger.wandb}",
    ]
    return [quote_override(override) for override in overrides]


def needs_base(config: Config) -> bool:
    return bool(config.model.base_run) and config.model.path is None and not config.recipe.from_scratch


def base_run(config: Config) -> Config:
    """The configuration of the run that trains the base; of a comparison, that of the arm it names."""
    found = parse(compose("config", base_overrides(config)))
    return found if found.variant is None else compose_variant(found, found.variant, base_overrides(config))


def make_base(config: Config) -> None:
    """Train the base in a process of its own, unless it is there; UserError if that fails.

    Of several runs that need it one trains it and the others wait.
    """
    if not needs_base(config) or finished_record(base_run(config)) is not None:
        return
    folder = run_folder(base_run(config))
    with file_lock(folder.with_name(f".{folder.name}.making"), str(folder), wait=True):
        if finished_record(base_run(config)) is not None:
            return
        print(f"{config.model.name} is trained here first: {' '.join(config.model.base_run)}")
        code = subprocess.run([sys.executable, "-m", "focus_exp", *base_overrides(config)]).returncode
    if code:
        raise UserError(
            f"model {config.model.name} could not be trained (exit code {code}); see the lines above, "
            "or give other weights with model.path="
        )


def with_base(config: Config) -> ModelConfig:
    """The model's configuration, with the path of the weights that its own run left."""
    if not needs_base(config):
        return config.model
    return replace(config.model, path=str(Path(run_folder(base_run(config))) / "model"))


def refuse_another_base(config: Config, record: Record) -> None:
    """UserError where the run was made with another base than `config` has: a run's name tells the command of its base,
    but neither the scale nor what that command's experiment was then."""
    if not needs_base(config):
        return
    made, then = finished_record(base_run(config)), record.model.get("fingerprint")
    same = made.method.get("weights", then) == then if made else record.setting("budget", "name") == config.budget.name
    if then is not None and not same:
        raise UserError(
            f"{run_folder(config)} was made with another {config.model.name}, trained at "
            f"budget={record.setting('budget', 'name')}, than budget={config.budget.name} trains now; "
            "overwrite=true makes it again, another runs_dir leaves it alone"
        )


def share_scores(config: Config, others: Iterable[Config]) -> None:
    """Spare a run what another one has measured, the same numbers from its folder: its base, and the soft gates of the
    same adapter, to which it makes no difference how many groups a query reads."""
    wanted = [f"evaluation/{slug(BASE)}.npz", f"benchmarks/{slug(BASE)}"]
    soft = f"evaluation/{slug(SOFT)}.npz"
    for other in others:
        if config.recipe.from_scratch or other.recipe.from_scratch or same_base(config) != same_base(other):
            continue
        source, target = run_folder(other), run_folder(config)
        for name in [*wanted, soft] if same_router(config, other) else wanted:
            if (source / name).exists() and not (target / name).exists():
                copy(source / name, target / name)
        if not same_router(config, config) or (target / soft).exists():  # there is nothing more to share
            return


def same_router(config: Config, other: Config) -> bool:
    """Whether both measure one adapter of centroids, by whatever number of groups a query."""
    if not config.adapter or not config.has_router or config.adapter != other.adapter:
        return False
    return replace(other.focus, top_k=config.focus.top_k, pair_rule=config.focus.pair_rule) == config.focus


def same_base(config: Config) -> tuple[object, ...]:
    """What the scores of a model with nothing attached depend on."""
    evaluation = replace(
        config.eval, controls=True, top_k=[], pair_rules=[], adapters=[], request_batch_size=1, batch_size=1
    )
    # of the long-range suite, which other tasks than perplexity may be of
    asked = any(not is_perplexity(task) for task in config.eval.tasks)
    window = (config.eval.long_range_distance or config.attention.window) if asked else None
    trainer = config.trainer
    precision = choose_precision(trainer.precision, trainer.accelerator, config.recipe.trains("all"))
    return config.model, config.data, evaluation, window, precision, config.seed, config.assets


def copy(source: Path, target: Path) -> None:
    """A file or a folder, whole or not at all."""
    with atomic_write(target) as new:
        if source.is_dir():
            shutil.copytree(source, new)
        else:
            shutil.copyfile(source, new)
