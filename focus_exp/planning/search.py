"""Find the settings under which a run fits, and say what it needs or what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from focus_exp.errors import UserError
from focus_exp.planning.estimate import Estimate
from focus_exp.planning.hardware import Gpu
from focus_exp.planning.settings import MOST_GPUS, Needs, as_configured, candidates, needs, sequences
from focus_exp.planning.tables import LayoutRow, PlanRow, gib_text, time_text
from focus_exp.reporting.text_table import share_text
from focus_exp.training.regimes import tokens_per_step

# bytes of a number as the hub stores it
STORED = {"float32": 4, "float16": 2, "bfloat16": 2}
REMEDIES = 3


@dataclass(frozen=True)
class Planned:
    """A run and the settings that were chosen for it; where none fits, those that come closest."""

    name: str
    estimate: Estimate
    gpu: Gpu
    chosen: Needs

    @cached_property
    def error(self) -> str | None:
        """Why it cannot run, and what could."""
        config, chosen, gpus = self.estimate.config, self.chosen, self.chosen.setting.gpus
        if fits(self.estimate, chosen, self.gpu):
            return None
        if chosen.total > self.gpu.usable:
            kinds = sorted(chosen.held, key=lambda kind: -chosen.held[kind])[:2]
            parts = ", ".join(f"{kind} {gib_text(chosen.held[kind])}" for kind in kinds)
            problem = (
                f"{gib_text(chosen.total)} GiB ({parts}) do not fit the {gib_text(self.gpu.usable)} that tensors may "
                f"take on each of {gpus} {self.gpu.name} ({chosen.setting.name})"
            )
        else:
            problem = (
                f"{time_text(chosen.seconds / 3600)} on {gpus} {self.gpu.name}, bound by {chosen.bound}, are "
                f"more than plan.hours={config.plan.hours:g}"
            )
        found = list(self.remedies())
        fixes = "; or ".join(found[:REMEDIES]) or "data.block_size lower, or a larger plan.gpu: nothing else is enough"
        return f"{problem}. Use {fixes}"

    def remedies(self) -> Iterator[str]:
        """What to add to the command line so that the run fits, on as many GPUs as there may be first."""
        config, trainer = self.estimate.config, self.estimate.config.trainer
        most = config.plan.gpus or MOST_GPUS
        found = [need for need in layouts(self.estimate, self.gpu, MOST_GPUS) if fits(self.estimate, need, self.gpu)]
        found.sort(key=lambda need: (need.setting.gpus > most, len(need.setting.overrides(config))))
        if trainer.batch_size > 1:
            smaller = replace(trainer, batch_size=1, accumulate=trainer.batch_size * trainer.accumulate)
            estimate = Estimate(replace(config, trainer=smaller), self.estimate.prepare)
            need = needs(estimate, self.chosen.setting, self.gpu)
            if fits(estimate, need, self.gpu):
                yield f"trainer.batch_size=1 trainer.accumulate={smaller.accumulate}"
        told: list[set[str]] = []
        for need in found:
            changes = need.setting.overrides(config)
            if not any(fewer <= set(changes) for fewer in told):
                told.append(set(changes))
                more = [f"plan.gpus={need.setting.gpus}"] if need.setting.gpus > most else []
                yield " ".join([*more, *changes]) + self.as_much(need, " ({})")

    def row(self) -> PlanRow:
        estimate, chosen, config = self.estimate, self.chosen, self.estimate.config
        plain, checkpointed = (
            needs(estimate, replace(chosen.setting, checkpointing=on), self.gpu) for on in (False, True)
        )
        stored = STORED.get(config.model.dtype or "")
        steps = sum(phase.steps for _, phase in estimate.phases)
        return PlanRow(
            run=self.name,
            setting=chosen.setting.name,
            gpus=chosen.setting.gpus,
            parameters=estimate.weights.parameters,
            trainable=estimate.weights.trainable,
            download=stored and stored * estimate.weights.base / estimate.dtype.itemsize,
            held=chosen.held,
            activations=plain.held["activations"],
            checkpointed=checkpointed.held["activations"],
            cache=estimate.cache_bytes,
            main_memory=chosen.main_memory,
            tokens=steps * tokens_per_step(config),
            flops=chosen.flops,
            pair_flops=chosen.pair_flops,
            hours=chosen.seconds / 3600,
            bound=chosen.bound,
            overrides=chosen.setting.overrides(config),
            error=self.error,
        )

    def layout_rows(self) -> list[LayoutRow]:
        """Every strategy, without and with checkpointing, on the fewest GPUs that are enough."""
        rows: dict[str, LayoutRow] = {}
        for need in layouts(self.estimate, self.gpu, self.estimate.config.plan.gpus or MOST_GPUS):
            setting = need.setting
            gpus = setting.gpus if fits(self.estimate, need, self.gpu) else None
            row = rows.setdefault(setting.name, LayoutRow(layout=setting.name, main_memory=need.main_memory))
            column = (gpus, need.total, need.seconds / 3600)
            if setting.checkpointing:
                row.checkpointed = column
            else:
                row.plain = column
        return list(rows.values())

    @property
    def finding(self) -> str:
        """What fits where, what takes the most, what the time goes to."""
        chosen, config, setting = self.chosen, self.estimate.config, self.chosen.setting
        largest = max(chosen.held, key=lambda kind: chosen.held[kind])
        words = [
            f"{self.name} fits {setting.gpus} {self.gpu.name} ({setting.name}) with {gib_text(chosen.total)} of "
            f"{gib_text(self.gpu.usable)} GiB on each at the worst moment ({chosen.window}); "
            f"{share_text(chosen.held[largest] / chosen.total)} are {largest}"
        ]
        if chosen.seconds:
            words.append(
                f"{time_text(chosen.seconds / 3600)}, bound by {chosen.bound}; "
                f"{share_text(chosen.pair_flops / chosen.flops)} of the arithmetic is on pairs of tokens"
            )
        if needed := setting.overrides(config):
            words.append(f"Add {' '.join(needed)}" + self.as_much(chosen, ". That is {}"))
        return ". ".join(words) + "."

    def as_much(self, need: Needs, said: str) -> str:
        """What becomes of the tokens where a layout takes more blocks a step than are configured; "" where not."""
        config = self.estimate.config
        blocks, own = sequences(config, need.setting.gpus), config.trainer.batch_size * config.trainer.accumulate
        fewer = f"{blocks} blocks a step instead of {own}: regime.steps / {blocks / own:g} reads as much"
        return said.format(fewer) if blocks > own else ""


def plan_run(name: str, estimate: Estimate, gpu: Gpu) -> Planned:
    """The first settings that fit among those that the configuration leaves open; UserError where it leaves none."""
    config = estimate.config
    most = config.plan.gpus or MOST_GPUS
    own = [setting for setting in candidates(config, most) if as_configured(config, setting)]
    if not own:
        raise UserError(
            f"{name}: trainer.strategy={config.trainer.strategy} on {config.trainer.devices} x "
            f"{config.trainer.num_nodes} GPUs with trainer.cpu_offload={str(config.trainer.cpu_offload).lower()} and "
            f"model.quantization={config.model.quantization} cannot be had on {most} GPUs: cpu_offload goes with fsdp, "
            "quantization with a frozen base that is not sharded; leave them at their defaults, or raise plan.gpus"
        )
    tried = []
    for setting in own:
        tried.append(needs(estimate, setting, gpu))
        if fits(estimate, tried[-1], gpu):  # the others would have to be traced for nothing
            return Planned(name, estimate, gpu, tried[-1])
    closest = min(tried, key=lambda need: (max(need.total, gpu.usable), need.seconds))
    return Planned(name, estimate, gpu, closest)


def layouts(estimate: Estimate, gpu: Gpu, most: int) -> list[Needs]:
    """Of every strategy, without and with checkpointing, the fewest GPUs on which it fits, or the most there are."""
    best: dict[tuple[str, bool], Needs] = {}
    for setting in candidates(estimate.config, most):
        key = (setting.name, setting.checkpointing)
        if key not in best or not fits(estimate, best[key], gpu):
            best[key] = needs(estimate, setting, gpu)
    return list(best.values())


def fits(estimate: Estimate, need: Needs, gpu: Gpu) -> bool:
    hours = estimate.config.plan.hours
    return need.total <= gpu.usable and (hours is None or need.seconds <= 3600 * hours)
