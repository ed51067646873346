"""Builders that several test files share."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import PreTrainedModel

from focus_exp import attach, set_routing
from focus_exp import config as schema
from focus_exp.checks import parse
from focus_exp.config import Config, conf_dir, register_schemas
from focus_exp.results.intervals import Estimate
from focus_exp.results.losses import benchmark_name
from focus_exp.results.measurement import Measurement
from focus_exp.results.record import Record
from focus_exp.training.callbacks import Checkpoint

CONF = Path(conf_dir())
GROUPS = ("attention", "recipe", "model", "data", "eval")


def compose_config(*overrides: str) -> DictConfig:
    """Compose the configuration of a command line."""
    register_schemas()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides))


def make_config(*overrides: str) -> Config:
    """Compose and validate the configuration of a command line."""
    return parse(compose_config(*overrides))


def load_recorded(values: dict[str, Any]) -> Any:
    """Return a recorded configuration under the schema, which refuses unknown keys."""
    recorded = OmegaConf.create(values)
    recorded.attention = schema.build_attention(recorded.attention)
    return OmegaConf.merge(OmegaConf.structured(Config), recorded)


def find_inconsistent(record: Record) -> list[str]:
    """Return the measurements of a run that do not follow from its losses.

    Nine digits of the losses leave 1e-5 nats of a bound over few units.
    """
    final = [m for m in record.measurements if m.value is not None and not m.settings.get("phase")]
    wrong = []
    for m in final:
        losses = record.losses.get(benchmark_name(m.settings))
        if m.metric == "nll":
            follows = losses and m.variant in losses.nll and is_close([m.value], [losses.estimate(m.variant).value])
        elif m.metric.startswith("nll_change"):
            follows = losses and {m.variant, m.reference} <= losses.nll.keys() and is_close(
                (m.value, m.low, m.high), _change(losses.difference(m.variant, losses, m.reference))
            )  # fmt: skip
        else:
            continue
        wrong += [] if follows else [f"{m.metric} of {m.variant}"]
    return wrong


def _change(estimate: Estimate) -> tuple[float | None, ...]:
    return estimate.value, *estimate.bounds


def is_close(some: Any, others: Any) -> bool:
    """Return whether numbers, 0 where missing, are equal to 1e-5."""
    return others is not None and bool(np.allclose(*([x or 0.0 for x in part] for part in (some, others)), 1e-9, 1e-5))


def write_variants(folder: Path, variants: dict[str, list[str]]) -> list[str]:
    """Write variants as overlays below `folder`; returns the arguments of a command that compares them.

    Args:
        folder: becomes the --config-dir.
        variants: name -> overrides, as they would be typed.
    """
    for name, overrides in variants.items():
        write_variant(folder / "variant" / "adhoc" / f"{name}.yaml", overrides)
    return ["--config-dir", str(folder), f"variants=[{','.join(f'adhoc/{name}' for name in variants)}]"]


def write_comparison(folder: Path, settings: list[str], variants: dict[str, list[str]]) -> list[str]:
    """Return the arguments that compare variants under settings, of which a variant may set others.

    Those that one sets are not typed, which would win over it, but in an overlay that all variants share.
    """
    changed = {override.partition("=")[0] for overrides in variants.values() for override in overrides}
    changed |= {"data"} if "data.files" in changed else set()  # whose file is not complete without them
    shared = [setting for setting in settings if setting.partition("=")[0] in changed]
    write_variant(folder / "variant" / "adhoc" / "shared.yaml", shared)
    typed = [setting for setting in settings if setting not in shared]
    return [*typed, "job=compare", "shared_variant=adhoc/shared", *write_variants(folder, variants)]


def write_variant(path: Path, overrides: list[str]) -> None:
    pairs = [override.partition("=")[::2] for override in overrides]
    chosen = [{f"override /{key}": value} for key, value in pairs if key in GROUPS]
    values = OmegaConf.from_dotlist([f"{key}={value}" for key, value in pairs if key not in GROUPS])
    body = {"defaults": chosen, "variant": path.stem, **OmegaConf.to_container(values)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# @package _global_\n" + OmegaConf.to_yaml(OmegaConf.create(body)), encoding="utf-8")


def scored(measurements: Iterable[Measurement], phase: str | None = None) -> list[SimpleNamespace]:
    """Return each variant that was scored: its settings, its metrics, and its paired `changes` by reference."""
    rows: dict[str, SimpleNamespace] = {}
    absent = dict.fromkeys(("error", "top_k", "pair_rule", "window", "path", "nll"))
    for m in measurements:
        if {"clock", "task"} & m.settings.keys() or m.settings.get("phase") != phase:
            continue
        if m.metric == "perplexity":
            known = {key: value for key, value in m.settings.items() if value is not None}
            sparsity = None if m.density is None else 1 - m.density
            cells = {
                "name": m.variant,
                "sparsity": sparsity,
                "interval": (m.low, m.high),
                "changes": {},
                "causal": True,
            }
            rows[m.variant] = SimpleNamespace(**absent | cells | known)
        if row := rows.get(m.variant):
            if m.metric == "nll_change":
                row.changes[m.reference] = m
            elif not m.reference:
                vars(row)[m.metric] = m.value
    return list(rows.values())


def primary(record: Record) -> SimpleNamespace:
    """Return the variant that represents a run."""
    return next(row for row in scored(record.measurements) if row.name == record.primary_variant)


def eval_config(
    attention: schema.AttentionConfig, phases: dict[str, schema.PhaseConfig] | None = None, **evaluation: Any
) -> schema.Config:
    """Return the configuration of a tiny evaluation."""
    return schema.Config(
        assets="embedded",
        model=schema.ModelConfig(name="tiny"),
        attention=attention,
        recipe=schema.RecipeConfig(name="recipe", phases=phases or {}),
        data=schema.DataConfig(name="random", source="files"),
        eval=schema.EvalConfig(name="eval", **evaluation),
        trainer=schema.TrainerConfig(name="trainer"),
        logger=schema.LoggerConfig(name="logger"),
    )


def timings(measurements: Iterable[Measurement]) -> list[SimpleNamespace]:
    """Return each timed case: its settings, its metrics, and as full_<metric> those of full attention."""
    cases: dict[str, SimpleNamespace] = {}
    for row in measurements:
        if "clock" not in row.settings:
            continue
        name = row.reference if row.variant == "full" else row.variant
        case = cases.setdefault(
            f"{name} {row.settings}", SimpleNamespace(**{"variant": name, "error": None} | row.settings)
        )
        prefix = "full_" if row.variant == "full" else ""
        vars(case)[prefix + row.metric] = row.value
        if not prefix:
            case.density = row.density
    return list(cases.values())


def make_tokens(batch: int = 2, length: int = 40, seed: int = 0) -> Tensor:
    """Draw token ids `(B, T)` below 100."""
    return torch.randint(3, 100, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def compute_logits(model: PreTrainedModel, tokens: Tensor | None = None, **options: Any) -> Tensor:
    """Compute the logits of `make_tokens()`, or of others, without a cache."""
    return model(make_tokens() if tokens is None else tokens, **{"use_cache": False} | options).logits


def attach_focus(
    model: PreTrainedModel, top_k: int = 1, pair_rule: str = "query_topk", hard: bool = True, **options: Any
) -> PreTrainedModel:
    """Attach seeded routers that prune pairs of 40 tokens."""
    options = {"groups": 4, "window": 6, "sinks": 2} | options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        attach(model, "focus", top_k=top_k, pair_rule=pair_rule, **options)
    return set_routing(model, hard=hard)


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the program runs to its end."""


def stop_training(
    patch: pytest.MonkeyPatch, step: int, phase: str | None = None, signum: int | None = signal.SIGTERM
) -> None:
    """Send a signal after optimizer step `step` of `phase`, before its checkpoint; without one, raise `Killed`."""
    original = Checkpoint.on_train_batch_end

    def on_train_batch_end(self: Checkpoint, trainer: Any, module: Any, *rest: Any) -> None:
        if trainer.global_step == step and phase in (None, module.name):
            if signum is None:
                raise Killed
            if not self.received:
                signal.raise_signal(signum)
        original(self, trainer, module, *rest)

    patch.setattr(Checkpoint, "on_train_batch_end", on_train_batch_end)


def random_sequences(count: int, seed: int = 0, length: int = 64) -> list[Tensor]:
    """Draw sequences `(T,)` of bytes."""
    return list(torch.randint(256, (count, length), generator=torch.Generator().manual_seed(seed)))


def copy_state(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
