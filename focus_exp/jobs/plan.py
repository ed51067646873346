"""job=plan: what a run needs before anything is downloaded or allocated; refuses one that cannot fit.

From a trace of the run's own training step on tensors without data: memory, GPUs, hours. It names the settings under
which a run that cannot fit would; plan=zoo is a table of every model.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from transformers import PreTrainedModel

from focus_exp.attention.focus_options import FocusOptions
from focus_exp.checks import parse
from focus_exp.config import Config, phases_of
from focus_exp.config_attention import method_options
from focus_exp.errors import UserError, first_line
from focus_exp.jobs.prepare import check_length
from focus_exp.jobs.run import TABLE_WIDTH
from focus_exp.jobs.variants import compose_variant, compose_variants, variant_name
from focus_exp.models.attach import attach
from focus_exp.models.attached import set_routing
from focus_exp.models.lora import add_lora, router_parameters
from focus_exp.planning.estimate import Estimate, Prepare
from focus_exp.planning.hardware import USABLE, Gpu, gpu_named
from focus_exp.planning.search import Planned, plan_run
from focus_exp.planning.tables import ExperimentRow, PlanRow, experiments_table, layouts_table, runs_table
from focus_exp.storage import replace_file
from focus_exp.training.regimes import tokens_per_step


def plan(config: Config) -> None:
    """Plan the run, each of its arms, or each of plan.models; UserError, after the table, for what cannot fit."""
    gpu, settings = gpu_named(config.plan.gpu), config.plan
    if settings.experiments:
        plan_experiments(config, gpu)
        return
    configs = planned_configs(config)
    most = "as many GPUs as it takes" if settings.gpus is None else f"at most {settings.gpus}"
    limit = "" if settings.hours is None else f", at most {settings.hours:g} hours"
    print(f"plan of {headline(config, configs)} on {gpu.name}, {most}{limit}")
    found, unknown = [], []
    for name, each in configs.items():
        try:
            found.append(plan_run(name, Estimate(each, preparation(each)), gpu))
        except UserError as error:
            unknown.append(f"{name} is not planned: {error}")
    if not found:
        raise UserError("\n  ".join(unknown))
    rows = [planned.row() for planned in found]
    notes = [
        f"{gpu.name}: {gpu.memory:g} GiB, of which tensors may take {100 * USABLE:.0f} %; "
        f"{gpu.bf16 / 1e12:g} TFLOP/s in bfloat16, {gpu.float32 / 1e12:g} in float32 ({gpu.source})",
        f"Assumed: {100 * settings.utilization:.0f} % of that arithmetic is reached (plan.utilization; small models do "
        "not), with transfers beside it. Time is that of the training steps, without evaluation and warm start",
        "Memory and FLOPs are those of the training step's own code, traced without data; soft gates weigh all pairs, "
        "O(T^2), and hard groups are planned as masked attention, which costs as much",
    ]
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(runs_table(rows, gpu.name, notes).to_console())
    if len(found) == 1:
        console.print(layouts_table(found[0].layout_rows(), gpu.name).to_console())
    print("\n".join(["", *(planned.finding for planned in found if planned.error is None), *unknown]))
    if refused := [row for row in rows if row.error]:
        raise UserError("\n  ".join(f"{row.run}: {row.error}" for row in refused))


def plan_experiments(config: Config, gpu: Gpu) -> None:
    """The table of what every experiment of `plan.experiments` trains; arms that need the same are traced once."""
    command_line = [part for part in HydraConfig.get().overrides.task if not part.startswith("plan")]
    kept: dict[Hashable, Planned | str] = {}
    rows = []
    for name in config.plan.experiments:
        overrides = [f"+experiment={name}", *command_line]
        composed = parse(compose("config", overrides))
        arms = {arm: compose_variant(composed, arm, overrides) for arm in map(variant_name, composed.variants)} or {
            composed.model.name: composed
        }
        planned: dict[Hashable, list[str]] = {}
        for arm, each in arms.items():
            if any(phase.steps for _, phase in phases_of(each)):
                planned.setdefault(needs_of(each), []).append(arm)
        for key, alike in planned.items():
            if key not in kept:
                kept[key] = planned_or_why(alike[0], replace(arms[alike[0]], plan=config.plan), gpu)
            found, tries = kept[key], len(arms[alike[0]].regime.tune.factors)
            row = found.row() if isinstance(found, Planned) else PlanRow(run=alike[0], error=found)
            rows.append(ExperimentRow(experiment=name, arms=alike, runs=len(alike) * (1 + tries), each=row))
            print(f"planned: {name}, {', '.join(alike)}")
    table = experiments_table(rows, gpu.name, config.scale.name, config.plan.utilization)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table.to_console())
    if config.plan.folder:
        for suffix, text in ((".md", table.to_markdown()), (".csv", table.to_csv())):
            place = Path(config.plan.folder) / f"plans{suffix}"
            replace_file(place, text.encode())
            print(place)


def planned_or_why(name: str, config: Config, gpu: Gpu) -> Planned | str:
    """The plan of a run, or why there is none."""
    try:
        return plan_run(name, Estimate(config, preparation(config)), gpu)
    except UserError as error:
        return first_line(error)


def needs_of(config: Config) -> Hashable:
    """What a plan depends on, but for numbers that move it little: groups, widths, ranks of LoRA, rates."""
    trainer, phases = config.trainer, [(phase.train, phase.aim, phase.steps) for _, phase in phases_of(config)]
    return (
        config.model.name, config.attention.method, tuple(phases), len(config.regime.tune.factors),
        config.data.block_size, trainer.batch_size, trainer.accumulate, trainer.precision,
    )  # fmt: skip


def planned_configs(config: Config) -> dict[str, Config]:
    """What is planned, by the name of its line."""
    if config.plan.models:
        return {name: compose_model(name, config.plan.paper) for name in config.plan.models}
    if config.variants:
        return compose_variants(config)
    return {config.model.name: config}


def compose_model(name: str, paper: bool) -> Config:
    """The command line's configuration with another model, and with the setting that the paper trained it in."""
    command_line = [part for part in HydraConfig.get().overrides.task if not part.startswith("model=")]
    composed = compose("config", [f"model={name}", *command_line])
    if paper:
        composed = compose("config", [f"model={name}", *composed.model.paper, *command_line])
    return parse(composed)


def preparation(config: Config) -> Prepare:
    """Put on a model without data what the run puts on it. Hard groups take the masked path: a trace has no groups to
    sort tokens by, and the masked path holds the most."""

    def prepare(model: PreTrainedModel) -> PreTrainedModel:
        check_length(model, "data.block_size", config.data.block_size, config.model.name)
        check_length(model, "eval.window", config.eval.window, config.model.name)
        attention = config.attention
        if attention.method != "full":
            attach(model, attention.method, **method_options(attention))
            set_routing(model, hard=not phases_of(config), backend="masked")
        if config.regime.trains("lora"):
            lora = config.regime.lora
            add_lora(model, lora, router_parameters(model, lora.router_groups, FocusOptions.routing_dim))
        return model

    return prepare


def headline(config: Config, configs: dict[str, Config]) -> str:
    """What is planned, in words."""
    if len(configs) > 1:
        return f"{config.experiment}: {len(configs)} runs"
    (only,) = configs.values()
    phases = ", then ".join(f"{p.steps} steps ({p.train})" for _, p in phases_of(only)) or "no training"
    return (
        f"{only.experiment}: {only.regime.name} of {only.model.name} with {only.attention.name}, {phases} of "
        f"{tokens_per_step(only):,} tokens"
    )
